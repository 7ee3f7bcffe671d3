"""docs/acting-on-jobs.md: its code does what it says."""

from datetime import UTC, datetime, timedelta

import pytest

from jsworker import JobClient
from tests.support.documents import Page
from tests.worker.conftest import rows
from tests.worker.rows import Rows

__all__ = ["rows"]

PAGE = Page("docs/acting-on-jobs.md")


async def test_its_code_does_what_it_says(
    client: JobClient, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    names = PAGE.names()
    failed = await client.enqueue("count-words", {})
    await client.enqueue("count-words", {}, delay=60.0, limit_key="tenant-7")
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'failed', attempts = 1, errors = 1, needs_publish = false,"
        " finished_at = now(), last_error = 'OSError: disk is full' WHERE id = %s",
        failed.id,
    )
    assert await names["repair"](client, datetime.now(UTC) - timedelta(hours=1)) == 1
    assert await names["put_off"](client) == 1
    await names["print_actions"](client)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1 jobs"
    assert [line.rsplit("} ")[-1] for line in printed[1:]] == ["1 of 1", "1 of 1"]
    assert [action.action for action in await client.audit()] == ["reschedule", "retry"]
