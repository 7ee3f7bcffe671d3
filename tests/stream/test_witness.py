"""Whether a worker can be reached: what is heard of it on a real server, and what says nothing."""

import asyncio
import math
from collections.abc import Awaitable
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient
from nats.js.api import ClusterInfo, PeerInfo

from jsworker.stream.jetstream import quorum_age
from jsworker.stream.liveness import STACKS, SUBJECT, Answer, Witness, ask
from tests.stream.conftest import OpenStream, StartServer
from tests.stream.desk import until
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream
from tests.support.polling import eventually

LONG = 60.0
"""Longer than any test waits: an answer that comes has come for another reason."""

RESTRICTED = """
authorization { users: [
  { user: anybody, password: secret }
  { user: mute, password: secret, permissions: { publish: { deny: "jsworker.worker.>" } } }
  { user: deaf, password: secret, permissions: { subscribe: { deny: "jsworker.worker.>" } } }
] }
"""


async def soon(asking: Awaitable[Answer]) -> Answer:
    async with asyncio.timeout(10.0):
        return await asking


async def never_answers(plain: NatsClient, worker_id: str) -> asyncio.Event:
    """Listen in a worker's place as one that is frozen; the event is set when it was asked."""
    asked = asyncio.Event()

    async def hear(_: Any) -> None:
        asked.set()

    await plain.subscribe(f"jsworker.worker.{worker_id}", cb=hear)
    await plain.flush()
    return asked


async def test_a_worker_that_listens_is_alive_and_one_that_left_has_no_responders(
    open_stream: OpenStream,
) -> None:
    stream, other = await open_stream(), await open_stream()
    asking = Witness(stream.connection, "asking")
    assert await asking.ask("other-1", LONG) is Answer.NO_RESPONDERS
    assert await Witness(other.connection, "other-1").prove(LONG)
    assert await soon(asking.ask("other-1", LONG)) is Answer.ALIVE
    assert await soon(asking.ask("other-10", LONG)) is Answer.NO_RESPONDERS
    await other.close()

    async def has_left() -> None:
        assert await asking.ask("other-1", 0.2) is Answer.NO_RESPONDERS

    await eventually(has_left)


async def test_asking_needs_no_subject_of_ones_own(open_stream: OpenStream) -> None:
    one, other = await open_stream(), await open_stream()
    await Witness(other.connection, "other").prove(LONG)
    assert await soon(Witness(one.connection, "asking").ask("other", LONG)) is Answer.ALIVE
    assert await soon(Witness(other.connection, "other").ask("asking", LONG)) is Answer.NO_RESPONDERS


async def test_a_name_too_long_for_a_subject_is_not_asked(open_stream: OpenStream) -> None:
    """The server would close the connection, also for the questions about all other workers."""
    connection = (await open_stream()).connection
    lost: list[bool] = []
    connection.lost_callbacks.append(lambda: lost.append(True))
    asking = Witness(connection, "asking")
    assert await asking.ask("w" * 5_000, LONG) is Answer.UNKNOWN
    assert await asking.ask("w" * 230, LONG) is Answer.NO_RESPONDERS
    assert lost == []


async def test_proving_again_answers_each_question_once(open_stream: OpenStream, plain: NatsClient) -> None:
    witness = Witness((await open_stream()).connection, "me")
    for _ in range(3):
        assert await witness.prove(LONG)
    inbox = plain.new_inbox()
    answers = await plain.subscribe(inbox)
    await plain.publish("jsworker.worker.me", reply=inbox)
    assert (await answers.next_msg(timeout=5)).data == b"alive"
    await plain.flush()
    assert answers.pending_msgs == 0


async def test_a_frozen_worker_is_unknown(open_stream: OpenStream, plain: NatsClient) -> None:
    asked = await never_answers(plain, "frozen")
    assert await Witness((await open_stream()).connection, "me").ask("frozen", 0.1) is Answer.UNKNOWN
    async with asyncio.timeout(LONG):
        await asked.wait()  # by a busy server, a little later


