import gc
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from jsworker import __version__
from jsworker.cli import app, run

from .commands import COMMAND, Cli, Terminal


def test_the_help_lists_every_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    found = cli("--help").ok()
    for name, entry in app._COMMANDS.items():
        assert f" {name} " in found.out
        assert entry.summary in found.out


def test_without_arguments_the_help_is_shown(cli: Cli) -> None:
    found = cli()
    assert (found.code, found.err) == (2, "")
    assert "Usage: jsworker" in found.out


@pytest.mark.parametrize("name", app._COMMANDS)
def test_every_command_of_the_list_exists_and_explains_itself(name: str, cli: Cli) -> None:
    found = cli(name, "--help").ok()
    assert f"Usage: jsworker {name}" in found.out
    assert get_command(app.app).commands.keys() == app._COMMANDS.keys()  # type: ignore[attr-defined]


def test_the_version_is_shown(cli: Cli) -> None:
    assert cli("--version").ok().out == f"jsworker {__version__}\n"


def test_python_m_jsworker_is_the_command() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"jsworker {__version__}\n"


@pytest.mark.usefixtures("_logs_as_before", "capsys")
def test_ctrl_c_while_the_command_loads_ends_it_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run([*COMMAND, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_command_is_loaded_without_passes_of_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    load = importlib.import_module

    def note(name: str) -> ModuleType:
        collects.append(gc.isenabled())
        return load(name)

    monkeypatch.setattr(importlib, "import_module", note)
    monkeypatch.setattr(app, "exit_within", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["jsworker", "jobs", "--help"])
    frozen = gc.get_freeze_count()
    with pytest.raises(SystemExit):
        app.main()
    assert collects == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


def test_closed_streams_are_no_obstacle(cli_environment: Mapping[str, str]) -> None:
    script = f"exec {shlex.join(COMMAND)} jobs --json <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", script], env=os.environ | cli_environment, check=False)
    assert done.returncode == 0


def test_help_and_version_load_neither_sqlalchemy_nor_nats() -> None:
    script = (
        "import sys; from jsworker.cli.app import run_command; run_command(['--help']); "
        "sys.exit(' '.join({'sqlalchemy', 'nats', 'psycopg'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_supervisor_loads_neither_servers_nor_pictures_nor_greenlets() -> None:
    script = (
        "import sys; import jsworker.cli.run; "
        "sys.exit(' '.join({'sqlalchemy', 'nats', 'psycopg', 'rich', 'greenlet'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["jobz"], "No such command 'jobz'. Did you mean 'job', 'jobs'? See jsworker --help"),
        (["--nonsense"], "No such option: --nonsense; see jsworker --help"),
        (["jobs", "--limit", "0"], "Invalid value for '--limit'"),
        (["jobs", "--status", "asleep"], "'asleep' is not one of 'scheduled', 'queued', 'processing'"),
        (["job"], "Missing argument 'ID'; see jsworker job --help"),
        (["job", "42"], "'42' is no id of a job: a UUID, or at least its last eight digits"),
        (["cancel", "xyz"], "Invalid value for 'ID': 'xyz' must be a whole id, a UUID; see jsworker cancel"),
        (["cancel", "AF8bb981"], "'AF8bb981' must be a whole id, a UUID, which jsworker job AF8bb981 shows;"),
        (["retry", "af8bb981"], "'af8bb981' must be a whole id, a UUID, which jsworker job af8bb981 shows;"),
        (["priority", "af8bb981", "high"], "must be a whole id, a UUID, which jsworker job af8bb981 shows;"),
        (["reschedule", "af8bb981", "--delay", "0"], "'af8bb981' must be a whole id, a UUID, which"),
        (["jobs", "--after", "xyz"], "Invalid value for '--after': 'xyz' must be a whole id, a UUID;"),
        (["audit", "--after", "af8bb981"], "'--after': 'af8bb981' must be a whole id, a UUID;"),
        (["clear", "--yes", "--kind", "x"], "Missing option '--reason'; see jsworker clear --help"),
        (["db", "sideways"], "No such command 'sideways'; see jsworker db --help"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], line: str, cli: Cli) -> None:
    assert line in cli(*arguments).refused(2)


@pytest.mark.parametrize(
    "arguments",
    [
        *("jobs --error X", "jobs --key X", "jobs --unique-key X", "jobs --worker X", "retry --error X"),
        *("workers --after X", "status --after X", "enqueue tidy --payload X", "pause tidy --reason X"),
        *("run --database-url X cli_jobs:Double", "drain X", "workers X --stack", "schedules pause X"),
        *("cancel -y --error X", "jobs --limit 5 --error=X"),
    ],
)
def test_bytes_that_are_not_utf8_are_refused_by_the_name_of_the_option(cli: Cli, arguments: str) -> None:
    line = cli(*arguments.replace("X", os.fsdecode(b"a\xff")).split()).refused(2)
    name, _, rule = line.partition(" ")
    assert rule == "must be text in UTF-8"
    assert name in {"WORKER", "NAME", "ID"} or f"{name}{'=' if '=' in arguments else ' '}X" in arguments


def test_titles_in_the_help_fit_a_terminal_of_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = cli("run", "--help").ok().out
    assert [panel for panel in run._PANELS.values() if f"─ {panel} ─" not in found] == []


def test_help_fits_a_terminal_of_100_columns(tmp_path: Path) -> None:
    terminal = Terminal("run", "--help", cwd=tmp_path, environment=os.environ)
    assert terminal.wait() == 0
    assert max(map(len, terminal.plain_text.splitlines())) == 100
    assert "--watchdog-timeout,--heartbeat-timeout" in terminal.plain_text


def test_a_missing_setting_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JSWORKER_DATABASE_URL")
    for command in (["jobs"], ["enqueue", "double"], ["db", "upgrade"], ["workers"]):
        assert cli(*command).refused(2).startswith("JSWORKER_DATABASE_URL must be set")


def test_a_misspelled_setting_is_named_with_the_one_that_is_missing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, cli_environment: Mapping[str, str]
) -> None:
    monkeypatch.delenv("JSWORKER_DATABASE_URL")
    monkeypatch.setenv("JSWORKER_DATABSE_URL", cli_environment["JSWORKER_DATABASE_URL"])
    for command in (["status"], ["doctor"], ["db", "upgrade"]):
        found = cli(*command)
        assert (found.code, found.out) == (2, "")
        assert found.errors == [
            "JSWORKER_DATABASE_URL must be set, for example to postgresql://user@host:5432/database",
            "JSWORKER_DATABSE_URL is no setting: did you mean JSWORKER_DATABASE_URL?",
        ]


