from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID
from xml.etree import ElementTree as ET

import pytest

from jsworker.client.job_timeline import _ENTRIES, ENDS
from jsworker.dashboard.timeline_picture import timeline_picture, timeline_table
from jsworker.dashboard.timeline_story import MOST_MARKS, MOST_RUNS, Story, job_story
from tests.dashboard import stories
from tests.dashboard.stories import after, event, job


def drawn(story: Story) -> ET.Element:
    """Return the picture as a tree: it must be well formed, and nothing stands outside of it."""
    tree = ET.fromstring(timeline_picture(story))  # noqa: S314 -- our own
    svg = tree.find(".//svg")
    assert svg is not None
    width = float(svg.get("width") or 0)
    for each in svg.iter():
        if (x := each.get("x")) is not None:
            assert 0 <= float(x) <= width
    return tree


def titles(story: Story) -> list[str]:
    return [each.text or "" for each in drawn(story).iter("title")]


def test_a_zombie_is_refused() -> None:
    story = job_story(*stories.zombie())
    first, second = story.runs
    assert (first.worker, first.outcome, first.begin, first.end) == (
        "alpha-0",
        "reset",
        after(0.004),
        after(306),
    )
    assert first.silent_since == after(306 - 15)
    assert (second.worker, second.outcome, second.end) == ("beta-1", "completed", after(371))
    assert [wait.words for wait in story.waits] == ["waited in the queue"] * 2
    shown = titles(story)
    assert any(each.startswith("run 1 by alpha-0: taken back by gamma-2") for each in shown)
    assert any(each.startswith("a late complete by alpha-0 was refused") for each in shown)
    assert "no heartbeat for 15 s" in shown
    classes = [each.get("class") for each in drawn(story).iter("path")]
    assert "timeline-ghost" in classes
    assert "timeline-handover timeline-lost" in classes


def test_every_line_is_in_the_table_in_order() -> None:
    story = job_story(*stories.zombie())
    assert [line.words for line in story.lines] == [
        "enqueued",
        "its last message was stored as number 4711 of the stream",
        "claimed by alpha-0",
        (
            "taken back by gamma-2, because its heartbeats stopped and no process answered for it on NATS; "
            "stall 1"
        ),
        "claimed by beta-1 for attempt 2, after it was taken back: worker alpha-0 fell silent",
        "a late complete by alpha-0 was refused",
        "completed by beta-1",
    ]
    rows = list(ET.fromstring(timeline_table(story)).iter("tr"))  # noqa: S314 -- our own
    assert len(rows) == len(story.lines) + 1


def test_a_claim_after_a_run_that_was_handed_back_says_so() -> None:
    words = [line.words for line in job_story(*stories.retried()).lines]
    again = "claimed by worker-7b9f6c-0 for attempt 2, after it was handed back: the worker stops"
    assert words[words.index("handed back: the worker stops") + 1] == again


def test_milliseconds_and_hours_are_readable_in_one_picture() -> None:
    found, events = stories.retried()
    tree = drawn(job_story(found, events, now=after(20_090)))
    widths = [
        float(each.get("width") or 0) for each in tree.iter("rect") if "timeline-run" in each.get("class", "")
    ]
    assert len(widths) == 4
    assert min(widths) >= 14
    assert "Not to scale" in "".join(tree.itertext())


def test_waits_say_for_what() -> None:
    found, events = stories.retried()
    waits = [(wait.look, wait.words) for wait in job_story(found, events, now=after(20_090)).waits]
    assert waits[:2] == [("scheduled", "waited for its time"), ("queued", "waited in the queue")]
    assert ("scheduled", "waited for its back-off") in waits
    assert ("held", "held: limit") in waits


def test_a_back_off_is_no_first_wait() -> None:
    failed = event(3, "error", 1, "a", "no", errors=1, run_at=after(60).isoformat())
    found = job(
        status="scheduled", fencing_token=1, started_at=after(2), claimed_at=after(2), run_at=after(60)
    )
    waits = [(wait.words, wait.begin, wait.end) for wait in job_story(found, [failed], now=after(9)).waits]
    assert waits == [
        ("waited in the queue", after(0), after(2)),
        ("waited for its back-off", after(3), after(9)),
    ]


def test_a_job_that_is_due_and_not_queued_is_in_no_queue() -> None:
    waits = job_story(job(status="scheduled", run_at=after(60)), [], now=after(90)).waits
    assert [(wait.look, wait.words, wait.begin, wait.end) for wait in waits] == [
        ("scheduled", "waited for its time", after(0), after(60)),
        ("scheduled", "was due, but not queued", after(60), after(90)),
    ]


def test_a_member_of_a_workflow_waits_for_what_it_needs() -> None:
    found = job(
        status="completed", fencing_token=1, batch_id=UUID(int=7), queued_at=after(5), completed_by="a"
    )
    found = replace(found, started_at=after(6), claimed_at=after(6), finished_at=after(7))
    waits = [(wait.look, wait.words) for wait in job_story(found, []).waits]
    assert waits == [("held", "waited for what it needs"), ("queued", "waited in the queue")]


