"""Settings: values, files, secrets, and one clear line for everything that is wrong."""

import dataclasses
import os
import re
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from sqlalchemy import make_url

from jsworker.core.errors import SettingsError
from jsworker.core.settings import (
    Settings,
    changed_environment,
    check_timing,
    load_settings,
    redact_url,
    unknown_variables,
    variable_of,
)
from jsworker.core.settings.cores import usable_cores

URL = "postgresql://jobs@db:5432/jobs"
CANARY = "c4n4ry-s3cret"
PREFIX_RULE = (
    "must not begin with jsworker.worker, jsworker.awaited or jsworker.ended, where workers answer and hints "
    "at results are sent"
)

Set = Callable[..., None]
MOUNT = "sys/fs/cgroup"
unhurried = examples(deadline=None)  # the machine may be busy


@pytest.fixture(autouse=True, scope="module")
def _clean_environment() -> Any:
    """Hide the variables of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("JSWORKER_")]:
            patch.delenv(variable)
        yield


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Set variables by the names of settings."""

    def put(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"JSWORKER_{name}", value)

    put(DATABASE_URL=URL)
    return put


def faults(**overrides: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(**overrides)
    return caught.value.lines


def may_be_none(name: str) -> bool:
    try:
        Settings(**{"database_url": URL, name: None})
    except SettingsError:
        return False
    return True


class TestValues:
    @pytest.mark.usefixtures("put")
    def test_defaults(self) -> None:
        settings = load_settings()
        assert settings.nats_url == "nats://127.0.0.1:4222"
        assert (settings.stream, settings.subject_prefix, settings.stream_replicas) == ("JOBS", "jobs", 1)
        assert (settings.concurrency, settings.processes) == (10, 1)
        assert (settings.heartbeat_interval, settings.crash_threshold) == (5, 15)
        assert (settings.stale_threshold, settings.scan_interval, settings.ack_wait) == (300, 5, 600)
        assert (settings.relay_interval, settings.statement_timeout) == (0.5, 3)
        assert (settings.watchdog_timeout, settings.shutdown_timeout) == (120, 25)
        assert settings.recover_on_start is True
        assert (settings.max_attempts, settings.max_stalls) == (5, 3)
        assert settings.job_timeout == 24 * 3600
        for name in ("grace_period", "progress_timeout", "worker_id", "pod_uid", "http_port"):
            assert getattr(settings, name) is None
        assert settings.retention == 7 * 24 * 3600
        assert settings.max_payload_bytes == 1_048_576
        assert settings.max_result_bytes == settings.max_checkpoint_bytes == settings.max_payload_bytes
        assert settings.hostname == socket.gethostname()
        assert settings.log_level == "info"

    def test_the_environment_and_above_it_the_command_line(self, put: Set, tmp_path: Path) -> None:
        seed = tmp_path / "seed"
        seed.write_text("SU")
        put(CONCURRENCY="7", ACK_WAIT="700.5", RECOVER_ON_START="no", PROCESSES="2", LOG_LEVEL="WARNING")
        put(NATS_NKEY_SEED_FILE=str(seed))
        settings = load_settings(processes="4", stale_threshold=301)
        assert (settings.concurrency, settings.ack_wait, settings.recover_on_start) == (7, 700.5, False)
        assert (settings.processes, settings.stale_threshold, settings.log_level) == (4, 301.0, "warning")
        assert settings.nats_nkey_seed_file == seed  # a path in itself, not the file's content

    @pytest.mark.parametrize("text", ["none", "None", " NONE ", ""])
    @pytest.mark.parametrize(
        "name",
        ["retention", "crash_threshold", "grace_period", "job_timeout", "progress_timeout", "http_port"],
    )
    def test_none_switches_off(self, put: Set, name: str, text: str) -> None:
        put(**{name.upper(): text})
        assert getattr(load_settings(), name) is None
        some = {"crash_threshold": 20, "http_port": 0}.get(name, 100_000)
        assert getattr(load_settings(**{name: some}), name) == some

    @pytest.mark.parametrize(
        "name", ["NATS_USER", "NATS_PASSWORD", "NATS_TOKEN", "NATS_CREDS_FILE", "WORKER_ID", "POD_UID"]
    )
    def test_an_empty_variable_is_not_set(self, put: Set, name: str) -> None:
        put(**{name: ""})
        assert getattr(load_settings(), name.lower()) is None

    @pytest.mark.parametrize("name", [name for name in Settings.model_fields if may_be_none(name)])
    def test_none_is_not_set_for_another_process_whatever_it_inherits(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        inherited = {variable_of(name): "1", f"{variable_of(name)}_FILE": "/x", "JSWORKER_DATABASE_URL": URL}
        monkeypatch.setattr(os, "environ", changed_environment(inherited, {name: None}))
        assert getattr(load_settings(), name) is None

    @pytest.mark.parametrize(
        ("update", "line"),
        [
            ({"max_atempts": 1}, "JSWORKER_MAX_ATEMPTS is no setting: did you mean JSWORKER_MAX_ATTEMPTS?"),
            ({"log_level": "loud"}, "JSWORKER_LOG_LEVEL='loud' must be debug, info, warning"),
            ({"encryption_keys": CANARY}, "JSWORKER_ENCRYPTION_KEYS must read NAME:KEY"),
        ],
    )
    def test_what_a_copy_changes_is_checked(self, put: Set, update: dict[str, Any], line: str) -> None:
        put(CONCURRENCY="7")
        settings = load_settings()
        with pytest.raises(SettingsError, match=f"^{re.escape(line)}") as caught:
            settings.model_copy(update=update)
        assert CANARY not in str(caught.value)
        copy = settings.model_copy(update={"max_attempts": "1", "nats_token": CANARY})
        assert (copy.max_attempts, copy.nats_token, copy.concurrency) == (1, SecretStr(CANARY), 7)
        assert copy.model_fields_set == {"database_url", "concurrency", "max_attempts", "nats_token"}

    def test_another_process_gets_the_secrets_themselves(self) -> None:
        values = {"nats_token": SecretStr(CANARY), "concurrency": 3}
        changed = changed_environment({"HOME": "/x", "JSWORKER_NATS_TOKEN_FILE": "/t"}, values)
        assert changed == {"HOME": "/x", "JSWORKER_NATS_TOKEN": CANARY, "JSWORKER_CONCURRENCY": "3"}

    @pytest.mark.usefixtures("put")
    def test_log_format_follows_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for terminal, expected in ((True, "console"), (False, "json")):
            monkeypatch.setattr("sys.stderr", FakeStream(terminal))
            assert load_settings().log_format == expected
        assert load_settings(log_format="console").log_format == "console"

    @pytest.mark.usefixtures("put")
    def test_settings_do_not_change(self) -> None:
        settings = load_settings()
        with pytest.raises(ValidationError, match="frozen"):
            settings.concurrency = 3  # type: ignore[misc]  # what is shown to fail

    def test_every_setting_explains_itself_in_one_line(self) -> None:
        for name, field in Settings.model_fields.items():
            assert field.description, name
            assert "\n" not in field.description
            if "Seconds" in str(field.annotation) or name.endswith(("_interval", "_timeout", "_threshold")):
                assert "seconds" in field.description, name

    def test_variables_are_named_after_settings(self) -> None:
        assert variable_of("ack_wait") == "JSWORKER_ACK_WAIT"

    def test_kubernetes_service_links_set_no_port(self, put: Set) -> None:
        put(HTTP_PORT="tcp://10.96.0.12:8080")
        assert load_settings().http_port is None


@dataclasses.dataclass
class FakeStream:
    terminal: bool

    def isatty(self) -> bool:
        return self.terminal


class TestWrongValues:
    @pytest.mark.parametrize(
        ("name", "value", "line"),
        [
            ("CONCURRENCY", "ten", "JSWORKER_CONCURRENCY='ten' must be a whole number"),
            ("CONCURRENCY", "", "JSWORKER_CONCURRENCY='' must be a whole number"),
            ("CONCURRENCY", "1.5", "JSWORKER_CONCURRENCY=1.5 must be a whole number"),
            ("CONCURRENCY", "0", "JSWORKER_CONCURRENCY=0 must be from 1 to 10000"),
            ("CONCURRENCY", "10001", "JSWORKER_CONCURRENCY=10001 must be from 1 to 10000"),
            ("CONCURRENCY", "1\n2\x1b", r"JSWORKER_CONCURRENCY='1\n2\x1b' must be a whole number"),
            ("PROCESSES", "0", "JSWORKER_PROCESSES=0 must be from 1 to 1000"),
            ("MAX_ATTEMPTS", "0", "JSWORKER_MAX_ATTEMPTS=0 must be from 1 to 1000000"),
            ("MAX_STALLS", "-1", "JSWORKER_MAX_STALLS=-1 must be from 1 to 1000000"),
            ("STREAM_REPLICAS", "6", "JSWORKER_STREAM_REPLICAS=6 must be from 1 to 5"),
            ("MAX_PAYLOAD_BYTES", "0", "JSWORKER_MAX_PAYLOAD_BYTES=0 must be from 1 to 268435455"),
            ("MAX_RESULT_BYTES", "0", "JSWORKER_MAX_RESULT_BYTES=0 must be from 1 to 268435455"),
            ("MAX_CHECKPOINT_BYTES", "0", "JSWORKER_MAX_CHECKPOINT_BYTES=0 must be from 1 to 268435455"),
            ("HTTP_PORT", "65536", "JSWORKER_HTTP_PORT=65536 must be from 0 to 65535"),
            ("HTTP_PORT", "http", "JSWORKER_HTTP_PORT='http' must be a whole number"),
            ("SCAN_INTERVAL", "soon", "JSWORKER_SCAN_INTERVAL='soon' must be a number of seconds"),
            ("SCAN_INTERVAL", "none", "JSWORKER_SCAN_INTERVAL='none' must be a number of seconds"),
            ("SCAN_INTERVAL", "0", "JSWORKER_SCAN_INTERVAL=0 must be from 0.01 to 1000000000"),
            ("SCAN_INTERVAL", "nan", "JSWORKER_SCAN_INTERVAL='nan' must be from 0.01 to 1000000000"),
            ("RELAY_INTERVAL", "0.009", "JSWORKER_RELAY_INTERVAL=0.009 must be from 0.01 to 1000000000"),
            (
                "HEARTBEAT_INTERVAL",
                "1e-9",
                "JSWORKER_HEARTBEAT_INTERVAL=1e-9 must be from 0.01 to 1000000000",
            ),
            (
                "STATEMENT_TIMEOUT",
                "0.0004",  # which PostgreSQL would take for no time-out
                "JSWORKER_STATEMENT_TIMEOUT=0.0004 must be from 0.01 to 1000000000",
            ),
            ("WATCHDOG_TIMEOUT", "0.0001", "JSWORKER_WATCHDOG_TIMEOUT=0.0001 must be from 0.1 to 1000000000"),
            ("STARTUP_TIMEOUT", "0.5", "JSWORKER_STARTUP_TIMEOUT=0.5 must be from 1 to 1000000000"),
            ("STATUS_INTERVAL", "0", "JSWORKER_STATUS_INTERVAL=0 must be from 0.1 to 1000000000"),
            ("ACK_WAIT", "0", "JSWORKER_ACK_WAIT=0 must be greater than 0 and at most 1000000000"),
            (
                "RETENTION",
                "inf",
                "JSWORKER_RETENTION='inf' must be greater than 0 and at most 1000000000",
            ),
            (
                "JOB_TIMEOUT",
                "-0.5",
                "JSWORKER_JOB_TIMEOUT=-0.5 must be greater than 0 and at most 1000000000",
            ),
            ("RECOVER_ON_START", "maybe", "JSWORKER_RECOVER_ON_START='maybe' must be true or false"),
            (
                "RECOVERY",
                "stale,evrything",
                (
                    "JSWORKER_RECOVERY='stale,evrything' must be on, off or a comma list of: "
                    "supervisor, start, crashed, stale"
                ),
            ),
            ("EVENT_LOOP", "trio", "JSWORKER_EVENT_LOOP='trio' must be auto, asyncio or uvloop"),
            ("LOG_FORMAT", "xml", "JSWORKER_LOG_FORMAT='xml' must be json or console"),
            (
                "LOG_LEVEL",
                "loud",
                "JSWORKER_LOG_LEVEL='loud' must be debug, info, warning, error or critical",
            ),
            ("POD_UID", "a b", "JSWORKER_POD_UID='a b' must be 1 to 200 visible ASCII characters"),
            *(
                ("SUBJECT_PREFIX", prefix, f"JSWORKER_SUBJECT_PREFIX={prefix!r} {PREFIX_RULE}")
                for prefix in ("jsworker.worker.x", "jsworker.awaited", "jsworker.ended")
            ),
        ],
    )
    def test_one_line_names_variable_value_and_rule(self, put: Set, name: str, value: str, line: str) -> None:
        put(**{name: value})
        assert faults() == [line]

    @pytest.mark.parametrize(
        "stream", ["", "my jobs", "a.b", "a*", "a>", "a/b", r"a\b", "a\n", "ä", "x" * 201]
    )
    def test_stream_names(self, put: Set, stream: str) -> None:
        put(STREAM=stream)
        (line,) = faults()
        assert line.startswith("JSWORKER_STREAM='")
        assert line.endswith(" must hold no spaces, dots, wildcards or slashes")
        assert "\n" not in line

    @pytest.mark.parametrize("stream", ["JOBS", "jobs-2_b", "a:b+c"])
    @pytest.mark.usefixtures("put")
    def test_good_stream_names(self, stream: str) -> None:
        assert load_settings(stream=stream).stream == stream

    @pytest.mark.parametrize("prefix", ["", ".a", "a.", "a..b", "A", "a b", "a.*", "a.>", "a\n", "x" * 201])
    def test_subject_prefixes(self, put: Set, prefix: str) -> None:
        put(SUBJECT_PREFIX=prefix)
        (line,) = faults()
        assert line.startswith("JSWORKER_SUBJECT_PREFIX='")
        assert line.endswith(" must be dot-separated words of a-z, 0-9, '_' and '-'")

    @pytest.mark.parametrize("prefix", ["jobs", "team-a.jobs_1.x", "jsworker", "jsworker.workers"])
    @pytest.mark.usefixtures("put")
    def test_good_subject_prefixes(self, prefix: str) -> None:
        assert load_settings(subject_prefix=prefix).subject_prefix == prefix

    @pytest.mark.parametrize("name", ["", "a b", "a..b", ".a", "a*", "a>", "a\n", "x" * 201])
    def test_host_names_become_subjects(self, put: Set, name: str) -> None:
        put(HOSTNAME=name)
        (line,) = faults()
        assert line.startswith("JSWORKER_HOSTNAME='")
        assert load_settings(hostname="pod-0.jobs.svc").hostname == "pod-0.jobs.svc"

    def test_the_database_url_is_required(self) -> None:
        line = "JSWORKER_DATABASE_URL must be set, for example to postgresql://user@host:5432/database"
        assert faults() == [line]
        assert faults(database_url="")[0].startswith("JSWORKER_DATABASE_URL")

    @pytest.mark.usefixtures("put")
    def test_an_option_is_named_by_its_variable(self) -> None:
        assert faults(concurrency="ten") == ["JSWORKER_CONCURRENCY='ten' must be a whole number"]
        assert faults(concurency=3) == [
            "JSWORKER_CONCURENCY is no setting: did you mean JSWORKER_CONCURRENCY?"
        ]

    def test_all_faults_are_told_at_once(self, put: Set, tmp_path: Path) -> None:
        put(CONCURRENCY="ten", STREAM="a b", STALE_THRESHOLD="x", ACK_WAIT="6", RETENTION="7")
        put(NATS_TOKEN_FILE=f"{tmp_path}/none", NATS_USER="u")
        assert faults(heartbeat_interval=2) == [
            f"JSWORKER_NATS_TOKEN_FILE='{tmp_path}/none' cannot be read: No such file or directory",
            "JSWORKER_STREAM='a b' must hold no spaces, dots, wildcards or slashes",
            "JSWORKER_CONCURRENCY='ten' must be a whole number",
            "JSWORKER_STALE_THRESHOLD='x' must be a number of seconds",
            "JSWORKER_NATS_USER must come with JSWORKER_NATS_PASSWORD",
            "JSWORKER_HEARTBEAT_INTERVAL=2 must exceed JSWORKER_STATEMENT_TIMEOUT=3",
            "JSWORKER_RETENTION=7 must exceed 2 × JSWORKER_ACK_WAIT=6",
        ]

    @pytest.mark.usefixtures("put")
    def test_the_model_itself_speaks_in_lines_too(self) -> None:
        with pytest.raises(SettingsError) as caught:
            Settings(concurrency=0, stream="a b")
        assert caught.value.lines == [
            "JSWORKER_STREAM='a b' must hold no spaces, dots, wildcards or slashes",
            "JSWORKER_CONCURRENCY=0 must be from 1 to 10000",
        ]

    @unhurried
    @given(st.sampled_from(sorted(set(Settings.model_fields) - {"database_url"})), st.text(max_size=30))
    def test_any_text_is_taken_or_refused_in_one_printable_line(self, name: str, text: str) -> None:
        lines = []
        try:
            load_settings(database_url=URL, **{name: text})
        except SettingsError as error:
            lines = error.lines
        for line in lines:
            assert line.isprintable()
            assert "JSWORKER_" in line


class TestFiles:
    @pytest.mark.parametrize("content", ["s3cret", "s3cret\n", "s3cret\r\n"])
    @pytest.mark.parametrize("name", ["DATABASE_PASSWORD", "NATS_TOKEN"])
    def test_a_secret_from_a_file_loses_the_newline_at_its_end(
        self, put: Set, tmp_path: Path, name: str, content: str
    ) -> None:
        (tmp_path / "secret").write_bytes(content.encode())
        put(**{f"{name}_FILE": f"{tmp_path}/secret"})
        assert getattr(load_settings(), name.lower()).get_secret_value() == "s3cret"

    def test_other_white_space_belongs_to_the_secret(self, put: Set, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text(" two\nlines \n\n")
        put(NATS_TOKEN_FILE=f"{tmp_path}/secret")
        assert load_settings().nats_token == SecretStr(" two\nlines \n")

    def test_what_came_from_a_file_is_read_again_and_nothing_else(self, put: Set, tmp_path: Path) -> None:
        for name in ("user", "token"):
            (tmp_path / name).write_text("old")
        put(NATS_USER_FILE=f"{tmp_path}/user", NATS_TOKEN_FILE=f"{tmp_path}/token")
        settings = Settings(nats_token="given", concurrency=7)
        for name in ("user", "token"):
            (tmp_path / name).write_text("new")
        again = settings.read_again(["nats_user", "nats_token"]).read_again(["nats_user"])
        assert dict(again) == dict(settings.model_copy(update={"nats_user": "new"}))
        assert settings.read_again(["nats_token"]) is settings
        given = settings.model_copy(update={"nats_user": "in a test"})
        assert given.read_again(["nats_user"]).nats_user == "in a test"
        (tmp_path / "user").unlink()
        with pytest.raises(SettingsError, match=r"JSWORKER_NATS_USER_FILE=.* cannot be read"):
            settings.read_again(["nats_user"])

    def test_urls_and_the_user_name_come_from_files(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        values = {
            "DATABASE_URL": URL,
            "NATS_URL": "nats://a:1,nats://b:2",
            "NATS_USER": "u",
            "NATS_PASSWORD": "p",
        }
        for name, value in values.items():
            (tmp_path / name).write_text(f"{value}\n")
            monkeypatch.setenv(f"JSWORKER_{name}_FILE", f"{tmp_path}/{name}")
        settings = load_settings()
        assert (settings.database_url, settings.nats_url) == (URL, "nats://a:1,nats://b:2")
        assert (settings.nats_user, settings.nats_password) == ("u", SecretStr("p"))

    def test_a_variable_and_its_file_exclude_each_other(self, put: Set, tmp_path: Path) -> None:
        (tmp_path / "url").write_text(URL)
        put(DATABASE_URL_FILE=f"{tmp_path}/url")
        assert faults() == [
            "JSWORKER_DATABASE_URL and JSWORKER_DATABASE_URL_FILE must not be set together: keep one"
        ]
        put(DATABASE_URL="")
        assert load_settings().database_url == URL

    def test_an_option_wins_over_variable_and_file(self, put: Set) -> None:
        put(NATS_TOKEN="from environment", NATS_TOKEN_FILE="/nowhere")
        assert load_settings(nats_token="given").nats_token == SecretStr("given")

    def test_what_cannot_be_read(self, put: Set, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        (tmp_path / "empty").write_text("\n")
        for path, rule in [
            ("none", "cannot be read: No such file or directory"),
            ("", "cannot be read: Is a directory"),
            ("binary", "must be a text file in UTF-8"),
            ("empty", "must not be an empty file"),
        ]:
            put(NATS_PASSWORD_FILE=f"{tmp_path}/{path}")
            (line,) = [line for line in faults() if "_FILE" in line]
            assert line == f"JSWORKER_NATS_PASSWORD_FILE='{tmp_path}/{path}' {rule}"

    @pytest.mark.parametrize(
        "name", ["NATS_CREDS_FILE", "NATS_NKEY_SEED_FILE", "NATS_TLS_CA", "NATS_TLS_CERT", "NATS_TLS_KEY"]
    )
    def test_paths_must_lead_to_readable_files(self, put: Set, tmp_path: Path, name: str) -> None:
        put(**{name: f"{tmp_path}/none"})
        assert faults() == [f"JSWORKER_{name}='{tmp_path}/none' cannot be read: No such file or directory"]
        put(**{name: str(tmp_path)})
        assert faults() == [f"JSWORKER_{name}='{tmp_path}' cannot be read: Is a directory"]

    def test_certificate_and_key_come_together(self, put: Set, tmp_path: Path) -> None:
        (tmp_path / "pem").write_text("x")
        put(NATS_TLS_KEY=f"{tmp_path}/pem")
        assert faults() == ["JSWORKER_NATS_TLS_KEY must come with JSWORKER_NATS_TLS_CERT"]
        put(NATS_TLS_CERT=f"{tmp_path}/none")  # the one line about the path is enough
        assert faults() == [
            f"JSWORKER_NATS_TLS_CERT='{tmp_path}/none' cannot be read: No such file or directory"
        ]

    def test_one_login_only(self, put: Set, tmp_path: Path) -> None:
        (tmp_path / "creds").write_text("x")
        put(NATS_CREDS_FILE=f"{tmp_path}/creds", NATS_TOKEN="t")
        line = "JSWORKER_NATS_TOKEN and JSWORKER_NATS_CREDS_FILE must not be set together: keep one login"
        assert faults() == [line]


class TestDatabaseUrl:
    @pytest.mark.parametrize(
        ("url", "password", "dsn"),
        [
            ("postgresql://u@h/d", None, "postgresql://u@h/d"),
            ("postgresql+psycopg://u:p@h:1/d", None, "postgresql://u:p@h:1/d"),
            ("postgres://h", None, "postgresql://h"),
            ("postgresql://u:p%40%2f@h/d", None, "postgresql://u:p%40%2F@h/d"),
            ("postgresql://u:50%@h/d", None, "postgresql://u:50%25@h/d"),
            ("postgresql://u@h/d", "a@b/c:d ü%", "postgresql://u:a%40b%2Fc%3Ad%20%C3%BC%25@h/d"),
            ("postgresql://[::1]:5432/d", "p", "postgresql://:p@[::1]:5432/d"),
            ("postgresql://u:@/d?host=/run/pg&x=1", "p", "postgresql://u:p@/d?host=/run/pg&x=1"),
            (" postgresql://u@h/d\t", None, "postgresql://u@h/d"),
        ],
    )
    def test_the_dsn_holds_the_password(self, url: str, password: str | None, dsn: str) -> None:
        assert load_settings(database_url=url, database_password=password).database_dsn() == dsn

    @unhurried
    @given(st.text(min_size=1))
    def test_any_password_arrives(self, password: str) -> None:
        password = password.encode(errors="replace").decode()
        settings = load_settings(database_url=URL, database_password=password)
        read = make_url(settings.database_dsn())
        assert (read.username, read.password, read.host, read.database) == ("jobs", password, "db", "jobs")

    @pytest.mark.parametrize("url", [f"u:{CANARY}@h/d", f"u@h/d?sslmode=require&password={CANARY}"])
    def test_two_passwords_are_one_too_many(self, url: str) -> None:
        both = "JSWORKER_DATABASE_PASSWORD and a password in JSWORKER_DATABASE_URL"
        lines = faults(database_url=f"postgresql://{url}", database_password="p")
        assert lines == [f"{both} must not be set together: keep one"]

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            (f"mysql://user:{CANARY}@host/db", "mysql://user:***@host/db"),
            (f"http://{CANARY}@host", "http://***@host"),
            (f"postgresql+asyncpg://user:{CANARY}@host/db", "postgresql+asyncpg://user:***@host/db"),
        ],
    )
    def test_other_databases_are_refused(self, url: str, shown: str) -> None:
        rule = "must begin with postgresql://, postgresql+psycopg:// or postgres://"
        assert faults(database_url=url) == [f"JSWORKER_DATABASE_URL='{shown}' {rule}"]

    def test_without_a_scheme_nothing_is_shown(self) -> None:
        rule = "must begin with postgresql://, postgresql+psycopg:// or postgres://"
        for url in (CANARY, f"user:{CANARY}@host/db", f"host=h password={CANARY}"):
            assert faults(database_url=url) == [f"JSWORKER_DATABASE_URL {rule}"]

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            (f"postgresql://u:{CANARY}@x@h/d", "postgresql://u:***@h/d"),
            (f"postgresql://u:1/{CANARY}@h/d", "postgresql://u:***@h/d"),
            (f"postgresql://u:1?{CANARY}@h/d", "postgresql://u:***@h/d"),
            (f"postgresql://u:#{CANARY}@h/d", "postgresql://u:***@h/d"),
            (f"postgresql://u:{CANARY}", "postgresql://u:***"),
            (f"postgresql://u {CANARY}@h", "postgresql://***@h"),
            (f"postgresql://h/d?password={CANARY}#x", "postgresql://h/d?password=***"),
            ("postgresql://a:1,b:2/d", "postgresql://a:***"),
            ("postgresql://h:123456/d", "postgresql://h:123456/d"),
        ],
    )
    def test_malformed_urls_are_refused_without_their_secret(self, url: str, shown: str) -> None:
        rule = "must read postgresql://user:password@host:port/database, special characters percent-encoded"
        assert faults(database_url=url) == [f"JSWORKER_DATABASE_URL='{shown}' {rule}"]


class TestNatsUrl:
    def test_a_list_of_servers(self) -> None:
        settings = load_settings(database_url=URL, nats_url="nats://a:4222, tls://u:p@b ,nats://[::1]:4222/")
        assert settings.nats_url == "nats://a:4222,tls://u:p@b,nats://[::1]:4222/"
        assert settings.redacted_nats_url() == "nats://a:4222,tls://u:***@b,nats://[::1]:4222/"

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("localhost:4222", "='localhost:4222'"),
            (f"nats://u:1,{CANARY}:4222,2@b", ""),
            (CANARY, ""),
            ("nats://a,", ""),
            (f"nats://u:1,{CANARY}@b", ""),
            ("http://a:4222", "='http://a:4222'"),
            ("nats://", "='nats://'"),
            (f"nats://a,http://u:{CANARY}@b", "='http://u:***@b'"),
            (f"nats://{CANARY}@a@b", "='nats://***@b'"),
        ],
    )
    def test_what_is_no_server_is_refused(self, url: str, shown: str) -> None:
        rule = "must read nats://host:port or tls://host:port, special characters percent-encoded"
        assert faults(database_url=URL, nats_url=url) == [f"JSWORKER_NATS_URL{shown} {rule}"]


