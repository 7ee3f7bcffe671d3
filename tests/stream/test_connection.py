"""The connection outlives its servers: restarts, freezes, and a client that gives up."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from jsworker.core.errors import StreamRefused
from jsworker.stream import connection
from jsworker.stream.liveness import Witness
from jsworker.stream.message import WireMessage
from tests.stream.conftest import OpenStream, StartServer
from tests.stream.desk import until
from tests.stream.nats_server import HOST, NatsServer
from tests.stream.streams import TestStream, settings_for
from tests.support.polling import eventually


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a client without a connection is replaced."""
    monkeypatch.setattr(connection, "_REPLACE_SECONDS", 1.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restart_of_the_server_is_told_and_survived(
    stream: TestStream, server: NatsServer, how: signal.Signals
) -> None:
    calls: list[str] = []
    stream.connection.lost_callbacks.append(lambda: calls.append("lost"))
    stream.connection.restored_callbacks.append(lambda: calls.append("back"))
    await server.stop(how)
    await until(lambda: bool(stream.told_of("worker.degraded")))
    assert not stream.connected
    assert [fields["what"] for fields in stream.told_of("worker.degraded")] == ["nats"]
    await server.start()
    await until(lambda: bool(stream.told_of("worker.restored")))
    assert stream.connected
    assert stream.told_of("worker.restored") == [{"what": "nats"}]
    assert calls == ["lost", "back"]
    assert (await stream.state()).messages == 0


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_closed_itself_is_replaced(open_stream: OpenStream) -> None:
    stream = await open_stream()
    first = stream.connection.client
    await first.close()
    await until(lambda: stream.connected)
    assert stream.connection.client is not first
    assert stream.told_of("worker.restored") == [{"what": "nats"}]
    await stream.ensure(["resize"], {})


async def test_an_error_that_nats_py_takes_for_final_is_survived(
    open_stream: OpenStream, start_server: StartServer
) -> None:
    server = await start_server("max_subscriptions: 3")
    stream = await open_stream(url=server.url)
    first = stream.connection.client
    for number in range(5):
        first.open_inbox(f"crowd.{number}", lambda *_: None)
    await until(lambda: stream.connected and stream.connection.client is not first)
    assert stream.told_of("worker.degraded") == [{"what": "nats", "reason": "maximum subscriptions exceeded"}]


@pytest.mark.usefixtures("impatient")
async def test_a_password_whose_file_changed_is_read_again(
    open_stream: OpenStream, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorization = 'authorization {{ user: "resizer", password: "{}" }}'
    secret = tmp_path / "secret"
    secret.write_text("old-secret\n")
    monkeypatch.setenv("JSWORKER_NATS_PASSWORD_FILE", str(secret))
    server = await start_server(authorization.format("old-secret"))
    stream = await open_stream(url=server.url, nats_user="resizer")
    server.configure(authorization.format("new-secret"))
    server.reload()
    refused = f"NATS at {HOST}:{server.port} refused the login: authorization violation"
    await until(lambda: refused in [told.get("reason") for told in stream.told_of("worker.degraded")])
    secret.write_text("new-secret\n")
    await until(lambda: stream.connected)
    assert stream.told_of("worker.restored")[-1] == {"what": "nats"}
    await stream.ensure(["resize"], {})


@pytest.mark.usefixtures("impatient")
async def test_subscriptions_come_back_with_a_permission_that_was_taken_away(
    open_stream: OpenStream, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload ends the subscriptions that it forbids, and the connection lasts."""
    monkeypatch.setattr(connection, "_SUBSCRIBE_AGAIN_SECONDS", 0.2)
    users = (
        "authorization { users: [ { user: a, password: b, permissions: { subscribe: { deny: [%s] } } } ] }"
    )
    server = await start_server(users % "nothing")
    stream = await open_stream(url=f"nats://a:b@{HOST}:{server.port}")
    await stream.ensure(["resize"], {"resize": 600.0})
    witness = Witness(stream.connection, "pod-0")
    await witness.prove(10.0)
    await stream.publish(WireMessage(uuid4(), "resize", 1), timeout=10.0)
    first = stream.connection.client
    server.configure(users % '"_INBOX.>", "jsworker.>"')
    server.reload()
    refused = 'permissions violation for subscription to "'

    def complaints(subject: str) -> int:
        reasons = [told["reason"] for told in stream.told_of("worker.degraded")]
        return sum(reason.startswith(f"{refused}{subject}") for reason in reasons)

    await until(lambda: complaints("jsworker.worker.pod-0") == complaints("_inbox.") == 1)
    with pytest.raises(StreamRefused, match=r"for subscription to .* \(see JSWORKER_NATS_INBOX_PREFIX\)"):
        await stream.state()  # at once, not after a time-out
    server.configure(users % "nothing")
    server.reload()

    async def is_answered() -> None:
        try:
            assert (await stream.state()).messages == 1
        except StreamRefused as refused:
            raise AssertionError from refused

    await eventually(is_answered)
    await until(lambda: not stream.connection._ended)
    assert await witness.prove(10.0)
    await stream.publish(WireMessage(uuid4(), "resize", 1), timeout=10.0)
    assert (await stream.state()).messages == 2
    server.configure(users % '"_INBOX.>", "jsworker.>"')
    server.reload()
    await until(lambda: complaints("jsworker.worker.pod-0") == complaints("_inbox.") == 2)
    assert stream.connection.client is first


@pytest.mark.usefixtures("impatient")
async def test_a_frozen_server_that_is_owed_bytes_is_left(
    open_stream: OpenStream, start_server: StartServer, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py waits for ever for its socket to close; after a while it gets a new client."""
    monkeypatch.setattr(connection, "_PING_SECONDS", 0.3)
    other = await start_server()
    stream = await open_stream(url=f"{server.url},{other.url}")
    held = server if stream.connection.client.connected_url.port == server.port else other  # type: ignore[union-attr] # connected
    first = stream.connection.client
    held.freeze()
    for _ in range(7):
        first.post("nobody.listens", b"x" * 1_000_000)
    await until(lambda: stream.connection.client is not first and stream.connected)
    held.thaw()


async def test_close_takes_seconds_whatever_the_server_does(
    open_stream: OpenStream, server: NatsServer
) -> None:
    stream = await open_stream()
    server.freeze()
    for _ in range(7):
        stream.connection.client.post("nobody.listens", b"x" * 1_000_000)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await stream.close()
    assert not stream.connected
    server.thaw()


async def test_what_a_frozen_server_is_owed_is_bounded(stream: TestStream, server: NatsServer) -> None:
    server.freeze()
    client = stream.connection.client
    for _ in range(40):
        client.post("nobody.listens", b"x" * 1_000_000)
        await asyncio.sleep(0)
    assert client.pending_data_size < 16_000_000
    server.thaw()
    assert await stream.flush()


async def test_close_while_reconnecting_with_unsent_bytes(
    open_stream: OpenStream, server: NatsServer
) -> None:
    stream = await open_stream()
    await server.stop(signal.SIGKILL)
    await until(lambda: not stream.connected)
    stream.connection.client.post("nobody.listens", b"x" * 100_000)
    async with asyncio.timeout(5):
        await stream.close()
    await stream.close()


async def test_a_closed_stream_leaves_no_task_behind(open_stream: OpenStream, server: NatsServer) -> None:
    before = asyncio.all_tasks()
    stream = await open_stream()
    await server.stop(signal.SIGKILL)
    await until(lambda: not stream.connected)
    await stream.close()
    gc.collect()
    await until(lambda: not asyncio.all_tasks() - before)


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("back", [False, True], ids=["refused", "connected"])
async def test_an_attempt_that_ends_while_the_stream_is_closed_is_the_last_one(
    open_stream: OpenStream, server: NatsServer, monkeypatch: pytest.MonkeyPatch, *, back: bool, ticks: int
) -> None:
    """In Python 3.11 a cancellation that meets the end of what ``wait_for`` awaits gets lost."""
    monkeypatch.setattr("jsworker.stream.connection._RECONNECT_SECONDS", 0.05)
    before = asyncio.all_tasks()
    stream = await open_stream()
    client, dial = stream.connection.client, asyncio.open_connection
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        if not back:  # sooner than the stream, which ends its watch first
            await client.discard()
        await stream.close()

    async def dial_and_close(*address: Any, **options: Any) -> Any:
        connected = False
        try:
            streams = await dial(*address, **options)
            connected = True
            return streams
        finally:
            if connected == back and not closing:
                closing.append(asyncio.create_task(close()))

    monkeypatch.setattr(asyncio, "open_connection", dial_and_close)
    await server.stop(signal.SIGKILL)
    await until(lambda: not stream.connected)
    if back:
        await server.start()
    await until(lambda: bool(closing) and closing[0].done())
    closing[0].result()
    await until(lambda: not asyncio.all_tasks() - before)


async def test_a_connection_that_is_made_while_its_caller_is_cancelled_is_closed(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asyncio.all_tasks()
    stream = TestStream(settings_for(server.url), installation_id=None)
    connecting = asyncio.create_task(stream.connect())
    connect = NatsClient.connect

    async def connect_and_cancel(client: NatsClient, *addresses: Any, **options: Any) -> None:
        await connect(client, *addresses, **options)
        connecting.cancel()

    monkeypatch.setattr(NatsClient, "connect", connect_and_cancel)
    await asyncio.wait({connecting})
    assert connecting.cancelled()
    assert asyncio.all_tasks() - before == set()


async def test_flush_sends_the_ping_behind_what_waits() -> None:
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
            writer.write(b"PONG\r\n" * data.count(b"PING"))
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    stream = TestStream(settings_for(f"nats://{HOST}:{port}"), installation_id=None)
    await stream.connection.connect(5)
    heard.clear()
    stream.connection.client.post("a.subject", b"verdict")
    assert await stream.flush()
    assert heard.index(b"verdict") < heard.index(b"PING")
    await stream.close()
    server.close()


async def test_flush_says_no_without_a_connection(stream: TestStream, server: NatsServer) -> None:
    await server.stop()
    await until(lambda: not stream.connected)
    assert not await stream.flush()


async def test_a_late_answer_to_flush_does_no_harm(stream: TestStream, server: NatsServer) -> None:
    """nats-py stops reading for good when it comes."""
    server.freeze()
    assert not await stream.flush(0.1)
    server.thaw()
    assert await stream.flush(5.0)
    assert stream.connected
    assert stream.told_of("worker.degraded") == []


async def test_what_is_not_permitted_is_told_once(open_stream: OpenStream, start_server: StartServer) -> None:
    server = await start_server("""authorization { users: [
      { user: a, password: b, permissions: { publish: { deny: "secret.>" } } }
    ] }""")
    stream = await open_stream(url=f"nats://a:b@{HOST}:{server.port}")
    for _ in range(3):
        stream.connection.client.post("secret.one", b"")
        assert await stream.flush()
    stream.connection.client.post("secret.two", b"")
    await until(lambda: len(stream.told_of("worker.degraded")) == 2)
    assert stream.told_of("worker.degraded") == [
        {"what": "nats client", "reason": f'permissions violation for publish to "secret.{number}"'}
        for number in ("one", "two")
    ]


@pytest.mark.usefixtures("impatient")
async def test_many_refusals_of_one_kind_hide_no_other_complaint(
    open_stream: OpenStream, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MOST_COMPLAINTS", 3)
    users = """authorization { users: [ { user: a, password: %s, permissions: {
      publish: { deny: ["$JS.ACK.>", "_INBOX_A.*", "secret"] }, subscribe: { deny: "_INBOX_A.no.*" }
    } } ] }"""
    server = await start_server(users % "b")
    stream = await open_stream(url=f"nats://a:b@{HOST}:{server.port}", nats_inbox_prefix="_INBOX_A")
    client = stream.connection.client
    for number in range(5):
        client.post(f"$JS.ACK.JOBS.resize.1.{number}.{number}.1795825506890368019.0", b"+ACK")
        client.post(f"_INBOX_A.{number}", b"")
    client.post("secret", b"")
    client.open_inbox("_INBOX_A.no.1", lambda *_: None)  # more than the most
    assert await stream.flush(30.0)
    denied = 'permissions violation for publish to "'
    assert [fields["reason"] for fields in stream.told_of("worker.degraded")] == [
        f'{denied}$js.ack.jobs.resize.1.0.0.1795825506890368019.0"',
        f'{denied}_inbox_a.0"',
        f'{denied}secret"',
    ]
    await server.stop()
    server.configure(users % "another")
    await server.start()

    def reasons() -> list[str]:
        return [fields["reason"] for fields in stream.told_of("worker.degraded")[4:]]

    await until(lambda: any("refused the login" in reason for reason in reasons()))


async def test_an_attempt_to_reconnect_that_is_refused_leaves_no_socket(
    open_stream: OpenStream, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_RECONNECT_SECONDS", 0.05)
    users = "authorization { users: [ { user: a, password: %s } ] }"
    server = await start_server(users % "b")
    await open_stream(url=f"nats://a:b@{HOST}:{server.port}")
    writers: list[asyncio.StreamWriter] = []
    dial = asyncio.open_connection

    async def note(*address: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        streams = await dial(*address, **options)
        writers.append(streams[1])
        return streams

    monkeypatch.setattr(asyncio, "open_connection", note)
    await server.stop()
    server.configure(users % "another")
    await server.start()
    await until(lambda: len(writers) > 3)
    assert all(writer.is_closing() for writer in writers[:-1])


async def test_of_what_waits_for_a_lost_connection_only_verdicts_are_kept(
    stream: TestStream, plain: NatsClient
) -> None:
    """A request would be served to an inbox that is gone."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    await plain.subscribe("request", cb=hear)
    await plain.subscribe("$JS.ACK.>", cb=hear)
    await plain.flush()
    stream.connection.client.post("request", b"")
    stream.connection.client.post("$JS.ACK.JOBS.resize.1.1.1.1.0", b"+ACK")
    stream.connection.client.lose()
    assert await stream.flush()
    await plain.flush()
    assert heard == ["$JS.ACK.JOBS.resize.1.1.1.1.0"]


async def test_a_stream_that_is_closed_leaves_others_alone(open_stream: OpenStream) -> None:
    one, two = await open_stream(), await open_stream()
    await one.ensure(["resize"], {})
    await one.close()
    assert (await two.publish(WireMessage(uuid4(), "resize", 1))).stream_seq == 1


@pytest.mark.parametrize("call", ["request", "flush"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_that_comes_with_the_answer_is_kept(
    stream: TestStream, server: NatsServer, call: str, *, fails: bool
) -> None:
    client = stream.connection.client
    await client.request("$JS.API.INFO", b"", timeout=20)  # has subscribed to answers
    await client.flush(20)
    server.freeze()  # so that the answer comes from here, in the very round of the loop that cancels
    expected: dict[str, Callable[[], list[asyncio.Future[Any]]]] = {
        "request": lambda: list(client._resp_map.values()),
        "flush": lambda: list(client._pongs),
    }
    asked: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "request": stream.state,
        "flush": lambda: client.flush(20),
    }
    before = expected[call]()
    task = asyncio.create_task(asked[call]())
    await until(lambda: expected[call]() != before)
    await asyncio.sleep(0)
    future = expected[call]()[-1]
    if fails:
        future.set_exception(NatsError("no answer"))
    else:
        future.set_result(Msg(client) if call == "request" else True)
    task.cancel()
    await asyncio.wait({task}, timeout=20)
    server.thaw()
    assert task.cancelled()


async def test_an_error_that_comes_with_the_cancellation_of_a_question_is_read(
    stream: TestStream, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise NatsError("no answer") from None

    asking = asyncio.create_task(stream.connection.answered("a.subject", ask()))
    await until(lambda: bool(stream.connection._failures))
    asking.cancel()
    await asyncio.wait({asking}, timeout=20)
    assert asking.cancelled()
    await asyncio.sleep(0)
    del asking
    gc.collect()
    assert caplog.messages == []
