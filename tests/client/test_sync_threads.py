"""Threads, signals, forks and ends of processes around the client for code that waits: real ones."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg
import pytest

from jsworker import Job, JobProcessor, Limit, SyncJobClient, SyncJobHandle
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from tests.worker.processors import KIND

THREADS = 32
EACH = 50
SECONDS = 60.0


def value(settings: Settings, statement: LiteralString) -> Any:
    with psycopg.connect(settings.database_dsn(), autocommit=True) as connection:
        found = connection.execute(statement).fetchone()
    assert found is not None
    return found[0]


@contextmanager
def taken_key(settings: Settings) -> Iterator[None]:
    """Let a twin take the unique key ``mine`` in a transaction that is rolled back: enqueues wait for it."""
    with psycopg.connect(settings.database_dsn()) as twin:
        twin.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, unique_key, status, run_at)"
            " VALUES (gen_random_uuid(), %s, '{}', 'mine', 'scheduled', now() + interval '1 hour')",
            [KIND],
        )
        yield
        twin.rollback()


def soon(check: Callable[[], bool]) -> None:
    """Wait in this thread until something is true."""
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tasks_of(client: SyncJobClient) -> set[str]:
    """Return the names of the tasks on the client's event loop that wait for a job or run a statement."""
    opened = client._thread._opened
    assert opened is not None

    async def names(_: Any) -> set[str]:
        return {str(task.get_coro()) for task in asyncio.all_tasks()}

    ours = ("_Awaited", "Client.result", "enqueue")
    return {name for name in opened.submit(names).result() if any(each in name for each in ours)}


def test_many_threads_enqueue_at_once(settings: Settings) -> None:
    client = SyncJobClient(settings)
    begin = threading.Barrier(THREADS)

    def enqueue(number: int) -> list[SyncJobHandle]:
        begin.wait()
        own = [client.enqueue(KIND, {"n": [number, n]}) for n in range(EACH)]
        shared = [client.enqueue(KIND, {}, unique_key=f"shared {n}", delay=3600) for n in range(5)]
        return own + [job for job in shared if job.created]

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [job for of_thread in pool.map(enqueue, range(THREADS)) for job in of_thread]
    client.close()
    expected = THREADS * EACH
    assert len({job.id for job in jobs}) == len(jobs) == expected + 5
    assert (
        value(settings, "SELECT count(DISTINCT payload) FROM jsworker.jobs WHERE unique_key IS NULL")
        == expected
    )
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == expected + 5
    assert not [thread for thread in threading.enumerate() if thread.name == "jsworker client"]


def test_closing_cuts_off_the_calls_of_other_threads(settings: Settings) -> None:
    client = SyncJobClient(settings)
    late = client.enqueue(KIND, {}, delay=3600)
    with ThreadPoolExecutor(5) as pool, taken_key(settings):
        waiting: list[Future[Any]] = [pool.submit(late.result, SECONDS) for _ in range(2)]
        waiting.append(pool.submit(client.enqueue, KIND, {}, unique_key="mine"))
        soon(lambda: len(tasks_of(client)) == 3)
        closing = [pool.submit(client.close) for _ in range(2)]
        for each in closing:
            each.result(SECONDS)
        for one in waiting:
            with pytest.raises(RuntimeError, match=r"^the client (was|is) closed"):
                one.result(SECONDS)


def interrupt(call: Callable[[], Any], client: SyncJobClient) -> None:
    """Send this thread Ctrl-C once the call is under way.

    And again after a while: Python does not notice a signal that comes just before a thread begins to wait.
    """
    main, interrupted = threading.get_ident(), threading.Event()

    def send() -> None:
        soon(lambda: bool(tasks_of(client)))
        while not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(10.0)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    interrupted.set()
    thread.join()
    soon(lambda: not tasks_of(client))


def test_ctrl_c_cancels_the_call_that_waits(settings: Settings) -> None:
    client = SyncJobClient(settings)
    late = client.enqueue(KIND, {}, delay=3600)
    interrupt(late.result, client)
    with taken_key(settings):
        interrupt(lambda: client.enqueue(KIND, {}, unique_key="mine"), client)
    assert client.get(late.id).status == "scheduled"  # the client goes on
    client.close()


