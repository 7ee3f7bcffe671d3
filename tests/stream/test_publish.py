"""Publishing: stored once, in order, tried again while the server is away, and honest about the rest."""

import asyncio
import json
import signal
from collections import Counter
from functools import partial
from uuid import UUID, uuid4

import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from jsworker.core.errors import PublishFailed, PublishRefused
from jsworker.stream import publisher
from jsworker.stream.message import WireMessage, decode
from jsworker.stream.publisher import Published
from tests.stream.conftest import OpenStream
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream
from tests.support.polling import eventually
from tests.support.proxy import proxied


def messages(count: int, kind: str = "resize") -> list[WireMessage]:
    return [WireMessage(uuid4(), kind, 1) for _ in range(count)]


async def test_a_message_is_stored_with_id_and_headers(stream: TestStream) -> None:
    [message] = messages(1)
    published = await stream.publish(message, headers={"traceparent": "00-ab-cd-01"})
    state = await stream.state()
    assert published == Published(1, state.created, duplicate=False)
    stored = await stream.get(1)
    assert stored is not None
    assert (stored.subject, stored.headers) == (
        "jobs.resize",
        {"Nats-Msg-Id": f"{message.job_id}:1", "traceparent": "00-ab-cd-01"},
    )
    assert decode(stored.data or b"", subject_kind="resize") == message


async def test_a_stream_that_was_made_anew_is_named_by_its_own_date(
    stream: TestStream, plain: NatsClient
) -> None:
    """Else every message published from here on would be taken for one of the stream that has gone."""
    before = await stream.publish_many(messages(3))
    made_first = (await stream.state()).created
    await plain.jetstream().delete_stream(stream.name)
    await stream.ensure(["resize"], timeout=0.0)
    stream.publisher.stream_created = made_first  # as in a client, which restores nothing
    after = await stream.publish_many(messages(2))
    made_anew = (await stream.state()).created
    assert made_anew != made_first
    assert [each.stream_created for each in before if isinstance(each, Published)] == [made_first] * 3
    assert [each.stream_created for each in after if isinstance(each, Published)] == [made_anew] * 2


async def test_who_published_nothing_for_long_names_the_stream_that_was_made_anew_meanwhile(
    stream: TestStream, open_stream: OpenStream, plain: NatsClient
) -> None:
    """Others have published to it since, so that no number is lower than an earlier one."""
    idle = await open_stream()
    await idle.ensure([])
    await plain.jetstream().delete_stream(stream.name)
    await stream.ensure(["resize"])
    await stream.publish_many(messages(3))
    made_anew = (await stream.state()).created
    idle._learnt_at -= 61.0
    [published] = await idle.publish_many(messages(1))
    assert published == Published(4, made_anew, duplicate=False)


async def test_headers_reach_the_reader(stream: TestStream, plain: NatsClient) -> None:
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await plain.subscribe("jobs.resize", cb=hear)
    await plain.flush()
    [message] = messages(1)
    await stream.publish(message, headers={"traceparent": "00-ab-cd-01", "tracestate": ""})

    async def is_heard() -> None:
        assert heard

    await eventually(is_heard)
    headers = heard[0].headers or {}
    assert (headers["traceparent"], headers["Nats-Msg-Id"]) == ("00-ab-cd-01", f"{message.job_id}:1")


async def test_the_same_dispatch_is_no_second_message_and_the_next_one_is(stream: TestStream) -> None:
    job = uuid4()
    first = await stream.publish(WireMessage(job, "resize", 1))
    again = await stream.publish(WireMessage(job, "resize", 1, cleared=True))
    after = await stream.publish(WireMessage(job, "resize", 2))
    assert (first.stream_seq, first.duplicate) == (1, False)
    assert (again.stream_seq, again.duplicate) == (1, True)
    assert (after.stream_seq, after.duplicate) == (2, False)


async def test_many_messages_keep_their_order(stream: TestStream) -> None:
    sent = messages(3000)
    outcomes = await stream.publish_many(sent)
    assert [outcome.stream_seq for outcome in outcomes if isinstance(outcome, Published)] == list(
        range(1, 3001)
    )
    for number in (1, 1500, 3000):
        stored = await stream.get(number)
        assert stored is not None
        assert (stored.headers or {})["Nats-Msg-Id"] == f"{sent[number - 1].job_id}:1"


async def test_nothing_to_publish(stream: TestStream) -> None:
    assert await stream.publish_many([]) == []


