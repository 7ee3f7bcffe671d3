"""Checks of the stream and its consumers: as the settings and the protocol want them, ours, and served."""

from collections.abc import Iterator, Mapping, Sequence

from jsworker.core.names import printable
from jsworker.core.settings import Settings
from jsworker.doctor.facts import Facts, Found, Unknown
from jsworker.doctor.finding import Remark, counted, error, info, listed, ok, unchecked, warning
from jsworker.ownership.queries.job_report import Rows
from jsworker.stream.diagnostics import MOST_CONSUMERS, ConsumerReport
from jsworker.stream.topology import Difference

_FIX = "Workers change it within a minute; `jsworker doctor --fix` does it now."


def shape(facts: Facts) -> Iterator[Remark]:
    """Whether the stream is there and keeps what it must keep."""
    stream, settings = facts.stream, facts.settings
    if isinstance(stream, Unknown):
        yield _unread(stream)
        return
    if stream.stream is None:
        yield warning(
            f"there is no stream {settings.stream}: jobs start late, from the table, until it is made",
            "Start a worker, which makes it, or run `jsworker doctor --fix`.",
        )
        return
    fixed, changeable = _sorted(stream.stream.differences)
    if fixed:
        yield error(
            f"stream {settings.stream} cannot be used: {_list(fixed)}",
            f"Delete the stream, and a worker makes it anew (no job is lost with it): `nats stream rm "
            f"{settings.stream}`; or name another one: JSWORKER_STREAM.",
        )
    elif changeable:
        yield error(f"stream {settings.stream} is not as it must be: {_list(changeable)}", _FIX)
    if not fixed and not changeable:
        yield ok(
            f"stream {settings.stream} is as it must be: {counted(stream.stream.messages, 'message')}, "
            f"{stream.stream.bytes:,} bytes"
        )


def pairing(stream: Found, rows: Rows, settings: Settings) -> Iterator[Remark]:
    """Whether the stream belongs to this very database."""
    if stream.stream is None:
        yield unchecked("there is no stream")
        return
    owner, own = stream.stream.installation, rows.installation
    if owner is None:
        yield info(
            "the stream belongs to no database yet", "The first worker that starts claims it for its own."
        )
    elif owner == str(own):
        yield ok(f"stream and database are both of installation {owner}")
    else:
        yield error(
            f"stream {settings.stream} belongs to another installation, {printable(owner, 60)}; "
            f"this database is {own or 'without an id yet'}",
            "Give this installation a stream and subjects of its own (JSWORKER_STREAM, "
            "JSWORKER_SUBJECT_PREFIX); or, after restoring a database, delete the stream.",
        )


def replicas(stream: Found, settings: Settings) -> Iterator[Remark]:
    """Whether the stream survives the loss of a server."""
    report = stream.stream
    if report is None:
        yield unchecked("there is no stream")
        return
    behind = [peer.name for peer in report.peers if not peer.current]
    if behind:
        yield warning(
            f"{counted(len(behind), 'copy', plural='copies')} of the stream not current: "
            f"{printable(listed(behind), 200)}",
            "See that these nats-servers run and reach the others.",
        )
    if report.clustered and report.replicas == 1:
        yield warning(
            "the stream has one copy in a cluster: while its server is away, jobs start late, from the table",
            "Set JSWORKER_STREAM_REPLICAS=3 for the workers; the next one that starts changes the stream.",
        )
    elif report.replicas % 2 == 0:
        yield info(
            f"{report.replicas} copies survive the loss of no more servers than {report.replicas - 1} do",
            f"Set JSWORKER_STREAM_REPLICAS={report.replicas + 1}: workers add copies, and take none away.",
        )
    elif not behind:
        more = (
            f"; {settings.stream_replicas} asked for" if report.replicas != settings.stream_replicas else ""
        )
        yield ok(f"{counted(report.replicas, 'copy', plural='copies')} of the stream{more}")


