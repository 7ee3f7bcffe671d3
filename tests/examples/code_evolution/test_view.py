import io
from typing import Any

import pytest
from rich.console import Console

from code_evolution.view import open_view, render
from code_evolution.watch import Watch

from .fake_client import ENDED, FakeClient, kill, new_watch, new_worker


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "seconds", 4.25)


def console(**options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, color_system=None, **options), out


async def test_shows_repositories_and_workers(client: FakeClient) -> None:
    watch = new_watch(client, "completed", "processing", "processing", "queued")
    workers = [new_worker(1), new_worker(2), new_worker(3, None)]
    _, first, second, _ = watch.tasks
    client.jobs[first] |= {"worker_id": "id-1", "stage": "count", "progress": 0.5}
    client.jobs[second] |= {"worker_id": "id-1"}
    await watch.look()
    page, out = console(width=100)
    page.print(render(watch, workers))
    text = out.getvalue()

    running = min(first, second)
    stage = " (count)" if running == first else ""
    assert "project-0" in text
    assert "1 of 4" in text
    assert "4.2 s" in text
    assert "worker-1  4711  running   1 done" in text
    assert f"{watch.tasks[running].label}{stage} and 1 more" in text
    assert "worker-2  4712  running   0 done" in text
    assert "worker-3  4713  starting  0 done" in text
    assert "killed" not in text


async def test_shows_a_kill_and_what_waits_to_be_taken_back(client: FakeClient) -> None:
    watch = new_watch(client, "processing", "processing")
    worker = new_worker(1)
    watch.kill = kill(worker, *((job_id, 1) for job_id in watch.tasks))
    await watch.look()
    page, out = console(width=100)
    page.print(render(watch, [worker]))

    assert " ".join(out.getvalue().split()[-10:]) == "worker-1 4711 killed 0 done 2 jobs to take back"


@pytest.mark.parametrize("width", [50, 80, 132])
async def test_fits_the_width_of_a_terminal(client: FakeClient, width: int) -> None:
    watch = new_watch(client, "processing", repositories=8, worker_id="id-1", stage="list " * 30)
    await watch.look()
    page, out = console(width=width)
    page.print(render(watch, [new_worker(1)]))

    assert max(map(len, out.getvalue().splitlines())) <= width


async def test_a_terminal_shows_the_last_moment_when_it_ends(client: FakeClient) -> None:
    watch = new_watch(client, "completed", "queued")
    page, out = console(width=100, force_terminal=True)

    with open_view(page) as show:
        show(watch, [])
        await watch.look()
        show(watch, [])

    assert "1 of 2" in out.getvalue().rpartition("0 of 2")[2]
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    "options", [{"force_terminal": False}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}]
)
async def test_each_key_moment_is_one_line(client: FakeClient, options: dict[str, Any]) -> None:
    watch = new_watch(client, "processing")
    [job_id] = watch.tasks
    label = watch.tasks[job_id].label
    first, second = new_worker(1, None), new_worker(2)
    page, out = console(width=40, **options)

    with open_view(page) as show:
        show(watch, [first, second])
        first.id = "id-1"
        for _ in range(3):
            await watch.look()
            show(watch, [first, second])
        watch.kill = kill(first, (job_id, 1))
        show(watch, [first, second])
        client.record(job_id, "claimed", 2, "id-2", seconds=2.25)
        client.jobs[job_id] |= {"status": "processing", "fencing_token": 2}
        for _ in range(2):
            await watch.look()
            show(watch, [first, second])
        end = {"status": ENDED[0], "finished_at": watch.kill.at, "result": {"pid": 4712}}
        client.jobs[job_id] |= end
        await watch.look()
        show(watch, [first, second])

    assert out.getvalue().splitlines() == [
        "   4.2 s  worker-2 (process 4712) runs",
        "   4.2 s  worker-1 (process 4711) runs",
        "   4.2 s  worker-1 (process 4711) killed with SIGKILL while it owned 1 job",
        f"   4.2 s  {label} runs again on worker-2, 2.2 s after the kill",
        "   4.2 s  project-0: 1 of 1 job completed",
    ]