async def test_calls_at_the_same_time_get_their_own_outcomes(stream: TestStream) -> None:
    calls = [messages(700) for _ in range(4)]
    outcomes = await asyncio.gather(*map(stream.publish_many, calls))
    for sent, received in zip(calls, outcomes, strict=True):
        for message, outcome in zip(sent[::100], received[::100], strict=True):
            assert isinstance(outcome, Published)
            stored = await stream.get(outcome.stream_seq)
            assert stored is not None
            assert (stored.headers or {})["Nats-Msg-Id"] == f"{message.job_id}:1"


async def test_a_message_that_cannot_be_sent_does_not_fail_its_neighbours(stream: TestStream) -> None:
    good = messages(3)
    bad = [WireMessage(uuid4(), "no such\r\nPUB jobs.resize 0", 1), *messages(2)]
    outcomes = await stream.publish_many(
        [good[0], bad[0], good[1], bad[1], bad[2], good[2]],
        headers=[None, None, None, {"a": "b\r\nc"}, {"a": "x" * 70_000}, {"a": "b"}],
    )
    assert [isinstance(outcome, Published) for outcome in outcomes] == [True, False, True, False, False, True]
    assert "kind" in str(outcomes[1])
    assert "header 'a' must be one line of text" in str(outcomes[3])
    assert "larger than 65536 bytes" in str(outcomes[4])
    assert str(outcomes[3]).startswith(f"message {bad[1].job_id}:1 was not stored in stream JOBS: ")
    assert (await stream.state()).messages == 3
    assert stream.connected


async def test_headers_must_be_as_many_as_messages(stream: TestStream) -> None:
    with pytest.raises(ValueError, match="1 headers for 2 messages"):
        await stream.publish_many(messages(2), headers=[None])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restart_in_the_middle_costs_time_and_no_message(
    stream: TestStream, server: NatsServer, how: signal.Signals
) -> None:
    sent = messages(30_000)
    publishing = asyncio.create_task(stream.publish_many(sent, timeout=15.0))

    async def under_way() -> None:
        assert (await stream.state()).messages > 0

    await eventually(under_way)
    assert not publishing.done()
    await server.restart(how)
    outcomes = await publishing
    assert not [outcome for outcome in outcomes if isinstance(outcome, PublishFailed)]
    assert (await stream.state()).messages == len(sent)
    numbers = Counter(outcome.stream_seq for outcome in outcomes if isinstance(outcome, Published))
    assert len(numbers) == len(sent)


async def test_what_is_published_while_the_server_is_away_is_stored_when_it_is_back(
    stream: TestStream, server: NatsServer
) -> None:
    await server.stop(signal.SIGKILL)
    publishing = asyncio.create_task(stream.publish_many(messages(600), timeout=10.0))
    await asyncio.sleep(0)
    await server.start()
    outcomes = await publishing
    assert all(isinstance(outcome, Published) for outcome in outcomes)
    assert (await stream.state()).messages == 600


async def test_an_unanswered_question_whose_the_stream_is_costs_time_and_no_message(
    server: NatsServer, open_stream: OpenStream
) -> None:
    """The connection is lost again before the answer."""
    async with proxied(server.url) as (proxy, url):
        stream = await open_stream(url=url)
        await stream.ensure(["resize"])
        proxy.cut()
        publishing = asyncio.create_task(stream.publish_many(messages(3), timeout=120.0))
        lost = proxy.lose_next_answer(b"STREAM.INFO", then=proxy.cut)
        proxy.restore()
        await lost
        proxy.restore()
        outcomes = await publishing
    assert all(isinstance(outcome, Published) for outcome in outcomes), outcomes


async def test_a_server_that_stays_away(stream: TestStream, server: NatsServer) -> None:
    await server.stop()
    await eventually(partial(not_connected, stream))
    [message] = messages(1)
    started = asyncio.get_running_loop().time()
    with pytest.raises(PublishFailed) as caught:
        await stream.publish(message, timeout=0.4)
    assert 0.3 < asyncio.get_running_loop().time() - started < 10.0
    assert str(caught.value) == (
        f"message {message.job_id}:1 was not stored in stream JOBS: "
        "no acknowledgement within 0.4 s, NATS is not connected"
    )


async def test_a_frozen_server(stream: TestStream, server: NatsServer) -> None:
    server.freeze()
    outcomes = await stream.publish_many(messages(3), timeout=0.3)
    assert ["the stream did not answer" in str(outcome) for outcome in outcomes] == [True] * 3, outcomes
    server.thaw()
    assert isinstance((await stream.publish_many(messages(1)))[0], Published)