class TestSecrets:
    def test_nothing_that_prints_settings_shows_a_secret(self, put: Set) -> None:
        put(DATABASE_URL=f"postgresql://u:{CANARY}@h/d", NATS_URL=f"nats://u:{CANARY}@n:4222")
        put(NATS_USER="u", NATS_PASSWORD=CANARY)
        settings = load_settings()
        texts = [repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()]
        texts += [settings.redacted_database_url(), settings.redacted_nats_url(), str(unknown_variables())]
        assert [text for text in texts if CANARY in text] == []
        assert settings.redacted_database_url() == "postgresql://u:***@h/d"
        settings = load_settings(database_url=URL, database_password=CANARY)
        assert settings.redacted_database_url() == "postgresql://jobs:***@db:5432/jobs"
        assert CANARY not in repr(settings) + str(settings.model_dump()) + settings.model_dump_json()

    @pytest.mark.parametrize("make", [load_settings, Settings])
    @pytest.mark.parametrize("scheme", ["mysql", "postgresql"])
    def test_no_traceback_shows_one_even_with_local_variables(
        self, put: Set, make: Callable[..., Settings], scheme: str
    ) -> None:
        put(DATABASE_URL=f"{scheme}://u:{CANARY}@h/d", NATS_URL=f"nats://{CANARY}@h", NATS_PASSWORD=CANARY)
        put(CONCURRENCY="ten")
        with pytest.raises(SettingsError) as caught:
            make(nats_token=CANARY, database_password=CANARY)
        shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        text = "".join(shown.format(chain=True))
        assert "JSWORKER_CONCURRENCY='ten'" in text
        assert "lines = " in text or "faults = " in text  # local variables are there
        assert CANARY not in text
        assert caught.value.__context__ is None

    @pytest.mark.usefixtures("put")
    def test_a_secret_of_the_wrong_type_is_not_shown(self) -> None:
        assert faults(nats_token=[CANARY]) == ["JSWORKER_NATS_TOKEN must be text"]

    @unhurried
    @given(st.text(min_size=4, max_size=20), st.sampled_from(["", "/", "?", "#", "@", ":", "&", "?token="]))
    def test_redaction_hides_any_password(self, password: str, special: str) -> None:
        password = f"{password[:2]}{special}zq{password[2:]}"
        shown = redact_url(f"postgresql://user:{password}@host:5432/db")
        assert shown == "postgresql://user:***@host:5432/db"

    def test_redaction_keeps_what_is_no_secret(self) -> None:
        for url in ("nats://h:4222", "postgresql://u@h:1/d?host=/x", "tls://[::1]:4222"):
            assert redact_url(url) == url
        assert redact_url("nats://token@h") == "nats://***@h"
        assert redact_url(CANARY) == "***"
        assert (
            redact_url("postgresql://h/d?a=1&sslPassword=x&b=2") == "postgresql://h/d?a=1&sslPassword=***&b=2"
        )


