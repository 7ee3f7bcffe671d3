import pytest
from nats.js import JetStreamContext

from jsworker.client import JobClient
from jsworker.core.settings import Settings
from tests.dashboard.browsing import EVIL, browsing
from tests.worker.rows import Rows

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


async def put_aside(rows: Rows, subject: str) -> int:
    found = await rows.query(
        "INSERT INTO jsworker.dead_messages (subject, stream_seq, reason, data, truncated)"
        " VALUES (%s, 7, %s, '{}', false) RETURNING id",
        subject,
        EVIL,
    )
    return int(found[0]["id"])


async def test_replay_and_drop(
    client: JobClient, rows: Rows, settings: Settings, js: JetStreamContext
) -> None:
    good, foreign, other = [
        await put_aside(rows, subject)
        for subject in (f"{settings.subject_prefix}.mail", "foreign.mail", f"{settings.subject_prefix}.mail")
    ]
    async with browsing(client) as browser:
        page = await browser.page("/dead-messages")
        assert "not" in page.text
        page = await browser.act(f"/dead-messages/replay?id={good}&id={foreign}")
        assert (
            f"1 message replayed; 1 refused: message {foreign} came from subject 'foreign.mail'" in page.text
        )
        stored = await js.get_last_msg(settings.stream, f"{settings.subject_prefix}.mail")
        assert stored.data == b"{}"
        question = await browser.page("/dead-messages/drop?all=yes")
        assert "Drop 2 messages?" in question.text
        page = await browser.answer(question, "/dead-messages/drop")
        assert "2 messages dropped" in page.text
        assert "There are no dead messages." in page.text
        assert (await browser.act(f"/dead-messages/drop?id={other}")).text.count("1 refused") == 1
        await browser.page("/dead-messages/drop", 400)
        await browser.page("/dead-messages/drop?id=x", 400)
    done = [(each.action, each.matched, each.changed) for each in await client.audit(limit=3)]
    assert done == [
        ("dead_messages.drop", 1, 0),
        ("dead_messages.drop", 2, 2),
        ("dead_messages.replay", 2, 1),
    ]
