import asyncio
import re
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
import pytest
from pydantic import BaseModel

from jsworker import JobClient
from jsworker.client import selected_jobs
from jsworker.client.client_publisher import ClientPublisher
from jsworker.client.selected_jobs import count_jobs
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.dashboard import Access, dashboard
from jsworker.dashboard.pages import job_actions
from jsworker.ownership.queries import listing
from tests.dashboard.conftest import PutJob
from tests.dashboard.viewer import Viewer
from tests.worker.rows import Rows


async def test_a_job_is_cancelled_after_a_question(
    viewer: Viewer, put: PutJob, rows: Rows, client: JobClient
) -> None:
    job_id = await put("queued")
    question = await viewer.see((await viewer.see(f"/jobs/{job_id}")).links["Cancel …"])
    assert (await rows.job(job_id))["status"] == "queued"
    page = await viewer.press(question, "Cancel 1 job")
    assert "1 job cancelled" in page.text
    assert (await rows.job(job_id))["status"] == "cancelled"
    assert "1 job cancelled" not in (await viewer.see(f"/jobs/{job_id}")).text
    [action] = await client.audit()
    assert (action.action, action.matched, action.changed) == ("cancel", 1, 1)


async def test_the_answer_does_not_wait_for_what_others_have_to_publish(
    viewer: Viewer, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish_without_end(_: ClientPublisher) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ClientPublisher, "publish_pending", publish_without_end)
    job_id = await put("failed")
    async with asyncio.timeout(60.0):
        page = await viewer.press(await viewer.see(f"/jobs/{job_id}/retry"), "Retry 1 job")
    assert "1 job retried" in page.text