async def test_a_lost_connection_is_noticed_at_once(
    stream: TestStream, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_SILENCE_SECONDS", 60.0)  # and not because the server is silent
    server.freeze()
    publishing = asyncio.create_task(stream.publish(messages(1)[0], timeout=4.0))
    await asyncio.sleep(0.05)
    await server.stop(signal.SIGKILL)
    with pytest.raises(PublishFailed, match="NATS is not connected"):
        await publishing


async def test_no_stream_listens(stream: TestStream, plain: NatsClient) -> None:
    await plain.jetstream().delete_stream("JOBS")

    async def is_said() -> None:  # a busy server may not answer at all in so short a time
        with pytest.raises(PublishFailed) as caught:
            await stream.publish(messages(1)[0], timeout=0.3)
        assert "within 0.3 s, stream JOBS does not listen" in str(caught.value)

    await eventually(is_said)


async def test_a_stream_that_is_made_in_time(stream: TestStream, plain: NatsClient) -> None:
    await plain.jetstream().delete_stream("JOBS")
    publishing = asyncio.create_task(stream.publish(messages(1)[0], timeout=60.0))
    await asyncio.sleep(0.05)
    await stream.ensure(["resize"], timeout=0.0)
    assert (await publishing).stream_seq == 1


async def test_another_stream_that_took_the_message(stream: TestStream, plain: NatsClient) -> None:
    await plain.jetstream().delete_stream("JOBS")
    await plain.jetstream().add_stream(name="OTHER", subjects=["jobs.>"])
    with pytest.raises(PublishFailed, match="it was stored by another stream"):
        await stream.publish(messages(1)[0], timeout=60.0)


async def test_a_stream_without_a_majority_says_why(stream: TestStream, plain: NatsClient) -> None:
    """What a leader answered that had lost both followers, to a message that was sent to it again."""

    async def answer(request: Msg) -> None:
        error = {"code": 409, "err_code": 10158, "description": "duplicate message id is in process"}
        await request.respond(json.dumps({"error": error, "stream": "JOBS", "seq": 0}).encode())

    await plain.jetstream().delete_stream("JOBS")
    await plain.subscribe("jobs.resize", cb=answer)
    await plain.flush()
    with pytest.raises(PublishRefused, match="not a majority of the stream's servers"):
        await stream.publish(messages(1)[0], timeout=60.0)


async def test_a_full_stream_says_why(stream: TestStream, plain: NatsClient) -> None:
    jetstream = plain.jetstream()
    await jetstream.update_stream((await jetstream.stream_info("JOBS")).config, max_msgs=2)
    outcomes = await stream.publish_many(messages(3), timeout=60.0)  # it says so at once
    assert [isinstance(outcome, Published) for outcome in outcomes] == [True, True, False]
    assert isinstance(outcomes[2], PublishRefused)
    assert str(outcomes[2]).endswith("was not stored in stream JOBS: maximum messages exceeded")


async def test_an_answer_that_jetstream_never_gives(stream: TestStream, plain: NatsClient) -> None:
    jetstream = plain.jetstream()
    await jetstream.update_stream((await jetstream.stream_info("JOBS")).config, max_msg_size=10)
    with pytest.raises(PublishFailed, match="message size exceeds maximum allowed"):
        await stream.publish(messages(1)[0], timeout=60.0)


async def test_a_cancelled_call_leaves_nothing_behind(stream: TestStream, server: NatsServer) -> None:
    server.freeze()
    publishing = asyncio.create_task(stream.publish_many(messages(10)))
    await asyncio.sleep(0.05)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert stream.publisher._batches == {}
    server.thaw()
    assert isinstance((await stream.publish_many(messages(1)))[0], Published)


async def test_a_closed_stream_fails_at_once(open_stream: OpenStream) -> None:
    stream = await open_stream()
    await stream.close()
    async with asyncio.timeout(5):
        with pytest.raises(PublishFailed, match="there is no connection to NATS"):
            await stream.publish(WireMessage(UUID(int=1), "resize", 1), timeout=60.0)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_closing_ends_a_call_that_waits(
    open_stream: OpenStream, server: NatsServer, how: signal.Signals
) -> None:
    stream = await open_stream()
    if how == signal.SIGSTOP:
        server.freeze()
    else:
        await server.stop(how)
        await eventually(partial(not_connected, stream))
    publishing = asyncio.create_task(stream.publish(WireMessage(UUID(int=1), "resize", 1), timeout=60.0))
    await asyncio.sleep(0.05)
    assert not publishing.done()
    async with asyncio.timeout(8):
        await stream.close()
        with pytest.raises(PublishFailed):
            await publishing


async def not_connected(stream: TestStream) -> None:
    assert not stream.connected