def test_a_run_that_goes_on_shows_its_silence() -> None:
    found, events = stories.retried()
    [*_, last] = job_story(found, events, now=after(20_090)).runs
    assert (last.outcome, last.end, last.silent_since) == ("running", after(20_090), after(20_060))
    [*_, last] = job_story(found, events, now=after(20_062)).runs
    assert last.silent_since is None


def test_a_claim_straight_from_a_silent_owner() -> None:
    found = job(
        status="processing",
        worker_id="beta-1",
        fencing_token=2,
        started_at=after(1),
        claimed_at=after(400),
        last_activity_at=after(400),
        stale_after=timedelta(seconds=300),
    )
    taken = event(
        400, "claimed", 2, "beta-1", attempt=2, owner="alpha-0", cause="stale", counted=True, stalls=1
    )
    first, second = job_story(found, [taken], now=after(401)).runs
    assert (first.worker, first.outcome, first.end) == ("alpha-0", "reset", after(400))
    assert first.words.startswith("run 1 by alpha-0: taken over by beta-1, because its heartbeats stopped")
    assert second.outcome == "running"


def test_hundreds_of_runs_are_bounded() -> None:
    story = job_story(*stories.endless())
    assert len(story.runs) == MOST_RUNS
    assert [story.runs[0].token, story.runs[-1].token] == [1, 300]
    assert story.left_out == 300 - MOST_RUNS
    assert (
        len({each.text for each in drawn(story).iter("text") if each.get("class") == "timeline-name"}) == 11
    )
    assert "276 runs and events are left out here" in timeline_picture(story)
    steps = [event(20 + n / 100, "step", 1, "w", step=f"s{n}") for n in range(900)]
    found = job(
        status="completed", fencing_token=1, started_at=after(1), claimed_at=after(1), finished_at=after(40)
    )
    assert len(job_story(found, steps).marks) == MOST_MARKS + 1
    assert "were read" not in timeline_picture(job_story(found, steps))
    more = [*steps, *(event(35, "step", 1, "w", step=f"more {n}") for n in range(100))]
    assert "Only the last 1,000 entries of the timeline were read." in timeline_picture(
        job_story(found, more)
    )
    assert len(timeline_picture(job_story(found, steps))) < 100_000


def test_of_a_cut_timeline_nothing_is_said_of_what_was_before() -> None:
    events = [
        each
        for token in range(501, 1_001)
        for each in (
            event(token * 10, "claimed", token, "w", attempt=token),
            event(token * 10 + 1, "error", token, "w", "OSError: gone", errors=token),
        )
    ]
    found = job(
        status="queued",
        fencing_token=1_000,
        attempts=1_000,
        errors=1_000,
        started_at=after(10),
        claimed_at=after(10_000),
    )
    story = job_story(found, events)
    assert (story.runs[0].token, story.runs[-1].token) == (501, 1_000)
    assert not [line for line in story.lines if "without a trace" in line.words]
    assert min(wait.begin for wait in story.waits) > after(5_000)


@pytest.mark.parametrize("status", ["queued", "scheduled", "cancelled", "failed", "completed"])
def test_a_job_without_a_timeline(status: str) -> None:
    ended = after(5) if status in {"cancelled", "failed", "completed"} else None
    drawn(job_story(job(status=status, finished_at=ended), [], now=after(5)))


def test_all_at_one_instant() -> None:
    drawn(job_story(job(), [], now=after(0)))


def test_hostile_texts_are_escaped() -> None:
    evil = '"><script>alert(1)</script>\x00\x1b'
    events = [
        event(1, "error", 1, evil, evil, run_at=evil, reason=evil),
        event(2, evil, 2, evil, evil, owner=evil),
        event(3, "fenced", 2, evil, seconds_without_heartbeat=1e308),
        event(4, "held", 2, evil, held_by=evil, key=evil),
    ]
    found = job(
        status="processing",
        worker_id=evil,
        fencing_token=2,
        claimed_at=after(1.5),
        started_at=after(0.5),
        last_activity_at=after(2),
        schedule=evil,
    )
    story = job_story(found, events, now=after(6))
    drawn(story)
    assert "<script" not in timeline_picture(story) + timeline_table(story)


@pytest.mark.parametrize("value", [[], {}, [{"a": 1}], True, float("nan"), None], ids=str)
def test_details_of_any_json_are_drawn(value: Any) -> None:
    found, events = stories.zombie()
    every = {*ENDS, *_ENTRIES, "claimed", "woken", "another"}
    names = "cause reason was failed_for owner run_at until to held_by clear_reason seconds_without_heartbeat"
    hostile = [
        event(300 + token, name, token, "beta-1", **dict.fromkeys(names.split(), value))
        for token, name in enumerate(sorted(every), 1)
    ]
    many = replace(found, fencing_token=len(hostile) + 1)
    for row, entries in ((found, [*events, *hostile]), (many, hostile)):
        story = job_story(row, entries)
        assert len(drawn(story)) > 0
        assert len(story.lines) >= len(entries)


def test_clocks_that_go_back_harm_nothing() -> None:
    events = [event(-50, "error", 1, "a", "no", errors=1), event(-60, "claimed", 2, "a", attempt=2)]
    found = job(
        status="processing",
        worker_id="a",
        fencing_token=2,
        claimed_at=after(-60),
        started_at=after(1),
        last_activity_at=after(-60),
    )
    drawn(job_story(found, events, now=after(-70)))
