"""Stream and consumers: made, compared, changed, or refused with a clear line."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamConsumerLimits

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.stream.api import JetStreamApi
from jsworker.stream.diagnostics import Inspector
from jsworker.stream.topology import INSTALLATION, stream_config, stream_differences
from tests.stream.conftest import OpenStream, StartServer
from tests.stream.desk import edit_consumer
from tests.stream.nats_server import HOST, NatsServer
from tests.stream.streams import INSTALLATION as OWN
from tests.stream.streams import TestStream, settings_for
from tests.support.polling import eventually

WAITS = {"resize": 600.0}


@pytest.fixture
def jetstream(plain: NatsClient) -> JetStreamContext:
    return plain.jetstream()


@asynccontextmanager
async def requests_counted(plain: NatsClient) -> AsyncIterator[list[str]]:
    """Yield the subjects of JetStream's requests as they are made."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject.removeprefix("$JS.API."))

    subscription = await plain.subscribe("$JS.API.>", cb=hear)
    await plain.flush()
    yield heard
    await plain.flush()
    await subscription.unsubscribe()


async def test_stream_and_consumers_are_made_in_the_shape_of_the_protocol(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure(["resize", "crop"], {"resize": 600.0, "crop": 31.5})
    config = (await jetstream.stream_info("JOBS")).config
    assert config.subjects == ["jobs.*", "jobs.*.high", "jobs.*.low"]
    assert (config.retention, config.storage, config.discard) == ("workqueue", "file", "new")
    assert (config.max_msgs, config.max_bytes, config.max_age, config.max_msgs_per_subject) == (-1, -1, 0, -1)
    assert (config.duplicate_window, config.max_msg_size, config.num_replicas) == (120, 65536, 1)
    assert (config.metadata or {})[INSTALLATION] == str(OWN)
    for kind, ack_wait in [("resize", 600.0), ("crop", 31.5)]:
        consumer = (await jetstream.consumer_info("JOBS", kind)).config
        assert (consumer.durable_name, consumer.filter_subject) == (kind, f"jobs.{kind}")
        assert (consumer.ack_policy, consumer.deliver_policy) == ("explicit", "all")
        assert (consumer.ack_wait, consumer.backoff) == (ack_wait, None)
        assert (consumer.max_deliver, consumer.max_ack_pending) == (-1, -1)
        assert (consumer.max_waiting or 0) >= 512


async def test_a_consumer_is_changed_although_a_restarted_server_answers_with_what_it_was(
    server: NatsServer,
) -> None:
    settings = settings_for(server.url, stale_threshold=20.0)
    stream = TestStream(settings, installation_id=OWN)
    await stream.connect()
    try:
        await stream.ensure(["resize"], {"resize": 45.0})
        await server.restart()

        async def is_there() -> None:
            assert stream.connected

        await eventually(is_there)
        await stream.ensure(["resize"], {"resize": 90.0})
        assert (await stream.consumer_state("resize")).config.ack_wait == 90.0
    finally:
        await stream.close()


async def test_ensuring_what_is_there_changes_nothing(open_stream: OpenStream, plain: NatsClient) -> None:
    await (await open_stream()).ensure(["resize"], WAITS)
    stream = await open_stream()
    async with requests_counted(plain) as requests:
        await stream.ensure(["resize"], WAITS)
    assert requests == ["STREAM.INFO.JOBS", "CONSUMER.INFO.JOBS.resize"]
    assert stream.told_of("stream.changed") == []


async def test_many_workers_may_ensure_at_once(open_stream: OpenStream, jetstream: JetStreamContext) -> None:
    streams = [await open_stream() for _ in range(10)]
    await asyncio.gather(*(stream.ensure(["resize", "crop"], WAITS) for stream in streams))
    assert len(await jetstream.consumers_info("JOBS")) == 2


async def test_that_the_stream_was_made_is_told(open_stream: OpenStream) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], WAITS)
    [told] = stream.told_of("stream.changed")
    assert (told["what"], told["setting"], told["was"]) == ("stream JOBS", "created", None)


