"""``jsworker enqueue``: jobs from the shell."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from jsworker.cli.enqueue_lines import enqueue_lines, enqueuers_right
from jsworker.cli.enqueued_batches import EnqueuedBatches, JobBatch, remark_unpublished
from jsworker.cli.interruption import run_in_batches
from jsworker.cli.options import argument, flag, in_options, new_app, option
from jsworker.cli.output import json_text, print_stored, progress_bar, progress_wanted, remark
from jsworker.cli.selection import choose_instant, warn_unless_served
from jsworker.client.enqueueing import Kind, kind_name
from jsworker.client.job_client import JobClient
from jsworker.client.terms import LONGEST_DELAY, Terms
from jsworker.core import strict_json
from jsworker.core.errors import JobCancelled, JobFailed, JobNotCompleted
from jsworker.core.exit_codes import TIMED_OUT, WrongUsage
from jsworker.core.names import check_kind, shown
from jsworker.core.priorities import Priority
from jsworker.core.processor import Unique
from jsworker.core.settings.variables import LONGEST_SECONDS
from jsworker.core.targets import load_processor_class

_BATCH = 10_000
_LARGE_COUNT = 20_000
_MOST_JOBS = 10_000_000

app = new_app()


@app.command()
def enqueue(
    kind: Annotated[str, argument("KIND", "The jobs' kind, or MODULE:CLASS of its processor.")],
    *,
    payload: Annotated[
        str | None,
        option("JSON", "What the processor gets, {} without it; @FILE reads a file, - reads stdin."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=_MOST_JOBS, metavar="N", help="So many equal jobs.")] = 1,
    delay: Annotated[float, option("SECONDS", "The jobs are due only then.")] = 0.0,
    unique_key: Annotated[str | None, option("KEY", "At most one live job of the kind has it.")] = None,
    limit_key: Annotated[str | None, option("KEY", "Limits, rates and pauses count the jobs by it.")] = None,
    max_attempts: Annotated[
        int | None, option("N", "Instead of the processor's own.", min=1, max=1_000_000)
    ] = None,
    max_stalls: Annotated[int | None, option("N", "Instead of the processor's own.", min=1, max=100)] = None,
    wait: Annotated[bool, flag("Wait for the job to end and print its result, as JSON.", "--wait")] = False,
    timeout: Annotated[float | None, option("SECONDS", "Wait no longer, with --wait.")] = None,
    priority: Annotated[
        Priority | None, option("PRIORITY", "high, normal or low; else the processor's.")
    ] = None,
    run_at: Annotated[
        str | None, option("TIME", "Due then: ISO 8601 with a zone, instead of --delay.")
    ] = None,
    expires_in: Annotated[
        float | None, option("SECONDS", "Cancel the job if it has not begun by then.")
    ] = None,
    unique: Annotated[
        Unique | None,
        option("SCOPE", "Of the key: live (default), or waiting: one job may wait beside one that runs."),
    ] = None,
    unique_for: Annotated[
        float | None, option("SECONDS", "At most one job of the key in this time, ended ones included.")
    ] = None,
    debounce: Annotated[
        float | None,
        option("SECONDS", "Due then; a waiting job of the key takes this payload, and waits anew."),
    ] = None,
    debounce_max: Annotated[
        float | None, option("SECONDS", "With --debounce: due at the latest so long after the first enqueue.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FILE", help="A job for each line, its payload as JSON; - reads stdin."
        ),
    ] = None,
    key_field: Annotated[
        str | None, option("NAME", "With --from: this field of each payload is its unique key.")
    ] = None,
    as_json: Annotated[bool, flag("Print an array of {id, created}.", "--json")] = False,
) -> None:
    """Enqueue jobs and print their ids, one per line.

    With MODULE:CLASS the payload is checked by the processor's own type. When a live job has the unique key
    already, nothing is enqueued and that job's id is printed. When NATS cannot be reached, the jobs are
    stored all the same, and a worker publishes them.

    With --wait the exit code is 3 when the job failed, was cancelled or is gone, and 4 when it has not ended
    in time; --json adds the status and the result, or the reason and the error, to the object.

    With --from all lines are checked before the first job is enqueued; wrong ones are named, with the rule. A
    run that was cut short is repeated with --key-field, so that no job is enqueued twice while it waits or
    runs; with --unique-for also none that has ended in that time.

    Example: `jsworker enqueue count-words --from texts.jsonl --key-field id --unique-for 86400`
    """
    if unique_key is not None and count > 1:
        raise WrongUsage(
            f"--unique-key cannot be shared by --count {count} jobs: only one live job may have it"
        )
    if not 0 <= delay <= LONGEST_DELAY:
        raise WrongUsage(f"--delay {delay:g} must be from 0 to {LONGEST_DELAY:.0f} seconds")
    _check_waiting(wait=wait, timeout=timeout, count=count)
    _check_lines(source, key_field, payload is not None or count > 1 or wait or unique_key is not None)
    of_kind = kind_of(kind)
    content = None if source is not None else read_payload("{}" if payload is None else payload)
    at = None if run_at is None else choose_instant("run-at", run_at)
    terms = Terms(at, expires_in, unique, unique_for, debounce, debounce_max)
    try:
        terms.check_keys([unique_key or key_field])
        terms.check(delay)
    except ValueError as error:
        key = "unique_key" if source is None else "key_field"
        words = str(error).replace("a unique_key for each job", key)
        raise in_options(words, key, "delay", *Terms._fields) from None
    options: dict[str, Any] = {
        "delay": delay,
        "max_attempts": max_attempts,
        "max_stalls": max_stalls,
        "limit_key": limit_key,
        "priority": priority,
        **terms._asdict(),
    }
    if source is not None:
        enqueue_lines(source, of_kind, options, key_field=key_field, as_json=as_json)
    elif count > 1:
        with enqueuers_right(options):
            _enqueue_many(of_kind, content, count, options, as_json=as_json)
    else:
        if wait:
            warn_unless_served(kind_name(of_kind))
        _enqueue_one(
            of_kind, content, options, unique_key=unique_key, wait=wait, timeout=timeout, as_json=as_json
        )
    if not (wait or as_json) and sys.stderr.isatty():  # scripts need not wait for another statement
        warn_unless_served(kind_name(of_kind))


def _enqueue_many(kind: Kind, payload: Any, count: int, options: dict[str, Any], *, as_json: bool) -> None:
    jobs = EnqueuedBatches(count, as_json=as_json)
    watched = count >= _LARGE_COUNT and progress_wanted(as_json=as_json)
    sizes = (min(_BATCH, count - start) for start in range(0, count, _BATCH))
    batches = (JobBatch([payload] * size, None, size) for size in sizes)

    async def enqueue_them() -> None:
        with progress_bar("enqueued", count if watched else 0) as advance:
            await jobs.enqueue(kind, batches, options, advance)

    try:
        run_in_batches(enqueue_them())
    finally:  # committed jobs are printed, whatever came after the commit
        jobs.report()


def _enqueue_one(
    kind: Kind,
    payload: Any,
    options: dict[str, Any],
    *,
    unique_key: str | None,
    wait: bool,
    timeout: float | None,
    as_json: bool,
) -> None:
    known: dict[str, Any] = {}

    async def enqueue_and_wait() -> None:
        async with AsyncExitStack() as opened:
            with enqueuers_right(options):
                client = await opened.enter_async_context(JobClient.from_env())
                one = await client.enqueue(kind, payload, unique_key=unique_key, **options)
            known.update(id=one.id, created=one.created)
            if not (as_json or wait):
                print_stored(str(one.id))
            if not one.created:
                remark(_existing_in_words(unique_key, options))
            if wait:
                try:
                    known.update(status="completed", result=await client.result(one.id, timeout))
                except JobNotCompleted as error:
                    status = {JobFailed: "failed", JobCancelled: "cancelled"}.get(type(error), "gone")
                    known.update(status=status, reason=error.reason, error=error.error)
                    raise
                if not as_json:
                    print_stored(strict_json.dumps(known["result"]))
        if one.created and not wait:
            remark_unpublished(client, options)

    try:
        asyncio.run(enqueue_and_wait())
    except TimeoutError as error:
        remark(str(error))
        raise typer.Exit(TIMED_OUT) from None
    except KeyboardInterrupt:
        if wait and known and "status" not in known:
            remark(f"job {known['id']} goes on")
        raise
    finally:  # a committed job is printed, whatever came after the commit
        if as_json:
            print_stored(json_text([known] if known else []))


def _check_waiting(*, wait: bool, timeout: float | None, count: int) -> None:
    if wait and count > 1:
        raise WrongUsage(f"--wait is for one job, not for --count {count}")
    if timeout is not None and not wait:
        raise WrongUsage("--timeout needs --wait")
    if timeout is not None and not 0 < timeout <= LONGEST_SECONDS:
        raise WrongUsage(f"--timeout {timeout:g} must be more than 0 and at most {LONGEST_SECONDS} seconds")


def _check_lines(source: str | None, key_field: str | None, is_other: bool) -> None:  # noqa: FBT001 -- whether a contradicting option is given
    if source is None and key_field is not None:
        raise WrongUsage("--key-field needs --from: else give --unique-key")
    if source is not None and is_other:
        raise WrongUsage("--from goes without --payload, --count, --unique-key and --wait")


def kind_of(given: str) -> Kind:
    """Return the kind, or the processor at MODULE:CLASS."""
    return load_processor_class(given) if ":" in given else check_kind(given)


def read_payload(given: str) -> Any:
    """Return the JSON value of --payload: JSON itself, @FILE, or - for stdin."""
    text: str | bytes = given
    if given == "-":
        text = sys.stdin.buffer.read()
    elif given.startswith("@"):
        try:
            text = Path(given[1:]).read_bytes()
        except OSError as error:
            raise WrongUsage(f"--payload {shown(given)} cannot be read: {error.strerror}") from None
    return strict_json.loads(text, what="payload")


def _existing_in_words(key: str | None, options: dict[str, Any]) -> str:
    if options["debounce"] is not None:
        return f"a waiting job has unique key {key} already, this one; its payload was replaced"
    holder = "waiting" if options["unique"] == "waiting" else "live"
    holder = holder if options["unique_for"] is None else "recent"
    return f"a {holder} job has unique key {key} already, this one; nothing was enqueued"
