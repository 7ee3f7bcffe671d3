"""What a viewer asks for, and the page that is made of it."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import FormData

import jsworker
from jsworker.client.job_client import JobClient
from jsworker.core.errors import DatabaseUnavailable, UsageError
from jsworker.core.names import shown
from jsworker.core.processor import JobProcessor
from jsworker.dashboard.access import Access
from jsworker.dashboard.filters import FILTERS
from jsworker.dashboard.live import Poller
from jsworker.ownership.database import Database

_DIGITS: Final = 9
_STATEMENTS: Final = 4
"""As long as so many that are ended by the time-out may all that a page reads take."""


def is_short_number(text: str) -> bool:
    """Return whether a text is a number of at most nine digits."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


class WrongFilter(UsageError, ValueError):
    """The address or a form holds a value that makes no sense there."""


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A page: where it is, what is read for it, and the template that shows that.

    Attributes:
        path: below the dashboard's own address.
        name: for ``Visit.url``.
        read: returns the values of the template.
        template: its block ``live``, and those whose names begin so, are sent to those who look at it, each
            when it has changed. They are rendered once for all: no form in them, for forms hold a token of
            the viewer.
        title: in the navigation; empty: it does not stand there.
    """

    path: str
    name: str
    read: Callable[["Visit"], Awaitable[Mapping[str, Any]]]
    template: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What an action did: a line for the viewer, and the address where they see it."""

    says: str
    to: str


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked before something is done.

    Attributes:
        verb: the text of the button, ``Cancel 3 jobs``.
        says: what will happen.
        values: what the form that comes back holds, hidden.
        back: the address for those who do not want it.
        fields: template with inputs that the answer needs besides; None: none.
        names: what ``fields`` shows.
        is_harmful: whether it takes something away.
        is_possible: whether there is anything to do; else there is no button.
        is_wrong: whether it is asked again, because the answer made no sense.
    """

    verb: str
    says: str
    values: Sequence[tuple[str, str]]
    back: str
    fields: str | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    is_harmful: bool = False
    is_possible: bool = True
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class ActionRoute:
    """Something that a viewer does: GET, or a form without ``confirmed``, asks; a form with it does it.

    The form holds a token of the viewer, without which nothing is done.

    Attributes:
        path: below the dashboard's own address.
        name: for ``Visit.url``.
        right: which of ``ACTIONS`` the viewer needs.
        ask: returns the question; it changes nothing.
        act: does it, or asks again.
    """

    path: str
    name: str
    right: str
    ask: Callable[["Visit", FormData], Awaitable[Question]]
    act: Callable[["Visit", FormData], Awaitable[Done | Question]]


@dataclass(frozen=True, slots=True)
class Site:
    """What all pages of one dashboard share.

    Attributes:
        client: for actions.
        reads: the client's database, for reads alone; each ends after ``read_seconds``.
        read_seconds: of a statement.
        poller: feeds live pages.
        trace_url: where a trace is shown, with ``{trace_id}`` in it.
        processors: by kind, those whose models make forms.
        pages: those of the navigation.
    """

    client: JobClient
    reads: Database
    read_seconds: float
    poller: Poller
    trace_url: str | None
    processors: Mapping[str, type[JobProcessor[Any]]]
    pages: tuple[PageRoute, ...]
    app: Starlette

    async def read(self, page: PageRoute, visit: "Visit") -> Mapping[str, Any]:
        """Return what a page reads; DatabaseUnavailable: all of it together takes too long."""
        try:
            async with asyncio.timeout(self.read_seconds * _STATEMENTS):
                return await page.read(visit)
        except TimeoutError:
            raise DatabaseUnavailable("PostgreSQL did not answer in time") from None

    def render(self, template: str, visit: "Visit", values: Mapping[str, Any]) -> str:
        """Return a page."""
        return TEMPLATES.get_template(template).render(_names(visit, values))

    async def render_live(self, page: PageRoute, visit: "Visit") -> Mapping[str, str]:
        """Return the parts of a page that are sent again and again."""
        template = TEMPLATES.get_template(page.template)
        found = template.new_context(_names(visit, await self.read(page, visit)))
        return {
            name: "".join(block(found)) for name, block in template.blocks.items() if name.startswith("live")
        }


@dataclass(frozen=True, slots=True)
class Visit:
    """What one viewer asks for.

    Attributes:
        site: what all share.
        page: the name of the page or action.
        path: values from its address, by name.
        query: of its address, in their order.
        access: what the viewer may do.
        root: the path under which the dashboard is mounted.
        csrf: what the viewer's forms hold; empty in a live part.
        said: what an action has just reported to the viewer.
    """

    site: Site
    page: str
    path: Mapping[str, Any]
    query: tuple[tuple[str, str], ...]
    access: Access
    root: str
    csrf: str = ""
    said: str = ""

    def get(self, name: str) -> str | None:
        """Return a value of the query; None: there is none, or an empty one."""
        return next((value for key, value in self.query if key == name and value), None)

    def number(self, name: str, default: int, *, most: int) -> int:
        """Return a number of the query, from 1 to ``most``; WrongFilter: it is none."""
        given = self.get(name)
        if given is None:
            return default
        if not (is_short_number(given) and 1 <= int(given) <= most):
            raise WrongFilter(f"{name}={shown(given)} must be a number from 1 to {most}")
        return int(given)

    def may(self, action: str) -> bool:
        """Return whether the viewer may act so."""
        return self.access.may(action)

    def url(self, name: str, query: Mapping[str, Any] | None = None, /, **path: Any) -> str:
        """Return the address of a page or action, with these values of the query that are not None."""
        found = str(self.site.app.url_path_for(name, **{key: str(value) for key, value in path.items()}))
        given = [(key, str(value)) for key, value in (query or {}).items() if value is not None]
        return f"{self.root}{found}" + (f"?{urlencode(given)}" if given else "")

    def here(self, **changes: Any) -> str:
        """Return the address of this page with values of its query changed; None takes one out."""
        query = {**dict(self.query), **changes}
        return self.url(self.page, query, **self.path)

    @property
    def token_field(self) -> Markup:
        """The hidden field that each form needs."""
        return Markup('<input type="hidden" name="csrf" value="{}">').format(self.csrf)

    @property
    def live(self) -> Markup:
        """The attributes of an element whose content is the block ``live``."""
        return Markup('{} sse-swap="live"').format(self.stream)

    @property
    def stream(self) -> Markup:
        """The attributes of an element in which others have the name of their block as ``sse-swap``."""
        return Markup('hx-ext="sse" sse-connect="{}"').format(self.here())

    def for_all(self) -> "Visit":
        """Return this visit without what is the viewer's own."""
        return replace(self, csrf="", said="")

    def what(self) -> Hashable:
        """Return what all who see the same have in common."""
        rights = replace(self.access, name="")
        return self.page, tuple(sorted(self.path.items())), self.query, rights, self.root


def _names(visit: Visit, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"visit": visit, "url": visit.url, "may": visit.may, **values}


TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    auto_reload=False,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(FILTERS)
TEMPLATES.globals["version"] = jsworker.__version__