async def test_settings_that_may_change_are_changed_and_told(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], WAITS)
    await jetstream.update_stream(
        (await jetstream.stream_info("JOBS")).config, max_age=3600.0, max_msgs=1000, discard="old"
    )
    await jetstream.add_consumer(
        "JOBS",
        name="resize",
        durable_name="resize",
        filter_subject="jobs.resize",
        ack_wait=10.0,
        max_deliver=3,
        max_ack_pending=7,
        max_waiting=4096,
    )
    stream.told.clear()
    await stream.ensure(["resize"], WAITS)
    assert [tuple(told.values()) for told in stream.told_of("stream.changed")] == [
        ("stream JOBS", "discard", "old", "new"),
        ("stream JOBS", "max_age", 3600.0, 0.0),
        ("stream JOBS", "max_msgs", 1000, -1),
        ("consumer resize of stream JOBS", "ack_wait", 10.0, 600.0),
        ("consumer resize of stream JOBS", "max_deliver", 3, -1),
        ("consumer resize of stream JOBS", "max_ack_pending", 7, -1),
    ]
    config = (await jetstream.stream_info("JOBS")).config
    assert (config.max_age, config.max_msgs, config.discard) == (0, -1, "new")
    assert (config.metadata or {})[INSTALLATION] == str(OWN)
    consumer = (await jetstream.consumer_info("JOBS", "resize")).config
    assert (consumer.ack_wait, consumer.max_deliver, consumer.max_ack_pending) == (600, -1, -1)


async def test_backoff_which_overrides_ack_wait_is_removed(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], WAITS)
    config = (await jetstream.consumer_info("JOBS", "resize")).config
    await jetstream.add_consumer("JOBS", config, backoff=[1.0, 2.0])
    assert (await jetstream.consumer_info("JOBS", "resize")).config.ack_wait == 1.0
    await stream.ensure(["resize"], WAITS)
    config = (await jetstream.consumer_info("JOBS", "resize")).config
    assert (config.ack_wait, config.backoff) == (600.0, None)


async def test_limits_for_new_consumers_are_removed(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure([], WAITS)
    config = (await jetstream.stream_info("JOBS")).config
    limits = StreamConsumerLimits(inactive_threshold=3600.0, max_ack_pending=7)
    await jetstream.update_stream(config, consumer_limits=limits)
    stream.told.clear()
    await stream.ensure(["resize"], WAITS)
    changes = [("stream JOBS", "consumer_limits", {"inactive_threshold": 3600.0, "max_ack_pending": 7}, None)]
    assert [tuple(told.values()) for told in stream.told_of("stream.changed")] == changes
    consumer = (await jetstream.consumer_info("JOBS", "resize")).config
    assert (consumer.inactive_threshold, consumer.max_ack_pending) == (None, -1)


async def test_limits_of_requests_that_somebody_set_are_kept(stream: TestStream, plain: NatsClient) -> None:
    limits = {"max_batch": 5, "max_expires": 20_000_000_000, "max_bytes": 100_000}
    await edit_consumer(plain, **limits, max_deliver=3)
    await stream.keep_consumer_in_shape("resize")
    kept = json.loads((await plain.request("$JS.API.CONSUMER.INFO.JOBS.resize")).data)["config"]
    assert kept["max_deliver"] == -1
    assert {name: kept.get(name) for name in limits} == limits


@pytest.mark.parametrize("policy", ["overflow", "pinned_client"])
async def test_groups_of_priorities_whose_requests_would_be_refused_are_removed(
    open_stream: OpenStream, plain: NatsClient, policy: str
) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], WAITS)
    await edit_consumer(plain, priority_policy=policy, priority_groups=["A"])
    stream.told.clear()
    inspector = Inspector(stream.settings)
    await inspector.connect()
    [report] = await inspector.consumers([])
    await inspector.close()
    assert f"priority_policy={policy}, must be none" in map(str, report.differences)
    await stream.keep_consumer_in_shape("resize")
    assert [(told["setting"], told["was"]) for told in stream.told_of("stream.changed")] == [
        ("priority_policy", policy),
        ("priority_groups", ["A"]),
    ]
    answer = json.loads((await plain.request("$JS.API.CONSUMER.INFO.JOBS.resize")).data)
    assert "priority_groups" not in answer["config"]


