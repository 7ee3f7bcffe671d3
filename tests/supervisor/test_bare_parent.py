"""The parent by itself: what children may do to it, and what it costs."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from jsworker.core.settings import Settings, variable_of
from tests.ownership.rows import Sql, insert_job, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually

pytestmark = pytest.mark.hurried

ROOT = Path(__file__).parents[2]
KILLS = 20
NO_ONE = "nats://127.0.0.1:1"

TALKS = """
import json, os, signal, socket, sys, time
signal.pthread_sigmask(signal.SIG_SETMASK, [])
parent = socket.socket(fileno=json.loads(sys.argv[-1])["link"])
def tell(what, **facts):
    parent.sendall(json.dumps({"what": what, **facts}).encode() + b"\\n")
"""
SERVES = TALKS + 'tell("ready", kinds=[]); time.sleep(600)'
IMPERSONATES = TALKS + 'tell("registered", worker_id="host-1-0123abcd"); ' + SERVES.removeprefix(TALKS)
FLOODS = TALKS + "while True: parent.sendall(b'{\\n' * 30_000)"
TICKS = TALKS + 'while True: parent.sendall(b\'{"what":"tick"}\\n\' * 4_000)'
LIES = (
    TALKS
    + """
for worker_id in ("alpha-1-aaaa", f"{os.environ['JSWORKER_HOSTNAME']}-{os.getpid()}-x'; --"):
    tell("registered", worker_id=worker_id)
