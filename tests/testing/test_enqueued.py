"""``assert_enqueued`` and ``assert_not_enqueued``: what fits, and what a failure shows."""

import re
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, SecretStr

from jsworker import Job, JobClient, JobProcessor, KeyMissing, Settings, SyncJobClient
from jsworker.ownership import for_tests
from jsworker.testing import assert_enqueued, assert_not_enqueued, sync, work_until_empty
from tests.test_contents import OLD, text_of_keys


class Mail(BaseModel):
    to: str
    subject: str = "hello"
    options: dict[str, Any] = {}


class SendMail(JobProcessor[Mail]):
    async def process(self, job: Job[Mail]) -> None:
        await job.update_progress(stage="sent")


async def test_a_dict_may_leave_fields_out(job_client: JobClient) -> None:
    await job_client.enqueue(SendMail, Mail(to="a", options={"retry": True, "n": 1}))
    await assert_enqueued(SendMail)
    await assert_enqueued("send-mail", {"to": "a"})
    await assert_enqueued(SendMail, {"options": {"n": 1.0}}, count=1)
    await assert_enqueued(SendMail, Mail(to="a", options={"retry": True, "n": 1}))
    await assert_not_enqueued(SendMail, Mail(to="a"))
    await assert_not_enqueued(SendMail, {"to": "b"})
    await assert_not_enqueued(SendMail, {"options": {"n": True}})
    await assert_not_enqueued(SendMail, {"to": "a", "subject": None})
    await assert_not_enqueued("send-letter")


async def test_true_is_no_number_in_lists_and_whole_payloads_either(job_client: JobClient) -> None:
    class Sum(JobProcessor[Any]):
        async def process(self, job: Job[Any]) -> None: ...

    for payload in ([1, {"n": [0, 1.0]}], {"flags": [1, {"n": 0}], "more": None}):
        await job_client.enqueue(Sum, payload)
    await assert_enqueued(Sum, [1.0, {"n": [0, 1]}], count=1)
    await assert_enqueued(Sum, {"flags": [1, {"n": 0}]}, count=1)
    for other in (
        [True, {"n": [0, 1]}],
        [1, {"n": [False, 1]}],
        [1, {}],
        [1],
        {"flags": [True, {"n": 0}]},
        {"flags": [1, {"n": False}]},
        {"flags": [1, {}]},  # in a list a dict has all of its fields
        {"flags": [1]},
    ):
        await assert_not_enqueued(Sum, other)


async def test_the_number_counts(job_client: JobClient) -> None:
    await job_client.enqueue_many(SendMail, [Mail(to="a"), Mail(to="a"), Mail(to="b")])
    await assert_enqueued(SendMail, count=3)
    await assert_enqueued(SendMail, {"to": "a"}, count=2)
    with pytest.raises(AssertionError, match=r"^expected 1 job of kind send-mail .*, found 2\n"):
        await assert_enqueued(SendMail, {"to": "a"}, count=1)


async def test_a_job_is_seen_behind_many_newer_ones_that_have_ended(
    job_client: JobClient, jsworker_settings: Settings
) -> None:
    await job_client.enqueue(SendMail, Mail(to="old"))
    with psycopg.connect(jsworker_settings.database_dsn()) as connection:
        connection.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, attempts, max_attempts, max_stalls,"
            " dispatch, finished_at)"
            " SELECT cast('ffffffff-0000-4000-8000-' || lpad(to_hex(n), 12, '0') AS uuid), 'send-mail',"
            " '{}', 'completed', 1, 5, 3, 1, now() FROM generate_series(1, 10000) AS n"
        )
    await assert_enqueued(SendMail, {"to": "old"}, count=1)
    with pytest.raises(AssertionError, match=r"1 of kind send-mail wait \(besides: 10000 completed\)"):
        await assert_not_enqueued(SendMail, {"to": "old"})


async def test_more_waiting_jobs_than_can_be_read_are_refused(
    job_client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_tests, "MOST_WAITING", 2)
    await job_client.enqueue_many(SendMail, [Mail(to="a"), Mail(to="b")])
    await assert_enqueued(SendMail, {"to": "a"}, count=1)
    await job_client.enqueue(SendMail, Mail(to="c"))
    with pytest.raises(RuntimeError, match="assert_not_enqueued: more than 2 jobs of kind send-mail wait"):
        await assert_not_enqueued(SendMail, {"to": "d"})


async def test_priority_key_and_due_time_count(job_client: JobClient) -> None:
    await job_client.enqueue(SendMail, Mail(to="a"), priority="high", unique_key="k", delay=3600)
    await assert_enqueued(SendMail, priority="high", unique_key="k", due_after=3000, due_within=3600)
    await assert_enqueued(SendMail, due_within=timedelta(hours=1))
    for other in ({"priority": "low"}, {"unique_key": "l"}, {"due_within": 60}, {"due_after": 3700}):
        await assert_not_enqueued(SendMail, **other)
        with pytest.raises(AssertionError):
            await assert_enqueued(SendMail, **other)
    await job_client.enqueue(SendMail, Mail(to="b"))
    await assert_enqueued(SendMail, {"to": "b"}, due_within=0)


