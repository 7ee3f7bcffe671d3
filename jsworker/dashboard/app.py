"""The application: tables of its pages and actions, and the steps of every request."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from markupsafe import escape
from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.datastructures import FormData, MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jsworker.client.job_client import JobClient
from jsworker.core.errors import (
    DatabaseUnavailable,
    JobNotFound,
    JsworkerError,
    SettingsError,
    TransitionRefused,
    UsageError,
    WorkflowNotFound,
)
from jsworker.core.exit_codes import lines_of
from jsworker.core.names import printable, shown
from jsworker.core.processor import JobProcessor
from jsworker.dashboard.access import (
    HEADERS,
    Access,
    Authorize,
    CsrfTokens,
    access_of,
    host_name,
    is_own_address,
    is_own_origin,
    refusal,
)
from jsworker.dashboard.live import Away, EventStream, Poller
from jsworker.dashboard.pages import (
    audit,
    dead_messages,
    doctor,
    enqueue,
    failures,
    job,
    job_actions,
    jobs,
    keys,
    kinds,
    limit_actions,
    overview,
    schedules,
    stacks,
    workers,
    workflows,
)
from jsworker.dashboard.visit import (
    ActionRoute,
    Done,
    PageRoute,
    Question,
    Site,
    Visit,
    WrongFilter,
    is_short_number,
    live_blocks,
)
from jsworker.ownership.refusals import needed_right, readers_right

PAGES: Final = (
    PageRoute("/", "overview", overview.read, "overview.html", title="Overview"),
    PageRoute("/jobs", "jobs", jobs.read, "jobs.html", title="Jobs"),
    PageRoute("/jobs/{id:uuid}", "job", job.read, "job.html"),
    PageRoute("/jobs/{id:uuid}/stack", "job-stack", stacks.read_job, "stack.html"),
    PageRoute("/failures", "failures", failures.read, "failures.html", title="Failures"),
    PageRoute("/kinds", "kinds", kinds.read, "kinds.html", title="Kinds"),
    PageRoute("/keys", "keys", keys.read, "keys.html", title="Keys"),
    PageRoute("/schedules", "schedules", schedules.read, "schedules.html", title="Schedules"),
    PageRoute("/workflows", "workflows", workflows.read, "workflows.html", title="Workflows"),
    PageRoute("/workflows/{id:uuid}", "workflow", workflows.read_one, "workflow.html"),
    PageRoute("/workers", "workers", workers.read, "workers.html", title="Workers"),
    PageRoute("/workers/stack", "worker-stack", stacks.read_worker, "stack.html"),
    PageRoute(
        "/dead-messages", "dead-messages", dead_messages.read, "dead_messages.html", title="Dead messages"
    ),
    PageRoute("/doctor", "doctor", doctor.read, "doctor.html", title="Doctor"),
    PageRoute("/audit", "audit", audit.read, "audit.html", title="Audit"),
)
"""All pages, in the order of the navigation."""

ACTIONS: Final = (
    ActionRoute("/enqueue", "enqueue", "enqueue", enqueue.ask, enqueue.act),
    *(
        ActionRoute(
            path.replace("VERB", verb),
            name.replace("VERB", verb),
            right.replace("VERB", verb),
            partial(page.ask, verb),
            partial(page.act, verb),
        )
        for path, name, right, page in (
            ("/jobs/VERB", "VERB-jobs", "VERB", job_actions),
            ("/jobs/{id:uuid}/VERB", "VERB-job", "VERB", job_actions),
            ("/kinds/VERB", "VERB-kind", "pause", limit_actions),
            ("/schedules/VERB", "VERB-schedule", "schedules", schedules),
            ("/workflows/{id:uuid}/VERB", "VERB-workflow", "workflows", workflows),
            ("/workers/VERB", "VERB-worker", "workers", workers),
            ("/dead-messages/VERB", "VERB-messages", "dead-messages", dead_messages),
        )
        for verb in page.VERBS
    ),
    ActionRoute("/doctor/repair", "repair", "repair", doctor.ask, doctor.act),
)
"""All actions, each with the right that it needs."""

_log: Final = logging.getLogger(__name__)
_FAULT: Final = "the dashboard failed; its log tells why"
_OF_ANOTHER_SESSION: Final = (
    "nothing was done: the form was shown in another session of the browser; open its page anew and repeat it"
)
_STATIC: Final = Path(__file__).parent / "static"
_ACCESS: Final = "jsworker.access"
_ROOT: Final = "jsworker.root"
"""Where the dashboard is mounted, kept because Starlette adds its own mounts to the scope's root_path."""
_BEGAN: Final = "jsworker.began"
_HEALTH: Final = "/healthz"
"""Answered to anybody, by any host name: a probe of Kubernetes has neither a login nor the name of the host.

It tells only that the process answers; no server is asked.
"""
_REPORT: Final = "jsworker-said"
_REPORT_SECONDS: Final = 30
_LONGEST_REPORT: Final = 500
_MOST_FORM_BYTES: Final = 4 * 1024 * 1024
_MOST_FIELDS: Final = 5_000
_MOST_QUERY_BYTES: Final = 8 * 1024
"""Links of a page repeat its query, a table's in every row."""
_READS_AT_ONCE: Final = 3
_LONGEST_WAIT_SECONDS: Final = 5.0
_NO_PAGE: Final = 404
_REFRESH_SECONDS: Final = (5, 30)
"""Until a page loads itself again that failed at once, or after a while: many may wait for places."""
_IMMUTABLE: Final = "public, max-age=3600"


