"""``dashboard``: where it listens, whom it lets in, and how it ends."""

import io
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.ownership.rows import Sql
from tests.support.listening import has_ipv6
from tests.support.servers import as_role

from .commands import DEADLINE, Cli, Process, Spawn, Terminal, listens, wait_until


def address_of(process: Process) -> str:
    return process.read_errors_until("dashboard: ").removeprefix("dashboard: ").strip()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "jobs.example"])  # noqa: S104 -- refused
def test_without_a_login_it_listens_on_this_machine_alone(cli: Cli, host: str) -> None:
    line = cli("dashboard", "--host", host).refused(2)
    assert line.startswith(f"--host {host}: without a login the dashboard listens on this machine alone")


def test_it_serves_until_it_is_told_to_end(spawn: Spawn, here: Path) -> None:
    process = spawn("dashboard", "cli_jobs:Double", "--port", "0", JSWORKER_GRACE_PERIOD="65")
    address = address_of(process)
    page = httpx.get(address, timeout=DEADLINE)
    assert (page.status_code, "Overview" in page.text) == (200, True)
    assert (
        'name="payload.n"' in httpx.get(f"{address}enqueue", params={"kind": "double"}, timeout=DEADLINE).text
    )
    rebound = httpx.get(address, headers={"host": "evil.example"}, timeout=DEADLINE)
    assert rebound.status_code == 403
    # The doctor judges the settings of workers, though the dashboard waits longer for a statement.
    examined = httpx.get(f"{address}doctor", params={"examine": "yes"}, timeout=DEADLINE).text
    assert "shutting down takes 31 s at most, the pod gets 65 s" in examined
    # An open page does not keep it.
    asks_for_events = {"accept": "text/event-stream"}
    with httpx.stream("GET", address, headers=asks_for_events, timeout=DEADLINE) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 1000"
        process.signal(signal.SIGTERM)
        for _ in lines:  # to the end of the response: it is not cut off
            pass
        ended = process.wait()
    assert (ended.code, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_action_is_finished_before_it_ends(
    spawn: Spawn, sql: Sql, cli_environment: Mapping[str, str], *, is_interrupted: bool
) -> None:
    process = spawn("dashboard", "--port", "0")
    address = address_of(process)
    port = httpx.URL(address).port
    assert port is not None

    with httpx.Client(base_url=address, timeout=DEADLINE) as browser, ThreadPoolExecutor() as threads:
        token = re.search(r'name="csrf" value="([^"]+)"', browser.get("/kinds/pause?kind=double").text)
        assert token is not None
        form = {"kind": "double", "csrf": token[1], "confirmed": "yes"}
        with psycopg.connect(cli_environment["JSWORKER_DATABASE_URL"]) as other:
            other.execute("LOCK TABLE jsworker.audit IN SHARE MODE")
            headers = {"origin": address.rstrip("/")}
            answer = threads.submit(lambda: browser.post("/kinds/pause", data=form, headers=headers))
            waiting = "SELECT FROM pg_locks WHERE relation = 'jsworker.audit'::regclass AND NOT granted"
            wait_until(lambda: sql.execute(waiting).fetchall(), "the action waits")
            process.signal(signal.SIGTERM)
            wait_until(lambda: not listens(port), "the dashboard ends")
            if is_interrupted:
                process.signal(signal.SIGTERM)
                process.popen.wait(DEADLINE)
            else:
                with pytest.raises(subprocess.TimeoutExpired):  # longer than open pages are waited for
                    process.popen.wait(3.0)
        found, ended = answer.result(), process.wait()
    assert (ended.code, ended.out) == (0, "")
    paused = len(sql.execute("SELECT FROM jsworker.limits WHERE paused_at IS NOT NULL").fetchall())
    if is_interrupted:
        assert (found.status_code, paused) == (503, 0)
        assert "It may have been done, or not" in found.text
        assert ended.err == "action pause-kind of 'unnamed' was interrupted\n"
    else:
        assert (found.status_code, paused, ended.err) == (303, 1, "")


def test_a_port_that_is_taken_is_named(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = cli("dashboard", "--port", port).refused(1)
    assert line == f"the dashboard cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--logins", "nowhere"], "logins nowhere: No such file"),
        (["--proxy-secret", "nowhere", "--proxy-group", "ops=all"], "--proxy-secret nowhere: No such file"),
        (["--logins", "a", "--proxy-secret", "b"], "--logins and --proxy-secret: one of them"),
        (
            ["--logins", "garbled"],
            "garbled, line 1: must be as `jsworker dashboard --new-login NAME` prints it",
        ),
        (["--rights", "all"], "--rights needs --new-login"),
        (["--new-login", "ann", "--rights", "write"], "rights 'write' must be of these"),
        (
            ["--proxy-secret", "latin", "--proxy-everybody", "read"],
            "--proxy-secret latin: must be UTF-8 text",
        ),
        (["--proxy-secret", "secret"], "--proxy-secret lets no one in without"),
        (["--proxy-secret", "secret", "--proxy-group", "ops"], "--proxy-group ops: must be GROUP=RIGHTS"),
        (["--trace-url", "https://traces.example/"], "trace_url 'https://traces.example/': must hold"),
        (["--allow-host", "jobs.example:80"], "host name 'jobs.example:80': must be a name or an address"),
        (["--proxy-group", "ops=all"], "--proxy-group and --proxy-everybody need --proxy-secret"),
        (["--proxy-secret", "secret", "--proxy-group", "ops=write"], "rights 'write' must be of these"),
        (
            ["--proxy-secret", "short", "--proxy-everybody", "read"],
            "the secret of the proxy must have at least 16 characters",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused_in_one_line(
    cli: Cli, here: Path, arguments: list[str], says: str
) -> None:
    (here / "secret").write_text("a secret of the proxy\n")
    (here / "short").write_text("short\n")
    (here / "latin").write_bytes(b"a secret of the pr\xf6xy\n")
    (here / "garbled").write_text("ann:scrypt$AAAAA$AAAA:all\n")
    assert says in cli("dashboard", *arguments).refused(2)


def test_a_read_role_that_cannot_be_used_is_named_before_it_serves(
    cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch, cli_environment: Mapping[str, str]
) -> None:
    line = cli("dashboard", "--read-role", "No such", "--port", "0").refused(2)
    assert line.startswith("--read-role 'No such': ")
    assert 'role "No such" does not exist' in line
    plain, other = (f"{each}_{secrets.token_hex(4)}" for each in ("plain", "other"))
    for statement in (
        *(f"CREATE ROLE {role} LOGIN" for role in (plain, other)),
        f"GRANT USAGE ON SCHEMA jsworker TO {plain}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA jsworker TO {plain}",
    ):
        sql.execute(statement.encode())
    monkeypatch.setenv("JSWORKER_DATABASE_URL", as_role(cli_environment["JSWORKER_DATABASE_URL"], plain))
    line = cli("dashboard", "--read-role", other, "--port", "0").refused(2)
    assert line.startswith(f"--read-role '{other}': ")
    assert f'permission denied to set role "{other}"' in line


def test_a_login_is_made_of_a_password_from_stdin_and_asked_for_on_every_address(
    cli: Cli, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("right\n"))
    made = cli("dashboard", "--new-login", "ann", "--rights", "retry,payloads")
    assert (made.code, made.errors) == (0, ["the password of 'ann' is read from stdin, one line"])
    (tmp_path / "logins").write_text(made.out)
    every = "::" if has_ipv6() else "0.0.0.0"  # noqa: S104 -- with logins
    process = spawn("dashboard", "--host", every, "--port", "0", "--logins", "logins")
    address = address_of(process)
    for each in (address, address.replace("127.0.0.1", "[::1]" if has_ipv6() else "127.0.0.1")):
        assert httpx.get(each, timeout=DEADLINE).status_code == 401
    assert httpx.get(address, auth=("ann", "wrong"), timeout=DEADLINE).status_code == 401
    assert httpx.get(address, auth=("ann", "right"), timeout=DEADLINE).status_code == 200
    (tmp_path / "logins").write_text("# nobody\nann\n")
    assert httpx.get(address, auth=("ann", "right"), timeout=DEADLINE).status_code == 200
    assert process.read_errors_until("line 2: must be as").startswith("logins logins, line 2: ")


def test_a_file_of_logins_that_cannot_be_read_is_one_line(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "logins").write_text("# nobody\n")
    process = spawn("dashboard", "--port", "0", "--logins", "logins")
    address = address_of(process)
    (tmp_path / "logins").unlink()
    for _ in range(3):
        refused = httpx.get(address, auth=("ann", "right"), timeout=DEADLINE)
        assert (refused.status_code, refused.text.partition(";")[0]) == (503, "the logins cannot be read now")
    (tmp_path / "logins").write_text("# nobody\n")
    assert httpx.get(address, auth=("ann", "right"), timeout=DEADLINE).status_code == 401
    process.signal(signal.SIGTERM)
    assert process.wait().err == "logins logins: No such file or directory; all logins are refused\n"


BROKEN = """
from typing import Any

from pydantic import BaseModel

from jsworker import Job, JobProcessor


class Order(BaseModel):
    n: int

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        raise RuntimeError("no schema today")


class Broken(JobProcessor[Order]):
    async def process(self, job: Job[Order]) -> None: ...
"""


def test_what_a_page_failed_with_is_on_stderr(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    process = spawn("dashboard", "broken:Broken", "--port", "0")
    failed = httpx.get(f"{address_of(process)}enqueue", params={"kind": "broken"}, timeout=DEADLINE)
    assert (failed.status_code, failed.text) == (500, "the dashboard failed; its log tells why\n")
    assert process.read_errors_until("RuntimeError: ").endswith("no schema today\n")


def test_a_host_that_does_not_exist_is_named(cli: Cli, here: Path) -> None:
    (here / "logins").write_text("# nobody\n")
    line = cli("dashboard", "--host", "nosuchhost.invalid", "--logins", "logins").refused(1)
    assert line.startswith("the dashboard cannot listen on nosuchhost.invalid: ")
    assert "Unknown error" not in line


def test_without_a_password_on_stdin_no_login_is_made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ended = cli("dashboard", "--new-login", "ann")
    assert (ended.code, ended.errors[1:]) == (2, ["--new-login ann: no password was given"])


@pytest.mark.parametrize(
    ("again", "code", "says"),
    [("right", 0, r"ann:scrypt\$.*:read\n"), ("wrong", 2, "--new-login ann: the two passwords differ\n")],
)
def test_a_password_is_asked_for_twice_on_a_terminal(
    tmp_path: Path, again: str, code: int, says: str
) -> None:
    asking = Terminal("dashboard", "--new-login", "ann", cwd=tmp_path, environment=os.environ)
    asking.read_until("Password of 'ann': ")
    asking.type("right\n")
    asking.read_until("Once more: ")
    asking.type(f"{again}\n")
    assert "right" not in asking.read_until(says)
    assert asking.wait() == code