def consumers(facts: Facts) -> Iterator[Remark]:
    """Whether each consumer delivers what it must, as often as it must, and late enough."""
    reports, settings = facts.consumers, facts.settings
    if isinstance(reports, Unknown):
        yield _unread(reports)
        return
    least = settings.stale_threshold + 2 * settings.scan_interval
    sound = True
    for report in reports:
        # A consumer that waits longer than these settings ask for does no harm.
        bad = [each for each in report.differences if each.setting != "ack_wait"]
        fixed, changeable = _sorted(bad)
        name = printable(report.name, 64)
        if report.ack_wait <= least:
            sound = False
            yield error(
                f"consumer {name} has ack_wait={report.ack_wait:g} s, must exceed "
                f"JSWORKER_STALE_THRESHOLD={settings.stale_threshold:g} + 2 × "
                f"JSWORKER_SCAN_INTERVAL={settings.scan_interval:g}: messages of running jobs come again",
                _FIX,
            )
        if fixed:  # nothing else of it is changed then
            sound = False
            yield error(
                f"consumer {name} cannot be used: {_list(fixed)}",
                f"Delete it, and a worker makes it anew: `nats consumer rm {settings.stream} {name}`.",
            )
        elif changeable:
            sound = False
            yield error(f"consumer {name} is not as it must be: {_list(changeable)}", _FIX)
        if report.paused:
            sound = False
            yield warning(f"consumer {name} is paused", f"`nats consumer resume {settings.stream} {name}`")
    if len(reports) >= MOST_CONSUMERS:
        yield info(
            f"no more than {counted(len(reports), 'consumer')} were looked at; there may be others",
            f"If there are consumers of kinds that are gone: `nats consumer rm {settings.stream} KIND`.",
        )
    if sound:
        yield ok(f"{counted(len(reports), 'consumer')} as they must be" if reports else "no consumers yet")


def subjects(unconsumed: Mapping[str, int]) -> Iterator[Remark]:
    """Whether somebody takes every message."""
    if not unconsumed:
        yield ok("every message has a consumer")
        return
    yield warning(
        f"{counted(sum(unconsumed.values()), 'message')} of {counted(len(unconsumed), 'subject')} that no "
        f"consumer takes: {printable(listed(sorted(unconsumed)), 300)}",
        "Run workers for these kinds, or find who publishes there. Workers remove the messages of kinds "
        "without a queued job after an hour or two.",
    )


def service(reports: list[ConsumerReport], rows: Rows, settings: Settings) -> Iterator[Remark]:
    """Whether each consumer has workers, and each kind of the workers its consumer."""
    served = {kind for worker in rows.workers if worker.alive for kind in worker.kinds}
    idle = [report for report in reports if report.name not in served and not report.requests]
    for report in idle:
        waiting = report.pending + report.unanswered
        name = printable(report.name, 64)
        if waiting:
            yield warning(
                f"consumer {name} holds {counted(waiting, 'message')}, and no worker of this kind is alive",
                f"Run a worker for {name}; or, if the kind is gone: `jsworker cancel --kind {name}`, then "
                f"`nats consumer rm {settings.stream} {name}`.",
            )
        else:
            yield info(
                f"consumer {name} is empty, and no worker of this kind is alive",
                f"If the kind is gone: `nats consumer rm {settings.stream} {name}`.",
            )
    missing = sorted(served - {report.name for report in reports})
    for kind in missing:
        yield error(
            f"workers for {printable(kind, 64)} are alive, and there is no consumer of this name",
            "Workers make it again within a minute; `jsworker doctor --fix` does it now.",
        )
    if not reports and not missing:
        yield ok("no consumers yet")
    elif not idle and not missing:
        pending = sum(report.pending for report in reports)
        yield ok(f"every consumer has workers; {counted(pending, 'message')} wait to be delivered")


def _unread(unknown: Unknown) -> Remark:
    """Tell why something could not be read; a missing permission is an error of its own."""
    if "permissions violation" not in unknown.because.lower():
        return unchecked(unknown.because)
    return error(
        f"this login lacks a permission: {printable(unknown.because, 300)}",
        "Add that subject to the publish permissions of the login; workers ask there too.",
    )


def _sorted(differences: Sequence[Difference]) -> tuple[list[Difference], list[Difference]]:
    """Return what the server cannot change, and what it can."""
    return [each for each in differences if not each.changeable], [
        each for each in differences if each.changeable
    ]


def _list(differences: Sequence[Difference]) -> str:
    return printable("; ".join(map(str, differences)), 400)