def test_ctrl_c_right_after_the_call_has_begun_cancels_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SyncJobClient(settings)
    late = client.enqueue(KIND, {}, delay=3600)
    submit = asyncio.run_coroutine_threadsafe

    def submit_and_interrupt(*given: Any) -> Any:
        submit(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", submit_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            late.result()
    soon(lambda: not tasks_of(client))
    client.close()


@pytest.mark.parametrize("exits", [SystemExit, KeyboardInterrupt])
def test_what_would_end_the_process_ends_one_call_alone(
    settings: Settings, exits: type[BaseException]
) -> None:
    def key(payload: dict[str, Any]) -> str:
        raise exits(payload["n"])

    class Exiting(JobProcessor[dict[str, Any]]):
        kind = KIND
        limit = Limit(1, key=key)

        async def process(self, job: Job[dict[str, Any]]) -> None: ...

    client = SyncJobClient(settings)
    late = client.enqueue(KIND, {}, delay=3600)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(late.result, SECONDS)
        soon(lambda: len(tasks_of(client)) == 1)
        for n in (3, 4):
            with pytest.raises(exits) as raised:
                client.enqueue(Exiting, {"n": n})
            assert raised.value.args == (n,)
        assert pool.submit(client.get, late.id).result(SECONDS).status == "scheduled"
        assert len(tasks_of(client)) == 1
        client.close()
        with pytest.raises(RuntimeError, match=r"^the client was closed"):
            waiting.result(SECONDS)


@contextmanager
def silent_server(settings: Settings) -> Iterator[Settings]:
    """Take connections, and never say a word on them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield settings.model_copy(update={"database_url": f"postgresql://a@127.0.0.1:{port}/a"})


def test_threads_wait_together_for_a_database_that_is_silent(settings: Settings) -> None:
    with silent_server(settings) as silent, ThreadPoolExecutor(THREADS) as pool:
        client = SyncJobClient(silent)
        begin = threading.Barrier(THREADS)

        def enqueue(_: int) -> float:
            begin.wait()
            since = time.monotonic()
            with pytest.raises(DatabaseUnavailable):
                client.enqueue(KIND, {})
            return time.monotonic() - since

        slowest = max(pool.map(enqueue, range(THREADS)))
        since = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            client.enqueue(KIND, {})
        assert slowest < 8 * max(1.0, time.monotonic() - since)  # not one after the other
        client.close()


@pytest.mark.parametrize("does", ["close", "enqueue"])
def test_the_handler_of_a_signal_may_use_a_client_that_is_being_opened(settings: Settings, does: str) -> None:
    call = "client.close()" if does == "close" else "client.enqueue('scripted', {})"
    with silent_server(settings) as silent:
        out = run(
            silent,
            f"""
def handle(*_):
    try:
        {call}
    except Exception as error:
        print(type(error).__name__, flush=True)
    sys.exit(3)
import signal
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1.0)
client.enqueue("scripted", {{}})
""",
            code=3,
        )
    assert out == ("" if does == "close" else "DatabaseUnavailable\n")


PROGRAM = """
import os, sys, time, threading
from jsworker import SyncJobClient

client = SyncJobClient.from_env()

def children(*, by_multiprocessing=False):
    def work(number):
        jobs = [client.enqueue("scripted", {"child": number, "n": n}) for n in range(3)]
        jobs += client.enqueue_many("scripted", [{"child": number, "n": n} for n in (3, 4)])
        assert client.get(jobs[0].id).payload == {"child": number, "n": 0}
        assert threading.active_count() == 2, threading.enumerate()
    if by_multiprocessing:
        import multiprocessing
        processes = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        return
    pids = []
    for number in range(2):
        if not (pid := os.fork()):
            work(number)
            sys.exit(7)  # all that a process does at its end
        pids.append(pid)
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


def run(settings: Settings, program: str, *, code: int = 0) -> str:
    """Run a program with the settings in its environment; return what it printed. It complains of nothing."""
    with running(settings, program) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (code, "")
    return out


