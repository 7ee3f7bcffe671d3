"""Jobs from the newest on: all of a kind, whether they have ended or not; and no more than are needed."""

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing

from .rows import KIND, Sql, insert_job


@pytest.mark.parametrize("most", [listing.WINDOW, 3, 2])
async def test_all_are_found_page_by_page(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    statement = listing.NEWEST_OF_KIND.text
    for word in ("LIMIT", "<"):
        statement = statement.replace(f"{word} {listing.WINDOW}", f"{word} {most}")
    monkeypatch.setattr(listing, "NEWEST_OF_KIND", text(statement))
    statuses = ("completed", "queued", "failed", "processing", "scheduled", "cancelled", "queued", "queued")
    ids: list[UUID] = []
    for status in statuses:
        ids.append(insert_job(sql, status))
        insert_job(sql, status, kind="another")
        insert_job(sql, status, kind="zzz")
    found: list[UUID] = []
    after: UUID | None = None
    while not found or after is not None:
        page = await listing.list_jobs(database, kind=KIND, limit=3, after=after)
        found += [job["id"] for job in page.jobs]
        after = page.after
    assert found == sorted(ids, reverse=True)
    completed = await listing.list_jobs(database, kind=KIND, status="completed")
    assert [job["id"] for job in completed.jobs] == ids[:1]
    last = UUID(int=2**128 - 1)
    insert_job(sql, "completed", id=last)
    assert (await listing.list_jobs(database, kind=KIND, limit=1)).jobs[0]["id"] == last


async def test_no_more_are_looked_at_than_are_shown(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[int] = []
    run = Database.run_along_index

    async def noting(self: Database, statement: Any, values: Any) -> Any:
        windows.append(values["window"])
        return await run(self, statement, values)

    monkeypatch.setattr(Database, "run_along_index", noting)
    for number in range(40):
        insert_job(sql, "completed", priority=0 if number < 1 else 1)
    assert len((await listing.list_jobs(database, limit=3)).jobs) == 3
    assert windows == [3]
    windows.clear()
    assert len((await listing.list_jobs(database, limit=3, priority=0)).jobs) == 1
    assert windows == [3, 30, 300]
