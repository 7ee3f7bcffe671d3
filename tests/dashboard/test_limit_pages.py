"""Kinds and keys: what limits them, and pausing them."""

import re
from typing import Any

import httpx
import pytest
from psycopg.sql import SQL
from psycopg.types.json import Jsonb

from jsworker import JobClient
from jsworker.core.errors import Retry, Snooze
from jsworker.core.job import Job
from jsworker.core.limits import Limit, Rate
from jsworker.core.processor import Backoff, JobProcessor
from jsworker.core.settings import Settings
from jsworker.dashboard import Access, dashboard
from tests.dashboard.conftest import PutJob
from tests.dashboard.viewer import Shown, Viewer
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

EVIL = "'\"><script>alert(1)</script>"


class Slow(JobProcessor):
    kind = "slow"
    limit = Limit(2)

    async def process(self, job: Job[dict[str, int]]) -> None:
        raise AssertionError(job)


class Refused(JobProcessor):
    kind = "refused"

    async def process(self, job: Job[dict[str, str]]) -> None:
        raise Retry(3600, f"429 for {job.payload['user']}", pause="key")


class Early(JobProcessor):
    kind = "early"

    async def process(self, job: Job[dict[str, str]]) -> None:
        raise Snooze(3600, f"no invoice of {job.payload['user']}")


class Careful(JobProcessor):
    kind = "careful"
    max_attempts = 7
    max_stalls = 20
    backoff = Backoff(first=2, factor=3.0, longest=90)
    timeout = 3600
    progress_timeout = 300.0
    concurrency = 2
    priority = "high"
    isolation = "process"
    max_jobs_per_process = 50
    max_memory_mb = 300

    async def process(self, job: Job[dict[str, int]]) -> None:
        raise AssertionError(job)


RUN_SETTINGS: dict[str, Any] = {
    "max_attempts": 5,
    "max_stalls": 3,
    "backoff": {"first": 1, "factor": 2, "longest": 600},
    "timeout": None,
    "progress_timeout": None,
    "stale_threshold": 300,
    "concurrency": 8,
    "priority": "normal",
    "isolation": None,
    "max_jobs_per_process": None,
    "max_memory_mb": None,
}