@contextmanager
def running(settings: Settings, program: str) -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | {
        "JSWORKER_DATABASE_URL": settings.database_dsn(),
        "JSWORKER_NATS_URL": settings.nats_url,
        "JSWORKER_STREAM": settings.stream,
        "JSWORKER_SUBJECT_PREFIX": settings.subject_prefix,
        "JSWORKER_STATEMENT_TIMEOUT": "4.5",
    }
    process = subprocess.Popen(
        # Later versions of Python warn of every fork beside a thread.
        [sys.executable, "-Wignore::DeprecationWarning", "-c", PROGRAM + program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # forked processes that hang, too
        process.communicate()


FORKS = {
    "os.fork": "children()",
    "multiprocessing": "children(by_multiprocessing=True)",
    "beside calls": """
stop = threading.Event()
def busy():
    while not stop.is_set():
        client.get(first.id)
threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads:
    thread.start()
children()
stop.set()
for thread in threads:
    thread.join()
""",
}


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_forked_processes_connect_anew(settings: Settings, fork: str) -> None:
    before = "first = client.enqueue('scripted', {'parent': 1})\nflow = client.workflow('a')\n"
    after = """
assert client.get(first.id).payload == {"parent": 1}  # its own connections still work
client.enqueue("scripted", {"parent": 2})
client.close()
"""
    run(settings, before + fork + after)
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == 2 + 2 * 5
    assert value(settings, "SELECT count(DISTINCT payload) FROM jsworker.jobs") == 2 + 2 * 5


def test_a_fork_while_another_thread_opens_the_client(settings: Settings) -> None:
    # Its lock is held at that moment, by a thread that the child does not have.
    run(
        settings,
        """
lock = client._thread._lock
lock.acquire()
children()
lock.release()
client.close()
""",
    )
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == 2 * 5


def test_what_was_begun_before_a_fork_is_refused_after_it(settings: Settings) -> None:
    out = run(
        settings,
        """
flow = client.workflow("mine")
flow.__enter__()
flow.job("scripted", {})
if not (pid := os.fork()):
    try:
        flow.__exit__(None, None, None)
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit()
os.waitpid(pid, 0)
flow.__exit__(None, None, None)
client.close()
if not (pid := os.fork()):
    try:
        client.enqueue("scripted", {})
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit()
os.waitpid(pid, 0)
""",
    )
    assert out.splitlines() == [
        "workflow 'mine' was begun before its client was closed, or its process forked",
        "the client is closed",
    ]
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == 1


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "os._exit(3)"])
def test_a_program_that_never_closes_its_client_ends_by_itself(settings: Settings, end: str) -> None:
    enqueues = "client.enqueue('scripted', {})\nclient.enqueue_many('scripted', [{}] * 100)\n"
    run(settings, enqueues + end, code=3 if end else 0)
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == 101


def test_a_finalizer_that_uses_the_client_at_the_interpreters_end_does_not_hang(settings: Settings) -> None:
    out = run(
        settings,
        """
class Shop:
    def __init__(self, jobs):
        self.jobs = jobs
    def __del__(self):
        try:
            self.jobs.enqueue("scripted", {})
        except RuntimeError as error:
            print(str(error).partition(":")[0], flush=True)
        self.jobs.close()
shop = Shop(client)
client.enqueue("scripted", {})
""",
    )
    assert out == "the interpreter is ending and has stopped the client's thread\n"
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == 1


@pytest.mark.parametrize("before", [0, 1])
def test_a_function_of_atexit_connects_to_servers_by_their_names(settings: Settings, before: int) -> None:
    urls = {name: getattr(settings, name) for name in ("database_url", "nats_url")}
    by_name = {name: url.replace("127.0.0.1", "localhost") for name, url in urls.items()}
    out = run(
        settings.model_copy(update=by_name),
        f"""
import atexit
@atexit.register
def count():
    if {before}:
        client.close()
        client.open()
    print(client.enqueue("scripted", {{}}).created)
    client.close()
if {before}:
    client.enqueue("scripted", {{}})
""",
    )
    assert out == "True\n"
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == before + 1


def test_killed_within_an_enqueue_a_second_try_with_the_key_is_safe(settings: Settings) -> None:
    waits = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    enqueue = "client.enqueue('scripted', {}, unique_key='mine')"
    with taken_key(settings), running(settings, enqueue) as process:
        soon(lambda: value(settings, waits) == 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with SyncJobClient(settings) as client:
        job = client.enqueue(KIND, {}, unique_key="mine")
        assert client.enqueue(KIND, {}, unique_key="mine") == (job.id, False)
    assert value(settings, "SELECT count(*) FROM jsworker.jobs") == 1
