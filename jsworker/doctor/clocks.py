"""Checks of the clocks. No decision about a job compares two of them: a wrong one misleads people first."""

from collections.abc import Iterator
from typing import Final

from jsworker.doctor.facts import Facts, Unknown
from jsworker.doctor.finding import Remark, info, ok, seconds, warning
from jsworker.ownership.queries.server_report import Clock

_MUCH_SECONDS: Final = 2.0
_DO: Final = "Let a time service (chrony, systemd-timesyncd) keep the clocks of all machines."


def database(clock: Clock) -> Iterator[Remark]:
    """The database's clock beside this machine's: ages that commands show compare the two."""
    yield _judged(
        "PostgreSQL's", clock.ahead, clock.within, "ages that commands show, and logs, are off by it"
    )


def stream_server(facts: Facts) -> Iterator[Remark]:
    """The nats-server's clock beside this machine's: how old a message is compares the two."""
    consequence = "a message that comes before its job's row is given up too early or too late"
    stream = None if isinstance(facts.stream, Unknown) else facts.stream.stream
    if stream is not None and stream.ahead is not None:
        yield _judged("the nats-server's", stream.ahead, stream.within, consequence)
        return
    told = [each for each in facts.monitoring.values() if not isinstance(each, Unknown)]
    for each in told:
        if each.ahead is not None:
            yield _judged(f"nats-server {each.name}'s", each.ahead, 0.0, consequence)
    if not told:
        yield info(
            "the nats-server's clock was not learnt: it comes with the stream, or from the monitoring port",
            "Give `--nats-monitoring URL`.",
        )


def _judged(whose: str, ahead: float, within: float, consequence: str) -> Remark:
    apart = max(abs(ahead) - within, 0.0)
    direction = "ahead of" if ahead > 0 else "behind"
    if apart >= _MUCH_SECONDS:
        return warning(f"{whose} clock is {seconds(apart)} {direction} this machine's: {consequence}", _DO)
    return ok(f"{whose} clock and this machine's are less than {seconds(apart + 0.1)} apart")
