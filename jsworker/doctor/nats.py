"""Checks of the nats-servers: reachable, recent, with JetStream, acknowledged messages on the disk."""

from collections.abc import Iterator, Mapping
from typing import Final

from jsworker.core.names import printable
from jsworker.doctor.facts import Facts, Found, Learnt, Unknown
from jsworker.doctor.finding import Remark, counted, error, info, listed, ok, seconds, unchecked, warning
from jsworker.doctor.monitoring import ServerConfiguration
from jsworker.stream.diagnostics import NatsServer

_LEAST_VERSION: Final = (2, 10, 0)
_LOSING_VERSIONS: Final = ((2, 10, 20), (2, 10, 22))
_LEAST_PAYLOAD: Final = 8192
_NEARLY_FULL: Final = 0.8
_DEFAULT_SYNC_SECONDS: Final = 120.0
_JEPSEN: Final = (
    "Jepsen saw NATS 2.12.1 lose 131,418 of 930,005 acknowledged messages in a coordinated power failure "
    "(jepsen.io/analyses/nats-2.12.1)"
)
_SYNC_ALWAYS: Final = "Set `sync_interval: always` in the jetstream block of the nats-server's configuration"


def connection(facts: Facts) -> Iterator[Remark]:
    """Whether a server answers at all."""
    if isinstance(facts.nats, Unknown):
        yield error(
            facts.nats.because,
            "Check JSWORKER_NATS_URL and the login (JSWORKER_NATS_…), and that the server runs.",
        )
    else:
        name = f", {printable(facts.nats.name, 60)}" if facts.nats.name else ""
        yield ok(f"NATS at {facts.nats.place}{name} answers")


def version(server: NatsServer) -> Iterator[Remark]:
    """Whether the server has what the stream needs, and is none that lost data."""
    name = ".".join(map(str, server.version))
    if server.version < _LEAST_VERSION:
        yield error(
            f"nats-server {name} is too old: 2.10 has the metadata that pairs a stream with its database",
            "Upgrade the nats-server.",
        )
    elif _LOSING_VERSIONS[0] <= server.version <= _LOSING_VERSIONS[1]:
        yield warning(
            f"nats-server {name}: 2.10.20 to 2.10.22 lost whole streams when their process crashed",
            "Upgrade the nats-server; 2.10.23 has the repair.",
        )
    else:
        yield ok(f"nats-server {name}")


def jetstream(facts: Facts) -> Iterator[Remark]:
    """Whether JetStream is on, and this login may use it."""
    server, account = facts.nats, facts.account
    if isinstance(server, Unknown):
        yield unchecked(server.because)
    elif not isinstance(account, Unknown):
        yield ok("JetStream is on")
    elif "permissions violation" in account.because.lower():
        yield info(
            f"what the account stores could not be read: {printable(account.because, 200)}",
            'Let the login publish to "$JS.API.INFO", if doctor is to see limits.',
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


def encryption(server: NatsServer) -> Iterator[Remark]:
    """Whether anybody on the way can read the login."""
    if server.encrypted or server.local:
        yield ok(
            "the connection uses TLS" if server.encrypted else "the connection does not leave this machine"
        )
    elif server.encrypted is None:
        yield info(
            "whether the connection uses TLS was not learnt", "Ask for it: tls:// in JSWORKER_NATS_URL."
        )
    else:
        yield warning(
            "the connection leaves this machine without TLS: the login can be read on the way",
            "Give the nats-server a certificate, and use tls:// in JSWORKER_NATS_URL.",
        )


def payload(server: NatsServer) -> Iterator[Remark]:
    """Whether the server takes every message of ours."""
    if server.max_payload < _LEAST_PAYLOAD:
        yield warning(
            f"max_payload is {server.max_payload:,} bytes; a message with a long reason may have "
            f"{_LEAST_PAYLOAD:,}",
            "Raise max_payload in the nats-server's configuration.",
        )
    else:
        yield ok(f"messages of up to {server.max_payload:,} bytes are taken")


def storage(facts: Facts) -> Iterator[Remark]:
    """Whether there is room for messages, in the account and on the servers that were asked."""
    places = [
        (f"nats-server {printable(each.name, 60)}", each.stored, each.limit)
        for each in facts.monitoring.values()
        if not isinstance(each, Unknown) and each.limit > 0
    ]
    account = facts.account
    if not isinstance(account, Unknown) and account.limit is not None:
        places.append(("the account", account.stored, account.limit))
    full = [place for place in places if place[1] >= _NEARLY_FULL * place[2]]
    for whose, stored, limit in full:
        uses = f"JetStream of {whose} uses {stored:,} of {limit:,} bytes"
        repair = "Give it more room (max_file_store, or the account's limit), or look what fills it."
        if stored >= limit:
            yield error(f"{uses}: nothing can be published, and jobs are claimed from the table", repair)
        else:
            yield warning(f"{uses}: soon nothing can be published", repair)
    if not full and isinstance(account, Unknown) and not places:
        yield unchecked(account.because)
    elif not full:
        room = f"{account.stored:,} bytes stored" if not isinstance(account, Unknown) else "enough room"
        yield ok(f"{room}, no limit is near")


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
    """Whether an acknowledged message is on the disk; only the monitoring port tells."""
    if not facts.monitoring:
        yield info(
            "how often the nats-server syncs to the disk is not known, it tells that only on its monitoring "
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
        return info(f"{name} does not tell how often it syncs to the disk", f"{_SYNC_ALWAYS}.")
    default = " (the default)" if found.sync_seconds == _DEFAULT_SYNC_SECONDS else ""
    return warning(
        f"{name} syncs every {seconds(found.sync_seconds)}{default}: messages that it acknowledged since are "
        f"lost in a power failure; {_JEPSEN}",
        f"{_SYNC_ALWAYS}. Jobs stay in PostgreSQL all the same: those whose messages are lost start later.",
    )


def _not_asked(
    stream: Learnt[Found], monitoring: Mapping[str, Learnt[ServerConfiguration]]
) -> Iterator[Remark]:
    """Tell of servers of the stream whose monitoring port was not given."""
    asked = {each.name for each in monitoring.values() if not isinstance(each, Unknown)}
    report = None if isinstance(stream, Unknown) else stream.stream
    others = sorted(peer.name for peer in report.peers if peer.name not in asked) if report and asked else []
    if others:
        yield info(
            f"{counted(len(others), 'server')} of the stream not asked: {printable(listed(others), 200)}",
            "Give `--nats-monitoring URL` once for each.",
        )
