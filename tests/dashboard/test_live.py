import asyncio
import itertools
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
from jinja2 import nodes

from jsworker import JobClient
from jsworker.dashboard import Access, dashboard, live
from jsworker.dashboard.app import PAGES
from jsworker.dashboard.live import EventStream, Poller, as_event
from jsworker.dashboard.visit import TEMPLATES
from jsworker.ownership.pool import Pool
from tests.dashboard.conftest import PutJob
from tests.dashboard.viewer import Viewer
from tests.support.polling import eventually

VIEWERS = 40


class Looks:
    """Counts what is rendered; each time it is something else."""

    def __init__(self) -> None:
        self.number = 0

    async def __call__(self) -> dict[str, str]:
        self.number += 1
        return {"live": f"<p>{self.number}</p>"}


async def first(events: AsyncIterator[str], wanted: int) -> list[str]:
    found: list[str] = []
    async for event in events:
        if "data:" in event:
            found.append(event)
        if len(found) == wanted:
            break
    await events.aclose()  # type: ignore[attr-defined]
    return found


async def test_one_look_serves_all_viewers() -> None:
    poller, looks = Poller(interval=0.05), Looks()
    seen = await asyncio.gather(*(first(poller.follow("page", looks), 3) for _ in range(VIEWERS)))
    assert len(seen) == VIEWERS
    assert looks.number < VIEWERS
    assert poller.viewers == 0


async def test_an_event_is_made_once_for_all_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str, html: str) -> str:
        made.append(html)
        return as_event(name, html)

    monkeypatch.setattr(live, "as_event", counted)
    poller, looks = Poller(interval=0.05), Looks()
    await asyncio.gather(*(first(poller.follow("page", looks), 3) for _ in range(VIEWERS)))
    assert len(made) == looks.number


async def test_a_page_that_takes_long_does_not_keep_the_others_old() -> None:
    poller, looks, slow = Poller(interval=0.01), Looks(), Looks()

    async def slowly() -> dict[str, str]:
        await asyncio.sleep(0.2)
        return await slow()

    for _ in range(2):  # a page that is opened again rests as long
        page = poller.follow("slow", slowly)
        await anext(page)
        await first(poller.follow("page", looks), 5)
        await page.aclose()
    assert looks.number >= 10
    assert slow.number <= 2


async def test_without_viewers_nothing_is_looked_at() -> None:
    poller, looks = Poller(interval=0.01), Looks()
    await first(poller.follow("page", looks), 1)

    async def is_over() -> None:
        assert poller._task is not None
        assert poller._task.done()

    await eventually(is_over)
    before = looks.number
    await asyncio.sleep(0.1)
    assert looks.number == before
    assert await first(poller.follow("page", looks), 1)  # and begins again


async def test_what_has_not_changed_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAM_SECONDS", 0.3)
    poller = Poller(interval=0.01)

    async def same() -> dict[str, str]:
        return {"live": "<p>same</p>"}

    events = [event async for event in poller.follow("page", same) if "data:" in event]
    assert events == ["event: live\ndata: <p>same</p>\n\n"]


async def test_a_part_that_has_not_changed_is_not_sent() -> None:
    poller, looks = Poller(interval=0.01), Looks()

    async def render() -> dict[str, str]:
        return {**await looks(), "live_charts": "same"}

    events = await first(poller.follow("page", render), 3)
    assert events[0] == "event: live\ndata: <p>1</p>\n\nevent: live_charts\ndata: same\n\n"
    assert not any("live_charts" in event for event in events[1:])


async def test_what_changed_before_a_viewer_came_is_sent() -> None:
    poller = Poller(interval=0.01)

    async def same() -> dict[str, str]:
        return {"live": "<p>same</p>"}

    earlier = poller.follow("page", same)
    assert [await anext(earlier), await anext(earlier)][1] == "event: live\ndata: <p>same</p>\n\n"
    later = await asyncio.wait_for(first(poller.follow("page", same), 1), 10)
    assert later == ["event: live\ndata: <p>same</p>\n\n"]
    await earlier.aclose()


async def test_a_viewer_who_misses_a_message_gets_what_it_changed() -> None:
    poller = Poller(interval=0.01)
    looks = 0

    async def render() -> dict[str, str]:
        nonlocal looks
        looks += 1
        return {"live": str(min(looks, 3)), "live_charts": "old" if looks < 2 else "new"}

    events = poller.follow("page", render)
    assert [await anext(events), await anext(events)][1].count("data:") == 2

    async def is_over() -> None:
        assert looks > 3

    await eventually(is_over)
    assert await anext(events) == "event: live\ndata: 3\n\nevent: live_charts\ndata: new\n\n"
    await events.aclose()


