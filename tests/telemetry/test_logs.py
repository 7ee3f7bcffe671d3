"""Log lines: one an event, parseable, bounded, and nothing in them that a terminal or parser obeys."""

import io
import json
import logging
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from jsworker.core.events import EVENT_NAMES, Event, EventName, Events
from jsworker.telemetry.log_lines import CLEAR_LINE, LONGEST_TRACEBACK, LONGEST_VALUE
from jsworker.telemetry.logs import (
    bound_facts,
    configure_logs,
    drain_logs,
    level_of,
    log_events,
    own_logger,
    show_line,
)

Format = Literal["json", "console"]
unhurried = settings(deadline=None)  # the machine may be busy
FORGED = 'x\n2026-01-01T00:00:00Z warning job.lost\r\x1b[31m\x00\x7f\x85\u2028\u202e" job_id=1'


@pytest.fixture(autouse=True, scope="module")
def _leave_logging_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in [handler for handler in root.handlers if handler.get_name() == "jsworker"]:
        root.removeHandler(handler)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def start(
    format: Format = "json",  # noqa: A002 -- as configure_logs has it
    level: str = "debug",
    stream: io.StringIO | None = None,
    worker_id: str | None = "pod-0-17-a1",
) -> tuple[Events, io.StringIO]:
    out = stream or io.StringIO()
    configure_logs(format=format, level=level, stream=out)
    events = Events()
    log_events(events, worker_id=worker_id)
    return events, out


def lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def only_line(out: io.StringIO) -> dict[str, Any]:
    (line,) = lines(out)
    found: dict[str, Any] = json.loads(line)
    return found


class TestJson:
    def test_one_line_an_event_with_time_level_name_and_fields(self) -> None:
        events, out = start()
        before = datetime.now(UTC)
        events.emit("job.failed", job_id=UUID(int=7), kind="clone", fencing_token=3, attempt=2, error="boom")
        line = only_line(out)
        assert list(line) == [
            "timestamp",
            "level",
            "event",
            "job_id",
            "kind",
            "fencing_token",
            "worker_id",
            "attempt",
            "error",
        ]
        assert before <= datetime.fromisoformat(line["timestamp"]) <= datetime.now(UTC)
        assert line["timestamp"].endswith("Z")
        assert (line["level"], line["event"], line["error"]) == ("warning", "job.failed", "boom")
        assert (line["job_id"], line["kind"]) == ("00000000-0000-0000-0000-000000000007", "clone")
        assert (line["fencing_token"], line["worker_id"], line["attempt"]) == (3, "pod-0-17-a1", 2)

    def test_an_event_about_another_worker_names_that_one(self) -> None:
        events, out = start()
        events.emit("stale.detected", worker_id="pod-1-9-ff")
        assert only_line(out)["worker_id"] == "pod-1-9-ff"

    def test_values_of_every_type(self) -> None:
        events, out = start()
        events.emit(
            "worker.started",
            kinds=["a", "b"],
            since=datetime(2026, 1, 2, tzinfo=UTC),
            error=ValueError("no\n"),
            wait=float("inf"),
            share=0.5,
            nested={"a\n": {"b": [None, True]}},
            chosen={3},
        )
        line = only_line(out)
        assert line["kinds"] == ["a", "b"]
        assert line["since"] == "2026-01-02T00:00:00+00:00"
        assert line["error"] == r"ValueError: no\n"
        assert (line["wait"], line["share"]) == ("inf", 0.5)
        assert line["nested"] == {r"a\n": {"b": [None, True]}}
        assert line["chosen"] == [3]

    def test_a_field_cannot_pose_as_the_lines_own(self) -> None:
        events, out = start()
        events.emit("job.lost", event="job.completed", level="debug", timestamp="never", exc_info=True)
        line = only_line(out)
        assert (line["event"], line["level"]) == ("job.lost", "warning")
        assert (line["event_"], line["level_"], line["timestamp_"]) == ("job.completed", "debug", "never")
        assert line["exc_info_"] is True

    @unhurried
    @given(st.text(st.characters() | st.sampled_from(FORGED)), st.sampled_from(["json", "console"]))
    def test_any_text_stays_in_its_line(self, text: str, format: Format) -> None:  # noqa: A002 -- as above
        events, out = start(format)
        events.emit("job.error", error=text, parts=[text], more={text: text})
        written = out.getvalue()
        assert written.endswith("\n")
        assert written[:-1].isprintable()
        if format == "json":
            assert json.loads(written)["event"] == "job.error"


