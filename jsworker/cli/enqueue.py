"""``jsworker enqueue``: jobs from the shell."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jsworker.cli.failures import WrongUsage
from jsworker.cli.options import new_app
from jsworker.cli.output import print_json, print_line
from jsworker.cli.remarks import tell
from jsworker.client import Enqueued, JobClient
from jsworker.client.enqueueing import LONGEST_DELAY, Kind
from jsworker.core import strict_json
from jsworker.core.names import check_kind, shown
from jsworker.core.targets import load_processor_class

_BATCH = 10_000
_LARGE_COUNT = 20_000
_MOST_JOBS = 10_000_000

_Attempts = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000, metavar="N", help="Instead of the processor's own.", show_default=False
    ),
]
_Stalls = Annotated[
    int | None,
    typer.Option(min=1, max=100, metavar="N", help="Instead of the processor's own.", show_default=False),
]

app = new_app()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What shall be enqueued, and how often."""

    kind: Kind
    payload: Any
    count: int
    options: dict[str, Any]


@app.command()
def enqueue(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="The jobs' kind, or MODULE:CLASS of its processor.", show_default=False
        ),
    ],
    *,
    payload: Annotated[
        str, typer.Option(metavar="JSON", help="What the processor gets; @FILE reads a file, - reads stdin.")
    ] = "{}",
    count: Annotated[int, typer.Option(min=1, max=_MOST_JOBS, metavar="N", help="So many equal jobs.")] = 1,
    delay: Annotated[
        float, typer.Option(metavar="SECONDS", help="The jobs are due only then.", show_default=False)
    ] = 0.0,
    unique_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="At most one live job of the kind has it.", show_default=False),
    ] = None,
    max_attempts: _Attempts = None,
    max_stalls: _Stalls = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print an array of {id, created}.", show_default=False)
    ] = False,
) -> None:
    """Enqueue jobs and print their ids, one a line.

    With MODULE:CLASS the payload is checked by the processor's own type. When a live job has the unique key
    already, nothing is enqueued and that job's id is printed. When NATS cannot be reached, the jobs are
    stored all the same, and a worker publishes them.
    """
    if unique_key is not None and count > 1:
        raise WrongUsage(
            f"--unique-key cannot be shared by --count {count} jobs: only one live job may have it"
        )
    if not 0 <= delay <= LONGEST_DELAY:
        raise WrongUsage(f"--delay {delay:g} must be from 0 to {LONGEST_DELAY:.0f} seconds")
    options = {"delay": delay, "max_attempts": max_attempts, "max_stalls": max_stalls}
    wish = _Wish(_kind(kind), _read_payload(payload), count, options)
    enqueued: list[Enqueued] = []
    try:
        asyncio.run(_enqueue(wish, unique_key, enqueued.extend if as_json else _print_ids))
    finally:  # what is committed is committed, whatever came after it
        if as_json:
            print_json([{"id": each.id, "created": each.created} for each in enqueued])


def _kind(given: str) -> Kind:
    return load_processor_class(given) if ":" in given else check_kind(given)


def _read_payload(given: str) -> Any:
    text: str | bytes = given
    if given == "-":
        text = sys.stdin.buffer.read()
    elif given.startswith("@"):
        try:
            text = Path(given[1:]).read_bytes()
        except OSError as error:
            raise WrongUsage(f"--payload {shown(given)} cannot be read: {error.strerror}") from None
    return strict_json.loads(text, what="payload")


async def _enqueue(wish: _Wish, unique_key: str | None, take: Callable[[list[Enqueued]], Any]) -> None:
    unpublished: str | None = None
    async with JobClient.from_env() as client:
        if wish.count > 1:
            await _enqueue_many(client, wish, take)
            unpublished = await _publish(client)
        else:
            one = await client.enqueue(wish.kind, wish.payload, unique_key=unique_key, **wish.options)
            take([one])
            if not one.created:
                tell(f"a live job has unique key {unique_key} already, this one; nothing was enqueued")
                return
    unpublished = unpublished or client.unpublished_because
    if unpublished and not wish.options["delay"]:
        tell(f"stored, but not published yet, which a worker does: {unpublished}")


async def _enqueue_many(client: JobClient, wish: _Wish, take: Callable[[list[Enqueued]], Any]) -> None:
    with _progress(wish.count) as advance:
        for start in range(0, wish.count, _BATCH):
            payloads = [wish.payload] * min(_BATCH, wish.count - start)
            take(await client.enqueue_many(wish.kind, payloads, **wish.options))
            advance(len(payloads))


async def _publish(client: JobClient) -> str | None:
    """Publish what is due and return why it was not possible; everything is stored either way."""
    await client.publish_pending()
    return client.unpublished_because


def _print_ids(enqueued: list[Enqueued]) -> None:
    for each in enqueued:
        print_line(str(each.id))


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr for people who wait."""
    if count < _LARGE_COUNT or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("enqueued"), BarColumn(), MofNCompleteColumn())
    # The ids go to stdout, which rich would redirect to its own console.
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("enqueued", total=count)
        yield lambda done: bar.advance(task, done)
