import pytest
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.dashboard import dashboard
from jsworker.stream.jetstream import Stream
from tests.dashboard.viewer import Viewer
from tests.worker.conftest import js
from tests.worker.rows import Rows

__all__ = ["js"]


EVIL = "'\"><script>alert(1)</script>"


async def put_aside(rows: Rows, subject: str) -> int:
    found = await rows.query(
        "INSERT INTO jsworker.dead_messages (subject, stream_seq, reason, data, truncated)"
        " VALUES (%s, 7, %s, '{}', false) RETURNING id",
        subject,
        EVIL,
    )
    return int(found[0]["id"])


async def test_replay_and_drop(rows: Rows, settings: Settings, js: JetStreamContext) -> None:
    subject = f"{settings.subject_prefix}.mail"
    good, foreign, other = [await put_aside(rows, each) for each in (subject, "foreign.mail", subject)]
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client))
        page = await viewer.see("/dead-messages")
        assert EVIL in page.text
        question = await viewer.see(f"/dead-messages/replay?id={good}&id={foreign}")
        page = await viewer.press(question, "Replay 2 messages")
        assert f"1 message replayed; 1 left alone: message {foreign} came from" in page.text
        stored = await js.get_last_msg(settings.stream, subject)
        assert stored.data == b"{}"
        question = await viewer.see("/dead-messages/drop?all=yes")
        page = await viewer.press(question, "Drop 2 messages")
        assert "2 messages dropped" in page.text
        assert "There are no dead messages." in page.text
        question = await viewer.see(f"/dead-messages/drop?id={other}")
        assert "1 left alone" in (await viewer.press(question, "Drop")).text
        await viewer.see("/dead-messages/drop", 400)
        await viewer.see("/dead-messages/drop?id=x", 400)
        await viewer.http.aclose()
        done = [(each.action, each.matched, each.changed) for each in await client.audit(limit=3)]
    assert done == [
        ("dead_messages.drop", 1, 0),
        ("dead_messages.drop", 2, 2),
        ("dead_messages.replay", 2, 1),
    ]


async def test_messages_that_come_after_the_question_are_left_alone(viewer: Viewer, rows: Rows) -> None:
    ids = [await put_aside(rows, "foreign.mail") for _ in range(2)]
    question = await viewer.see("/dead-messages/drop?all=yes")
    later = await put_aside(rows, "foreign.mail")
    page = await viewer.press(question, "Drop 2 messages")
    assert "2 messages dropped" in page.text
    assert await rows.query("SELECT id FROM jsworker.dead_messages") == [{"id": later}]
    assert later > max(ids)
    await viewer.press(question, "Drop 2 messages", {"last": "x"}, status=400)


async def test_messages_that_nats_did_not_take_are_left_and_counted(
    rows: Rows, settings: Settings, js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [await put_aside(rows, f"{settings.subject_prefix}.mail") for _ in range(5)]
    publish, published = Stream.publish_raw, 0

    async def publish_two(self: Stream, subject: str, data: bytes) -> None:
        nonlocal published
        if published == 2:
            await self.connection.client.close()
        await publish(self, subject, data)
        published += 1

    monkeypatch.setattr(Stream, "publish_raw", publish_two)
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client))
        page = await viewer.press(await viewer.see("/dead-messages/replay?all=yes"), "Replay 5 messages")
        assert f"2 messages replayed; 3 left alone: message {ids[2]}: stream {settings.stream}: " in page.text
        await viewer.http.aclose()
        [action] = await client.audit()
    assert (action.action, action.matched, action.changed) == ("dead_messages.replay", 5, 2)
    left = await rows.query("SELECT id FROM jsworker.dead_messages ORDER BY id")
    assert [row["id"] for row in left] == ids[2:]
