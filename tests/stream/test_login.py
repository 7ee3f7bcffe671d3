"""Connecting: every way to enter, and one clear line for every way to fail."""

import asyncio
import socket
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
from tenacity import stop_after_attempt

from jsworker.core.errors import SettingsError, StreamRefused, StreamUnavailable
from jsworker.core.settings import Settings
from jsworker.embedded.resources import free_port
from jsworker.stream.connection import Connection as NatsConnection
from jsworker.stream.diagnostics import Inspector
from jsworker.stream.login import while_unavailable
from tests.stream.certificates import Authority, Pair
from tests.stream.conftest import StartServer
from tests.stream.nats_server import HOST
from tests.stream.operator_mode import operator_mode, user_identity
from tests.stream.streams import TestStream, settings_for
from tests.support.polling import eventually


async def enter(url: str, timeout: float = 5.0, **changes: Any) -> None:  # noqa: ASYNC109 -- passed on
    """Connect, use JetStream, and close."""
    stream = TestStream(settings_for(url, **changes), installation_id=None)
    try:
        await stream.connect(timeout)
        await stream.ensure(["resize"], {})
        assert stream.connected
    finally:
        await stream.close()
    assert not stream.connected


def at(port: int, login: str = "", scheme: str = "nats") -> str:
    return f"{scheme}://{login}{'@' if login else ''}{HOST}:{port}"


async def test_user_and_password(start_server: StartServer) -> None:
    server = await start_server('authorization { user: "resizer", password: "p@ss/word" }')
    await enter(server.url, nats_user="resizer", nats_password="p@ss/word")


async def test_user_info_of_a_url_is_percent_decoded(start_server: StartServer) -> None:
    server = await start_server('authorization { user: "re:sizer", password: "p@ss/word" }')
    await enter(at(server.port, "re%3Asizer:p%40ss%2Fword"))


async def test_a_url_with_one_word_holds_a_token(start_server: StartServer) -> None:
    server = await start_server('authorization { token: "t@ken" }')
    await enter(at(server.port, "t%40ken"))
    await enter(server.url, nats_token="t@ken")


async def test_settings_win_over_the_url(start_server: StartServer) -> None:
    server = await start_server('authorization { user: "resizer", password: "right" }')
    await enter(at(server.port, "resizer:wrong"), nats_user="resizer", nats_password="right")


async def test_nkey(start_server: StartServer, tmp_path: Path) -> None:
    user = user_identity()
    server = await start_server(f"authorization {{ users: [ {{ nkey: {user.public} }} ] }}")
    seed = tmp_path / "user.nk"
    seed.write_bytes(user.seed + b"\n")
    await enter(server.url, nats_nkey_seed_file=seed)