async def test_an_ack_wait_that_a_float_cannot_hold_is_right_the_first_time(
    open_stream: OpenStream, plain: NatsClient
) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], {"resize": 2.01})
    async with requests_counted(plain) as requests:
        await stream.ensure(["resize"], {"resize": 2.01})
    assert not [request for request in requests if "CREATE" in request]


async def test_replicas_that_the_server_cannot_keep_are_refused(open_stream: OpenStream) -> None:
    stream = await open_stream(stream_replicas=3)
    with pytest.raises(StreamRefused, match=r"stream JOBS cannot be made; the server says: .*replicas"):
        await stream.ensure([], {})


@pytest.mark.parametrize(("actual", "asked", "changed"), [(1, 3, True), (3, 1, False), (3, 3, False)])
def test_replicas_are_added_and_never_taken_away(actual: int, asked: int, changed: bool) -> None:  # noqa: FBT001 -- a table
    config = stream_config(settings_for("nats://localhost:1", stream_replicas=asked), None)
    differences = stream_differences(replace(config, num_replicas=actual), config)
    assert [each.setting for each in differences] == (["num_replicas"] if changed else [])


async def made_by_hand(jetstream: JetStreamContext, **changes: Any) -> None:
    shape = {"name": "JOBS", "subjects": ["jobs.*"], "retention": "workqueue", "discard": "new"}
    await jetstream.add_stream(**(shape | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"retention": "limits"}, "stream JOBS cannot be used: retention=limits, must be workqueue"),
        ({"storage": "memory"}, "stream JOBS cannot be used: storage=memory, must be file"),
        ({"subjects": ["orders.*"]}, r"stream JOBS cannot be used: subjects=\[orders.*\], must be \[orders"),
    ],
)
async def test_a_stream_of_another_shape_is_refused(
    open_stream: OpenStream, jetstream: JetStreamContext, changes: dict[str, Any], line: str
) -> None:
    await made_by_hand(jetstream, **changes)
    stream = await open_stream()
    before = (await jetstream.stream_info("JOBS")).config
    with pytest.raises(StreamRefused, match=line):
        await stream.ensure(["resize"], WAITS)
    assert (await jetstream.stream_info("JOBS")).config == before


