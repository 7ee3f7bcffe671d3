"""docs/large_payloads.md: its code stores, enqueues, works and cleans up, on real servers."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient, Settings, Worker
from tests.support.documents import Page
from tests.support.polling import eventually
from tests.test_contents import OLD, text_of_keys
from tests.worker.rows import Rows, open_rows

PAGE = Page("docs/large_payloads.md")
GONE = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("BUCKET", str(tmp_path))
    return PAGE.names()


def age(folder: Path) -> None:
    """Let all objects be two days old."""
    before = time.time() - 2 * 86_400
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (before, before))


async def swept(client: JobClient, rows: Rows) -> None:
    job = await client.schedules.run_now("sweep-objects")
    await job.result(60)
    assert (await rows.job(job.id))["status"] == "completed"


@pytest.mark.parametrize("keys", [{}, {"encryption_keys": text_of_keys(old=OLD)}], ids=["plain", "encrypted"])
async def test_objects_live_as_long_as_their_jobs(
    names: dict[str, Any], make_settings: Callable[..., Settings], tmp_path: Path, keys: dict[str, str]
) -> None:
    patient = {"statement_timeout": 5.0, "heartbeat_interval": 6.0}
    settings, bucket = make_settings(**patient, **keys), names["bucket"]
    rows = await open_rows(settings)
    processors = [names["CountBytes"], names["SweepObjects"]]
    async with JobClient(settings) as client, Worker(processors, settings):
        image = b"x" * 3_000_000
        job = await names["enqueue_scan"](client, image)
        assert await names["result_of"](client, job.id) == b"3000000 bytes"
        row = await rows.job(job.id)
        assert bucket.get(row["unique_key"]) == image
        kept = {row["unique_key"], f"results/{job.id}/1"}
        left = {f"payloads/{GONE}", f"payloads/.{GONE}", f"results/{GONE}/1", f"results/{GONE}/\udcff"}
        others = {"backups/database.dump", "payloads/README", "results/README", "results/of-2025/1"}
        for name in left | others:
            bucket.put(name, b"")

        await swept(client, rows)  # all of them are young
        assert set(bucket.names(-60)) == kept | left | others

        age(tmp_path)
        await swept(client, rows)
        assert set(bucket.names(-60)) == kept | others

        await rows.query("DELETE FROM jsworker.jobs WHERE id = %s", job.id)

        async def are_gone() -> None:
            await swept(client, rows)
            assert set(bucket.names(-60)) == others

        await eventually(are_gone)
    await rows.connection.close()