class TestUnknownVariables:
    def test_typing_errors_get_advice(self, put: Set) -> None:
        put(
            HEARTBEAT="5", CONCURENCY="3", DATABASE_PASWORD_FILE="/x", STREAM_FILE="/x", HEARTBEAT_TIMEOUT="9"
        )
        put(ZZZZZZ="")
        assert unknown_variables() == [
            "JSWORKER_CONCURENCY is no setting: did you mean JSWORKER_CONCURRENCY?",
            "JSWORKER_DATABASE_PASWORD_FILE is no setting: did you mean JSWORKER_DATABASE_PASSWORD_FILE?",
            "JSWORKER_HEARTBEAT is no setting: did you mean JSWORKER_HEARTBEAT_INTERVAL?",
            "JSWORKER_HEARTBEAT_TIMEOUT is no setting: did you mean JSWORKER_WATCHDOG_TIMEOUT?",
            "JSWORKER_STREAM_FILE is no setting: did you mean JSWORKER_STREAM?",
            "JSWORKER_ZZZZZZ is no setting",
        ]
        load_settings()  # warnings, not errors

    def test_they_are_told_with_the_faults(self, put: Set, monkeypatch: pytest.MonkeyPatch) -> None:
        put(DATABSE_URL=URL, CONCURENCY="3")
        monkeypatch.delenv("JSWORKER_DATABASE_URL")
        assert faults() == [
            "JSWORKER_DATABASE_URL must be set, for example to postgresql://user@host:5432/database",
            "JSWORKER_CONCURENCY is no setting: did you mean JSWORKER_CONCURRENCY?",
            "JSWORKER_DATABSE_URL is no setting: did you mean JSWORKER_DATABASE_URL?",
        ]

    def test_known_variables_their_files_and_kubernetes_are_left_alone(self, put: Set) -> None:
        put(CONCURRENCY="3", DATABASE_URL_FILE="/x", NATS_CREDS_FILE="/x", NATS_USER_FILE="/x")
        put(SERVICE_HOST="10.0.0.1", SERVICE_PORT="80", SERVICE_PORT_HTTP="80", PORT="tcp://10.0.0.1:80")
        put(HTTP_SERVICE_HOST="10.0.0.1", HTTP_SERVICE_PORT="80", HTTP_PORT_80_TCP_ADDR="10.0.0.1")
        put(PORT_80_TCP="tcp://10.0.0.1:80", TEST_DATABASE_URL=URL, TEST_NATS_URL="nats://h")
        assert unknown_variables() == []


