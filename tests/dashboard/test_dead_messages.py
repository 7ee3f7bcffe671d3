from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.dashboard import dashboard
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
        assert f"1 message replayed; 1 refused: message {foreign} came from" in page.text
        stored = await js.get_last_msg(settings.stream, subject)
        assert stored.data == b"{}"
        question = await viewer.see("/dead-messages/drop?all=yes")
        page = await viewer.press(question, "Drop 2 messages")
        assert "2 messages dropped" in page.text
        assert "There are no dead messages." in page.text
        question = await viewer.see(f"/dead-messages/drop?id={other}")
        assert "1 refused" in (await viewer.press(question, "Drop")).text
        await viewer.see("/dead-messages/drop", 400)
        await viewer.see("/dead-messages/drop?id=x", 400)
        await viewer.http.aclose()
        done = [(each.action, each.matched, each.changed) for each in await client.audit(limit=3)]
    assert done == [
        ("dead_messages.drop", 1, 0),
        ("dead_messages.drop", 2, 2),
        ("dead_messages.replay", 2, 1),
    ]
