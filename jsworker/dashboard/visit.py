"""A viewer's request, and the page that is made for it."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode
from uuid import UUID

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import FormData

import jsworker
from jsworker.client.job_client import JobClient
from jsworker.core.errors import DatabaseUnavailable, JsworkerError, UsageError
from jsworker.core.names import shown
from jsworker.core.processor import JobProcessor
from jsworker.dashboard.access import Access
from jsworker.dashboard.filters import FILTERS, number
from jsworker.dashboard.live import Poller
from jsworker.ownership.database import Database
from jsworker.ownership.queries.database_clock import DatabaseClock
from jsworker.ownership.refusals import readers_right

_DIGITS: Final = 9
_REASONS: Final = 2
_STATEMENTS: Final = 4
"""All reads of a page together may take as long as so many statements that reach the time-out."""


def is_short_number(text: str) -> bool:
    """Return whether a text is a number of at most nine digits."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


class WrongFilter(UsageError, ValueError):
    """The address or a form holds a value that makes no sense there."""


def needed(form: FormData, name: str, what: str) -> str:
    """Return a value of a form; WrongFilter says that ``what`` is needed: it is not there."""
    value = str(form.get(name) or "")
    if not value:
        raise WrongFilter(f"{what} is needed")
    return value


def uuid_of(given: str | None, fault: str) -> UUID | None:
    """Return a UUID; None: none is given. WrongFilter, with the text ``fault``: it is no UUID."""
    try:
        return UUID(given) if given else None
    except ValueError:
        raise WrongFilter(fault) from None


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A page: its path, the function that reads its values, and the template that shows them.

    Attributes:
        path: below the dashboard's own address.
        name: for ``Visit.url``.
        read: returns the values of the template.
        template: its blocks whose names begin with ``live`` are sent to viewers, each when it has changed.
            They are rendered once for all viewers, so they must not contain forms, which hold a viewer's
            token.
        title: in the navigation; empty: the navigation does not have the page.
    """

    path: str
    name: str
    read: Callable[["Visit"], Awaitable[Mapping[str, Any]]]
    template: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an action: a line for the viewer, and the address of the page that shows it."""

    says: str
    to: str

    @classmethod
    def of_several(cls, changed: str, left: int, why: Sequence[str], to: str) -> Self:
        """Return the result of an action on several: how many were left alone, and the first reasons why."""
        if left:
            changed += f"; {number(left)} left alone"
        if why:
            changed += f": {'; '.join(why[:_REASONS])}" + ("; …" if left > _REASONS else "")
        return cls(changed, to)


@dataclass(frozen=True, slots=True)
class Question:
    """The question that is asked before an action.

    Attributes:
        verb: the text of the button, ``Cancel 3 jobs``.
        says: what will happen.
        values: hidden fields of the form.
        back: the address for viewers who do not want the action.
        fields: template with further inputs of the form; None: there are none.
        names: values that ``fields`` shows.
        is_harmful: whether the action takes something away.
        is_possible: whether there is anything to do; else there is no button.
        error: why the question is asked again, such as a wrong value of the form; empty: it is asked anew.
    """

    verb: str
    says: str
    values: Sequence[tuple[str, str]]
    back: str
    fields: str | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    is_harmful: bool = False
    is_possible: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True)