SHUTDOWN = "JSWORKER_SHUTDOWN_TIMEOUT=25 + 2 × JSWORKER_STATEMENT_TIMEOUT=3"
TIMING = [
    # broken by one, kept at the edge, the line
    (
        {"heartbeat_interval": 100.5, "crash_threshold": None},
        {"heartbeat_interval": 100},
        "JSWORKER_STALE_THRESHOLD=300 must be at least 3 × JSWORKER_HEARTBEAT_INTERVAL=100.5",
    ),
    (
        {"crash_threshold": 14},
        {"crash_threshold": 15},
        "JSWORKER_CRASH_THRESHOLD=14 must be at least 3 × JSWORKER_HEARTBEAT_INTERVAL=5",
    ),
    (
        {"crash_threshold": 300},
        {"crash_threshold": 299},
        "JSWORKER_STALE_THRESHOLD=300 must exceed JSWORKER_CRASH_THRESHOLD=300",
    ),
    (
        {"statement_timeout": 5},
        {"statement_timeout": 4.9},
        "JSWORKER_HEARTBEAT_INTERVAL=5 must exceed JSWORKER_STATEMENT_TIMEOUT=5",
    ),
    (
        {"ack_wait": 200},
        {"ack_wait": 310.01},
        "JSWORKER_ACK_WAIT=200 must exceed JSWORKER_STALE_THRESHOLD=300 + 2 × JSWORKER_SCAN_INTERVAL=5",
    ),
    (
        {"ack_wait": 310},
        {"ack_wait": 311},
        "JSWORKER_ACK_WAIT=310 must exceed JSWORKER_STALE_THRESHOLD=300 + 2 × JSWORKER_SCAN_INTERVAL=5",
    ),
    (
        {"watchdog_timeout": 300},
        {"watchdog_timeout": 299.5},
        "JSWORKER_STALE_THRESHOLD=300 must exceed JSWORKER_WATCHDOG_TIMEOUT=300",
    ),
    (
        {"scan_interval": 150.5, "ack_wait": 700},
        {"scan_interval": 150, "ack_wait": 700},
        "JSWORKER_STALE_THRESHOLD=300 must be at least 2 × JSWORKER_SCAN_INTERVAL=150.5",
    ),
    (
        {"grace_period": 31},
        {"grace_period": 31.5},
        f"JSWORKER_GRACE_PERIOD=31 must exceed {SHUTDOWN}",
    ),
    (
        {"retention": 1200},
        {"retention": 1200.5},
        "JSWORKER_RETENTION=1200 must exceed 2 × JSWORKER_ACK_WAIT=600",
    ),
]


