"""Checks of the nats-servers, of the stream and of its consumers: as settings and protocol want them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from jsworker.core.names import printable
from jsworker.core.settings import Settings
from jsworker.doctor.finding import Remark, counted, error, info, listed, ok, seconds, unchecked, warning
from jsworker.doctor.gather import Facts, Learnt, Unknown, served_kinds
from jsworker.doctor.monitoring import ServerConfiguration
from jsworker.ownership.queries.job_report import Rows
from jsworker.stream.diagnostics import MOST_CONSUMERS, ConsumerReport, NatsServer, StreamReport
from jsworker.stream.topology import Difference

_LEAST_VERSION: Final = (2, 10, 0)
_LOSING_VERSIONS: Final = ((2, 10, 20), (2, 10, 22))
_DEFAULT_SYNC_SECONDS: Final = 120.0
_JEPSEN: Final = (
    "Jepsen saw NATS 2.12.1 lose 131,418 of 930,005 acknowledged messages in a coordinated power failure "
    "(jepsen.io/analyses/nats-2.12.1)"
)
_FIX: Final = "Workers change it within a minute; `jsworker doctor --fix` does it now."
_SYNC_ALWAYS: Final = "Set `sync_interval: always` in the jetstream block of the nats-server's configuration"


def connection(facts: Facts) -> Iterator[Remark]:
    """Whether a server answers, has what the stream needs, and is none that lost data."""
    if isinstance(facts.nats, Unknown):
        yield error(
            facts.nats.because,
            "Check JSWORKER_NATS_URL and the login (JSWORKER_NATS_…), and that the server runs.",
        )
    else:
        yield answering(facts.nats)


def answering(server: NatsServer) -> Remark:
    """Judge a server that answers."""
    version = ".".join(map(str, server.version))
    if server.version < _LEAST_VERSION:
        return error(
            f"nats-server {version} is too old: 2.10 has the metadata that pairs a stream with its database",
            "Upgrade the nats-server.",
        )
    if _LOSING_VERSIONS[0] <= server.version <= _LOSING_VERSIONS[1]:
        return warning(
            f"nats-server {version}: 2.10.20 to 2.10.22 lost whole streams when their process crashed",
            "Upgrade the nats-server; 2.10.23 has the repair.",
        )
    name = f", {printable(server.name, 60)}" if server.name else ""
    return ok(f"nats-server {version} at {server.place}{name} answers")


def jetstream(facts: Facts) -> Iterator[Remark]:
    """Whether JetStream is on, and this login may use it."""
    server, account = facts.nats, facts.account
    if isinstance(server, Unknown):
        yield unchecked(server.because)
    elif not isinstance(account, Unknown):
        yield ok("JetStream is on")
    elif "permissions violation" in account.because.lower():
        yield info(
            f"whether JetStream answers could not be seen: {printable(account.because, 200)}",
            'Let the login publish to "$JS.API.INFO", if doctor is to see it.',
        )
    elif server.offers_jetstream:
        yield error(
            f"JetStream does not answer: {printable(account.because, 200)}",
            "Enable JetStream for the account of this login, and see that a cluster has its majority.",
        )
    else:
        yield error(
            f"NATS at {server.place} has JetStream disabled",
            "Add a jetstream block to its configuration, with store_dir on a disk that stays.",
        )


def encryption(nats: NatsServer) -> Iterator[Remark]:
    """Whether the login can be read on the way."""
    if nats.encrypted or nats.local:
        yield ok(
            "the connection uses TLS" if nats.encrypted else "the connection does not leave this machine"
        )
    elif nats.encrypted is None:
        yield info(
            "whether the connection uses TLS was not learnt", "Ask for it: tls:// in JSWORKER_NATS_URL."
        )
    else:
        yield warning(
            "the connection leaves this machine without TLS: the login can be read on the way",
            "Give the nats-server a certificate, and use tls:// in JSWORKER_NATS_URL.",
        )


def publishing(refused: list[str]) -> Iterator[Remark]:
    """Whether workers find that their messages are stored."""
    if refused:
        yield error(
            f"JetStream stores no messages of {counted(len(refused), 'worker')}, "
            f"{printable(listed(refused), 200)}: jobs are claimed from the table",
            "The workers' logs have JetStream's reason, worker.degraded with what=publishing: a full volume, "
            "a limit of the account or of the stream. Once it is gone they publish again by themselves; a "
            "nats-server whose volume was full has to be restarted first.",
        )
    else:
        yield ok("no worker says that its messages are not stored")


def sync_interval(facts: Facts) -> Iterator[Remark]:
    """Whether an acknowledged message is on the disk; only the monitoring port shows it."""
    if not facts.monitoring:
        yield info(
            "how often the nats-server syncs to the disk is not known, it shows that only on its monitoring "
            f"port; the default is every 2 minutes, and {_JEPSEN}",
            "Give `--nats-monitoring http://host:8222`, once for each server.",
        )
    for address, configuration in facts.monitoring.items():
        yield _sync_of(address, configuration)
    yield from _not_asked(facts.stream, facts.monitoring)


def _sync_of(address: str, found: Learnt[ServerConfiguration]) -> Remark:
    if isinstance(found, Unknown):
        return warning(
            f"how often a nats-server syncs to the disk is not known: {printable(found.because, 200)}",
            "Enable monitoring (`http: 127.0.0.1:8222`) and give its address as `--nats-monitoring`.",
        )
    name = f"nats-server {printable(found.name, 60)}"
    if not found.jetstream:
        return info(f"{name} ({address}) runs no JetStream", "Ask the servers that keep the stream.")
    if found.sync_always:
        return ok(f"{name} syncs every message before it acknowledges it")
    if found.sync_seconds is None:
        return info(f"{name} does not show how often it syncs to the disk", f"{_SYNC_ALWAYS}.")
    default = " (the default)" if found.sync_seconds == _DEFAULT_SYNC_SECONDS else ""
    return warning(
        f"{name} syncs every {seconds(found.sync_seconds)}{default}: messages that it acknowledged since are "
        f"lost in a power failure; {_JEPSEN}",
        f"{_SYNC_ALWAYS}. Jobs stay in PostgreSQL all the same: those whose messages are lost start later.",
    )


def _not_asked(
    stream: Learnt[StreamReport | None], monitoring: Mapping[str, Learnt[ServerConfiguration]]
) -> Iterator[Remark]:
    asked = {each.name for each in monitoring.values() if not isinstance(each, Unknown)}
    peers = () if isinstance(stream, Unknown) or stream is None else stream.peers
    others = sorted(name for name in peers if name not in asked)
    if asked and others:
        yield info(
            f"{counted(len(others), 'server')} of the stream not asked: {printable(listed(others), 200)}",
            "Give `--nats-monitoring URL` once for each.",
        )


def stream(facts: Facts) -> Iterator[Remark]:
    """Whether the stream is there and keeps what it must keep."""
    report, settings = facts.stream, facts.settings
    if isinstance(report, Unknown):
        yield _unread(report)
        return
    if report is None:
        yield warning(
            f"there is no stream {settings.stream}: jobs start late, from the table, until it is made",
            "Start a worker, which makes it, or run `jsworker doctor --fix`.",
        )
        return
    fixed, changeable = _sorted(report.differences)
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
            f"stream {settings.stream} is as it must be: {counted(report.messages, 'message')}, "
            f"{report.bytes:,} bytes"
        )


def pairing(stream: StreamReport | None, rows: Rows, settings: Settings) -> Iterator[Remark]:
    """Whether the stream belongs to this very database."""
    if stream is None:
        yield unchecked("there is no stream")
        return
    owner, own = stream.installation, rows.installation
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


def replicas(stream: StreamReport | None, settings: Settings) -> Iterator[Remark]:
    """Whether the stream survives the loss of a server."""
    if stream is None:
        yield unchecked("there is no stream")
        return
    behind = [name for name, is_current in stream.peers.items() if not is_current]
    if behind:
        yield warning(
            f"{counted(len(behind), 'copy', plural='copies')} of the stream not current: "
            f"{printable(listed(behind), 200)}",
            "See that these nats-servers run and reach the others.",
        )
    if stream.clustered and stream.replicas == 1:
        yield warning(
            "the stream has one copy in a cluster: while its server is away, jobs start late, from the table",
            "Set JSWORKER_STREAM_REPLICAS=3 for the workers; the next one that starts changes the stream.",
        )
    elif not behind:
        more = (
            f"; {settings.stream_replicas} asked for" if stream.replicas != settings.stream_replicas else ""
        )
        yield ok(f"{counted(stream.replicas, 'copy', plural='copies')} of the stream{more}")


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
    """Whether every message has a consumer."""
    if not unconsumed:
        yield ok("every message has a consumer")
        return
    yield warning(
        f"{counted(sum(unconsumed.values()), 'message')} of {counted(len(unconsumed), 'subject')} that no "
        f"consumer takes: {printable(listed(sorted(unconsumed)), 300)}",
        "Run workers for these kinds, or find who publishes there. Workers remove the messages of kinds "
        "without a queued job after an hour or two.",
    )


def service(consumers: list[ConsumerReport], rows: Rows, settings: Settings) -> Iterator[Remark]:
    """Whether each consumer has workers, and each kind of the workers its consumer."""
    served = served_kinds(rows)
    idle = [report for report in consumers if report.name not in served and not report.requests]
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
    missing = sorted(set(served) - {report.name for report in consumers})
    for kind in missing:
        yield error(
            f"workers for {printable(kind, 64)} are alive, and there is no consumer of this name",
            "Workers make it again within a minute; `jsworker doctor --fix` does it now.",
        )
    if not consumers and not missing:
        yield ok("no consumers yet")
    elif not idle and not missing:
        pending = sum(report.pending for report in consumers)
        yield ok(f"every consumer has workers; {counted(pending, 'message')} wait to be delivered")


def _unread(unknown: Unknown) -> Remark:
    """Return why something could not be read; a missing permission is an error of its own."""
    if "permissions violation" not in unknown.because.lower():
        return unchecked(unknown.because)
    return error(
        f"this login lacks a permission: {printable(unknown.because, 300)}",
        "Add that subject to the publish permissions of the login; workers ask there too.",
    )


def _sorted(differences: Sequence[Difference]) -> tuple[list[Difference], list[Difference]]:
    return [each for each in differences if not each.changeable], [
        each for each in differences if each.changeable
    ]


def _list(differences: Sequence[Difference]) -> str:
    return printable("; ".join(map(str, differences)), 400)
