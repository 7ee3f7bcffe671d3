"""A browser without JavaScript: it follows links and sends forms as they stand in a page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx
from starlette.types import ASGIApp


@dataclass
class Form:
    """A form: where it goes, what it holds, and its buttons by their text."""

    method: str
    action: str
    values: list[tuple[str, str]] = field(default_factory=list)
    buttons: dict[str, dict[str, str]] = field(default_factory=dict)


class Shown(HTMLParser):
    """A page as a browser reads it."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.status = response.status_code
        self.address = str(response.url)
        self.source = response.text
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.links: dict[str, str] = {}
        self.forms: list[Form] = []
        self._text: list[str] = []
        self._inside: list[tuple[str, dict[str, str], int]] = []
        self._select: str | None = None
        self.feed(response.text)
        self.text = " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        form = self.forms[-1] if self.forms else None
        match tag:
            case "form":
                self.forms.append(Form(found.get("method", "get"), found.get("action", "")))
            case "input" if form and "name" in found:
                if found.get("type") not in {"checkbox", "radio"} or "checked" in found:
                    form.values.append((found["name"], found.get("value", "")))
            case "select":
                self._select = found.get("name")
            case "option" if form and self._select and "selected" in found:
                form.values.append((self._select, found.get("value", "")))
            case "textarea" | "a" | "button":
                self._inside.append((tag, found, len(self._text)))

    def handle_endtag(self, tag: str) -> None:
        if tag == "select":
            self._select = None
        if not self._inside or self._inside[-1][0] != tag:
            return
        _, found, start = self._inside.pop()
        text = "".join(self._text[start:])
        words = " ".join(text.split())
        if tag == "a":
            self.links.setdefault(words, found.get("href", ""))
        elif tag == "button" and self.forms:
            self.forms[-1].buttons[words] = found
        elif tag == "textarea" and self.forms:
            self.forms[-1].values.append((found["name"], text.removeprefix("\n")))

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    @property
    def addresses(self) -> set[str]:
        """Where its links lead; several may have the same words."""
        return {found["href"] for tag, found in self.elements if tag == "a" and "href" in found}

    def has(self, button: str) -> bool:
        return any(words.startswith(button) for form in self.forms for words in form.buttons)


class Viewer:
    """Looks at a dashboard at ``http://localhost``."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(
            **{"transport": transport, "base_url": "http://localhost", "follow_redirects": True, **options}
        )

    async def see(self, address: str, status: int = 200, /, **query: Any) -> Shown:
        shown = Shown(await self.http.get(address, params=query or None))
        assert shown.status == status, shown.text
        return shown

    async def press(
        self, page: Shown, button: str, values: Mapping[str, Any] | None = None, status: int = 200
    ) -> Shown:
        """Send the form of a button, with some values filled in."""
        form, found = next(
            (form, form.buttons[words])
            for form in page.forms
            for words in form.buttons
            if words.startswith(button)
        )
        given = values or {}
        data: dict[str, Any] = {}
        for name, value in form.values:
            if name not in given:
                data.setdefault(name, []).append(value)
        data |= given
        if "name" in found:
            data[found["name"]] = found.get("value", "")
        address = httpx.URL(page.address).join(found.get("formaction") or form.action)
        headers = {"referer": page.address}
        if form.method == "get":
            shown = Shown(await self.http.get(address, params=data or None, headers=headers))
        else:
            headers["origin"] = "http://localhost"
            shown = Shown(await self.http.post(address, data=data, headers=headers))
        assert shown.status == status, shown.text
        return shown