def dashboard(
    client: JobClient,
    *,
    authorize: Authorize | None = None,
    hosts: Collection[str] | None = None,
    read_seconds: float = 3.0,
    read_role: str | None = None,
    trace_url: str | None = None,
    processors: Iterable[type[JobProcessor[Any]] | JobProcessor[Any]] = (),
) -> Starlette:
    """Return the application, to be served alone or mounted in another: ``app.mount("/jobs", …)``.

    Args:
        client: must be open while requests are served; the application needs no lifespan of its own.
        authorize: returns what the sender of a request may do. Without it the dashboard answers only to
            browsers on the same machine, which may do everything.
        hosts: host names, without ports, to which it answers; None: any, because ``authorize`` decides.
        read_seconds: PostgreSQL ends a statement of a page after so long; the page then says so.
        read_role: role with whose rights pages are read, such as ``jsworker_reader``; the client's login must
            be a member of it. None: the login's own rights.
        trace_url: the address of a trace, with ``{trace_id}`` in it.
        processors: their models make the forms for enqueueing jobs; other payloads are entered as JSON.

    Raises:
        SettingsError: a name in ``hosts`` has a scheme or a port; ``trace_url`` has no ``{trace_id}``.
    """
    if trace_url is not None and "{trace_id}" not in trace_url:
        raise SettingsError(f"trace_url {shown(trace_url)}: must hold {{trace_id}}")
    for host in hosts or ():
        if host_name(f"[{host}]" if host.count(":") > 1 else host) != host.lower():
            raise SettingsError(f"host name {shown(host)}: must be a name or an address, without a port")
    app = Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=_STATIC), name="static"),
            *(Route(each.path, partial(_show, each), name=each.name) for each in PAGES),
            *(
                Route(each.path, partial(_act, each), name=each.name, methods=["GET", "POST"])
                for each in ACTIONS
            ),
        ],
        middleware=[
            Middleware(
                _Guard, authorize=authorize, hosts=None if hosts is None else frozenset(map(str.lower, hosts))
            )
        ],
        exception_handlers={JsworkerError: _tell, HTTPException: _tell, Exception: _fail},
    )
    app.state.site = Site(
        client=client,
        reads=client.database.for_reading(seconds=read_seconds, role=read_role),
        read_seconds=read_seconds,
        poller=Poller(),
        trace_url=trace_url,
        processors={each.kind: each if isinstance(each, type) else type(each) for each in processors},
        pages=PAGES,
        app=app,
    )
    app.router.redirect_slashes = False  # it redirects to http, also from behind a proxy that serves HTTPS
    app.state.reading = asyncio.Semaphore(_READS_AT_ONCE)
    return app


@asynccontextmanager
async def _reading(request: Request) -> AsyncIterator[None]:
    """Wait for one of the places of pages that read, but not for long."""
    places: asyncio.Semaphore = request.app.state.reading
    try:
        async with asyncio.timeout(_LONGEST_WAIT_SECONDS):
            await places.acquire()
    except TimeoutError:
        raise HTTPException(503, "other pages are still being read: try again in a moment") from None
    try:
        yield
    finally:
        places.release()


async def _show(page: PageRoute, request: Request) -> Response:
    """Respond with a page, or with the stream of its live parts."""
    visit, tokens = _visit(request, page.name)
    _check_text(visit.query)
    if "text/event-stream" in request.headers.get("accept", "") and live_blocks(page.template):
        return _stream(page, visit.for_all())
    async with _reading(request):
        values = await visit.site.read(page, visit)
    return _page(visit, page.template, values, tokens=tokens)