async def test_chosen_jobs_are_acted_on_and_others_left(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    ids = [await put("failed") for _ in range(3)]
    page = await viewer.see("/jobs", status="failed", kind="resize")
    question = await viewer.press(page, "Retry", {"id": list(map(str, ids[:2]))})
    assert "2 jobs" in question.text
    page = await viewer.press(question, "Retry 2 jobs")
    assert httpx.URL(page.address).query == b"status=failed&kind=resize"
    assert [(await rows.job(each))["status"] for each in ids] == ["queued", "queued", "failed"]


async def test_all_that_match_are_acted_on(
    viewer: Viewer, put: PutJob, rows: Rows, client: JobClient
) -> None:
    for number in range(60):
        await put("failed", kind="crop", last_error=f"KeyError: {number}")
    other = await put("failed")
    failures = await viewer.see("/failures", kind="crop")
    question = await viewer.see(failures.links["Retry all …"])
    assert "Retry 60 jobs" in question.text
    page = await viewer.press(question, "Retry 60 jobs")
    assert "60 jobs retried" in page.text
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'queued'") == 60
    assert (await rows.job(other))["status"] == "failed"
    [action] = await client.audit()
    assert (action.action, action.changed) == ("retry", 60)


async def test_thousands_are_told_as_they_were_asked_for(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    job_id = await put("failed", kind="crop")
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, failure_reason, fencing_token, attempts,"
        " errors, finished_at, dispatch)"
        " SELECT uuidv7(), kind, payload, status, 'attempts', 1, 1, 1, finished_at, 1"
        " FROM jsworker.jobs, generate_series(1, 1200) WHERE id = %s",
        job_id,
    )
    question = await viewer.see("/jobs/retry?all=yes&kind=crop")
    assert "Retry 1 201 jobs" in question.text
    assert "1 201 jobs retried" in (await viewer.press(question, "Retry 1 201 jobs")).text


async def test_all_that_were_left_alone_are_counted(
    viewer: Viewer, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_jobs, "_MOST_NAMED", 3)
    for number in range(5):
        await put("failed", kind="crop", unique_key=f"order:{number}")
        await put("queued", kind="crop", unique_key=f"order:{number}")
    await put("failed", kind="crop")
    page = await viewer.press(await viewer.see("/jobs/retry?all=yes&kind=crop"), "Retry 6 jobs")
    assert "1 job retried; 5 left alone: job " in page.text
    why = r"job [0-9a-f-]{36} cannot be retried: a live job holds its unique key"
    assert re.search(f"{why}; {why}; …", page.text)


@pytest.mark.parametrize("chosen", ["ticked", "all"])
async def test_running_jobs_are_told_apart_from_cancelled_ones(
    viewer: Viewer, put: PutJob, rows: Rows, chosen: str
) -> None:
    running, *waiting = [await put(each) for each in ("processing", "queued", "scheduled")]
    page = await viewer.see("/jobs")
    ids = {"id": [str(each) for each in (running, *waiting)]}
    question = await viewer.press(page, "Cancel", ids if chosen == "ticked" else {"all": "yes"})
    page = await viewer.press(question, "Cancel 3 jobs")
    assert "2 jobs cancelled, 1 asked to stop" in page.text
    assert "left alone" not in page.text
    found = await rows.job(running)
    assert (found["status"], found["cancel_requested"]) == ("processing", True)


async def test_jobs_that_are_enqueued_after_the_question_are_left_alone(
    viewer: Viewer, put: PutJob, rows: Rows, client: JobClient
) -> None:
    for _ in range(3):
        await put("queued", kind="crop")
    question = await viewer.see("/jobs/cancel?all=yes&kind=crop")
    assert "Jobs that are enqueued from now on are left alone." in question.text
    later = await put("queued", kind="crop")
    page = await viewer.press(question, "Cancel 3 jobs")
    assert "3 jobs cancelled" in page.text
    assert httpx.URL(page.address).query == b"kind=crop"
    assert (await rows.job(later))["status"] == "queued"
    assert sum(action.changed for action in await client.audit()) == 3
    await viewer.press(question, "Cancel 3 jobs", {"asked_at": "yesterday"}, status=400)


async def test_all_that_match_are_not_taken_back_from_runs_that_began_after_the_question(
    viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    hung, later = await put("processing", kind="crop"), await put("processing", kind="crop")
    question = await viewer.see("/jobs/clear?all=yes&kind=crop")
    assert "Runs that begin from now on are left alone." in question.text
    again = "UPDATE jsworker.jobs SET fencing_token = 2, claimed_at = clock_timestamp() WHERE id = %s"
    await rows.query(again, later)
    page = await viewer.press(question, "Take back 2 jobs", {"reason": "worker-1 hangs"})
    assert "1 job taken back" in page.text
    assert [(await rows.job(each))["status"] for each in (hung, later)] == ["queued", "processing"]


async def test_all_that_match_are_not_retried_twice_by_one_question(
    viewer: Viewer, client: JobClient, put: PutJob, rows: Rows
) -> None:
    failed, other = await put("failed", kind="crop"), await put("failed", kind="crop")
    question = await viewer.see("/jobs/retry?all=yes&kind=crop")
    await client.retry(other)
    await client.cancel(other)
    assert "1 job retried" in (await viewer.press(question, "Retry 2 jobs")).text
    fails = "UPDATE jsworker.jobs SET status = %s, needs_publish = false, finished_at = clock_timestamp()"
    await rows.query(f"{fails}, attempts = 1, errors = 1 WHERE id = %s", "failed", failed)
    assert "0 jobs retried" in (await viewer.press(question, "Retry 2 jobs")).text
    assert [(await rows.job(each))["status"] for each in (failed, other)] == ["failed", "cancelled"]


async def test_by_the_list_all_that_match_are_acted_on(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    for status in ("queued", "scheduled", "completed"):
        await put(status)
        await put(status, kind="crop")
    page = await viewer.see("/jobs", kind="crop")
    question = await viewer.press(page, "Cancel", {"all": "yes"})
    await viewer.press(question, "Cancel 2 jobs")
    found = await rows.query("SELECT kind, status FROM jsworker.jobs WHERE status = 'cancelled'")
    assert [(row["kind"], row["status"]) for row in found] == [("crop", "cancelled")] * 2


async def test_a_running_job_is_taken_back_with_a_reason(
    viewer: Viewer, put: PutJob, rows: Rows, client: JobClient
) -> None:
    job_id = await put("processing")
    question = await viewer.see(f"/jobs/{job_id}/clear")
    question = await viewer.press(question, "Take back", {"reason": " "}, status=422)
    assert "a reason is needed: the next run of the job finds it Running jobs are taken" in question.text
    await viewer.press(question, "Take back", {"reason": "it hangs"})
    found = await rows.job(job_id)
    assert (found["status"], found["clear_reason"], found["fencing_token"]) == ("queued", "it hangs", 1)
    [action] = await client.audit()
    assert (action.action, action.changed, action.target["reason"]) == ("clear", 1, "it hangs")


async def test_a_run_that_began_after_the_question_is_not_taken_back(
    viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    job_id = await put("processing")
    question = await viewer.see(f"/jobs/{job_id}/clear")
    await rows.query("UPDATE jsworker.jobs SET fencing_token = fencing_token + 1 WHERE id = %s", job_id)
    page = await viewer.press(question, "Take back", {"reason": "it hangs"})
    assert "0 jobs taken back; 1 left alone" in page.text
    assert "has begun another run" in page.text
    assert (await rows.job(job_id))["status"] == "processing"
    for seen in ("x", f"{job_id}:processing:-1", f"{job_id}:processing:{10**20}", f"{job_id}:x:1"):
        wrong = await viewer.see(f"/jobs/{job_id}/clear")
        again = await viewer.press(wrong, "Take back", {"reason": "it hangs", "seen": seen}, status=422)
        assert ("reason", "it hangs") in again.forms[-1].values


async def test_a_job_that_others_have_acted_on_since_the_question_is_not_retried(
    viewer: Viewer, client: JobClient, put: PutJob, rows: Rows
) -> None:
    cancelled, ran, failed = [await put("failed") for _ in range(3)]
    page = await viewer.see("/jobs", status="failed")
    question = await viewer.press(page, "Retry", {"id": [str(each) for each in (cancelled, ran, failed)]})
    await client.retry(cancelled)
    await client.cancel(cancelled)
    await rows.query("UPDATE jsworker.jobs SET fencing_token = fencing_token + 1 WHERE id = %s", ran)
    page = await viewer.press(question, "Retry 3 jobs")
    assert "1 job retried; 2 left alone" in page.text
    assert f"job {cancelled} is cancelled, and was acted on or has run since you were asked" in page.text
    found = [(await rows.job(each))["status"] for each in (cancelled, ran, failed)]
    assert found == ["cancelled", "failed", "queued"]


async def test_priority_and_time_are_set(viewer: Viewer, put: PutJob, rows: Rows, client: JobClient) -> None:
    job_id = await put("scheduled")
    await viewer.press(await viewer.see(f"/jobs/{job_id}/priority"), "Set", {"to": "high"})
    when = datetime.now(UTC).replace(microsecond=0, second=0) + timedelta(days=2)
    given = {"run_at": f"{when:%Y-%m-%dT%H:%M}"}
    question = await viewer.see(f"/jobs/{job_id}/reschedule")
    question = await viewer.press(question, "Reschedule", {"run_at": "tomorrow"}, status=422)
    assert "run_at='tomorrow' must be a time as 2026-01-31T12:00" in question.text
    await viewer.press(question, "Reschedule", given)
    found = await rows.job(job_id)
    assert (found["priority"], found["run_at"]) == (0, when)
    jobs = {"jobs": {"ids": [str(job_id)]}}
    assert [(each.action, each.target) for each in await client.audit()] == [
        ("reschedule", jobs | {"to": when.isoformat()}),
        ("set_priority", jobs | {"to": "high"}),
    ]


async def test_what_is_not_possible_any_more_is_said(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    job_id = await put("queued")
    question = await viewer.see(f"/jobs/{job_id}/cancel")
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = clock_timestamp() WHERE id = %s", job_id
    )
    page = await viewer.press(question, "Cancel")
    assert "0 jobs cancelled; 1 left alone" in page.text
    assert "is cancelled already" in page.text


async def test_a_job_that_another_transaction_keeps_locked_is_named(
    viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    job_id, other = await put("processing", kind="crop"), await put("processing", kind="crop")
    reason = "locked by another transaction: try again"
    async with rows.connection.transaction():
        await rows.query("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", job_id)
        page = await viewer.see("/jobs", kind="crop")
        question = await viewer.press(page, "Cancel", {"all": "yes"})
        page = await viewer.press(question, "Cancel 2 jobs")
        left = f"1 left alone: job {job_id} cannot be cancelled: {reason}"
        assert f"0 jobs cancelled, 1 asked to stop; {left}" in page.text
        question = await viewer.see(f"/jobs/{job_id}/clear")
        page = await viewer.press(question, "Take back", {"reason": "it hangs"})
        assert f"0 jobs taken back; 1 left alone: job {job_id} cannot be taken back: {reason}" in page.text
    assert (await rows.job(other))["cancel_requested"]


async def test_two_who_act_at_once_change_a_job_once(client: JobClient, put: PutJob, rows: Rows) -> None:
    job_id = await put("failed")
    tabs = [Viewer(dashboard(client)) for _ in range(4)]
    questions = [await each.see(f"/jobs/{job_id}/retry") for each in tabs]
    pressed = zip(tabs, questions, strict=True)
    pages = await asyncio.gather(*(each.press(question, "Retry") for each, question in pressed))
    assert sorted("1 job retried" in page.text for page in pages) == [False, False, False, True]
    assert sum("0 jobs retried; 1 left alone" in page.text for page in pages) == 3
    assert sorted(each.changed for each in await client.audit()) == [0, 0, 0, 1]
    assert await rows.value("SELECT count(*) FROM jsworker.job_events WHERE event = 'retried'") == 1


async def test_a_question_says_which_jobs_are_meant(viewer: Viewer, put: PutJob) -> None:
    job_id = await put("failed", kind="crop", last_error="KeyError: 1")
    assert f"This affects job {job_id}." in (await viewer.see(f"/jobs/{job_id}/retry")).text
    page = await viewer.see("/jobs/retry", all="yes", kind="crop", error="<b>", unique_key="a b")
    assert "This affects all jobs with kind crop, unique key a b, error <b>." in page.text
    assert "This affects all jobs to which it applies." in (await viewer.see("/jobs/retry?all=yes")).text
    failures = await viewer.see("/failures")
    question = await viewer.see(failures.links["Retry all …"])
    assert "status failed, kind crop, one kind of error." in question.text


async def test_what_was_not_counted_to_its_end_can_be_done(
    viewer: Viewer, put: PutJob, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE", 1)
    monkeypatch.setattr(job_actions, "count_jobs", partial(count_jobs, seconds=0.0))
    for worker in ("b", "b", "a"):
        await put("failed", completed_by=worker)
    question = await viewer.see("/jobs/retry", all="yes", worker="a")
    assert "Retry at least 0 jobs?" in question.text
    assert "1 job retried" in (await viewer.press(question, "Retry")).text


async def test_nothing_chosen_is_said(viewer: Viewer, put: PutJob) -> None:
    await put("queued")
    listed = await viewer.see("/jobs?kind=resize")
    page = await viewer.press(listed, "Cancel", status=400)
    assert "no job was chosen" in page.text
    assert page.links["Back"] == listed.address
    other = await viewer.http.get("/jobs/cancel", headers={"referer": "http://evil.example/"})
    assert "evil.example" not in other.text
    again = await viewer.http.get("/jobs/cancel", headers={"referer": str(other.url)})
    assert "no job was chosen" in again.text
    assert ">Back<" not in again.text


@pytest.mark.parametrize("right", ["retry", "cancel", "clear", "priority", "reschedule"])
async def test_an_action_needs_its_right(client: JobClient, put: PutJob, rows: Rows, right: str) -> None:
    job_id = await put("queued")
    others = {"retry", "cancel", "clear", "priority", "reschedule", "enqueue"} - {right}
    viewer = Viewer(dashboard(client, authorize=lambda _: Access(others, name="ann")))
    page = await viewer.see(f"/jobs/{job_id}")
    assert not [link for link in page.links.values() if link.endswith(f"/{right}")]
    page = await viewer.see(f"/jobs/{job_id}/{right}", 403)
    assert f"you may not do this: {right}" in page.text
    assert "Overview" in page.links
    assert (await rows.job(job_id))["status"] == "queued"


class Resize(BaseModel):
    width: int
    path: str = "a.png"


class ResizeImage(JobProcessor[Resize]):
    async def process(self, job: Job[Resize]) -> None:
        raise AssertionError(job.id)


async def test_a_job_is_enqueued_by_a_form_of_its_model(client: JobClient, rows: Rows) -> None:
    viewer = Viewer(dashboard(client, processors=[ResizeImage]))
    form = await viewer.see("/enqueue", kind="resize-image")
    wrong = await viewer.press(form, "Enqueue", {"payload.width": "wide"}, status=422)
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 0
    page = await viewer.press(
        wrong, "Enqueue", {"payload.width": "7", "unique_key": "one", "priority": "low"}
    )
    assert "is enqueued" in page.text
    [job] = await rows.query("SELECT * FROM jsworker.jobs")
    assert (job["kind"], job["unique_key"], job["priority"]) == ("resize-image", "one", 2)
    assert job["payload"] == {"width": 7, "path": "a.png"}
    [action] = await client.audit()
    assert (action.action, action.changed) == ("enqueue", 1)


async def test_a_job_of_an_unknown_kind_is_enqueued_as_json(viewer: Viewer, rows: Rows) -> None:
    form = await viewer.see("/enqueue", kind="crop")
    await viewer.press(form, "Enqueue", {"payload": "{not json"}, status=422)
    await viewer.press(form, "Enqueue", {"payload": '{"a": [1]}', "delay": "60"})
    [job] = await rows.query("SELECT * FROM jsworker.jobs")
    assert (job["status"], job["payload"]) == ("scheduled", {"a": [1]})


async def test_all_of_a_priority_are_acted_on(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    high, normal = await put("failed", priority=0), await put("failed")
    page = await viewer.see("/jobs", priority="high")
    await viewer.press(await viewer.press(page, "Retry", {"all": "yes"}), "Retry 1 job")
    assert [(await rows.job(each))["status"] for each in (high, normal)] == ["queued", "failed"]