async def test_kinds_show_what_live_workers_serve(
    viewer: Viewer, client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await client.pause("slow", reason=EVIL)
    await start(Slow)
    await client.enqueue("slow", {})
    await client.enqueue("unserved", {})
    await add_worker(rows, "drained", None, state="drained")
    page = await viewer.see("/kinds")
    assert page.links["drained or ending"] == "/workers"
    assert "paused for" in page.text
    assert EVIL in page.text
    assert "0 of 2 at once" in page.text
    assert "1 worker" in page.text
    assert page.text.count("none is alive") == 1
    links = [found["href"] for tag, found in page.elements if tag == "a"]
    assert "/kinds/resume?kind=slow" in links
    assert "/kinds/pause?kind=unserved" in links


async def test_a_limit_of_each_key_is_not_counted_for_the_kind(
    viewer: Viewer, client: JobClient, rows: Rows, put: PutJob
) -> None:
    await client.limits.set("resize", Limit(1))
    await put("processing", limit_key="")
    assert "1 of 1 at once" in (await viewer.see("/kinds")).text
    for key in ("a", "b"):
        await put("processing", limit_key=key)
        await rows.query("INSERT INTO jsworker.limits (kind, key) VALUES ('resize', %s)", key)
    page = await viewer.see("/kinds")
    assert "1 at once for each key" in page.text
    assert "2 keys" in page.text
    assert "of 1 at once" not in page.text


async def test_kinds_show_a_pause_beside_very_many_keys_of_another_kind(
    viewer: Viewer, client: JobClient, rows: Rows
) -> None:
    await rows.query(
        "INSERT INTO jsworker.limits (kind, key, max_running, set_by)"
        " SELECT 'busy', CAST(n AS text), 1, 'operator' FROM generate_series(1, 10001) AS n"
    )
    await client.enqueue("busy", {})
    await client.enqueue("calm", {})
    await client.pause("calm", "tenant-1")
    await client.pause("calm", reason="the server is moved")
    page = await viewer.see("/kinds")
    assert "the server is moved 1 key" in page.text
    assert "10 000+ keys" in page.text


def settings_table(page: Shown) -> str:
    return page.text.partition("How live workers run them")[2]


async def test_kinds_show_how_live_workers_run_them(
    viewer: Viewer, client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await start(Careful)
    await client.enqueue("careful", {})
    of_the_worker = (
        "careful 1 7 2.0 s, × 3, at most 1 m 30 s 20 1 h 5 m 1 m 2 high yes, 50 jobs each, 300 MB each"
    )
    page = await viewer.see("/kinds")
    assert of_the_worker in settings_table(page)
    assert "workers differ" not in page.text
    other = RUN_SETTINGS | {"max_attempts": 1234}
    await add_worker(rows, "twin", {"careful": other})
    await add_worker(rows, "another", {"careful": other})
    await add_worker(rows, "silent", {"careful": RUN_SETTINGS | {"max_attempts": 77}}, seen="1 hour")
    text = settings_table(await viewer.see("/kinds"))
    assert text.index("careful workers differ 2 1 234 ") < text.index("careful workers differ 1 7 ")
    assert " 77 " not in text


@pytest.mark.parametrize(
    "stored",
    ["x", 7, [], {}, RUN_SETTINGS | {"timeout": 10**400}, RUN_SETTINGS | {"backoff": {"first": 1}}],
)
async def test_settings_in_an_unknown_form_stop_no_page(
    viewer: Viewer, client: JobClient, rows: Rows, stored: Any
) -> None:
    await client.enqueue("careful", {})
    await add_worker(rows, "older", None)
    await add_worker(rows, "hostile", stored)
    await add_worker(rows, "other", {"careful": stored, "unknown": stored})
    text = settings_table(await viewer.see("/kinds"))
    assert "careful 1 in a form that this version does not know" in text
    assert "unknown" not in text


async def add_worker(
    rows: Rows, worker: str, settings: Any, *, seen: str = "0 s", state: str = "running"
) -> None:
    await rows.query(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval,"
        " state, kind_settings, last_seen_at) VALUES (%s, 'host', 7, '{careful}', 1, '2', '1 s', %s,"
        " %s, now() - CAST(%s AS interval))",
        *(worker, state, None if settings is None else Jsonb(settings), seen),
    )


async def test_a_kind_and_a_key_are_paused_and_resumed(viewer: Viewer, client: JobClient) -> None:
    question = await viewer.see("/kinds/pause?kind=mail")
    page = await viewer.press(question, "Pause", {"seconds": "3600", "reason": "the server is moved"})
    assert "kind mail is paused" in page.text
    await viewer.press(await viewer.see("/kinds/pause?kind=mail&key=tenant-9"), "Pause", {"reason": EVIL})
    found = {each["key"]: each for each in await client.limits.list()}
    assert (found[""]["reason"], found["tenant-9"]["reason"]) == ("the server is moved", EVIL)
    assert found[""]["paused_until"] is not None
    page = await viewer.see("/keys?kind=mail")
    assert "/kinds/resume?kind=mail&key=tenant-9" in page.addresses
    question = await viewer.see("/kinds/resume?kind=mail&key=tenant-9")
    page = await viewer.press(question, "Resume")
    assert "kind mail, key tenant-9 is resumed; its jobs wait until its kind is resumed, too" in page.text
    await viewer.press(question, "Resume", status=409)
    question = await viewer.see("/kinds/resume?kind=mail&key=tenant-9")
    assert "It is not paused." in question.text
    assert not question.has("Resume")
    [last, *_] = await client.audit()
    assert (last.action, last.target["kind"], last.changed) == ("resume", "mail", 1)


async def test_limits_are_set_and_reset(viewer: Viewer, client: JobClient) -> None:
    question = await viewer.see("/kinds/set-limits?kind=mail")
    page = await viewer.press(question, "Set", {"running": "4", "rate": "100", "per": "60"})
    assert "kind mail: 4 at once, 100 per 60 s" in page.text
    assert "100 per 60 s" in (await viewer.see("/keys?all=yes")).text
    numbers = await client.limits.numbers("mail")
    assert (numbers.max_running, numbers.rate, numbers.per) == (4, 100, 60.0)
    question = await viewer.see("/kinds/set-limits?kind=mail")
    assert {"running": "4", "rate": "100", "per": "60.0"}.items() <= dict(question.forms[0].values).items()
    await viewer.press(question, "Set", {"running": "", "rate": "", "per": ""}, status=422)
    again = await viewer.press(question, "Set", {"running": "many", "rate": ""}, status=422)
    assert "running='many' must be a number from 1 to 1e+06" in again.text
    assert {"running": "many", "rate": "", "per": "60.0"}.items() <= dict(again.forms[0].values).items()
    for name in ("running", "rate"):
        again = await viewer.press(question, "Set", {name: "2.5"}, status=422)
        assert f"{name}=2.5 must be a whole number" in again.text
    assert (await client.limits.numbers("mail")).max_running == 4
    await viewer.press(await viewer.see("/kinds/reset-limits?kind=mail"), "Reset")
    assert (await client.limits.numbers("mail")).max_running is None
    assert not (await viewer.see("/kinds/reset-limits?kind=mail")).has("Reset")
    assert [each.action for each in await client.audit()] == ["limits.reset", "limits.set"]
    await viewer.see("/kinds/pause?kind=No%20Kind", 400)
    await viewer.see("/kinds/pause", 400)


async def test_limits_that_others_have_changed_are_asked_about_again(
    viewer: Viewer, client: JobClient
) -> None:
    question = await viewer.see("/kinds/set-limits?kind=mail")
    await client.limits.set("mail", Limit(7), Rate(100, per=60.5))
    again = await viewer.press(question, "Set", {"running": "3"}, status=422)
    assert "They have changed since you were asked." in again.text
    assert "Current limits: 7 at once" in again.text
    assert {"running": "7", "rate": "100", "per": "60.5"}.items() <= dict(again.forms[0].values).items()
    assert (await client.limits.numbers("mail")).max_running == 7
    page = await viewer.press(again, "Set", {"running": "3"})
    assert "kind mail: 3 at once" in page.text
    question = await viewer.see("/kinds/reset-limits?kind=mail")
    await client.limits.set("mail", Limit(8))
    await viewer.press(question, "Reset", status=422)
    assert (await client.limits.numbers("mail")).max_running == 8


async def test_a_pause_that_others_have_changed_is_asked_about_again(
    viewer: Viewer, client: JobClient
) -> None:
    question = await viewer.see("/kinds/pause?kind=mail")
    assert "until it is resumed" not in question.text.partition("For so many seconds")[0]
    await client.pause("mail", reason=f"data is corrupted {EVIL}", actor="ann")
    typed = {"seconds": "3600", "reason": '"moved" to another server'}
    again = await viewer.press(question, "Pause", typed, status=422)
    assert "The pause has changed since you were asked." in again.text
    assert re.search(r"paused since 20[^,]+ UTC, by ann: data is corrupted", again.text)
    assert "The new pause takes the place of this one." in again.text
    [found] = await client.limits.list()
    assert (found["paused_until"], found["paused_by"]) == (None, "ann")
    page = await viewer.press(again, "Pause")
    assert "kind mail is paused until 20" in page.text
    assert (await client.limits.list())[0]["reason"] == typed["reason"]

    resume = await viewer.see("/kinds/resume?kind=mail")
    assert re.search(r"paused since 20[^,]+ UTC until 20[^,]+ UTC, by ", resume.text)
    await client.resume("mail")
    await client.pause("mail", reason="do not resume", actor="carol")
    again = await viewer.press(resume, "Resume", status=422)
    assert "by carol: do not resume." in again.text
    assert (await client.limits.list())[0]["paused_by"] == "carol"
    assert "kind mail goes on" in (await viewer.press(again, "Resume")).text


async def test_keys_are_listed_page_by_page(viewer: Viewer, client: JobClient) -> None:
    for number in range(101):
        await client.limits.set("mail", Limit(1), Rate(5), key=f"tenant-{number:03}")
    first = await viewer.see("/keys")
    second = await viewer.see(first.links["Next page"])
    assert "tenant-100" not in first.text
    assert "tenant-100" in second.text
    assert second.links["First page"] == "/keys"
    await viewer.see("/keys?after=none", 400)
    # The page goes on behind a key that is not limited any more.
    await client.limits.reset("mail", key="tenant-099")
    assert "tenant-100" in (await viewer.see(first.links["Next page"])).text
    await client.limits.set("zip", Limit(1))
    assert "tenant" not in (await viewer.see("/keys?kind=zip")).text
    assert "zip" in (await viewer.see("/keys?kind=zip")).links


async def test_a_limit_of_a_kind_without_keys_is_not_of_each_key(
    viewer: Viewer, client: JobClient, rows: Rows, put: PutJob
) -> None:
    await client.limits.set("resize", Rate(1, per=600))
    await put("scheduled", run_at=None, held_by="rate", held_at=SQL("clock_timestamp()"), limit_key="")
    assert "resize all of it " in (await viewer.see("/keys")).text
    await put("scheduled", run_at=None, held_by="rate", held_at=SQL("clock_timestamp()"), limit_key="a")
    await rows.query("INSERT INTO jsworker.limits (kind, key) VALUES ('resize', 'a')")
    assert "resize each key " in (await viewer.see("/keys")).text


async def test_without_the_right_nothing_is_offered_or_done(client: JobClient) -> None:
    await client.enqueue("mail", {})
    reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    page = await reader.see("/kinds")
    assert not [link for link in page.links.values() if "/pause" in link or "/enqueue" in link]
    answer: httpx.Response = await reader.http.get("/kinds/pause?kind=mail")
    assert answer.status_code == 403
    await reader.http.aclose()


async def test_what_processors_say_is_shown_with_the_right_to_payloads_alone(
    settings: Settings, rows: Rows, start: StartWorker
) -> None:
    running = await start(Refused, Early)
    async with JobClient(settings) as client:
        refused, early = [await client.enqueue(each, {"user": "alice"}) for each in (Refused, Early)]
        await running.events.told("limit.paused")
        await rows.becomes(refused.id, "scheduled")
        await rows.becomes(early.id, "scheduled")
        await client.pause("mail", reason="the provider moves")
        await client.enqueue("mail", {})
        reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
        may_see = Viewer(dashboard(client, authorize=lambda _: Access(payloads=True)))
        for address in ("/", "/keys", "/kinds", "/doctor?examine=yes", f"/jobs/{early.id}"):
            page = await reader.see(address)
            assert "alice" not in page.source, address
            assert "alice" in (await may_see.see(address)).text, address
            if "jobs" not in address:
                assert f"by {running.worker.id}: job {refused.id}" in page.text
                assert "the provider moves" in page.text
        for each in (reader, may_see):
            await each.http.aclose()