async def test_a_key_is_one_whatever_its_scope(job_client: JobClient) -> None:
    await job_client.enqueue(SendMail, Mail(to="a"), unique_key="window", unique_for=3600)
    await job_client.enqueue(SendMail, Mail(to="b"), unique_key="waiting", unique="waiting")
    for key, to in (("window", "a"), ("waiting", "b")):
        await assert_enqueued(SendMail, {"to": to}, unique_key=key)
        with pytest.raises(AssertionError, match=f"unique key '{key}'"):
            await assert_not_enqueued(SendMail, unique_key=key)


async def test_a_failure_shows_what_waits_and_the_difference(job_client: JobClient) -> None:
    far = await job_client.enqueue(SendMail, Mail(to="nobody", subject="other"), delay=60)
    near = await job_client.enqueue(SendMail, Mail(to="a@x"), priority="low")
    with pytest.raises(AssertionError) as caught:
        await assert_enqueued("send-mail", {"to": "b@x", "subject": "hello"})
    lines = str(caught.value).splitlines()
    assert re.sub(r"due in \d+ s", "due in 60 s", "\n".join(lines)) == "\n".join(
        [
            'expected a job of kind send-mail with payload {"to": "b@x", "subject": "hello"}, found 0',
            "2 of kind send-mail wait:",
            f'  {near.id} queued, low: {{"to": "a@x", "options": {{}}, "subject": "hello"}}',
            f'  {far.id} scheduled, due in 60 s: {{"to": "nobody", "options": {{}}, "subject": "other"}}',
            f"the nearest one, {near.id}, differs (- expected, + enqueued):",
            "    {",
            '      "subject": "hello",',
            '  -   "to": "b@x"',
            '  +   "to": "a@x"',
            "    }",
        ]
    )


async def test_a_failure_names_other_kinds_and_what_has_ended(job_client: JobClient) -> None:
    await job_client.enqueue(SendMail, Mail(to="a"))
    await work_until_empty([SendMail])
    await job_client.enqueue_many("send-letter", [{}, {}])
    with pytest.raises(AssertionError) as caught:
        await assert_enqueued(SendMail)
    assert str(caught.value).splitlines() == [
        "expected a job of kind send-mail, found 0",
        "0 of kind send-mail wait (besides: 1 completed)",
        "of other kinds wait: 2 send-letter",
    ]


async def test_a_failure_of_the_opposite_shows_what_waits(job_client: JobClient) -> None:
    job = await job_client.enqueue("send-letter", {"to": "a"})
    with pytest.raises(AssertionError) as caught:
        await assert_not_enqueued("send-letter", {"to": "a"})
    assert str(caught.value).splitlines() == [
        'expected no job of kind send-letter with payload {"to": "a"}, found 1',
        "1 of kind send-letter wait:",
        f'  {job.id} queued: {{"to": "a"}}',
    ]


async def test_encrypted_payloads_are_read_with_the_keys_of_the_settings(jsworker_settings: Settings) -> None:
    keys = SecretStr(text_of_keys(old=OLD))
    sealed = jsworker_settings.model_copy(update={"encryption_keys": keys})
    async with JobClient(sealed) as client:
        await client.enqueue(SendMail, Mail(to="a"))
        await client.enqueue(SendMail, Mail(to="b"), unique_key="k", unique="waiting")
    await assert_enqueued(SendMail, {"to": "a"}, count=1, settings=sealed)
    await assert_enqueued(SendMail, {"to": "b"}, unique_key="k", settings=sealed)
    with pytest.raises(AssertionError, match=r'queued: \{"to": "a", '):
        await assert_not_enqueued(SendMail, {"to": "a"}, settings=sealed)
    await assert_enqueued(SendMail, count=2)
    with pytest.raises(KeyMissing):
        await assert_not_enqueued(SendMail, {"to": "a"})


async def test_what_can_be_no_priority_is_refused(job_client: JobClient) -> None:
    with pytest.raises(ValueError, match="priority"):
        await assert_enqueued(SendMail, priority="urgent")  # type: ignore[arg-type]


def test_code_that_waits_has_a_client_of_its_own(sync_job_client: SyncJobClient) -> None:
    job = sync_job_client.enqueue(SendMail, Mail(to="a"))
    sync.assert_enqueued(SendMail, {"to": "a"}, count=1)
    sync.work_until_empty([SendMail])
    assert sync_job_client.get(job.id).status == "completed"