async def test_a_missing_permission_is_unknown_and_told_at_once(
    start_server: StartServer, open_stream: OpenStream
) -> None:
    server = await start_server(RESTRICTED)

    async def enter(user: str) -> TestStream:
        return await open_stream(url=server.url, nats_user=user, nats_password="secret")

    anybody, mute, deaf = await enter("anybody"), await enter("mute"), await enter("deaf")
    assert await Witness(anybody.connection, "anybody").prove(LONG)
    # It may not ask: nobody hears it, so that nobody answers proves nothing.
    assert await soon(Witness(mute.connection, "mute").ask("anybody", LONG)) is Answer.UNKNOWN
    assert await soon(Witness(mute.connection, "mute").ask("nobody", LONG)) is Answer.UNKNOWN
    async with asyncio.timeout(10.0):
        assert not await Witness(mute.connection, "mute").prove(LONG)
        # It may not listen, so nobody may ever take its silence for its end.
        assert not await Witness(deaf.connection, "deaf").prove(LONG)
    assert await soon(Witness(deaf.connection, "deaf").ask("anybody", LONG)) is Answer.ALIVE


async def test_a_lost_connection_is_unknown(
    open_stream: OpenStream, server: NatsServer, plain: NatsClient
) -> None:
    stream = await open_stream()
    witness = Witness(stream.connection, "me")
    asked = await never_answers(plain, "silent")
    asking = asyncio.create_task(witness.ask("silent", LONG))
    await asked.wait()
    await server.stop()
    assert await soon(asking) is Answer.UNKNOWN
    await until(lambda: not stream.connected)
    assert await soon(witness.ask("nobody", LONG)) is Answer.UNKNOWN
    assert not await witness.prove(LONG)
    await stream.close()
    assert await soon(witness.ask("nobody", LONG)) is Answer.UNKNOWN
    assert not await witness.prove(LONG)


async def test_a_worker_answers_again_after_a_reconnect(open_stream: OpenStream, server: NatsServer) -> None:
    stream, other = await open_stream(), await open_stream()
    witness = Witness(stream.connection, "me")
    assert await witness.prove(LONG)
    await server.restart()

    async def answers_again() -> None:
        assert await witness.prove(1.0)
        assert await Witness(other.connection, "other").ask("me", 1.0) is Answer.ALIVE

    await eventually(answers_again)


async def test_questions_for_stacks_that_come_together_have_one_answer(open_stream: OpenStream) -> None:
    asked: list[bytes] = []
    may_answer = asyncio.Event()

    async def read_stacks(question: bytes) -> bytes:
        asked.append(question)
        await may_answer.wait()
        return b"answer %d" % len(asked)

    assert await Witness((await open_stream()).connection, "me", read_stacks).prove(LONG)
    other = (await open_stream()).connection
    questions = [b"", b"", b"", b"job"]
    asking = [asyncio.create_task(ask(other, f"{SUBJECT}me{STACKS}", LONG, each)) for each in questions]
    # Comes behind them, on the same connections.
    assert (await asyncio.create_task(ask(other, f"{SUBJECT}me", LONG))).answer is Answer.ALIVE
    may_answer.set()
    assert [(await each).content for each in asking] == [b"answer 2"] * 4
    assert asked == [b"", b"job"]
    assert (await ask(other, f"{SUBJECT}me{STACKS}", LONG)).content == b"answer 3"


@pytest.mark.parametrize(
    ("leader", "silences", "age"),
    [
        ("one", [], 0.0),
        ("one", [7.0], 7.0),
        ("one", [90.0, 0.5], 0.5),  # one of three may be away
        ("one", [20.0, 9.0], 9.0),  # a leader that is cut off, and has not noticed yet
        ("one", [9.0, None], 9.0),
        ("one", [1.0, 3.0, 2.0], 2.0),
        ("one", [4.0, 1.0, 80.0, 2.0], 2.0),
        ("one", [None], math.inf),
        ("one", [0.0, 9.0], 9.0),  # not heard since the leader was elected
        ("one", [0.0], math.inf),
        (None, [0.5, 0.5], math.inf),
        ("", [], math.inf),
    ],
)
def test_a_leader_has_its_word_from_a_majority(
    leader: str | None, silences: list[float | None], age: float
) -> None:
    active = [None if each is None else int(each * 1e9) for each in silences]
    cluster = ClusterInfo(leader=leader, replicas=[PeerInfo(active=each) for each in active])
    assert quorum_age(cluster) == age
    assert quorum_age(None) == math.inf