def _page(
    visit: Visit,
    template: str,
    values: Mapping[str, Any],
    status: int = 200,
    *,
    tokens: CsrfTokens | None = None,
) -> Response:
    """Return a page; if an action has just reported something, only this page shows it."""
    response = HTMLResponse(visit.site.render(template, visit, values), status)
    if tokens is not None:
        tokens.remember(response)
    if visit.report:
        response.delete_cookie(_REPORT, path="/", httponly=True, samesite="strict")
    return response


def _stream(page: PageRoute, visit: Visit) -> Response:
    poller = visit.site.poller
    if poller.is_full(visit.what()):
        return refusal(503, "too many pages are open: this one does not renew itself")

    def stale(line: str) -> Mapping[str, str]:
        return {"stale": escape(f"Not up to date: {line}")}

    async def render() -> Mapping[str, str]:
        try:
            return {**await visit.site.render_live(page, visit), "stale": ""}
        except JsworkerError as error:
            found = stale(_line(visit.site, error))
            if isinstance(error, DatabaseUnavailable) and not _took_long(error):
                raise Away(found) from None
            return found
        except HTTPException as error:
            return stale(error.detail)
        except Exception:  # noqa: BLE001 -- one page's fault must not end the others'
            _log.exception("page %s", page.name)
            return stale(_FAULT)

    return EventStream(poller.follow(visit.what(), render))


async def _act(action: ActionRoute, request: Request) -> Response:
    """Ask before an action; or check that a form is the viewer's own, and act if it is confirmed."""
    visit, tokens = _visit(request, action.name)
    if not visit.may(action.right):
        raise HTTPException(403, f"you may not do this: {action.right}")
    wrong = ""
    if request.method == "POST":
        if (refused := _refused_unread(request)) is not None:
            return refused
        form = await request.form(max_files=0, max_fields=_MOST_FIELDS, max_part_size=_MOST_FORM_BYTES)
        if not tokens.is_own(visit.access, form.get("csrf")):
            return _error(visit, 403, _OF_ANOTHER_SESSION)
        _check_text(form.multi_items())
        if form.get("confirmed") == "yes":
            try:
                return await _perform(action, visit, tokens, form)
            except WrongFilter as error:
                wrong = str(error)
    else:
        _check_text(visit.query)
        form = FormData(list[tuple[str, str | UploadFile]](request.query_params.multi_items()))
    async with _reading(request):
        with readers_right():
            question = await action.ask(visit, form)
    return _question(visit, tokens, replace(question, error=wrong) if wrong else question)


async def _perform(action: ActionRoute, visit: Visit, tokens: CsrfTokens, form: FormData) -> Response:
    """Act, and lead to the page that shows it; or ask again."""
    try:
        with needed_right("this action", "more rights", "jsworker_operator"):
            done = await action.act(visit, form)
    except DatabaseUnavailable as error:
        writes_nothing = "25006" in str(error)  # as a standby, which has answered
        return _error(visit, 503, " ".join(lines_of(error)), may_be_done=not writes_nothing)
    except asyncio.CancelledError:  # the server ends; only this response is left to be sent
        _log.warning("action %s of %s was interrupted", action.name, shown(visit.access.name))
        return _error(visit, 503, "the dashboard was stopped before the action had ended", may_be_done=True)
    return _redirect(done) if isinstance(done, Done) else _question(visit, tokens, done)


def _refused_unread(request: Request) -> Response | None:
    """Return the response that refuses a form before it is parsed, for any site can send one, else None."""
    if not is_own_origin(request):
        return refusal(403, "refused: the form was not sent by the dashboard's own page")
    _, options = parse_options_header(request.headers.get("content-type", ""))
    # Some of Python's codecs take minutes for a form of a few megabytes.
    if options.get(b"charset", b"utf-8").lower() not in {b"utf-8", b"utf8"}:
        return refusal(415, "refused: a form must be sent in UTF-8")
    length = request.headers.get("content-length", "")
    is_chunked = "transfer-encoding" in request.headers  # then there is no length to rely on
    if is_chunked or not (is_short_number(length) and int(length) <= _MOST_FORM_BYTES):
        return refusal(413, f"a form must say its length, of at most {_MOST_FORM_BYTES} bytes")
    return None


def _check_text(values: Iterable[tuple[str, object]]) -> None:
    """Raise WrongFilter for a value with NUL, which no row can hold."""
    for name, value in values:
        if isinstance(value, str) and "\0" in value:
            raise WrongFilter(f"{shown(name)} must not hold NUL characters")