@pytest.mark.parametrize(
    ("command", "query"),
    [
        ("doctor", "port=abc"),
        ("db upgrade", "port=1,2"),
        ("run cli_jobs:Double", "host=a&host=b&port=1"),
        ("jobs", "host=a:1:2&host=b:1:2"),
    ],
)
def test_wrong_ports_of_a_url_are_named_without_its_password(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, command: str, query: str
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://u:sesame@h/d?{query}")
    line = cli(*command.split()).refused(2)
    rule = "must list hosts and ports in its query as ?host=a,b&port=1,2 or as ?host=a:1&host=b:2"
    assert line == f"JSWORKER_DATABASE_URL='postgresql://u:***@h/d?{query}' {rule}"


NO_OPTION = "must have options of PostgreSQL in its query: invalid connection option"


@pytest.mark.parametrize(
    ("command", "query", "rule"),
    [
        ("db current", "ssl=true", f'{NO_OPTION} "ssl"'),
        ("run cli_jobs:Double", "pwrd=sesame", f'{NO_OPTION} "pwrd"'),
        ("jobs", "row_factory=x", f'{NO_OPTION} "row_factory"'),
        ("db upgrade", "autocommit=false", f'{NO_OPTION} "autocommit"'),
        ("jobs", "conninfo=sesame", f'{NO_OPTION} "conninfo"'),
        ("doctor", "user=sesame&user=b", "must give the option user once"),
        ("jobs", "connect_timeout=sesame", "must have a number of seconds as connect_timeout"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_wrong_option_of_a_url_is_named_without_its_value(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, query: str, rule: str
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://u:sesame@h/d?{query}")
    assert cli(*command.split()).refused(2) == f"JSWORKER_DATABASE_URL {rule}"


def test_a_read_only_server_is_named_with_what_to_do(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, cli_environment: Mapping[str, str]
) -> None:
    url = cli_environment["JSWORKER_DATABASE_URL"]
    options = f"{'&' if '?' in url else '?'}options=-c%20default_transaction_read_only%3Don"
    monkeypatch.setenv("JSWORKER_DATABASE_URL", url + options)
    line = cli("enqueue", "tidy").refused(1)
    assert " is read-only, as a standby is or with default_transaction_read_only = on; let " in line
    assert "or a login that may write" in line


def test_wrong_settings_are_shown_line_by_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, cli_environment: Mapping[str, str]
) -> None:
    monkeypatch.setenv("JSWORKER_ACK_WAIT", "200")
    monkeypatch.setenv("JSWORKER_CONCURRENCY", "many")
    found = cli("jobs")
    assert (found.code, found.out) == (2, "")
    assert found.errors == [
        "JSWORKER_CONCURRENCY='many' must be a whole number",
        "JSWORKER_ACK_WAIT=200 must exceed JSWORKER_STALE_THRESHOLD=300 + 2 × JSWORKER_SCAN_INTERVAL=5",
    ]
