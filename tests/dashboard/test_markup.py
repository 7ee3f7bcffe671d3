import json
from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from jsworker.dashboard.live import as_event
from tests.dashboard.conftest import PutJob
from tests.dashboard.test_limit_pages import RUN_SETTINGS
from tests.dashboard.viewer import Viewer
from tests.worker.rows import Rows

CORPUS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</pre></td></table><script src=//evil.example></script>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "data: x\n\nevent: message\ndata: <script>alert(1)</script>",
    "</title><style>*{display:none}</style>",
    "\u202e<b>evil</b>",
    "--><script>alert(1)</script><!--",
)
ALLOWED_SOURCES = ("/static/",)


def line_of(text: str) -> str:
    return "".join(c for c in text if c.isprintable())[:200]


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
async def test_text_of_a_row_is_never_markup(viewer: Viewer, put: PutJob, rows: Rows, text: str) -> None:
    line = line_of(text)
    held: dict[str, Any] = {
        "payload": Jsonb({text: [text]}),
        "checkpoint": Jsonb(text),
        "stage": text,
        "message": text,
        "last_error": text,
        "clear_reason": text,
        "limit_key": line,
        "traceparent": text,
    }
    running = await put("processing", worker_id=line, unique_key=line, **held)
    failed = await put("failed", failure_reason=text, result=Jsonb({"x": text}), **held)
    await rows.query(
        "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token) VALUES (%s, %s, %s, 1)",
        running,
        line,
        Jsonb(text),
    )
    await rows.query(
        "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error, detail)"
        " VALUES (%s, 'rejected', %s, 1, %s, %s), (%s, %s, %s, 1, %s, %s)",
        *(running, text, text, Jsonb({"write": text, text: text})),
        *(running, text, text, text, Jsonb({text: text})),
    )
    await rows.query(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval,"
        " state, limits, kind_settings) VALUES (%s, %s, 7, %s, 3, %s, '1 hour', 'running', %s, %s)",
        *(line, text, [text, "resize"], text, Jsonb({text: {"max_running": 1, "key": text}})),
        Jsonb({"resize": RUN_SETTINGS | {"priority": text, "isolation": text}, text: text}),
    )
    await rows.query(
        "INSERT INTO jsworker.limits (kind, key, paused_at, paused_by, reason)"
        " VALUES ('resize', %s, now(), %s, %s), ('resize', '', now(), %s, %s)",
        *(line, text, text, text, text),
    )
    await rows.query(
        "INSERT INTO jsworker.dead_messages (subject, stream_seq, reason, data, truncated)"
        " VALUES (%s, 7, %s, '{}', false)",
        *(text, text),
    )
    for address in ("/workers", "/kinds", "/keys", "/dead-messages"):
        await shape(viewer, address, running)
    await shape(viewer, "/workers/drain", running, worker=line)
    await shape(viewer, "/kinds/pause", running, kind="resize", key=line)
    addresses = ["/", "/jobs", f"/jobs/{running}", f"/jobs/{failed}", "/failures", f"/jobs/{running}/cancel"]
    plain = await shape(viewer, "/jobs", running)
    for address in addresses:
        await shape(viewer, address, running)
    for name in ("worker", "unique_key", "key", "error"):
        await shape(viewer, "/jobs", running, **{name: line, "status": "processing"})
    assert plain
    # Where it is shown, it is shown as it is, but for characters that would reorder others.
    shown = json.dumps(text, ensure_ascii=False)[1:-1].replace("\u202e", "\\u202e")[:5]
    page = await viewer.see(f"/jobs/{running}")
    assert shown in page.text
    assert "\u202e" not in page.text


async def shape(viewer: Viewer, address: str, running: UUID, **query: str) -> list[str]:
    """Check that a page has no element or attribute but its own, and return its tags."""
    page = await viewer.see(address, **query)
    for tag, found in page.elements:
        assert tag not in {"img", "style", "iframe", "object", "b"}, (address, tag)
        assert tag != "script" or found["src"].startswith(ALLOWED_SOURCES)
        assert not [name for name in found if name.startswith("on") or name == "style"], (address, found)
        for name in ("href", "src", "action", "formaction", "sse-connect"):
            assert found.get(name, "/").startswith(("/", "#")), (address, found)
            assert not found.get(name, "/").startswith("//"), (address, found)
    assert "49" not in [word for word in page.text.split() if "{{" in word]
    return [tag for tag, _ in page.elements]


async def test_a_live_part_is_one_event_whatever_it_holds(viewer: Viewer, put: PutJob) -> None:
    for text in CORPUS:
        event = as_event("live", f"<p>{text.replace('<', '&lt;')}</p>\r\nx")
        first, *lines = event.removesuffix("\n\n").split("\n")
        assert first == "event: live"
        assert all(line.startswith("data: ") for line in lines)
        assert event.count("\n\n") == 1