class TestTiming:
    @pytest.mark.parametrize(("broken", "kept", "line"), TIMING)
    def test_each_rule_with_its_numbers(
        self, broken: dict[str, Any], kept: dict[str, Any], line: str
    ) -> None:
        assert faults(database_url=URL, **broken) == [line]
        # Rules that are not shown here must not speak at the edge of this one.
        others = {"crash_threshold": None} if "heartbeat_interval" in kept else {}
        load_settings(database_url=URL, **kept, **others)

    def test_decimals_are_compared_as_written(self) -> None:
        settings = load_settings(
            database_url=URL,
            heartbeat_interval=0.1,
            statement_timeout=0.05,
            crash_threshold=0.3,  # as floats 3 × 0.1 exceeds 0.3
            stale_threshold=0.7,
            watchdog_timeout=0.6,
            scan_interval=0.1,
            ack_wait=1,
        )
        check_timing(settings, {"quick": 0.61})

    def test_a_kind_is_named_with_its_own_threshold(self) -> None:
        settings = load_settings(database_url=URL)
        with pytest.raises(SettingsError) as caught:
            check_timing(settings, {"analyze-repo": 900, "fine": 400, "never": None, "short": 8})
        kind = "stale_threshold=900 of kind analyze-repo"
        assert caught.value.lines == [
            f"JSWORKER_ACK_WAIT=600 must exceed {kind} + 2 × JSWORKER_SCAN_INTERVAL=5",
            "stale_threshold=8 of kind short must be at least 3 × JSWORKER_HEARTBEAT_INTERVAL=5",
            "stale_threshold=8 of kind short must exceed JSWORKER_CRASH_THRESHOLD=15",
            "stale_threshold=8 of kind short must exceed JSWORKER_WATCHDOG_TIMEOUT=120",
            "stale_threshold=8 of kind short must be at least 2 × JSWORKER_SCAN_INTERVAL=5",
        ]

    def test_the_settings_own_rules_hold_even_when_no_kind_uses_them(self) -> None:
        settings = Settings(database_url=URL, ack_wait=200)
        for thresholds in ({}, {"as-the-settings": 300.0}, {"never": None}):
            with pytest.raises(SettingsError) as caught:
                check_timing(settings, thresholds)
            (line,) = caught.value.lines
            assert line.startswith("JSWORKER_ACK_WAIT=200 must exceed JSWORKER_STALE_THRESHOLD=300")

    @pytest.mark.parametrize("threshold", [0, -1, float("nan"), float("inf"), True, "300"])
    def test_a_kinds_threshold_must_be_a_duration(self, threshold: Any) -> None:
        with pytest.raises(SettingsError) as caught:
            check_timing(load_settings(database_url=URL), {"clone": threshold})
        (line,) = caught.value.lines
        assert line.startswith("stale_threshold=")
        assert line.endswith(
            " of kind clone must be a number of seconds greater than 0 and at most 1000000000"
        )

    @unhurried
    @given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 2000))
    def test_ack_wait_exceeds_the_latest_recovery(self, stale: int, scan: int, ack: int) -> None:
        lines = lines_of(stale_threshold=stale, scan_interval=scan, ack_wait=ack)
        assert any(line.startswith("JSWORKER_ACK_WAIT=") for line in lines) == (ack <= stale + 2 * scan)


