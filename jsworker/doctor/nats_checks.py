"""Checks of NATS, the stream and its consumers: whether they are as the settings and the protocol require."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from uuid import UUID

from jsworker.core.names import printable
from jsworker.core.settings import Settings
from jsworker.doctor import finding
from jsworker.doctor.finding import Finding, counted, error, info, listed, ok, unchecked, warning
from jsworker.doctor.gather import Facts, Unknown, served_kinds
from jsworker.ownership.queries.job_report import RegisteredWorker
from jsworker.ownership.transitions.republish import Posted
from jsworker.stream.api import MOST_CONSUMERS, lane_at
from jsworker.stream.diagnostics import ConsumerReport, NatsServer, StreamReport
from jsworker.stream.message import lane_of, overlap, subject_of
from jsworker.stream.topology import Difference, prefix_of

_LEAST_VERSION: Final = (2, 10, 0)
_LOSING_VERSIONS: Final = ((2, 10, 20), (2, 10, 22))
_MAY: Final = "Workers whose login may do so"
_FIX: Final = f"{_MAY} change it within a minute; `jsworker doctor --fix` with such a login does it now."
_FIX_UNSERVED: Final = "`jsworker doctor --fix` changes it; no worker that would is alive."
_MAKE_ANEW: Final = (
    "Delete the stream, and a worker or `jsworker doctor --fix` whose login may do so makes it anew (no job "
    "is lost with it)"
)
_FIX_STREAM: Final = "First mend the stream (above)."
_FIX_PAIRING: Final = "Leave it: it belongs to another installation (below)."
_REFUSAL: Final = (
    "If JetStream refuses it, for example for a limit of consumers, the workers' logs have its reason: "
    "worker.degraded."
)
_MADE_AGAIN: Final = (
    f"{_MAY} make it again within a minute; `jsworker doctor --fix` or `jsworker stream ensure KIND` with "
    f"such a login does it now. {_REFUSAL}"
)


def connection(nats: NatsServer) -> Iterator[Finding]:
    """Whether a server answers, has what the stream needs, and is none that lost data."""
    version = ".".join(map(str, nats.version))
    if nats.version < _LEAST_VERSION:
        yield error(
            f"nats-server {version} is too old: 2.10 has the metadata that pairs a stream with its database",
            "Upgrade the nats-server.",
        )
    elif _LOSING_VERSIONS[0] <= nats.version <= _LOSING_VERSIONS[1]:
        yield warning(
            f"nats-server {version}: 2.10.20 to 2.10.22 lost whole streams when their process crashed",
            "Upgrade the nats-server; 2.10.23 has the repair.",
        )
    else:
        name = f", {printable(nats.name, 60)}" if nats.name else ""
        yield ok(f"nats-server {version} at {nats.place}{name} answers")


def encryption(nats: NatsServer) -> Iterator[Finding]:
    """Whether the login can be read on the way."""
    yield finding.encryption(
        encrypted=bool(nats.encrypted),
        local=nats.local,
        readable="the login",
        do="Give the nats-server a certificate, and use tls:// in JSWORKER_NATS_URL.",
    )


def publishing(refused: list[str]) -> Iterator[Finding]:
    """No worker says that its messages are not stored."""
    if refused:
        yield error(
            f"JetStream stores no messages of {counted(len(refused), 'worker')}, "
            f"{printable(listed(refused), 200)}: jobs are claimed from the table",
            "The workers' logs have JetStream's reason, worker.degraded with what=publishing: a full volume, "
            "a limit of the account or of the stream, a cluster without its majority. Once it is gone they "
            "publish again with the next job, and this stays until then; a nats-server whose volume was full "
            "has to be restarted first.",
        )


def liveness(answered_for_unknown_worker: bool) -> Iterator[Finding]:  # noqa: FBT001 -- a fact, given by its name
    """Only workers answer whether they live."""
    if answered_for_unknown_worker:
        yield error(
            "something answers for workers that do not exist: a worker that dies silently is not noticed"
            " before its jobs are stale",
            "Find the stream (`nats stream find --subject 'jsworker.worker.*'`) or service that takes"
            " jsworker.worker.>, and give it other subjects.",
        )


def stream(nats: NatsServer, facts: Facts) -> Iterator[Finding]:
    """Whether JetStream answers, and the stream is there and keeps what it must keep."""
    report, name = facts.stream, facts.settings.stream
    if isinstance(report, Unknown):
        yield _lacking(report) or _silent(report, nats)
        return
    if report is None:
        yield warning(
            f"there is no stream {name}: jobs start late, from the table, until it is made",
            "Run `jsworker doctor --fix`, or start a worker, with a login that may make it.",
        )
        return
    if fixed := [each for each in report.differences if not each.changeable]:
        yield error(
            f"stream {name} cannot be used: {_list(fixed)}",
            f"{_MAKE_ANEW}: `nats stream rm {name}`; or name another one: JSWORKER_STREAM.",
        )
    elif report.differences:
        fix = _fix(served=_served(facts) != []) if _may_be_mended(facts) else _FIX_PAIRING
        yield error(f"stream {name} is not as it must be: {_list(report.differences)}", fix)
    elif report.denies_purge:
        yield warning(
            f"stream {name} has deny_purge, which cannot be taken back: messages that no consumer takes stay"
            " for good",
            f"{_MAKE_ANEW}: `nats stream rm {name}`.",
        )
    elif not report.overlapping:
        messages = counted(report.messages, "message")
        yield ok(f"stream {name} is as it must be: {messages}, {report.bytes:,} bytes")

    if report.overlapping:
        yield warning(
            f"stream {name} cannot have subjects for priorities: stream {printable(report.overlapping, 64)} "
            f"has one that overlaps; messages of high and low jobs go with the normal ones",
            "Give workers and producers of this installation another JSWORKER_SUBJECT_PREFIX, one that no "
            "other installation's prefix begins with, and start them anew.",
        )


def _fix(*, served: bool) -> str:
    return _FIX if served else _FIX_UNSERVED


def _served(facts: Facts) -> list[str] | None:
    """Return the kinds that workers serve; None if that is not known."""
    return None if isinstance(facts.registered, Unknown) else served_kinds(facts.registered)


def pairing(
    stream: StreamReport | None, installation: UUID | None, settings: Settings, posted: Sequence[Posted]
) -> Iterator[Finding]:
    """Whether the stream belongs to this very database, and the messages of its jobs go to this stream."""
    if stream is None:
        yield unchecked("there is no stream")
    elif stream.installation is None:
        yield info(
            "the stream belongs to no database yet", "The first worker that starts claims it for its own."
        )
    elif stream.installation != str(installation):
        other, own = printable(stream.installation, 60), installation or "without an id yet"
        yield error(
            f"stream {settings.stream} belongs to another installation, {other}; this database is {own}",
            "Give this installation a stream and subjects of its own (JSWORKER_STREAM, "
            "JSWORKER_SUBJECT_PREFIX); or, after restoring a database, delete the stream.",
        )
    elif beside := [row for row in posted if stream.created is not None and row.is_beside(stream.created)]:
        kinds = listed(sorted({row.kind for row in beside}))
        yield warning(
            f"messages of {counted(len(beside), 'queued job')} ({printable(kinds, 200)}) went to another "
            f"stream than this {settings.stream}: such jobs start late, from the table",
            "Give all processes that use this database the same JSWORKER_NATS_URL, JSWORKER_STREAM and "
            "JSWORKER_SUBJECT_PREFIX; installations that are to be apart need databases of their own.",
        )
    else:
        yield ok(f"stream and database are both of installation {stream.installation}")


def replicas(stream: StreamReport | None, settings: Settings) -> Iterator[Finding]:
    """Whether the stream survives the loss of a server."""
    if stream is None:
        yield unchecked("there is no stream")
    elif stream.behind:
        copies = counted(stream.replicas, "copy", plural="copies")
        yield warning(
            f"of {copies} of the stream, {len(stream.behind)} away or behind, on "
            f"{printable(listed(stream.behind), 200)}: it needs a majority of them to store messages",
            "Start these nats-servers; remove one that is gone for good: `nats server cluster peer-remove`.",
        )
    elif stream.clustered and stream.replicas == 1:
        yield warning(
            "the stream has one copy in a cluster: while its server is away, jobs start late, from the table",
            "Set JSWORKER_STREAM_REPLICAS=3 for the workers; the next one that starts changes the stream.",
        )
    else:
        copies = counted(stream.replicas, "copy", plural="copies")
        yield ok(f"{copies} of the stream; {settings.stream_replicas} asked for")


def consumers(facts: Facts) -> Iterator[Finding]:
    """Each consumer delivers what it must, as often as it must, and late enough."""
    reports, settings = facts.consumers, facts.settings
    if isinstance(reports, Unknown):
        yield _lacking(reports) or unchecked(reports.because, failed=reports.failed)
        return
    served, may_be_mended = _served(facts), _may_be_mended(facts)
    for report in reports:
        is_served = served is None or lane_of(report.name)[0] in served
        if report.apart and not (served and is_served):
            continue
        if report.takes and not is_served:
            name = printable(report.name, 64)
            yield error(
                f"consumer {name} is none of a kind of jobs, and takes messages of "
                f"{printable(listed(report.takes), 200)}: workers get them late or not at all, and then take "
                "the jobs from the table",
                f"Find out who made it, then delete it: `nats consumer rm {settings.stream} {name}`. "
                f"{_MAY} then make the consumers that they miss within a minute.",
            )
            continue
        fix = _fix(served=is_served) if may_be_mended else _FIX_STREAM
        yield from _of_consumer(report, settings, fix=fix)
    if len(reports) >= MOST_CONSUMERS:
        yield info(
            f"no more than {counted(len(reports), 'consumer')} were looked at; there may be others",
            f"If there are consumers of kinds that are gone: `nats consumer rm {settings.stream} KIND`.",
        )


def _of_consumer(report: ConsumerReport, settings: Settings, *, fix: str) -> Iterator[Finding]:
    name = printable(report.name, 64)
    if report.ack_wait <= settings.stale_threshold + 2 * settings.scan_interval:
        yield error(
            f"consumer {name} has ack_wait={report.ack_wait:g} s, must exceed "
            f"JSWORKER_STALE_THRESHOLD={settings.stale_threshold:g} + 2 × "
            f"JSWORKER_SCAN_INTERVAL={settings.scan_interval:g}: messages of running jobs come again",
            fix,
        )
    # Not ack_wait: a longer one than these settings ask for does no harm.
    bad = [each for each in report.differences if each.setting != "ack_wait"]
    if fixed := [each for each in bad if not each.changeable]:  # workers then change none of its settings
        yield error(
            f"consumer {name} cannot be used: {_list(fixed)}",
            "Delete it, and a worker or `jsworker doctor --fix` whose login may do so makes it anew: "
            f"`nats consumer rm {settings.stream} {name}`.",
        )
    elif bad:
        subjects = [each.actual for each in bad if each.setting == "filter_subject"]
        if subjects and (prefix := prefix_of(subjects[0], report.name)):
            fix += (
                f" If it comes back: other processes have JSWORKER_SUBJECT_PREFIX={printable(prefix, 60)}. "
                "Give all processes that use this database the same."
            )
        yield error(f"consumer {name} is not as it must be: {_list(bad)}", fix)
    if report.paused:
        yield warning(
            f"consumer {name} is paused: its jobs start late, from the table",
            f"`nats consumer resume {settings.stream} {name}`; to hold jobs back, `jsworker pause KIND`.",
        )


def subjects(unconsumed: Mapping[str, int], facts: Facts) -> Iterator[Finding]:
    """Every message has a consumer."""
    kinds, prefix = _served(facts) or [], f"{facts.settings.subject_prefix}."
    served: dict[str, int] = {}
    others: dict[str, int] = {}
    for subject, messages in unconsumed.items():
        lane = lane_at(subject.removeprefix(prefix))
        (others if lane is None or lane[0] not in kinds else served)[subject] = messages
    if served:
        yield warning(
            f"{_without_consumer(served)}, and workers of these kinds are alive: their jobs start late, from "
            "the table",
            _MADE_AGAIN if _may_be_mended(facts) else _FIX_STREAM,
        )
    if others:
        yield warning(
            _without_consumer(others),
            "Run workers for these kinds, or find who publishes there. Workers remove the messages of kinds "
            "without a queued job after an hour or two.",
        )


def _without_consumer(messages: Mapping[str, int]) -> str:
    many, subjects = counted(sum(messages.values()), "message"), counted(len(messages), "subject")
    return f"{many} of {subjects} that no consumer takes: {printable(listed(sorted(messages)), 300)}"


def is_usable(stream: StreamReport | None, installation: UUID | None) -> bool:
    """Return whether workers can create the stream, or change it to what it must be."""
    if stream is None:
        return True
    own = stream.installation in {None, str(installation)}
    return own and all(each.changeable for each in stream.differences)


def _may_be_mended(facts: Facts) -> bool:
    """Return whether workers can correct the stream and its consumers; True if that is not known."""
    stream, installation = facts.stream, facts.installation
    return isinstance(stream, Unknown) or isinstance(installation, Unknown) or is_usable(stream, installation)


def service(
    consumers: list[ConsumerReport], registered: Sequence[RegisteredWorker], facts: Facts
) -> Iterator[Finding]:
    """Every consumer has workers, and every kind of the workers its consumer."""
    makes = _MADE_AGAIN if _may_be_mended(facts) else _FIX_STREAM
    served, empty = served_kinds(registered), list[str]()
    for report in consumers:
        kind = lane_of(report.name)[0]
        if kind in served or report.requests or report.takes or report.apart:
            continue
        name, waiting = printable(report.name, 64), report.pending + report.unanswered
        if not waiting:
            empty.append(name)
            continue
        kind = printable(kind, 64)
        yield warning(
            f"consumer {name} holds {counted(waiting, 'message')}, and no worker of this kind claims jobs",
            f"Run a worker for {kind}, or undrain one; or, if the kind is gone: "
            f"`jsworker cancel --kind {kind}`, then `nats consumer rm {facts.settings.stream} {name}`.",
        )
    if empty:
        yield info(
            f"no message is in {counted(len(empty), 'consumer')} without a live worker: {listed(empty)}",
            "Run workers for these kinds; or, if a kind is gone: "
            f"`nats consumer rm {facts.settings.stream} CONSUMER`.",
        )
    for kind in sorted(set(served) - {report.name for report in consumers}):
        subject = subject_of(facts.settings.subject_prefix, kind)
        takers = [each.name for each in consumers if any(overlap(taken, subject) for taken in each.takes)]
        yield error(
            f"workers for {printable(kind, 64)} are alive, and there is no consumer of this name",
            f"First delete consumer {printable(takers[0], 64)} (above)." if takers else makes,
        )


def _lacking(unknown: Unknown) -> Finding | None:
    because = unknown.because.lower()
    if "permissions violation" not in because:
        return None
    do = "Add that subject to the publish permissions of the login; workers ask there too."
    if "violation for subscription" in because:
        do = (
            "Add JSWORKER_NATS_INBOX_PREFIX, followed by .>, to the subscribe permissions of the login; "
            "answers to workers come there too."
        )
    return error(f"this login lacks a permission: {printable(unknown.because, 300)}", do)


def _silent(unknown: Unknown, nats: NatsServer) -> Finding:
    if nats.offers_jetstream:
        return error(
            f"JetStream does not answer: {printable(unknown.because, 200)}",
            "Enable JetStream for the account of this login, and see that a cluster has its majority.",
        )
    return error(
        f"NATS at {nats.place} has JetStream disabled",
        "Add a jetstream block to its configuration, with store_dir on a disk that stays. If it is a leaf "
        "node, connect to the servers that have the stream.",
    )


def _list(differences: Sequence[Difference]) -> str:
    return printable("; ".join(map(str, differences)), 400)


CHECKS: Final = (
    connection,
    encryption,
    publishing,
    liveness,
    stream,
    pairing,
    replicas,
    consumers,
    subjects,
    service,
)
