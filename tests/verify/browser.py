"""Debian's Chromium, driven by Debian's chromedriver: what a person does, and what the browser says of it."""

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.shop import wait_for
from tests.verify.webdriver import Chrome, Element, StaleElement

PROGRAMS = ("/usr/bin/chromium", "/usr/bin/chromedriver")
DESKTOP = (1280, 800)
PHONE = (390, 844)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)
_AXE = Path(__file__).parent / "axe" / "axe.min.js"


class Browser:
    """A browser at one dashboard."""

    def __init__(self, driver: Chrome, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, path: str) -> None:
        self.driver.ask("POST", "/url", url=f"{self.address}{path}")

    @property
    def text(self) -> str:
        return str(self._steady(lambda: self.find("body").text))

    @property
    def path(self) -> str:
        return str(self.driver.ask("GET", "/url")).removeprefix(self.address)

    def find(self, selector: str) -> Element:
        """Return the first element that a CSS selector finds, of a page that may still be loading."""
        until = time.monotonic() + 30
        while not (found := self.driver.elements(selector)):
            assert time.monotonic() < until, f"the page has no {selector}"
        return found[0]

    def all(self, selector: str) -> list[Element]:
        return self.driver.elements(selector)

    def count(self, selector: str) -> int:
        return len(self.all(selector))

    def press(self, words: str, *, within: str = "main") -> None:
        """Click on the first button or link that begins with these words, of a page that may be loading."""
        selector = f"{within} button, {within} a, {within} summary"

        def click() -> bool:
            for each in self.all(selector):
                if each.text.startswith(words):
                    each.click()
                    return True
            return False

        wait_for(
            lambda: self._steady(click),
            lambda: f"no button {words!r} at {self.path}: {[each.text for each in self.all(selector)]}",
        )

    def click(self, selector: str) -> None:
        """Click on the first element that a CSS selector finds."""
        self._steady(lambda: self.find(selector).click())

    def type(self, name: str, words: str) -> None:
        """Write into an input, which is emptied before."""
        field = self.find(f'main [name="{name}"]')
        field.clear()
        field.type(words)

    def shows(self, *words: str) -> None:
        """Wait until the page shows all of these words."""
        wait_for(lambda: all(each in self.text for each in words), lambda: f"{words} not in: {self.text}")

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.run(script, *values)

    def complaints(self) -> list[str]:
        """Return what the console has said since it was last asked: errors, and what the policy refused."""
        entries = self.driver.ask("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in {"SEVERE", "WARNING"}]

    def set_scripts(self, *, are_run: bool) -> None:
        self.driver.devtools("Emulation.setScriptExecutionDisabled", value=not are_run)

    def look(self, scheme: str, size: tuple[int, int]) -> None:
        """Be in light or dark, and of a size, a phone below 600 pixels."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.devtools("Emulation.setEmulatedMedia", features=[feature])
        width, height = size
        self.driver.devtools("Emulation.setScrollbarsHidden", hidden=True)
        self.driver.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Write what is seen as PNG; the whole page, or what fits into the window."""
        clip = {"clip": self._all()} if whole else {}
        taken = self.driver.devtools(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip
        )
        file.write_bytes(base64.b64decode(taken["data"]))

    def _all(self) -> dict[str, float]:
        width, height = self.run("return [window.innerWidth, document.documentElement.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}

    def violations(self) -> list[str]:
        """Return what axe finds on the page that is serious or critical."""
        if not self.run("return 'axe' in window"):
            self.run(_AXE.read_text())
        found = self.driver.run(
            "const done = arguments[0];"
            "axe.run({resultTypes: ['violations']}).then(r => done(JSON.stringify(r.violations)),"
            " e => done(JSON.stringify([{id: String(e), impact: 'critical', nodes: []}])))",
            kind="async",
        )
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for each in json.loads(found)
            if each["impact"] in {"serious", "critical"}
            for node in each["nodes"] or [{"html": "", "failureSummary": ""}]
        ]

    def _steady(self, look: Callable[[], Any]) -> Any:
        """Look once more where a live part was replaced meanwhile."""
        until = time.monotonic() + 30
        while True:
            try:
                return look()
            except StaleElement:
                assert time.monotonic() < until, "the page does not stand still"


@contextmanager
def open_browser(address: str, folder: Path) -> Iterator[Browser]:
    """Open a browser with an empty profile in a folder; fails where Debian's packages are not installed."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.fail(f"{program} is not there: apt-get install chromium chromium-driver", pytrace=False)
    flags = [*_FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]
    driver = Chrome(*PROGRAMS, flags, folder / "chromedriver.log")
    try:
        found = Browser(driver, address)
        found.look("light", DESKTOP)
        yield found
    finally:
        driver.close()
