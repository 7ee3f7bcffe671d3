"""The WebDriver protocol (W3C), as Debian's chromedriver speaks it: JSON over HTTP, so httpx is all it needs.

Selenium does the same; it brings trio, whose plugin for Hypothesis warns, and a warning is an error here.
"""

import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx

_ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"
"""The key that stands for an element in JSON, a constant of the protocol."""
_SECONDS: Final = 120.0
_REPLACED: Final = "Node with given id does not belong to the document"
TAB, ENTER = "\ue004", "\ue007"


class StaleElement(Exception):
    """The element is not part of the page any more."""


class Chrome:
    """A session of chromedriver with a browser of its own."""

    def __init__(self, browser: str, chromedriver: str, flags: Sequence[str], log: Path) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen([chromedriver, "--port=0"], stdout=file, stderr=file)
        try:
            self._http = httpx.Client(base_url=self._address(log), timeout=_SECONDS, trust_env=False)
            options = {"binary": browser, "args": list(flags)}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self._session = ""
            begun = self.ask("POST", "/session", capabilities={"alwaysMatch": wanted})
            self._session = f"/session/{begun['sessionId']}"
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    @staticmethod
    def _address(log: Path) -> str:
        until = time.monotonic() + _SECONDS
        while not (found := re.search(r"started successfully on port (\d+)", log.read_text())):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        return f"http://127.0.0.1:{found[1]}"

    def ask(self, method: str, path: str, **values: Any) -> Any:
        """Send a command and return its value."""
        content = values if method == "POST" else None
        answer = self._http.request(method, f"{self._session}{path}", json=content)
        value = answer.json()["value"]
        if answer.status_code != 200:
            # Of one that is replaced at that very moment, the browser's own words come through.
            if value["error"] == "stale element reference" or _REPLACED in value["message"]:
                raise StaleElement
            raise AssertionError(f"{path} {values}: {value['error']}: {value['message']}")
        return value

    def run(self, script: str, *values: Any, kind: str = "sync") -> Any:
        """Run the body of a function in the page; ``async`` passes a callback as the last argument."""
        return self.ask("POST", f"/execute/{kind}", script=script, args=values)

    def devtools(self, command: str, **values: Any) -> Any:
        """Give a command of Chromium's own protocol."""
        return self.ask("POST", "/goog/cdp/execute", cmd=command, params=values)

    def elements(self, selector: str) -> "list[Element]":
        found = self.ask("POST", "/elements", using="css selector", value=selector)
        return [Element(self, each[_ELEMENT]) for each in found]

    def focused(self) -> "Element":
        return Element(self, self.ask("GET", "/element/active")[_ELEMENT])

    def close(self) -> None:
        with suppress(httpx.HTTPError):
            self.ask("DELETE", "")
        self._http.close()
        self._process.terminate()
        self._process.wait()


class Element:
    """An element of the page."""

    def __init__(self, chrome: Chrome, number: str) -> None:
        self._chrome = chrome
        self._path = f"/element/{number}"

    @property
    def text(self) -> str:
        return str(self._chrome.ask("GET", f"{self._path}/text"))

    def click(self) -> None:
        self._chrome.ask("POST", f"{self._path}/click")

    def double_click(self) -> None:
        pressed = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        here = {_ELEMENT: self._path.removeprefix("/element/")}
        moved = {"type": "pointerMove", "origin": here, "x": 0, "y": 0}
        pause = {"type": "pause", "duration": 60}
        mouse = {"type": "pointer", "id": "mouse", "actions": [moved, *pressed, pause, *pressed]}
        self._chrome.ask("POST", "/actions", actions=[mouse])

    def type(self, keys: str) -> None:
        self._chrome.ask("POST", f"{self._path}/value", text=keys)

    def clear(self) -> None:
        self._chrome.ask("POST", f"{self._path}/clear")