class ActionRoute:
    """An action of a viewer: GET, or a form without ``confirmed``, asks the question; a form with it acts.

    A form must hold the viewer's token, without which nothing is done.

    Attributes:
        path: below the dashboard's own address.
        name: for ``Visit.url``.
        right: which of ``ACTIONS`` the viewer needs.
        ask: returns the question; it changes nothing.
        act: takes the action, or returns a question to ask again.
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
        reads: the client's database, only for reading; a statement is ended after ``read_seconds``.
        read_seconds: the time-out of a statement.
        poller: feeds live pages.
        trace_url: where a trace is shown, with ``{trace_id}`` in it.
        processors: processors whose models make forms, by kind.
        pages: those of the navigation.
        clock: the time by which pages show ages.
    """

    client: JobClient
    reads: Database
    read_seconds: float
    poller: Poller
    trace_url: str | None
    processors: Mapping[str, type[JobProcessor[Any]]]
    pages: tuple[PageRoute, ...]
    app: Starlette
    clock: DatabaseClock = field(default_factory=DatabaseClock)

    async def read(self, page: PageRoute, visit: "Visit") -> Mapping[str, Any]:
        """Return the values that a page reads; DatabaseUnavailable: its reads together take too long."""
        try:
            async with asyncio.timeout(self.read_seconds * _STATEMENTS):
                with suppress(JsworkerError):  # what the page itself reads may fail, too, or need no database
                    await self.clock.ask_if_old(self.reads)
                with readers_right():
                    return await page.read(visit)
        except TimeoutError:
            raise DatabaseUnavailable("PostgreSQL did not answer in time") from None

    def render(self, template: str, visit: "Visit", values: Mapping[str, Any]) -> str:
        """Return a page as HTML."""
        return TEMPLATES.get_template(template).render(_names(visit, values))

    async def render_live(self, page: PageRoute, visit: "Visit") -> Mapping[str, str]:
        """Return the parts of a page that are sent when they have changed, by name."""
        template = TEMPLATES.get_template(page.template)
        found = template.new_context(_names(visit, await self.read(page, visit)))
        return {name: "".join(template.blocks[name](found)) for name in live_blocks(page.template)}


@dataclass(frozen=True, slots=True)
class Visit:
    """A request of one viewer.

    Attributes:
        site: what all pages share.
        page: the name of the page or action.
        path: values from its path, by name.
        query: names and values of its query, in their order.
        access: what the viewer may do.
        root: the path under which the dashboard is mounted.
        csrf: the token for the viewer's forms; empty in a live part.
        report: what an action has just reported to the viewer.
    """

    site: Site
    page: str
    path: Mapping[str, Any]
    query: tuple[tuple[str, str], ...]
    access: Access
    root: str
    csrf: str = ""
    report: str = ""

    def get(self, name: str) -> str | None:
        """Return a value of the query; None: there is none, or an empty one."""
        return next((value for key, value in self.query if key == name and value), None)

    def number(self, name: str, default: int, *, most: int) -> int:
        """Return a number of the query, from 1 to ``most``; WrongFilter: it is not such a number."""
        given = self.get(name)
        if given is None:
            return default
        if not (is_short_number(given) and 1 <= int(given) <= most):
            raise WrongFilter(f"{name}={shown(given)} must be a number from 1 to {most}")
        return int(given)

    def may(self, action: str) -> bool:
        """Return whether the viewer may take this action."""
        return self.access.may(action)

    def url(self, name: str, query: Mapping[str, Any] | None = None, /, **path: Any) -> str:
        """Return the address of a page or action, with these values of the query that are not None."""
        found = str(self.site.app.url_path_for(name, **{key: str(value) for key, value in path.items()}))
        given = [(key, str(value)) for key, value in (query or {}).items() if value is not None]
        return f"{self.root}{found}" + (f"?{urlencode(given)}" if given else "")

    def here(self, **changes: Any) -> str:
        """Return the address of this page with values of its query changed; None removes a value."""
        query = {**dict(reversed(self.query)), **changes}  # of a name given twice the first, as ``get`` does
        return self.url(self.page, query, **self.path)

    @property
    def token_field(self) -> Markup:
        """The hidden field that each form needs."""
        return Markup('<input type="hidden" name="csrf" value="{}">').format(self.csrf)

    def for_all(self) -> "Visit":
        """Return this visit without the viewer's token and report."""
        return replace(self, csrf="", report="")

    def what(self) -> Hashable:
        """Return a key that is equal for all visits that see the same."""
        rights = replace(self.access, name="")
        return self.page, tuple(sorted(self.path.items())), self.query, rights, self.root


def live_blocks(template: str) -> list[str]:
    """Return the names of the blocks of a template that are sent to viewers when they have changed."""
    return [name for name in TEMPLATES.get_template(template).blocks if name.startswith("live")]


def _names(visit: Visit, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"visit": visit, "url": visit.url, "may": visit.may, "now": visit.site.clock.now(), **values}


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
TEMPLATES.globals["parts"] = TEMPLATES.get_template("parts.html").module
