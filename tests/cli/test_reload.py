"""``jsworker run --reload``: a changed file starts the worker anew, after its jobs; a broken one is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ownership.rows import Sql

from .commands import Cli, Process, Spawn, Terminal, wait_until

MODULE = """
import time
from pathlib import Path

from jsworker import job


@job
def version(payload):
    if payload.get("until"):
        Path("begun").touch()
    while payload.get("until") and not Path(payload["until"]).exists():
        time.sleep(0.02)
    return {version}
"""
OPTIONS = ("--reload", "--relay-interval", "0.1", "--scan-interval", "1", "--log-format", "json")


def write(here: Path, text: str) -> None:
    """Replace the module at once, as editors do: a worker never reads half of it.

    Of versions of one size that are written within a second Python would run the first one's cached code.
    """
    (here / "versions.new").write_text(text)
    (here / "versions.new").rename(here / "versions.py")


@pytest.fixture
def worker(here: Path, spawn: Spawn) -> Process:
    write(here, MODULE.replace("{version}", "1"))
    started = spawn("run", "versions", *OPTIONS)
    started.read_errors_until('"worker.started"')
    return started


def result_of(cli: Cli, job_id: str) -> int:
    """Wait until a job has completed, and return its result."""
    wait_until(lambda: cli("job", job_id, "--json").json["status"] == "completed", f"{job_id} is done")
    return int(cli("job", job_id, "--json").json["result"])


def run_job(cli: Cli) -> int:
    return result_of(cli, cli("enqueue", "version").lines[0])


def ends_by(worker: Process, number: signal.Signals) -> None:
    children = psutil.Process(worker.popen.pid).children(recursive=True)
    worker.signal(number)
    assert worker.wait().code == 0
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_a_changed_file_is_loaded_after_running_jobs_have_ended_and_a_broken_one_is_told_of(
    cli: Cli, sql: Sql, here: Path, worker: Process
) -> None:
    assert run_job(cli) == 1
    until = here / "go-on"
    [running] = cli("enqueue", "version", "--payload", f'{{"until": "{until}"}}').lines
    wait_until((here / "begun").exists, "it has begun")
    write(here, MODULE.replace("{version}", "22"))
    assert worker.read_errors_until("changed").strip() == "versions.py changed: the worker is started anew"
    worker.read_errors_until('"worker.draining"')
    until.touch()
    worker.read_errors_until('"worker.started"')
    assert result_of(cli, running) == 1
    assert run_job(cli) == 22
    row = cli("job", running, "--json").json
    assert (row["attempts"], row["timeline"]) == (1, [])

    write(here, "def version(:\n")
    worker.read_errors_until("target versions: module versions cannot be imported: SyntaxError: ")
    told = worker.read_errors_until("exit code").strip()
    assert told == "the worker ended with exit code 2; it is started anew when a Python file changes"
    (here / "notes.txt").write_text("no Python")  # is none
    write(here, MODULE.replace("{version}", "333"))
    assert worker.read_errors_until("changed").startswith("versions.py changed")
    worker.read_errors_until('"worker.started"')
    assert run_job(cli) == 333
    ends_by(worker, signal.SIGTERM)


def test_without_it_nothing_is_left_of_the_worker(worker: Process) -> None:
    children = psutil.Process(worker.popen.pid).children(recursive=True)
    assert children
    worker.popen.kill()
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_ctrl_c_on_a_terminal_ends_both(here: Path, cli_environment: dict[str, str]) -> None:
    write(here, MODULE.replace("{version}", "1"))
    terminal = Terminal("run", "versions", *OPTIONS, cwd=here, environment={**os.environ, **cli_environment})
    terminal.read_until('"worker.started"')
    terminal.type("\x03")
    assert terminal.wait() == 0
    assert "worker.stopped" in terminal.text
    assert '"force": true' not in terminal.text


ASKS = """
from jsworker import job


@job
def asks(payload):
    try:
        return input()
    except EOFError:
        return "nobody"


@job
def insists(payload):
    return open("/dev/tty").readline()
"""


def test_a_job_that_asks_the_terminal_gets_no_answer_and_ctrl_c_ends_it_all_the_same(
    cli: Cli, here: Path, cli_environment: dict[str, str]
) -> None:
    (here / "asking.py").write_text(ASKS)
    options = (*OPTIONS, "--shutdown-timeout", "0.1", "--statement-timeout", "1")
    terminal = Terminal("run", "asking", *options, cwd=here, environment={**os.environ, **cli_environment})
    terminal.read_until('"worker.started"')
    [asks] = cli("enqueue", "asks").lines
    wait_until(lambda: cli("job", asks, "--json").json["status"] == "completed", "it goes on")
    assert cli("job", asks, "--json").json["result"] == "nobody"

    processes = psutil.Process(terminal.pid).children(recursive=True)
    cli("enqueue", "insists")
    wait_until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in processes), "it is stopped")
    terminal.type("\x03")
    _, left = psutil.wait_procs(processes, timeout=60)
    for process in left:
        process.kill()
    assert left == []
    terminal.wait()


def test_the_folder_is_watched_before_the_worker_starts(tmp_path: Path) -> None:
    folders = 3_000  # so many that it takes a while
    for number in range(folders):
        (tmp_path / str(number)).mkdir()
    counts = ["sh", "-c", "cat /proc/$PPID/fdinfo/* | grep --count ^inotify"]
    program = f"import os, jsworker.cli.reload as cli; cli.run_reloading({counts!r}, os.environ)"
    popen = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with popen as reloading:
        try:
            assert reloading.stdout
            assert int(reloading.stdout.readline()) > folders
        finally:
            reloading.terminate()


def test_without_watchfiles_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    found = cli("run", "versions", "--reload")
    assert found.refused(2) == "--reload needs watchfiles; install it: pip install 'jsworker[reload]'"


def test_wrong_settings_end_it_at_once(cli: Cli) -> None:
    assert "JSWORKER_CONCURRENCY" in cli("run", "versions", "--reload", "--concurrency", "0").refused(2)