async def test_credentials_file_in_operator_mode(start_server: StartServer, tmp_path: Path) -> None:
    configuration, credentials = operator_mode()
    server = await start_server(configuration)
    path = tmp_path / "user.creds"
    path.write_text(credentials)
    await enter(server.url, nats_creds_file=path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls(pair: Pair, *, clients: Authority | None = None) -> str:
    verify = f'ca_file: "{clients.certificate}", verify: true' if clients else ""
    return f'tls {{ cert_file: "{pair.certificate}", key_file: "{pair.key}", {verify} }}'


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_tls(start_server: StartServer, authority: Authority, scheme: str) -> None:
    server = await start_server(tls(authority.issue("server")))
    await enter(at(server.port, scheme=scheme), nats_tls_ca=authority.certificate)


async def test_tls_that_the_server_only_offers_is_taken(
    start_server: StartServer, authority: Authority
) -> None:
    server = await start_server(f"{tls(authority.issue('server'))}\nallow_non_tls: true")
    stream = TestStream(
        settings_for(at(server.port, scheme="tls"), nats_tls_ca=authority.certificate), installation_id=None
    )
    await stream.connect()
    transport = stream.connection.client._transport
    assert transport is not None
    assert transport._io_writer.get_extra_info("cipher")  # type: ignore[attr-defined] # nats-py does not tell
    await stream.close()


async def test_a_diagnosis_shows_whether_the_connection_uses_tls(
    start_server: StartServer, authority: Authority
) -> None:
    plain = Inspector(settings_for((await start_server()).url))
    server = await start_server(f"{tls(authority.issue('server'))}\nallow_non_tls: true")
    settings = settings_for(at(server.port, scheme="tls"), nats_tls_ca=authority.certificate)
    for inspector, encrypted in ((plain, False), (Inspector(settings), True)):
        await inspector.connect(5.0)
        found = await inspector.server()
        assert (found.encrypted, found.local) == (encrypted, True)
        assert found.name
        await inspector.close()


async def test_client_certificate(start_server: StartServer, authority: Authority) -> None:
    server = await start_server(tls(authority.issue("server"), clients=authority))
    own = authority.issue("client")
    await enter(
        at(server.port, scheme="tls"),
        nats_tls_ca=authority.certificate,
        nats_tls_cert=own.certificate,
        nats_tls_key=own.key,
    )


@pytest.fixture
def _three_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a server three times, however long that takes: in a short time a busy machine may not answer."""
    attempts = while_unavailable(60.0).copy(stop=stop_after_attempt(3))
    monkeypatch.setattr("jsworker.stream.connection.while_unavailable", lambda _: attempts)


async def refusal(url: str, expected: type[Exception], timeout: float = 5.0, **changes: Any) -> str:  # noqa: ASYNC109
    started = asyncio.get_running_loop().time()
    with pytest.raises(expected) as caught:
        await enter(url, timeout, **changes)
    # What no later try can mend is refused at once.
    longest = timeout + 15 if expected is StreamUnavailable else 30.0
    assert asyncio.get_running_loop().time() - started < longest
    line = str(caught.value)
    assert "\n" not in line
    return line


async def test_a_wrong_password_is_refused_at_once(start_server: StartServer) -> None:
    server = await start_server('authorization { user: "resizer", password: "right" }')
    line = await refusal(at(server.port, "resizer:hunter2"), StreamRefused, timeout=60.0)
    assert line == f"NATS at {HOST}:{server.port} refused the login: authorization violation"


async def test_no_login_where_one_is_needed(start_server: StartServer) -> None:
    server = await start_server('authorization { token: "t" }')
    line = await refusal(server.url, StreamRefused, timeout=60.0)
    assert "refused the login" in line


async def test_a_certificate_of_a_stranger_is_refused_at_once(
    start_server: StartServer, authority: Authority, tmp_path: Path
) -> None:
    server = await start_server(tls(Authority(tmp_path, "stranger").issue("server")))
    line = await refusal(at(server.port), StreamRefused, timeout=60.0, nats_tls_ca=authority.certificate)
    assert line.startswith(f"NATS at {HOST}:{server.port}: its TLS certificate cannot be verified, ")
    assert "JSWORKER_NATS_TLS_CA" in line


async def test_a_missing_client_certificate_is_refused_at_once(
    start_server: StartServer, authority: Authority
) -> None:
    server = await start_server(tls(authority.issue("server"), clients=authority))
    line = await refusal(at(server.port), StreamRefused, timeout=60.0, nats_tls_ca=authority.certificate)
    assert "wants a client certificate" in line


async def test_a_login_is_never_sent_in_clear_text_when_tls_was_asked_for(authority: Authority) -> None:
    heard = bytearray()

    async def plain_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
        writer.close()

    server = await asyncio.start_server(plain_server, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    for url, changes in [
        (at(port, "resizer:hunter2", scheme="tls"), {}),
        (at(port, "resizer:hunter2"), {"nats_tls_ca": authority.certificate}),
    ]:
        line = await refusal(url, StreamRefused, timeout=60.0, **changes)
        assert "offers no TLS" in line
    assert not heard
    await asyncio.sleep(0.01)  # for its side of the connections to end
    server.close()
    await server.wait_closed()


async def test_nobody_listens() -> None:
    port = free_port()
    line = await refusal(at(port), StreamUnavailable, timeout=2.0)
    assert line == f"NATS at {HOST}:{port} refused the connection: no server listens there"


async def test_a_silent_server_is_given_up_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jsworker.stream.connection._CONNECT_SECONDS", 60.0)  # of a single attempt
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen(16)
        port = silent.getsockname()[1]
        line = await refusal(at(port), StreamUnavailable, timeout=0.5)
        assert line.startswith(f"NATS at {HOST}:{port} did not answer")


async def test_a_last_attempt_that_is_cut_short_does_not_hide_why_the_one_before_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine that stands still meanwhile."""
    attempt, is_first = NatsConnection._attempt, True

    async def attempt_once(*given: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return await attempt(*given)
        return None

    monkeypatch.setattr(NatsConnection, "_attempt", attempt_once)
    port = free_port()
    line = await refusal(at(port), StreamUnavailable, timeout=2.0)
    assert line == f"NATS at {HOST}:{port} refused the connection: no server listens there"


@pytest.mark.usefixtures("_three_attempts")
async def test_an_unknown_host() -> None:
    line = await refusal("nats://nowhere.invalid:4222", StreamUnavailable, timeout=60.0)
    assert line.startswith("NATS at nowhere.invalid:4222 cannot be found")


async def test_a_server_that_comes_up_late_is_found(start_server: StartServer) -> None:
    port = free_port()
    entering = asyncio.create_task(enter(at(port), 10.0))
    await asyncio.sleep(0)
    await start_server(port=port)
    await entering


async def test_a_dead_server_of_several_does_no_harm(start_server: StartServer) -> None:
    server = await start_server()
    await enter(f"{at(free_port())},{server.url}")


async def test_silent_servers_do_not_use_up_the_time(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nats.aio.client.shuffle", lambda _: None)  # the good server comes last
    server = await start_server()
    async with AsyncExitStack() as silent:
        ports = []
        for _ in range(5):
            listening = silent.enter_context(socket.socket())
            listening.bind((HOST, 0))
            listening.listen(16)
            ports.append(listening.getsockname()[1])
        await enter(",".join([*map(at, ports), server.url]), 9.0)


@pytest.mark.usefixtures("_three_attempts")
async def test_a_server_that_hangs_up_during_the_login() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(hang_up, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    line = await refusal(at(port), StreamUnavailable, timeout=60.0)
    assert line == f"NATS at {HOST}:{port} closed the connection during the login"
    await asyncio.sleep(0.01)  # as above
    server.close()
    await server.wait_closed()


@pytest.mark.usefixtures("_three_attempts")
@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_full_server_is_named_every_time_and_asked_again(
    start_server: StartServer, authority: Authority, *, is_secure: bool
) -> None:
    """It closes the connection before it has read anything."""
    secure = tls(authority.issue("server")) if is_secure else ""
    server = await start_server(f"{secure}\nmax_connections: 1")
    changes: dict[str, Any] = {"nats_tls_ca": authority.certificate} if is_secure else {}
    only = TestStream(settings_for(server.url, **changes), installation_id=None)
    await only.connect(30.0)  # until the server has forgotten who asked whether it listens
    reason = "cannot be used: maximum connections exceeded"
    if is_secure:
        reason = "closed the connection at once, as it does when its max_connections is reached"
    for _ in range(8):
        line = await refusal(server.url, StreamUnavailable, timeout=60.0, **changes)
        assert line == f"NATS at {HOST}:{server.port} {reason}"
    await only.close()


@pytest.mark.usefixtures("_three_attempts")
async def test_a_server_that_resets_the_connection_may_be_full_too() -> None:
    """As with TLS, if the client's first words come after the server has closed."""

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.close()

    server = await asyncio.start_server(reset, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    line = await refusal(at(port), StreamUnavailable, timeout=60.0)
    reason = "closed the connection at once, as it does when its max_connections is reached"
    assert line == f"NATS at {HOST}:{port} {reason}"
    await asyncio.sleep(0.01)  # for its side of the connections to end
    server.close()
    await server.wait_closed()


@pytest.mark.usefixtures("_three_attempts")
async def test_a_server_that_waits_for_the_tls_handshake_is_told_from_a_silent_one(
    start_server: StartServer, authority: Authority
) -> None:
    pair = authority.issue("server")
    files = f'cert_file: "{pair.certificate}", key_file: "{pair.key}"'
    server = await start_server(f"tls {{ {files}, handshake_first: true, timeout: 0.5 }}")
    line = await refusal(server.url, StreamUnavailable, timeout=60.0, nats_tls_ca=authority.certificate)
    assert line.startswith(f"NATS at {HOST}:{server.port} sent no INFO")
    assert "handshake_first" in line


@pytest.mark.usefixtures("_three_attempts")
async def test_a_login_that_comes_too_late_is_sent_again() -> None:
    """As from a machine that stands still: no later login would be refused."""

    async def lose_patience(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        await reader.readline()
        writer.write(b"-ERR 'Authentication Timeout'\r\n")
        writer.close()

    server = await asyncio.start_server(lose_patience, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    line = await refusal(at(port), StreamUnavailable, timeout=60.0)
    assert line == f"NATS at {HOST}:{port} did not receive the login in time: authentication timeout"
    await asyncio.sleep(0.01)  # for its side of the connections to end
    server.close()
    await server.wait_closed()


async def test_jetstream_disabled(start_server: StartServer) -> None:
    server = await start_server(jetstream=False)
    line = await refusal(at(server.port, "resizer:hunter2"), StreamRefused, timeout=60.0)
    assert "has JetStream disabled" in line
    assert "hunter2" not in line


async def test_a_leaf_node_does_not_lead_to_the_stream_of_its_hub(start_server: StartServer) -> None:
    """As docs/scale-out.md says."""
    gate = free_port()
    hub = await start_server(f'server_name: hub\nleafnodes {{ listen: "{HOST}:{gate}" }}')
    leaf = await start_server(
        f'server_name: leaf\nleafnodes {{ remotes: [ {{ url: "nats://{HOST}:{gate}" }} ] }}', jetstream=False
    )
    await enter(hub.url)
    at_hub, at_leaf = await nats.connect(hub.url), await nats.connect(leaf.url)
    heard = await at_hub.subscribe("linked")

    async def is_linked() -> None:
        await at_leaf.publish("linked")
        await at_leaf.flush()
        assert heard.pending_msgs

    await eventually(is_linked)
    for each in (at_hub, at_leaf):
        await each.close()
    line = await refusal(leaf.url, StreamRefused, timeout=60.0)
    assert line == f"NATS at {leaf.url} has JetStream disabled"


async def test_a_request_that_is_not_permitted_is_named(start_server: StartServer) -> None:
    server = await start_server("""authorization { users: [
      { user: a, password: b, permissions: { publish: "x", subscribe: "_INBOX.>" } }
    ] }""")
    line = await refusal(at(server.port, "a:b"), StreamRefused)
    assert 'permissions violation for publish to "$js.api.stream.info.jobs"' in line


async def test_least_privilege_is_enough(start_server: StartServer) -> None:
    server = await start_server("""authorization { users: [
      { user: admin, password: admin }
      { user: worker, password: worker, permissions: {
          publish: [
            "$JS.API.STREAM.INFO.JOBS", "$JS.API.CONSUMER.INFO.JOBS.*", "$JS.API.CONSUMER.MSG.NEXT.JOBS.*",
            "$JS.ACK.JOBS.>", "jobs.*"
          ]
          subscribe: "_INBOX.>"
      } }
    ] }""")
    await enter(at(server.port, "admin:admin"))
    await enter(at(server.port, "worker:worker"))


@pytest.mark.parametrize(
    ("variable", "content", "rule"),
    [
        ("nats_creds_file", "no credentials", "must hold a user JWT and a user nkey seed"),
        ("nats_nkey_seed_file", "SAAB", "must hold a user nkey seed"),
        ("nats_tls_ca", "no certificates", "must hold certificates"),
    ],
)
async def test_a_file_with_the_wrong_content(tmp_path: Path, variable: str, content: str, rule: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    changes: dict[str, Any] = {variable: path}
    line = await refusal("nats://localhost:1", SettingsError, **changes)
    assert line.startswith(f"JSWORKER_{variable.upper()}={path} {rule}")
    assert content not in line


async def test_a_key_of_another_certificate(authority: Authority) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    line = await refusal(
        "nats://localhost:1",
        SettingsError,
        nats_tls_ca=authority.certificate,
        nats_tls_cert=one.certificate,
        nats_tls_key=other.key,
    )
    assert "must be a certificate and its key: key values mismatch" in line


async def test_servers_with_different_logins() -> None:
    line = await refusal("nats://a:secret1@one:4222,nats://b:secret2@two:4222", SettingsError)
    assert "must hold the same user and password for every server" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    "url",
    [
        "nats://user:hunter2@host:4222",
        "nats://hunter2@host:4222",
        "nats://a:hunter2@one:4222,nats://b:hunter2@two:4222",
        "nats://user:hunter2,x/y@host:4222",
        "user:hunter2@host:4222",
        "nats://user:hunter2",
    ],
)
def test_credentials_are_never_shown(url: str) -> None:
    assert "hunter2" not in redacted(url)


def test_a_redacted_url_still_names_the_servers() -> None:
    assert "one:4222" in redacted("nats://a:b@one:4222,nats://a:b@two:4222")
    assert "two:4222" in redacted("nats://a:b@one:4222,nats://a:b@two:4222")


def redacted(url: str) -> str:
    """Redact any text: what the settings would refuse must not be shown either."""
    return Settings.model_construct(nats_url=url).redacted_nats_url()