async def test_a_viewer_who_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SEND_SECONDS", 0.05)
    poller, looks = Poller(interval=0.01), Looks()
    stream = EventStream(poller.follow("page", looks))

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    await asyncio.wait_for(stream(scope, receive, send), 30)
    assert poller.viewers == 0


async def test_no_more_different_pages_are_kept_than_fit_into_memory(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_PAGES", 2)
    monkeypatch.setattr(live, "_MOST_BYTES", 10_000)
    poller = Poller(interval=0.01)

    async def large() -> dict[str, str]:
        return {"live": "x" * 8_000}

    first_page, second_page = poller.follow("first", large), poller.follow("second", large)
    assert len([await anext(first_page), await anext(first_page)][1]) > 8_000
    await anext(second_page)
    assert [poller.is_full(page) for page in ("first", "second", "third")] == [False, False, True]
    assert [event async for event in poller.follow("third", large)] == []
    with pytest.raises(StopAsyncIteration):  # it does not fit in
        await asyncio.wait_for(anext(second_page), 20)
    # Its next stream is refused until there is room, so that the page says that it is not updated.
    assert [poller.is_full(page) for page in ("first", "second", "third")] == [False, True, False]
    await first_page.aclose()
    assert not poller.is_full("second")
    assert len((await first(poller.follow("second", large), 1))[0]) > 8_000

    monkeypatch.setattr(live, "MOST_PAGES", 0)
    assert "too many pages are open" in await stream_of(dashboard(client), 1)


async def test_many_viewers_cost_the_database_what_one_does(
    client: JobClient, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put("queued")
    app = dashboard(client)
    app.state.site.poller._interval = 0.2
    number = itertools.count()
    # Each look is an event: the overview itself changes ten times a second, but after ten seconds only once.
    monkeypatch.setattr(live, "as_event", lambda name, html: as_event(name, f"{html}{next(number)}"))
    statements = 0
    execute = Pool.execute

    async def counting(self: Pool, *arguments: Any, **options: Any) -> Any:
        nonlocal statements
        statements += 1
        return await execute(self, *arguments, **options)

    monkeypatch.setattr(Pool, "execute", counting)
    looks = await statements_of(app, viewers=1, events=3)
    one, statements = statements, 0
    assert looks == 1
    assert await statements_of(app, viewers=VIEWERS, events=3) == VIEWERS
    # A look more for those who came while one was under way; forty times as many for a look each.
    assert statements <= 3 * one


async def statements_of(app: Any, *, viewers: int, events: int) -> int:
    """Let so many look at the overview until each has got so many events; return how many got markup."""
    texts = await asyncio.gather(*(stream_of(app, events) for _ in range(viewers)))
    return sum("waiting" in text for text in texts)


async def stream_of(app: Any, events: int, path: str = "/", sent: list[str] | None = None) -> str:
    """Speak ASGI, for httpx's transport waits for the end of an answer; ``sent`` gets what comes."""
    headers = [(b"host", b"localhost"), (b"accept", b"text/event-stream")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    sent = [] if sent is None else sent
    enough = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"].decode())
            if sum("data:" in text for text in sent) >= events:
                enough.set()

    await app(scope, receive, send)
    return "".join(sent)


async def test_each_live_page_renews_itself(client: JobClient, put: PutJob) -> None:
    job_id = await put("processing")
    for status in ("queued", "failed", "scheduled"):
        await put(status)
    app = dashboard(client)
    app.state.site.poller._interval = 0.05
    pages = [page for page in PAGES if page.name != "workflow"]
    live_pages = [page for page in pages if "live" in TEMPLATES.get_template(page.template).blocks]
    assert len(live_pages) > 5
    paths = [page.path.replace("{id:uuid}", str(job_id)) for page in live_pages]
    for path in paths:
        text = await stream_of(app, 1, path)
        assert "data:" in text
        assert "Not up to date" not in text, (path, text)


async def test_a_page_without_a_live_part_is_not_streamed(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAM_SECONDS", 3.0)
    app = dashboard(client, authorize=lambda _: Access.READ)
    viewer = Viewer(app)
    for path, status in (("/workers/stack?worker=w", 403), ("/audit", 200)):
        answer = await viewer.http.get(path, headers={"accept": "text/event-stream"})
        assert (answer.status_code, answer.headers["content-type"]) == (status, "text/html; charset=utf-8")
    await viewer.http.aclose()


def test_templates_use_filters_that_there_are() -> None:
    """One in a branch that is not taken is missed at its first use alone."""
    for name in TEMPLATES.list_templates():
        source, _, _ = TEMPLATES.loader.get_source(TEMPLATES, name)  # type: ignore[union-attr] # it has one
        used = {each.name for each in TEMPLATES.parse(source).find_all(nodes.Filter)}
        assert used <= TEMPLATES.filters.keys(), name