async def test_a_stream_made_by_hand_in_the_same_shape_is_adopted(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    await made_by_hand(jetstream, metadata={"team": "media"}, description="ours")
    stream = await open_stream()
    await stream.ensure(["resize"], WAITS)
    config = (await jetstream.stream_info("JOBS")).config
    assert (config.metadata or {})[INSTALLATION] == str(OWN)
    assert ((config.metadata or {})["team"], config.description) == ("media", "ours")


async def test_the_stream_of_another_installation_is_refused(open_stream: OpenStream) -> None:
    await (await open_stream()).ensure(["resize"], WAITS)
    other = uuid4()
    stream = await open_stream(installation_id=other)
    with pytest.raises(StreamRefused) as caught:
        await stream.ensure(["resize"], WAITS)
    assert str(caught.value) == (
        "stream JOBS belongs to another installation: "
        f"its metadata has {INSTALLATION}={OWN}, this database is {other}; "
        "give this installation its own JSWORKER_STREAM and JSWORKER_SUBJECT_PREFIX"
    )


async def test_who_only_publishes_writes_no_metadata(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    publisher = await open_stream(installation_id=None)
    await publisher.ensure([], {})
    assert INSTALLATION not in ((await jetstream.stream_info("JOBS")).config.metadata or {})
    await (await open_stream()).ensure(["resize"], WAITS)
    await publisher.ensure([], {})
    assert ((await jetstream.stream_info("JOBS")).config.metadata or {})[INSTALLATION] == str(OWN)


async def test_subjects_of_another_stream_are_refused_by_its_name(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    await jetstream.add_stream(name="ORDERS", subjects=["jobs.>"])
    stream = await open_stream()
    with pytest.raises(StreamRefused) as caught:
        await stream.ensure(["resize"], WAITS)
    assert str(caught.value) == (
        "stream JOBS cannot have subjects=[jobs.*]: stream ORDERS overlaps; "
        "give this installation its own JSWORKER_STREAM and JSWORKER_SUBJECT_PREFIX"
    )


async def test_a_new_prefix_is_added_to_the_subjects(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    await (await open_stream()).ensure(["resize"], WAITS)
    stream = await open_stream(subject_prefix="work")
    await stream.ensure(["resize"], WAITS)
    subjects = (await jetstream.stream_info("JOBS")).config.subjects or []
    assert [each for each in subjects if each.count(".") == 1] == ["jobs.*", "work.*"]
    assert (await jetstream.consumer_info("JOBS", "resize")).config.filter_subject == "work.resize"


@pytest.mark.parametrize("edited", ["jobs.resize", "jobs.>", "jobs.*.*"])
async def test_subjects_that_were_edited_are_made_good(
    open_stream: OpenStream, jetstream: JetStreamContext, edited: str
) -> None:
    await (await open_stream()).ensure(["resize"], WAITS)
    config = (await jetstream.stream_info("JOBS")).config
    await jetstream.update_stream(replace(config, subjects=["work.*", edited]))
    await (await open_stream()).ensure(["resize"], WAITS)
    subjects = (await jetstream.stream_info("JOBS")).config.subjects
    assert subjects == ["work.*", "jobs.*", "jobs.*.high", "jobs.*.low"]


async def test_a_consumer_that_cannot_be_changed_is_refused(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure([], {})
    await jetstream.add_consumer(
        "JOBS", name="resize", durable_name="resize", filter_subject="jobs.resize", max_waiting=3
    )
    with pytest.raises(StreamRefused) as caught:
        await stream.ensure(["resize"], WAITS)
    assert str(caught.value) == (
        "consumer resize of stream JOBS cannot be used: max_waiting=3, must be 4096; "
        "delete it, and it is made anew"
    )


async def test_another_consumer_of_the_same_messages_is_refused(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure([], {})
    await jetstream.add_consumer("JOBS", name="all", durable_name="all", filter_subject="jobs.*")
    with pytest.raises(
        StreamRefused, match=r"consumer resize of stream JOBS cannot be made for jobs\.resize"
    ):
        await stream.ensure(["resize"], WAITS)


READER = """authorization {{ users: [
  {{ user: admin, password: admin }}
  {{ user: reader, password: reader, permissions: {{ publish: {{ deny: [{denied}] }} }} }}
] }}"""


@pytest.fixture
async def guarded(start_server: StartServer) -> NatsServer:
    return await start_server(READER.format(denied='"$JS.API.CONSUMER.CREATE.>", "$JS.API.STREAM.UPDATE.>"'))


def url_of(server: NatsServer, user: str) -> str:
    return f"nats://{user}:{user}@{HOST}:{server.port}"


@pytest.mark.parametrize(
    ("ack_wait", "line"),
    [
        (
            310.0,
            (
                "consumer resize of stream JOBS has ack_wait=310 s, must exceed "
                "JSWORKER_STALE_THRESHOLD=300 + 2 × JSWORKER_SCAN_INTERVAL=5"
            ),
        ),
        (
            400.0,
            (
                "consumer resize of stream JOBS cannot be changed: ack_wait=400, must be 600; "
                "the server says: permissions violation for publish to "
                '"$js.api.consumer.create.jobs.resize.jobs.resize"'
            ),
        ),
    ],
)
async def test_an_ack_wait_that_is_too_short_and_cannot_be_changed_is_refused(
    open_stream: OpenStream, guarded: NatsServer, ack_wait: float, line: str
) -> None:
    admin = await open_stream(url=url_of(guarded, "admin"))
    await admin.ensure(["resize"], {"resize": ack_wait})
    reader = await open_stream(url=url_of(guarded, "reader"))
    with pytest.raises(StreamRefused) as caught:
        await reader.ensure(["resize"], WAITS)
    assert str(caught.value) == line


async def test_an_ack_wait_that_is_longer_than_asked_for_does_no_harm(
    open_stream: OpenStream, guarded: NatsServer
) -> None:
    await (await open_stream(url=url_of(guarded, "admin"))).ensure(["resize"], {"resize": 900.0})
    reader = await open_stream(url=url_of(guarded, "reader"))
    await reader.ensure(["resize"], WAITS)
    assert (await reader.consumer_state("resize")).config.ack_wait == 900.0


async def test_a_change_that_is_not_permitted_is_named(open_stream: OpenStream, guarded: NatsServer) -> None:
    admin = await open_stream(url=url_of(guarded, "admin"))
    await made_by_hand(admin.connection.client.jetstream(), max_age=3600.0)
    reader = await open_stream(url=url_of(guarded, "reader"))
    with pytest.raises(StreamRefused) as caught:
        await reader.ensure(["resize"], WAITS)
    assert "max_age=3600, must be 0" in str(caught.value)
    assert 'permissions violation for publish to "$js.api.stream.update.jobs"' in str(caught.value)


async def test_the_state_of_stream_and_consumer(open_stream: OpenStream, jetstream: JetStreamContext) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], WAITS)
    for _ in range(3):
        await jetstream.publish("jobs.resize", b"x", headers={"Nats-Msg-Id": str(uuid4())})
    await jetstream.publish("jobs.resize", b"last", headers={"Nats-Msg-Id": "the last"})
    subscription = await jetstream.pull_subscribe_bind("resize", "JOBS")
    first, _ = await subscription.fetch(2)
    await first.ack_sync()

    async def counted() -> None:  # a little later than acknowledged
        state = await stream.state()
        assert (state.first_seq, state.last_seq, state.messages) == (2, 4, 3)
        consumer = await stream.consumer_state("resize")
        assert (consumer.num_pending, consumer.num_ack_pending) == (2, 1)
        assert consumer.ack_floor is not None
        assert consumer.ack_floor.stream_seq == 1

    await eventually(counted)
    created = (await stream.state()).created
    assert created == (await jetstream.stream_info("JOBS")).created
    assert created.tzinfo is not None
    message = await stream.get(4)
    assert message is not None
    assert (message.subject, message.data) == ("jobs.resize", b"last")
    assert (message.headers or {})["Nats-Msg-Id"] == "the last"
    assert message.time is not None
    assert await stream.get(1) is None
    assert await stream.get(5) is None
    assert await stream.get(0) is None


async def test_the_state_of_what_is_not_there(open_stream: OpenStream) -> None:
    stream = await open_stream()
    with pytest.raises(StreamUnavailable, match="stream JOBS: stream not found"):
        await stream.state()
    await stream.ensure([], {})
    with pytest.raises(StreamUnavailable, match="consumer not found"):
        await stream.consumer_state("resize")


async def test_a_closed_stream_says_so(open_stream: OpenStream) -> None:
    stream = await open_stream()
    await stream.close()
    with pytest.raises(StreamUnavailable, match="there is no connection to NATS"):
        await stream.state()


async def test_a_request_ends_with_the_connection(open_stream: OpenStream, server: NatsServer) -> None:
    stream = await open_stream()
    server.freeze()
    asking = asyncio.create_task(stream.state())
    await asyncio.sleep(0.05)
    await server.stop(signal.SIGKILL)
    with pytest.raises(StreamUnavailable, match="stream JOBS: the connection to NATS was lost"):
        await asking


async def test_ensure_waits_for_a_server_that_is_just_restarted(
    open_stream: OpenStream, server: NatsServer
) -> None:
    stream = await open_stream()
    await server.stop()
    ensuring = asyncio.create_task(stream.ensure(["resize"], WAITS))
    await server.start()
    await ensuring
    assert (await stream.state()).messages == 0


async def test_a_start_waits_for_a_jetstream_that_is_offered_and_silent(
    open_stream: OpenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a cluster elects its leaders: the first request alone goes unanswered here."""
    asked: list[float] = []
    answered = JetStreamApi.stream_info

    async def silent_once(api: JetStreamApi) -> Any:
        asked.append(1.0)
        if len(asked) == 1:
            raise StreamUnavailable("stream JOBS: no answer")
        return await answered(api)

    monkeypatch.setattr(JetStreamApi, "stream_info", silent_once)
    stream = await open_stream()
    assert stream.connected
    await stream.ensure(["resize"], WAITS)
    assert len(asked) > 1
