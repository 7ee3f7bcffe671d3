"""Subjects and consumers of priorities: made, added to older streams, done without where they cannot be."""

from dataclasses import replace
from uuid import uuid4

import pytest
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from jsworker.core.priorities import HIGH, LOW, NORMAL
from jsworker.stream.api import lane_at
from jsworker.stream.message import WireMessage, consumer_of, lane_of, subject_of
from jsworker.stream.topology import stream_config
from tests.stream.conftest import OpenStream, StartServer
from tests.stream.nats_server import NatsServer
from tests.stream.streams import INSTALLATION, settings_for
from tests.stream.test_topology import url_of
from tests.support.polling import eventually

READER = """authorization {{ users: [
  {{ user: admin, password: admin }}
  {{ user: reader, password: reader, permissions: {{ publish: {{ deny: [{denied}] }} }} }}
] }}"""


def older_stream() -> StreamConfig:
    """Return the stream as an older version makes it."""
    return replace(stream_config(settings_for("nats://localhost:1"), INSTALLATION), subjects=["jobs.*"])


@pytest.fixture
def jetstream(plain: NatsClient) -> JetStreamContext:
    return plain.jetstream()


@pytest.mark.parametrize(
    ("priority", "subject", "consumer"),
    [
        (HIGH, "jobs.resize.high", "resize=high"),
        (NORMAL, "jobs.resize", "resize"),
        (LOW, "jobs.resize.low", "resize=low"),
    ],
)
def test_names_of_a_lane(priority: int, subject: str, consumer: str) -> None:
    assert subject_of("jobs", "resize", priority) == subject
    assert consumer_of("resize", priority) == consumer
    assert lane_of(consumer) == ("resize", priority)
    assert lane_at(subject.removeprefix("jobs.")) == ("resize", priority)


@pytest.mark.parametrize("name", ["resize-high", "high", "=high", "a=urgent", "a=normal=x", "="])
def test_other_names_are_those_of_kinds(name: str) -> None:
    assert lane_of(name) == (name, NORMAL)


@pytest.mark.parametrize("place", ["resize.urgent", "resize.normal", "a.b.high", "resize."])
def test_other_places_are_nobodys(place: str) -> None:
    assert lane_at(place) is None


async def test_messages_go_to_the_lane_of_their_priority(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    stream = await open_stream()
    await stream.ensure(["resize", "resize=high"])
    messages = [WireMessage(uuid4(), "resize", 1, priority=priority) for priority in (HIGH, NORMAL, LOW)]
    await stream.publish_many(messages)

    async def each_has_one() -> None:  # the server counts them a little later than it acknowledges them
        for name, subject in (("resize", "jobs.resize"), ("resize=high", "jobs.resize.high")):
            info = await jetstream.consumer_info("JOBS", name)
            assert (info.config.filter_subject, info.num_pending) == (subject, 1)

    await eventually(each_has_one)
    assert await stream.unconsumed() == {"resize.low": 1}
    await stream.remove("resize.low", up_to=3)
    assert await stream.unconsumed() == {}
    assert (await stream.state()).messages == 2


async def test_the_stream_of_an_older_version_gets_the_subjects(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    await jetstream.add_stream(older_stream())
    stream = await open_stream()
    await stream.ensure(["resize"])
    config = (await jetstream.stream_info("JOBS")).config
    assert config.subjects == ["jobs.*", "jobs.*.high", "jobs.*.low"]
    await stream.publish_many([WireMessage(uuid4(), "resize", 1, priority=HIGH)])
    assert (await jetstream.get_msg("JOBS", 1)).subject == "jobs.resize.high"


async def test_who_may_not_change_the_stream_publishes_beside_the_normal_jobs(
    start_server: StartServer, open_stream: OpenStream
) -> None:
    server: NatsServer = await start_server(READER.format(denied='"$JS.API.STREAM.UPDATE.>"'))
    admin = await open_stream(url=url_of(server, "admin"))
    await admin.connection.client.jetstream().add_stream(older_stream())
    reader = await open_stream(url=url_of(server, "reader"))
    for _ in range(2):
        await reader.ensure(["resize"])
    await reader.publish_many([WireMessage(uuid4(), "resize", 1, priority=HIGH)])
    message = await reader.get(1)
    assert message is not None
    assert message.subject == "jobs.resize"
    assert "cannot be changed: subjects=[jobs.*]" in (reader.lacks_lanes_because or "")
    await admin.ensure([])  # an operator's login may
    await reader.ensure([])
    assert reader.lacks_lanes_because is None
    await reader.publish_many([WireMessage(uuid4(), "resize", 1, priority=LOW)])
    message = await reader.get(2)
    assert message is not None
    assert message.subject == "jobs.resize.low"


async def test_another_stream_has_the_subjects_of_the_lanes(
    open_stream: OpenStream, jetstream: JetStreamContext
) -> None:
    """As that of an installation whose prefix begins with this one's: neither stands in the other's way."""
    await jetstream.add_stream(name="OTHER", subjects=["jobs.eu.*"])
    stream = await open_stream()
    await stream.ensure(["resize"])
    assert (await jetstream.stream_info("JOBS")).config.subjects == ["jobs.*"]
    await stream.publish_many([WireMessage(uuid4(), "resize", 1, priority=HIGH)])
    assert (await jetstream.get_msg("JOBS", 1)).subject == "jobs.resize"
    again = await open_stream()
    await again.ensure(["resize"])
    for each in (stream, again):
        assert each.lacks_lanes_because == (
            "stream JOBS cannot have subjects=[jobs.*.high, jobs.*.low]: stream OTHER overlaps; "
            "give this installation its own JSWORKER_STREAM and JSWORKER_SUBJECT_PREFIX"
        )
