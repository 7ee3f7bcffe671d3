"""Failed jobs in groups, and listings by what jobs have in common."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from jsworker.core.errors import JobNotFound
from jsworker.ownership.database import Database
from jsworker.ownership.queries import failures, listing
from jsworker.ownership.queries.failures import FailureId, list_failures
from jsworker.ownership.queries.job_filter import JobFilter, Selection

from .rows import KIND, Sql, ago, insert_job


async def test_errors_that_differ_in_numbers_and_quoted_text_are_one_group(
    database: Database, sql: Sql
) -> None:
    ids = [
        insert_job(sql, "failed", last_error=error, finished_at=ago(seconds))
        for error, seconds in (
            ("OSError: no answer from 10.0.0.7 after 3 s\nTraceback one", 9000),
            ("OSError: no answer from 10.0.0.19 after 30 s\nTraceback two", 100),
            ("KeyError: 'a'", 60),
            ('KeyError: "order 7"', 50),
            ("KeyError", 40),
        )
    ]
    insert_job(sql, "failed", kind="other-kind", last_error="KeyError", finished_at=ago(30))
    insert_job(sql, "failed", failure_reason="stalled", last_error="OSError: x", finished_at=ago(20))
    insert_job(sql, "failed", failure_reason="stalled", finished_at=ago(10))
    insert_job(sql, "cancelled", last_error="KeyError")
    found = (await list_failures(database)).groups
    assert [(each.kind, each.error, each.reason, each.jobs) for each in found] == [
        (KIND, None, "stalled", 2),
        ("other-kind", "KeyError", "attempts", 1),
        (KIND, "KeyError", "attempts", 1),
        (KIND, 'KeyError: "order 7"', "attempts", 2),
        (KIND, "OSError: no answer from 10.0.0.19 after 30 s", "attempts", 2),
    ]
    unanswered = found[-1]
    assert (unanswered.last_job, unanswered.is_bounded) == (ids[1], False)
    assert (unanswered.last_at - unanswered.first_at).total_seconds() == pytest.approx(8900, abs=10)
    assert (sum(unanswered.by_hour), unanswered.by_hour[-1], unanswered.by_hour[-3]) == (2, 1, 1)
    assert [each.kind for each in (await list_failures(database, kind="other-kind")).groups] == ["other-kind"]


def test_no_row_is_written_by_a_function_that_a_server_in_fips_mode_refuses(sql: Sql) -> None:
    query = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'jsworker' AND indexdef ~ 'md5'"
    assert sql.execute(query).fetchall() == []


async def test_groups_come_page_by_page(database: Database, sql: Sql) -> None:
    for kind in ("a", "b"):
        for word in ("one", "two", "three"):
            insert_job(sql, "failed", kind=kind, last_error=word)
    found: list[Any] = []
    after: FailureId | None = None
    while after is not None or not found:
        page = await list_failures(database, after=after, limit=2)
        found += page.groups
        after = page.after
    assert len({(each.kind, each.failure) for each in found}) == len(found) == 6
    assert {each.kind for each in (await list_failures(database, kind="a", limit=2)).groups} == {"a"}
    third = await list_failures(database, kind="b", limit=3)
    assert (len(third.groups), third.after) == (3, None)


async def test_counting_ends_at_a_bound(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "BOUND", 3)
    monkeypatch.setattr(failures, "_LEAST_BOUND", 2)
    for _ in range(5):
        insert_job(sql, "failed")
    [group] = (await list_failures(database)).groups
    assert (group.jobs, group.is_bounded) == (3, True)


async def test_the_jobs_of_a_group(database: Database, sql: Sql) -> None:
    first, last, _ = (
        insert_job(sql, "failed", last_error=error, finished_at=ago(seconds))
        for error, seconds in (("KeyError: 1", 20), ("KeyError: 2", 10), ("OSError", 5))
    )
    failure = next(each.failure for each in (await list_failures(database)).groups if each.jobs == 2)
    where = JobFilter(failure=failure)
    page = await listing.list_jobs(database, kind=KIND, where=where, limit=1)
    assert ([job["id"] for job in page.jobs], page.after) == ([last], last)
    page = await listing.list_jobs(database, kind=KIND, where=where, after=last)
    assert ([job["id"] for job in page.jobs], page.after) == ([first], None)
    pages = listing.matching(database, Selection(("failed",), kind=KIND, where=where))
    assert [job for page in [page async for page in pages] for job, _ in page] == [first, last]
    with pytest.raises(ValueError, match="needs its kind"):
        await listing.list_jobs(database, where=where)


COLUMNS: dict[str, dict[str, Any]] = {
    "error": {"last_error": "OSError: the DISK is full"},
    "key": {"limit_key": "tenant-7"},
    "unique_key": {"unique_key": "order 7"},
    "worker": {"completed_by": "alpha-1"},
}
FILTERS = {
    "error": JobFilter(error="disk IS full"),
    "key": JobFilter(key="tenant-7"),
    "unique_key": JobFilter(unique_key="order 7"),
    "worker": JobFilter(worker="alpha-1"),
}


class TestFilters:
    @pytest.mark.parametrize("name", FILTERS)
    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing", "completed", "failed"])
    async def test_what_jobs_have_in_common(
        self, database: Database, sql: Sql, status: str, name: str
    ) -> None:
        meant = insert_job(sql, status, **COLUMNS[name])
        insert_job(sql, status)
        for asked in (status, None):
            page = await listing.list_jobs(database, status=asked, where=FILTERS[name])
            assert ([job["id"] for job in page.jobs], page.after) == ([meant], None)
        if status != "completed":
            pages = listing.matching(database, Selection((status,), where=FILTERS[name]))
            assert [job for page in [page async for page in pages] for job, _ in page] == [meant]

    async def test_a_search_goes_on_from_page_to_page(
        self, database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "PAGE", 2)
        meant = [insert_job(sql, "failed", limit_key="a" if n % 3 == 0 else "b") for n in range(9)][::-3]
        where = JobFilter(key="a")
        meant = [job["id"] for job in (await listing.list_jobs(database, status="failed")).jobs][2::3]
        found: list[UUID] = []
        after: UUID | None = None
        while len(found) < 3:
            page = await listing.list_jobs(database, status="failed", where=where, limit=1, after=after)
            found += [job["id"] for job in page.jobs]
            after = page.after
        assert found == meant
        no = JobFilter(key="no")
        ended = await listing.list_jobs(database, status="failed", where=no, limit=1, seconds=0.0)
        assert ended.jobs == []
        assert ended.after is not None  # it may be searched on from there

    async def test_when_jobs_were_enqueued(self, database: Database, sql: Sql) -> None:
        old, middle, new = (insert_job(sql, created_at=ago(age)) for age in (7200, 3600, 0))
        now = datetime.now(UTC)
        between = JobFilter(since=now - timedelta(hours=1.5), until=now - timedelta(hours=0.5))
        for status in (None, "queued"):
            page = await listing.list_jobs(database, status=status, where=between)
            # The ids of these are of one moment, which is beyond the hours that are searched.
            assert [job["id"] for job in page.jobs] == ([middle] if status else [])
        assert {old, new} == {
            job["id"] for job in (await listing.list_jobs(database)).jobs if job["id"] != middle
        }

    @pytest.mark.parametrize("wrong", [{"error": " "}, {"key": ""}, {"since": datetime(2026, 1, 1)}])  # noqa: DTZ001 -- that is what is wrong
    def test_wrong_ones_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must"):
            JobFilter(**wrong)

    async def test_a_place_that_is_not_known(self, database: Database, sql: Sql) -> None:
        with pytest.raises(JobNotFound):
            await listing.list_jobs(
                database, status="queued", where=JobFilter(key="a"), after=insert_job(sql, "completed")
            )