class TestConsole:
    def test_a_line_for_people(self) -> None:
        events, out = start("console")
        events.emit(
            "job.error",
            job_id=UUID(int=0xC0FFEE),
            kind="clone",
            fencing_token=7,
            attempt=2,
            seconds=0.123456,
            error="not found: a=b",
            stage=None,
        )
        (line,) = lines(out)
        time, rest = line.split(" ", 1)
        assert re.fullmatch(r"\d\d:\d\d:\d\d", time)
        assert rest == ("warning  clone 00c0ffee attempt failed (attempt=2, seconds=0.123): not found: a=b")

    def test_the_time_is_local(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TZ", "Asia/Kathmandu")  # no whole hour from UTC
        time.tzset()
        try:
            before = datetime.now().astimezone().strftime("%H:%M:%S")
            events, out = start("console")
            events.emit("worker.started")
            after = datetime.now().astimezone().strftime("%H:%M:%S")
        finally:
            monkeypatch.undo()
            time.tzset()
        assert lines(out)[0].split()[0] in {before, after}

    def test_events_are_told_in_words(self) -> None:
        events, out = start("console", worker_id=None)
        events.emit("worker.started", kinds=["clone", "count"])
        events.emit("job.lost", kind="clone")
        events.emit("job.lost", kind="clone", reason="PostgreSQL refused to write its outcome")
        logging.getLogger("my_jobs").info("see job.lost")
        logging.getLogger("my_jobs").info("done.")
        assert [line.split(" ", 1)[1] for line in lines(out)] == [
            "info     worker started (kinds=clone,count)",
            "warning  clone lost: it is another run's by now",
            "warning  clone not settled: PostgreSQL refused to write its outcome",
            "info     see job.lost (logger=my_jobs)",
            "info     done. (logger=my_jobs)",
        ]

    def test_a_traceback_stands_below_and_begins_at_the_users_code(self) -> None:
        _, out = start("console", worker_id=None)
        code = "raise ValueError('a bad\x1b[31m word')"
        try:
            exec(compile(code, "/x/jsworker/worker/pipeline/invocation.py", "exec"))  # noqa: S102 -- the code stands above
        except ValueError:
            logging.getLogger("my_jobs").exception("no good")
        told = lines(out)
        assert told[0].endswith("error    no good (logger=my_jobs)")
        assert told[1] == "  Traceback (most recent call last):"
        assert "test_logs.py" in told[2]
        assert told[-1] == r"  ValueError: a bad\x1b[31m word"

    def test_a_line_that_is_shown_for_a_moment_is_written_over(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        show_line("3 done")
        drain_logs()
        assert capfd.readouterr().err == f"3 done{CLEAR_LINE}\r"
        monkeypatch.setenv("TERM", "xterm")
        events, out = start("console", stream=Terminal())
        events.emit("worker.started")
        assert out.getvalue().startswith(CLEAR_LINE)

    def test_colours_on_a_terminal_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        events, out = start("console", stream=Terminal())
        events.emit("job.lost")
        assert "\x1b[33mwarning \x1b[0m lost" in out.getvalue()
        monkeypatch.setenv("NO_COLOR", "1")
        events, out = start("console", stream=Terminal())
        events.emit("job.lost")
        assert "\x1b" not in out.getvalue().removeprefix(CLEAR_LINE)

    @pytest.mark.parametrize("value", [FORGED, ValueError(FORGED), "a job_id=1", "'", '"', ""])
    def test_a_value_cannot_pose_as_another_field(self, value: Any) -> None:
        events, out = start("console", worker_id=None)
        events.emit("job.error", cause=value)
        (line,) = lines(out)
        quoted = line.partition(" (cause=")[2].removesuffix(")")
        assert re.fullmatch(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", quoted)


class TestControlCharacters:
    @pytest.mark.parametrize("format", ["json", "console"])
    def test_they_are_written_as_escapes(self, format: Format) -> None:  # noqa: A002 -- as above
        events, out = start(format)
        events.emit("job.error", error=FORGED)
        (line,) = lines(out)
        assert line.isprintable()
        assert r"\n2026" in line
        assert r"\x1b[31m" in line

    def test_what_a_reader_of_the_json_prints_is_harmless_too(self) -> None:
        events, out = start()
        events.emit("job.error", error=FORGED)
        assert only_line(out)["error"].isprintable()


class TestLength:
    @pytest.mark.parametrize("format", ["json", "console"])
    @pytest.mark.parametrize(
        "value", ["x" * 5_000, "\x1b" * 5_000, ["x" * 1_500] * 9, {"k": ["x" * 1_500] * 9}, b"x" * 5_000]
    )
    def test_long_values_are_cut(self, format: Format, value: Any) -> None:  # noqa: A002 -- as above
        events, out = start(format)
        events.emit("job.error", error=value)
        (line,) = lines(out)
        shown = json.loads(line)["error"] if format == "json" else line.partition("): ")[2]
        assert len(shown) == LONGEST_VALUE
        assert "…" in shown

    def test_the_longest_value_is_shown_whole(self) -> None:
        events, out = start()
        events.emit("job.error", error="x" * LONGEST_VALUE)
        assert only_line(out)["error"] == "x" * LONGEST_VALUE


class Unwilling:
    """What a job may log by mistake, such as a row whose session is closed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Disguised:
    @property  # type: ignore[misc] # cannot be set
    def __class__(self) -> type:
        raise RuntimeError("no class")


class Uncounted(list[str]):
    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class Unformatted(float):
    def __format__(self, _: str) -> str:
        raise RuntimeError("no format")


def holds_itself() -> dict[str, Any]:
    node: dict[str, Any] = {"name": "a"}
    node["next"] = [node]
    return node


def deep() -> list[Any]:
    tree: list[Any] = []
    for _ in range(5_000):
        tree = [tree]
    return tree


class TestWhatCannotBeShown:
    """It costs a line its value, and the code that logs nothing."""

    @pytest.mark.parametrize("format", ["json", "console"])
    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (holds_itself(), "'name': 'a', 'next': [{'name': 'a'"),
            (deep(), "[[[['…']]]]"),
            (10**5_000, "an integer of 16610 bits"),
            ({"n": [10**5_000]}, "{'n': ['an integer of 16610 bits']}"),
            (Unwilling(), "it cannot be shown: showing it raised RuntimeError"),
            (ValueError(Unwilling()), "it cannot be shown: showing it raised RuntimeError"),
            ({Unwilling()}, "['it cannot be shown: showing it raised RuntimeError']"),
            ({Unwilling(): 1}, "{'it cannot be shown: showing it raised RuntimeError': 1}"),
        ],
        ids=["cycle", "deep", "integer", "integer within", "text", "error", "within", "name"],
    )
    def test_all_else_of_the_line_is_written(
        self,
        format: Format,  # noqa: A002 -- as above
        value: Any,
        shown: str,
    ) -> None:
        _, out = start(format)
        structlog.get_logger().info("by structlog", value=value, other=1)
        logging.getLogger("my_jobs").info("by logging", extra={"value": value, "other": 1})
        for line, event in zip(lines(out), ["by structlog", "by logging"], strict=True):
            if format == "json":
                told = json.loads(line)
                assert (told["event"], told["other"]) == (event, 1)
                assert shown in str(told["value"])
            else:
                assert event in line
                assert "other=1" in line
                assert shown in line

    @pytest.mark.parametrize("format", ["json", "console"])
    @pytest.mark.parametrize("kind", [Unwilling, Disguised, Uncounted, Unformatted])
    def test_a_value_costs_no_line_whatever_its_field(
        self,
        format: Format,  # noqa: A002 -- as above
        kind: type[Any],
    ) -> None:
        _, out = start(format)
        names = ["event", "kind", "job_id", "fencing_token", "worker_id", "attempt", "error", "reason", "at"]
        names += ["level", "timestamp", "exception", "value"]
        for name in names:
            structlog.get_logger().info(**{"event": "by structlog", name: kind(), "other": 1})
            extra: dict[Any, Any] = {f"my_{name}": kind(), Unwilling(): 1}
            logging.getLogger("my_jobs").info("by logging", extra=extra)
        found = lines(out)
        assert len(found) == 2 * len(names)
        assert [line for line in found if "by logging" in line] == found[1::2]
        assert sum("by structlog" in line for line in found) == len(names) - 1  # not where it is the event


class TestLevels:
    @pytest.mark.parametrize(
        ("level", "names"),
        [
            (
                "debug",
                [
                    "job.claimed",
                    "job.started",
                    "job.skipped",
                    "job.snoozed",
                    "job.step",
                    "job.progress",
                    "job.completed",
                    "job.held",
                    "jobs.woken",
                    "schedule.fired",
                    "batch.finished",
                    "isolated.ended",
                ],
            ),
            (
                "info",
                [
                    "worker.started",
                    "worker.drained",
                    "worker.undrained",
                    "worker.draining",
                    "worker.status",
                    "worker.stopped",
                    "worker.restored",
                    "reconcile.completed",
                    "job.released",
                    "job.cleared",
                    "jobs.expired",
                    "jobs.pruned",
                    "job.cancelled",
                    "stream.changed",
                    "limit.changed",
                    "limit.paused",
                    "limit.resumed",
                    "schedule.skipped",
                    "workflow.finished",
                ],
            ),
            (
                "warning",
                [
                    "job.error",
                    "job.stalled",
                    "job.fenced",
                    "job.failed",
                    "job.lost",
                    "message.dead",
                    "message.refused",
                    "message.republished",
                    "database.changed",
                    "heartbeat.failed",
                    "prune.failed",
                    "recovery.off",
                    "row.refused",
                    "schedule.refused",
                    "loop.blocked",
                    "setup.slow",
                    "worker.degraded",
                    "stale.detected",
                    "stale.recovered",
                ],
            ),
            ("error", ["job.stop_ignored"]),
        ],
    )
    def test_what_an_operator_must_know_is_info_and_above(self, level: str, names: list[EventName]) -> None:
        assert {name for name in EVENT_NAMES if level_of(name) == getattr(logging, level.upper())} == set(
            names
        )
        for name in names:
            events, out = start()
            events.emit(name)
            assert (only_line(out)["level"], only_line(out)["event"]) == (level, name)

    def test_an_outage_is_told_by_its_first_failed_heartbeat(self) -> None:
        events, out = start(level="info")
        for outage in ("one", "two"):
            for in_a_row in range(1, 4):
                events.emit("heartbeat.failed", reason=outage, in_a_row=in_a_row)
        told = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [(line["level"], line["reason"]) for line in told] == [("warning", "one"), ("warning", "two")]

    def test_jobs_that_were_taken_back_together_are_told_in_one_line(self) -> None:
        events, out = start(level="info")
        for job_id in range(300):
            events.emit("job.stalled", job_id=str(job_id), counted=False, together=300)
            events.emit("job.cleared", job_id=str(job_id), to="queued", together=300)
        events.emit("stale.recovered", jobs=300, cause="dead", counted=0, to={"queued": 300})
        line = only_line(out)
        assert (line["event"], line["level"], line["jobs"]) == ("stale.recovered", "warning", 300)
        assert (line["counted"], line["to"]) == (0, {"queued": 300})

    def test_a_single_job_keeps_its_own_line(self) -> None:
        events, out = start(level="info")
        events.emit("job.stalled", job_id="1", counted=True, together=1)
        events.emit("stale.recovered", jobs=1, cause="dead", counted=1, to={"queued": 1})
        assert only_line(out)["event"] == "job.stalled"

    @pytest.mark.parametrize(
        ("level", "seen"),
        [
            ("debug", ["job.completed", "worker.started", "job.lost"]),
            ("info", ["worker.started", "job.lost"]),
            ("warning", ["job.lost"]),
            ("error", []),
            ("critical", []),
        ],
    )
    def test_the_level_filters(self, level: str, seen: list[str]) -> None:
        events, out = start(level=level)
        for name in ("job.completed", "worker.started", "job.lost"):
            events.emit(name)
            assert events.wants(name) == (name in seen)  # hot paths build no event for nobody
        assert [json.loads(line)["event"] for line in lines(out)] == seen


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class TestListeners:
    def test_a_listener_that_raises_costs_no_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        out = io.StringIO()
        configure_logs(format="json", level="info", stream=out)
        events = Events()

        def broken(event: Event) -> None:
            raise RuntimeError("boom")

        events.on("*", broken)
        events.on("job.lost", broken)
        log_events(events)
        events.emit("job.lost")
        assert only_line(out)["event"] == "job.lost"
        assert capsys.readouterr().err.count("RuntimeError: boom") == 2

    @pytest.mark.parametrize("stderr", [None, closed()], ids=["none", "closed"])
    def test_without_a_stderr_one_that_raises_harms_nobody(
        self, stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stderr", stderr)
        events = Events()

        def broken(event: Event) -> None:
            raise RuntimeError("boom")

        heard: list[Event] = []
        events.on("job.lost", broken)
        events.on("*", heard.append)
        events.emit("job.lost")
        assert [event.name for event in heard] == ["job.lost"]

    def test_a_stream_that_cannot_be_written_harms_nobody(self, capsys: pytest.CaptureFixture[str]) -> None:
        events, out = start()
        heard: list[Event] = []
        events.on("*", heard.append)
        out.close()
        events.emit("job.lost")
        assert [event.name for event in heard] == ["job.lost"]
        assert "I/O operation on closed file" in capsys.readouterr().err


class TestOtherLibraries:
    @pytest.mark.parametrize("format", ["json", "console"])
    def test_their_warnings_come_in_the_same_form(self, format: Format) -> None:  # noqa: A002 -- as above
        _, out = start(format)
        logging.getLogger("nats.aio.client").warning("lost %s", FORGED)
        (line,) = lines(out)
        assert line.isprintable()
        if format == "json":
            found = json.loads(line)
            assert (found["level"], found["logger"]) == ("warning", "nats.aio.client")
            assert found["event"].startswith(r"lost x\n2026-01-01")
            assert list(found)[:3] == ["timestamp", "level", "event"]
        else:
            assert re.match(r"\S+ warning  lost x\\n2026", line)
            assert line.endswith(" (logger=nats.aio.client)")

    def test_what_a_worker_brings_along_is_quiet_unless_somebody_wants_it(self) -> None:
        _, out = start(level="debug")
        logger = logging.getLogger("nats.aio.client")
        logger.info("chatter")
        logger.setLevel(logging.DEBUG)
        try:
            logger.info("wanted")
        finally:
            logger.setLevel(logging.NOTSET)
        assert only_line(out)["event"] == "wanted"

    def test_psycopg_warns_of_no_statement_that_was_given_up(self) -> None:
        _, out = start(level="info")
        logging.getLogger("psycopg").warning("query cancellation failed: cancellation timeout expired")
        logging.getLogger("psycopg").error("loud")
        assert only_line(out)["event"] == "loud"

    def test_the_level_holds_for_them_too(self) -> None:
        _, out = start(level="error")
        logging.getLogger("nats").warning("quiet")
        logging.getLogger("nats").error("loud")
        assert only_line(out)["event"] == "loud"

    @pytest.mark.parametrize("format", ["json", "console"])
    def test_a_long_traceback_keeps_its_end(
        self,
        format: Format,  # noqa: A002 -- as above
    ) -> None:
        _, out = start(format)
        cause = ValueError("first\n" * 10_000 + "\nthe cause")
        logging.getLogger("nats").error("encountered error", exc_info=cause)
        told = lines(out)
        if format == "json":
            [line] = told
            shown = json.loads(line)["exception"]
            assert len(shown) == LONGEST_TRACEBACK
        else:
            shown = "\n".join(line.removeprefix("  ") for line in told[1:])
            assert len(shown) == LONGEST_TRACEBACK
        assert shown.startswith("…")
        assert shown.endswith("first\n\nthe cause")

    def test_configuring_again_writes_each_line_once(self) -> None:
        _, before = start()
        _, out = start()
        logging.getLogger("nats").warning("once")
        assert only_line(out)["event"] == "once"
        assert before.getvalue() == ""


def test_lines_go_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(format="json", level="info")
    events = Events()
    log_events(events)
    events.emit("worker.started")
    captured = capsys.readouterr()
    assert json.loads(captured.err)["event"] == "worker.started"
    assert captured.out == ""


STAMPED = [structlog.stdlib.add_log_level, structlog.processors.TimeStamper(fmt="%H:%M:%S")]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "generic": {"wrapper_class": structlog.BoundLogger},
    "asynchronous": {"wrapper_class": structlog.stdlib.AsyncBoundLogger},
    "errors only": {"wrapper_class": structlog.make_filtering_bound_logger(logging.ERROR)},
    "logging": {
        "processors": [*STAMPED, structlog.processors.JSONRenderer()],
        "wrapper_class": structlog.stdlib.BoundLogger,
        "logger_factory": structlog.stdlib.LoggerFactory(),
        "cache_logger_on_first_use": True,
    },
    "formatter": {
        "processors": [structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        "wrapper_class": structlog.stdlib.BoundLogger,
        "logger_factory": structlog.stdlib.LoggerFactory(),
    },
}
"""What users give to ``structlog.configure``, as structlog's own documentation shows it."""


@pytest.fixture
def configured(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """The log lines of a process in which user code has configured structlog."""
    _, out = start(level="info")
    structlog.configure(**CONFIGURATIONS[request.param])
    yield out
    structlog.reset_defaults()


class TestStructlog:
    """What users' code does with structlog."""

    @pytest.mark.parametrize("configured", CONFIGURATIONS, indirect=True)
    def test_no_configuration_changes_the_lines_of_jsworker(self, configured: io.StringIO) -> None:
        events = Events()
        log_events(events, worker_id="pod-0-17-a1")
        events.emit("worker.started", kinds=["clone"])
        own_logger().warning("setting.unknown", reason="no such setting")
        started, unknown = map(json.loads, lines(configured))
        facts = {"event": "worker.started", "worker_id": "pod-0-17-a1", "kinds": ["clone"], "level": "info"}
        assert started == {"timestamp": started["timestamp"], **facts}
        assert datetime.fromisoformat(started["timestamp"]).tzinfo == UTC
        assert (unknown["event"], unknown["reason"]) == ("setting.unknown", "no such setting")

    @pytest.mark.parametrize("format", ["json", "console"])
    def test_lines_rendered_by_the_handler_are_whole(
        self,
        format: Format,  # noqa: A002 -- as above
    ) -> None:
        _, out = start(format)
        structlog.configure(**CONFIGURATIONS["formatter"])
        bound = bound_facts.set(lambda: {"job_id": "4711", "kind": "clone", "attempt": 2})
        try:
            structlog.get_logger().warning("cloning", repository="x/y")
        finally:
            bound_facts.reset(bound)
            structlog.reset_defaults()
        (line,) = lines(out)
        if format == "json":
            told = json.loads(line)
            names = ("level", "event", "job_id", "kind", "attempt", "repository")
            assert [told[name] for name in names] == ["warning", "cloning", "4711", "clone", 2, "x/y"]
        else:
            assert re.fullmatch(r"[\d:]{8} warning  clone 4711 cloning \(.*repository=x/y.*\)", line)

    def test_context_variables_are_in_the_lines_of_users_only_and_replace_no_facts(self) -> None:
        events, out = start()
        bound = bound_facts.set(lambda: {"job_id": "4711"})
        try:
            with structlog.contextvars.bound_contextvars(request_id="r1", job_id="forged"):
                structlog.get_logger().info("by structlog")
                logging.getLogger("my_jobs").info("by logging")
                events.emit("worker.started")
        finally:
            bound_facts.reset(bound)
        told = [json.loads(line) for line in lines(out)]
        assert [(line["job_id"], line.get("request_id")) for line in told] == [
            ("4711", "r1"),
            ("4711", "r1"),
            ("4711", None),
        ]


class TestProcessors:
    """What users' code logs through ``logging``."""

    @pytest.mark.parametrize(("level", "seen"), [("debug", 2), ("info", 1), ("warning", 0)])
    def test_the_level_is_the_setting(self, level: str, seen: int) -> None:
        _, out = start(level=level)
        logging.getLogger("my_jobs").debug("in detail")
        logging.getLogger("my_jobs").info("in short")
        assert len(lines(out)) == seen

    def test_lines_name_the_job_and_hold_what_is_given_as_extra(self) -> None:
        _, out = start()
        bound = bound_facts.set(lambda: {"job_id": "4711", "kind": "clone", "attempt": 2})
        try:
            logging.getLogger("my_jobs").info("cloning", extra={"repository": "x/y", "event": "forged"})
        finally:
            bound_facts.reset(bound)
        line = only_line(out)
        assert (line["job_id"], line["kind"], line["attempt"]) == ("4711", "clone", 2)
        assert (line["logger"], line["repository"], line["worker_id"]) == ("my_jobs", "x/y", "pod-0-17-a1")
        assert (line["event"], line["event_"]) == ("cloning", "forged")

    def test_a_traceback_in_json_keeps_its_lines(self) -> None:
        _, out = start()
        try:
            json.loads("{")
        except ValueError:
            logging.getLogger("my_jobs").exception("no good")
        line = only_line(out)
        assert line["exception"].startswith("Traceback (most recent call last):\n  File ")
        assert "\\n" not in line["exception"]

    def test_an_event_with_an_exception_names_its_place(self) -> None:
        events, out = start()
        try:
            json.loads("{")
        except ValueError as error:
            events.emit("job.error", error, error="ValueError: boom")
        place = only_line(out)["at"]
        assert re.fullmatch(r".*test_logs\.py, line \d+", place)