tell("registered", worker_id=7)
parent.sendall(b"\\xff" * 200_000 + b"\\n")
tell("registered", worker_id=f"{os.environ['JSWORKER_HOSTNAME']}-{os.getpid()}-0123abcd")
tell("ready", kinds=[])
time.sleep(600)
"""
)


class Bare(Protocol):
    """Starts a bare parent whose children run this code."""

    def __call__(
        self, code: str | None = None, *, command: tuple[str, ...] = (), connect: float = 10.0, **changes: Any
    ) -> ParentProcess: ...


@pytest.fixture
def bare(make_settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Bare]:
    started: list[ParentProcess] = []

    def start(
        code: str | None = None, *, command: tuple[str, ...] = (), connect: float = 10.0, **changes: Any
    ) -> ParentProcess:
        settings = make_settings(hostname="host", **{"heartbeat_interval": 0.01, **changes})
        given = {name: getattr(settings, name) for name in settings.model_fields_set}
        parent = ParentProcess(
            str(connect),
            *(command or (sys.executable, "-I", "-S", "-c", str(code))),
            folder=tmp_path,
            environment={
                "PYTHONPATH": str(ROOT),
                **{variable_of(name): str(value) for name, value in given.items()},
            },
            command=(sys.executable, "-m", "tests.supervisor.bare_parent"),
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        parent.kill_all()


def loaded_by(parent: ParentProcess) -> set[str]:
    """Return the drivers whose compiled code a process has loaded."""
    paths = Path(f"/proc/{parent.pid}/maps").read_text()
    return {name for name in ("psycopg_binary", "sqlalchemy", "nacl") if f"/{name}/" in paths}


async def children_of(
    parent: ParentProcess, count: int, other_than: int | None = None
) -> list[psutil.Process]:
    """Wait until the parent has so many children, none of which has this pid."""

    async def there() -> list[psutil.Process]:
        assert parent.popen.poll() is None, parent.log
        children = psutil.Process(parent.pid).children()
        assert len(children) == count
        assert other_than not in [child.pid for child in children]
        return children

    return await eventually(there)


async def test_nothing_is_left_of_killed_children(bare: Bare) -> None:
    parent = bare(SERVES)

    async def after_start(count: int) -> int:
        """Wait until the parent has told of its last start and return how many files it holds."""
        await parent.tells("child.started", count)
        return len(os.listdir(f"/proc/{parent.pid}/fd"))  # noqa: PTH208 -- only how many

    before = await after_start(1)
    for killed in range(KILLS):
        [child] = await children_of(parent, 1)
        child.kill()
        after = await after_start(killed + 2)
    assert after == before
    assert len(await parent.tells("child.died", KILLS)) == KILLS


@pytest.mark.parametrize("code", [FLOODS, TICKS], ids=["nonsense", "ticks"])
async def test_a_flood_keeps_the_parent_from_nothing(code: str, bare: Bare) -> None:
    parent = bare(code, processes=3)
    children = await children_of(parent, 3)
    children[0].kill()
    await children_of(parent, 3, children[0].pid)
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0


async def test_only_a_workers_own_jobs_are_taken_back(bare: Bare, sql: Sql) -> None:
    foreign = insert_job(sql, "processing", worker_id="alpha-1-aaaa")
    parent = bare(LIES)
    [started] = await parent.tells("child.started")
    own = insert_job(sql, "processing", worker_id=started["worker_id"])
    assert started["worker_id"] == f"host-{started['pid']}-0123abcd"
    parent.send(signal.SIGKILL, started["pid"])
    await parent.tells("dead_owner.reset")
    assert (read_job(sql, own)["status"], read_job(sql, foreign)["status"]) == ("queued", "processing")
    assert parent.lines("child.not_registered") == []


async def test_a_child_that_registers_under_no_id_of_its_own_is_named(bare: Bare) -> None:
    parent = bare(IMPERSONATES)
    [told] = await parent.tells("child.not_registered")
    [started] = await parent.tells("child.started")
    assert (told["level"], told["pid"]) == ("warning", started["pid"])
    assert f"host-{told['pid']}" in told["reason"]
    assert "worker_id" not in started


async def test_children_that_find_no_server_end_the_parent(bare: Bare, supervise: Supervise) -> None:
    command = (sys.executable, "-m", "jsworker.supervisor.child_main", "my_jobs:Nap")
    parent = bare(command=command, connect=0.5, processes=2, heartbeat_interval=0.3, nats_url=NO_ONE)
    assert await parent.ends() == 1
    # A busy machine may add warnings of its own (`setup.slow`); a child that died is none of them.
    words = [line for line in parent.log.splitlines() if not line.startswith('{"timestamp"')]
    assert len(words) == 1, parent.log
    assert parent.lines("child.died") == []
    assert NO_ONE.removeprefix("nats://") in words[0]


async def test_a_wrong_target_ends_the_parent_with_one_line(supervise: Supervise) -> None:
    parent = supervise("NoSuch", processes=3)
    assert await parent.ends() == 2
    assert parent.log == "target my_jobs:NoSuch: module my_jobs has no NoSuch\n"


async def test_wrong_settings_end_the_parent_before_it_starts_children(supervise: Supervise) -> None:
    parent = supervise("Nap", ack_wait=1.0)
    assert await parent.ends() == 2
    assert parent.log.startswith("JSWORKER_ACK_WAIT=1 must exceed")


async def test_no_driver_is_loaded_before_the_first_burial(supervise: Supervise) -> None:
    parent = supervise("Nap")
    [pid] = await parent.ready()
    assert loaded_by(parent) == set()
    parent.send(signal.SIGKILL, pid)
    await parent.tells("dead_owner.reset")
    assert loaded_by(parent) == {"psycopg_binary", "sqlalchemy"}


async def test_options_reach_the_children_and_win_and_each_gets_a_worker_id_of_its_own(
    supervise: Supervise,
) -> None:
    options = ("--worker-id", "beta", "--log-level", "debug")
    parent = supervise("Nap", processes=2, options=options, worker_id="alpha")
    await parent.ready(2)
    names = {line["worker_id"].rpartition("-")[0] for line in parent.lines("child.started")}
    assert names == {"beta-1", "beta-2"}
    assert parent.lines("http.listening") == []  # nothing listens without a port
