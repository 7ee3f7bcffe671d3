"""The options of ``run``: every setting is one, and the settings' own rules speak."""

from pathlib import Path

import pytest

from jsworker.cli.app import run_command
from jsworker.core.settings import Settings, variable_of

from .commands import Cli


def test_every_setting_is_an_option_with_its_description(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = " ".join(cli("run", "--help").ok().out.split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description is not None
        assert field.description in shown
    for default in ("[default: 600]", "[default: JOBS]", "[default: true]", "[default: 0.5]"):
        assert default in shown
    for metavar in ("URL", "SECRET", "PATH", "NUMBER", "SECONDS", "true|false", "json|console", "LEVEL"):
        assert f" {metavar} " in shown


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("jsworker run my_jobs --event-loop ", ["auto", "asyncio", "uvloop"]),
        ("jsworker run my_jobs --log-level w", ["warning"]),
        ("jsworker run my_jobs --recover-on-start ", ["true", "false"]),
        ("jsworker jobs --status c", ["completed", "cancelled"]),
        ("jsworker priority 01a2074f-a6fa-739d-acb3-4f19a2de76ad h", ["high"]),
    ],
)
def test_a_shell_completes_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, values: list[str]
) -> None:
    monkeypatch.setenv("_JSWORKER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        run_command([])
    assert capsys.readouterr().out.split() == values


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--concurrency", "none", "JSWORKER_CONCURRENCY='none' must be a whole number"),
        ("--stale-threshold", "soon", "JSWORKER_STALE_THRESHOLD='soon' must be a number of seconds"),
        ("--log-format", "xml", "JSWORKER_LOG_FORMAT='xml' must be json or console"),
        ("--recover-on-start", "perhaps", "JSWORKER_RECOVER_ON_START='perhaps' must be true or false"),
        (
            "--nats-tls-ca",
            "gone.pem",
            "JSWORKER_NATS_TLS_CA='gone.pem' cannot be read: No such file or directory",
        ),
        (
            "--heartbeat-timeout",
            "400",
            "JSWORKER_STALE_THRESHOLD=300 must exceed JSWORKER_WATCHDOG_TIMEOUT=400",
        ),
        ("--processes", "0", "JSWORKER_PROCESSES=0 must be from 1 to 1000"),
    ],
)
def test_a_wrong_value_is_named_by_its_variable(option: str, value: str, line: str, cli: Cli) -> None:
    assert cli("run", "cli_jobs:Double", option, value).refused(2) == line


def test_the_option_wins_over_the_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable_of("ack_wait"), "300")
    assert cli("run", "x:Y").refused(2).startswith("JSWORKER_ACK_WAIT=300 must exceed")
    monkeypatch.setenv(variable_of("processes"), "3")
    assert cli("run", "x:Y", "--ack-wait", "700").refused(2).startswith("target x:Y: there is no module x")


def test_a_secret_is_never_shown(cli: Cli, tmp_path: Path) -> None:
    secrets = ("--nats-token", "sesame", "--nats-user", "me", "--nats-password", "sesame")
    line = cli("run", "x:Y", *secrets).refused(2)
    assert line == "JSWORKER_NATS_USER and JSWORKER_NATS_TOKEN must not be set together: keep one login"
    url = "postgresql://me:sesame@host:wrong/jobs"
    assert "sesame" not in cli("run", "x:Y", "--database-url", url).refused(2)


def test_a_target_is_needed(cli: Cli) -> None:
    assert cli("run").refused(2) == "Missing argument 'MODULE:CLASS'; see jsworker run --help"