def lines_of(**overrides: Any) -> list[str]:
    try:
        load_settings(database_url=URL, **overrides)
    except SettingsError as error:
        return error.lines
    return []


class TestCores:
    """The default of JSWORKER_ISOLATED_PROCESSES."""

    @pytest.mark.parametrize(
        ("groups", "files", "cores"),
        [
            ("0::/", {"cpu.max": "250000 100000"}, 3),
            ("0::/", {"cpu.max": "10000 100000"}, 1),
            ("0::/", {"cpu.max": "max 100000"}, 8),
            ("0::/", {"cpu.max": "1600000 100000"}, 8),
            ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
            ("0::/of/the/host", {"cpu.max": "200000 100000"}, 2),
            (
                "3:cpu,cpuacct:/a\n0::/",
                {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "50000"},
                3,
            ),
            ("3:cpu:/of/the/host", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "50000"}, 1),
            ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
            ("3:memory:/", {"memory/cpu.max": "100000 100000"}, 8),
            ("0::/", {"cpu.max": "much"}, 8),
            ("what is this", {}, 8),
            (None, {}, 8),
        ],
    )
    def test_as_many_as_affinity_and_the_control_groups_leave(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        groups: str | None,
        files: dict[str, str],
        cores: int,
    ) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
        if groups is not None:
            (tmp_path / "proc/self").mkdir(parents=True)
            (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
        for name, text in files.items():
            file = tmp_path / MOUNT / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        assert usable_cores(tmp_path) == cores

    def test_elsewhere_they_are_those_of_the_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr("os.sched_getaffinity", raising=False)
        monkeypatch.setattr("os.cpu_count", lambda: 12)
        assert usable_cores(tmp_path) == 12

    def test_they_are_the_default(self) -> None:
        assert Settings(database_url=URL).isolated_processes == usable_cores()