def _question(visit: Visit, tokens: CsrfTokens, question: Question) -> Response:
    status = 422 if question.error else 200
    return _page(visit, "question.html", {"question": question}, status, tokens=tokens)


def _redirect(done: Done) -> Response:
    response = RedirectResponse(done.to, 303)
    says = quote(printable(done.says.replace("\u202f", " "), _LONGEST_REPORT))  # the space in thousands
    response.set_cookie(_REPORT, says, path="/", max_age=_REPORT_SECONDS, httponly=True, samesite="strict")
    return response


def _visit(request: Request, name: str) -> tuple[Visit, CsrfTokens]:
    access: Access = request.scope[_ACCESS]
    tokens = CsrfTokens(request)
    visit = Visit(
        site=request.app.state.site,
        page=name,
        path=request.path_params,
        query=tuple(request.query_params.multi_items()),
        access=access,
        root=request.scope[_ROOT],
        csrf=tokens.token(access),
        report=printable(unquote(request.cookies.get(_REPORT, "")), _LONGEST_REPORT),
    )
    return visit, tokens


async def _tell(request: Request, error: Exception) -> Response:
    visit, _ = _visit(request, "error")
    if isinstance(error, HTTPException):
        status = error.status_code
        line = f"there is no page {shown(request.url.path)}" if status == _NO_PAGE else error.detail
    else:
        status, line = _status(error), _line(visit.site, error)
    came_from = request.headers.get("referer", "")
    # A question that was asked again stands at the address of its answer, which leads to an empty one.
    is_back = is_own_address(request, came_from) and urlsplit(came_from).path != request.url.path
    back = came_from if is_back else ""
    response = _error(visit, status, line, back=back)
    is_away = status == 503 and not (isinstance(error, DatabaseUnavailable) and _took_long(error))
    if request.method == "GET" and is_away and not visit.report:  # which the next page would not show
        was_late = time.monotonic() - request.scope[_BEGAN] > 1.0
        response.headers["refresh"] = str(_REFRESH_SECONDS[was_late])
    return response


def _error(visit: Visit, status: int, line: str, *, may_be_done: bool = False, back: str = "") -> Response:
    """Return the page of an error.

    ``may_be_done``: the answer to an action is missing, not the action. ``back``: the page that led here.
    """
    values = {"status": status, "line": line, "may_be_done": may_be_done, "back": back}
    return _page(visit, "error.html", values, status)


async def _fail(request: Request, error: Exception) -> Response:  # noqa: ARG001 -- a handler's shape
    """Respond to an error of the dashboard itself; the server logs the error."""
    return PlainTextResponse(f"{_FAULT}\n", 500, HEADERS)


def _status(error: Exception) -> int:
    match error:
        case JobNotFound() | WorkflowNotFound():
            return 404
        case TransitionRefused():
            return 409
        case UsageError():
            return 400
        case DatabaseUnavailable():
            return 503
    return 502


def _line(site: Site, error: Exception) -> str:
    if isinstance(error, DatabaseUnavailable) and (_took_long(error) or "did not answer" in str(error)):
        return f"PostgreSQL took longer than {site.read_seconds:g} s for this: narrow it down, or try again"
    return " ".join(lines_of(error)) if isinstance(error, JsworkerError) else str(error)


def _took_long(error: DatabaseUnavailable) -> bool:
    """Return whether PostgreSQL answered, and worked until the time-out of a statement or of a page."""
    return "57014" in str(error) or "did not answer in time" in str(error)


class _Guard:
    """Refuses requests that ``authorize`` does not allow, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, authorize: Authorize | None, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._authorize = authorize
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_file = False

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if is_file and message["status"] == 200:
                    headers["cache-control"] = _IMMUTABLE
            await send(message)

        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        if path == _HEALTH:
            await PlainTextResponse("ok\n")(scope, receive, send_safely)
            return
        if len(scope.get("query_string", b"")) > _MOST_QUERY_BYTES:
            too_long = refusal(414, f"the query of an address has at most {_MOST_QUERY_BYTES} bytes")
            await too_long(scope, receive, send_safely)
            return
        try:
            found = await access_of(Request(scope), self._authorize, self._hosts)
        except HTTPException as error:  # ``authorize`` may refuse by raising it
            found = PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
        if isinstance(found, Response):
            await found(scope, receive, send_safely)
            return
        is_file = path.startswith("/static/")
        await self._app(
            {**scope, _ACCESS: found, _ROOT: root, _BEGAN: time.monotonic()}, receive, send_safely
        )
