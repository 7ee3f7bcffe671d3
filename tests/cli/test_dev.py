"""``dev``: servers alone and around a command, and that nothing stays behind."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.support.servers import new_servers_folder

from .commands import PATIENT_COMMAND, Cli, Process, Spawn, Terminal, wait_until

LOOP = "while :; do sleep 0.05; done"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes with the folder in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:  # ended meanwhile
            continue
    return found


def variables_of(process: Process) -> dict[str, str]:
    """Read the lines that a shell would take."""
    lines = [process.read_line(), process.read_line()]
    assert all(line.startswith("export JSWORKER_") for line in lines), (lines, process.popen.poll())
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """A data folder whose servers run throughout this module, started by a first ``dev``."""
    folder = new_servers_folder()
    starter = Spawn(folder, {})
    first = starter("dev", "--no-dashboard", "--data", folder / "data")
    try:
        variables = variables_of(first)
        assert variables["JSWORKER_NATS_URL"].startswith("nats://127.0.0.1:")
        with psycopg.connect(variables["JSWORKER_DATABASE_URL"]) as connection:
            assert connection.execute("SELECT count(*) FROM jsworker.jobs").fetchone() == (0,)
        yield folder / "data"
        first.signal(signal.SIGINT)
        ended = first.wait()
        assert (ended.code, ended.out) == (0, "")
        assert ended.err == (
            f"NATS and PostgreSQL are running, data in {folder / 'data'}; Ctrl-C stops them\n"
        )
        assert processes_of(folder) == []
    finally:
        starter.end()
        for left in processes_of(folder):
            left.kill()
        shutil.rmtree(folder)


def test_a_command_gets_the_variables_and_its_code_is_handed_on(data: Path, spawn: Spawn) -> None:
    script = "env | grep ^JSWORKER_ | sort; exit 7"
    others = {"JSWORKER_NATS_USER": "me", "JSWORKER_NATS_PASSWORD": "x", "JSWORKER_STREAM": "MINE"}
    any_bytes = os.fsdecode(b"\xff")
    ended = spawn("dev", "--data", data, "--", "sh", "-c", script, any_bytes, **others).wait()
    assert (ended.code, ended.err) == (7, "")
    names = [line.partition("=")[0] for line in ended.lines]
    assert "JSWORKER_NATS_USER" not in names
    assert "JSWORKER_STREAM=MINE" in ended.lines
    assert {"JSWORKER_DATABASE_URL", "JSWORKER_NATS_URL"} < set(names)


def test_jsworker_itself_works_inside(data: Path, spawn: Spawn) -> None:
    enqueue = (*PATIENT_COMMAND, "enqueue", "double", "--count", "3")
    ended = spawn(
        "dev", "--data", data, "--", *enqueue, JSWORKER_STREAM="JOBS", JSWORKER_SUBJECT_PREFIX="jobs"
    ).wait()
    assert (ended.code, ended.err, len(ended.lines)) == (0, "", 3)


def test_variables_for_other_servers_are_unset(data: Path, spawn: Spawn) -> None:
    running = spawn("dev", "--data", data, JSWORKER_NATS_USER="me", JSWORKER_DATABASE_PASSWORD_FILE="/x")
    assert running.read_line() == "unset JSWORKER_DATABASE_PASSWORD_FILE JSWORKER_NATS_USER"
    variables_of(running)
    running.signal(signal.SIGTERM)
    assert running.wait().code == 0


def test_a_command_that_a_signal_killed_is_128_and_its_number(data: Path, cli: Cli) -> None:
    assert cli("dev", "--data", data, "--", "sh", "-c", "kill -KILL $$").code == 137


def test_signals_reach_the_command(data: Path, spawn: Spawn) -> None:
    asked = "trap 'echo TERM' TERM; trap 'echo INT' INT; trap 'echo HUP; exit 3' HUP"
    running = spawn("dev", "--data", data, "--", "sh", "-c", f"{asked}; echo ready; {LOOP}")
    assert running.read_line() == "ready"
    for number in (signal.SIGTERM, signal.SIGINT):
        running.signal(number)
        assert f"SIG{running.read_line()}" == number.name
    running.signal(signal.SIGHUP)
    ended = running.wait()
    assert (ended.code, ended.out) == (3, "HUP\n")


def test_ctrl_c_on_a_terminal_reaches_the_command_once(data: Path, tmp_path: Path) -> None:
    script = f"trap 'echo asked' INT; trap 'exit 4' TERM; echo ready; {LOOP}"
    terminal = Terminal("dev", "--data", data, "--", "sh", "-c", script, cwd=tmp_path, environment=os.environ)
    terminal.read_until("ready")
    terminal.type("\x03")
    terminal.read_until("asked")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait() == 4
    assert terminal.text.count("asked") == 1


def test_ctrl_c_ends_the_dashboard_in_silence_even_while_it_starts(data: Path, tmp_path: Path) -> None:
    terminal = Terminal("dev", "--data", data, cwd=tmp_path, environment=os.environ)
    terminal.read_until("dashboard: ")
    [dashboard] = [
        each for each in psutil.Process(terminal.pid).children() if each.cmdline()[-1] == "dashboard"
    ]
    assert os.getpgid(dashboard.pid) == dashboard.pid  # a terminal's Ctrl-C does not reach it
    terminal.type("\x03")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.text
    assert not dashboard.is_running()


def test_a_command_that_does_not_exist_is_127(data: Path, cli: Cli) -> None:
    ended = cli("dev", "--data", data, "--", "no-such-command")
    assert ended.refused(127) == "command 'no-such-command' is not an executable file and not on the PATH"


def test_neither_a_killed_guard_nor_a_killed_dev_leaves_anything_behind(spawn: Spawn) -> None:
    folder = new_servers_folder()
    try:
        serving = spawn("dev", "--no-dashboard", "--data", folder / "data")
        variables_of(serving)
        [guard] = [each for each in processes_of(folder) if "jsworker.embedded.guard" in each.cmdline()]
        guard.kill()
        ended = serving.wait()
        assert ended.code == 1
        assert ended.err.endswith(f"the servers in {folder / 'data'} have ended\n")
        wait_until(lambda: processes_of(folder) == [], "nothing is left")
        script = f"trap '' TERM; echo {folder}; {LOOP}"
        running = spawn("dev", "--data", folder / "data", "--", "sh", "-c", script)
        assert running.read_line() == str(folder)
        running.popen.kill()
        wait_until(lambda: processes_of(folder) == [], "nothing is left")
    finally:
        shutil.rmtree(folder)


def test_a_data_folder_that_cannot_be_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = cli("dev", "--data", tmp_path / "file").refused(1)
    assert line.startswith(f"data folder {tmp_path / 'file'} cannot be used: ")
