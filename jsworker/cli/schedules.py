"""``jsworker schedules``: rules that enqueue jobs by the clock."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import typer
from rich.table import Column

from jsworker.cli.client_call import ask_client
from jsworker.cli.enqueue import kind_of, read_payload
from jsworker.cli.options import Json, JsonObject, Limit, argument, flag, in_options, new_app, option
from jsworker.cli.output import (
    database_clock,
    folded,
    moment,
    print_json,
    print_line,
    print_stored,
    print_table,
    remark,
    remark_next_page,
    right,
    since,
    until,
)
from jsworker.cli.selection import warn_unless_served
from jsworker.client.enqueueing import kind_name
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import cell, shown
from jsworker.core.priorities import Priority
from jsworker.core.schedule_rules import Cron, Every, Schedule

app = new_app()

Name = Annotated[str, argument("NAME", "What the schedule is called.")]


@app.callback(invoke_without_command=True)
def _schedules(context: typer.Context, *, as_json: Json = False) -> None:
    """List, add, pause, resume, run or remove schedules of recurring jobs.

    Schedules of processors' classes are written by workers when they start; others are added here. Any worker
    fires them, each instant once.
    """
    if context.invoked_subcommand is None:
        list_schedules(as_json=as_json)
    elif as_json:
        raise WrongUsage(f"schedules --json {context.invoked_subcommand}: give --json behind the subcommand")


@app.command("list")
def list_schedules(
    *,
    limit: Limit = 1_000,
    after: Annotated[str | None, option("NAME", "Continue the list after this schedule.")] = None,
    as_json: Json = False,
) -> None:
    """List schedules, the next one due first.

    Example: `jsworker schedules list --limit 20`
    """
    every = ask_client(lambda client: client.schedules.list())
    start = 0 if after is None else _place_of(after, every) + 1
    found = every[start : start + limit]
    if as_json:
        print_json(found)
        return
    columns: list[str | Column] = [
        *(folded("NAME"), folded("KIND")),
        *("RULE", "NEXT", right("IN"), "LAST", "LAST JOB", "SET BY"),
    ]
    print_table(columns, map(_row, found), spare=("SET BY", "LAST", "IN", "LAST JOB", "KIND"))
    if len(every) > start + limit:
        remark_next_page(found[-1]["name"])
    if not every:
        remark("there are no schedules")


def _place_of(name: str, schedules: Sequence[Mapping[str, Any]]) -> int:
    for place, schedule in enumerate(schedules):
        if schedule["name"] == name:
            return place
    raise WrongUsage(f"--after {shown(name)}: the listing holds no such line")


def _row(schedule: Mapping[str, Any]) -> list[str]:
    is_paused = schedule["paused"]
    rule = schedule["rule"] if schedule["tz"] == "UTC" else f"{schedule['rule']} ({schedule['tz']})"
    return [
        cell(schedule["name"]),
        cell(schedule["kind"]),
        cell(rule),
        "paused" if is_paused else moment(schedule["next_at"]),
        "" if is_paused else _distance(schedule["next_at"]),
        moment(schedule["last_at"]),
        cell(schedule["last_status"]),
        cell(schedule["set_by"]),
    ]


def _distance(due: datetime) -> str:
    return until(due) if due > database_clock.now() else f"late {since(due)}"


@app.command()
def add(
    name: Name,
    kind: Annotated[str, argument("KIND", "The jobs' kind, or MODULE:CLASS of its processor.")],
    *,
    cron: Annotated[
        str | None, option("RULE", "Minute, hour, day, month, weekday, as in '0 3 * * MON-FRI'.")
    ] = None,
    tz: Annotated[
        str, typer.Option(metavar="ZONE", help="In which --cron is read, as in Europe/Berlin.")
    ] = "UTC",
    every: Annotated[float | None, option("SECONDS", "Instead of --cron: in equal steps.")] = None,
    payload: Annotated[
        str, typer.Option(metavar="JSON", help="What each job gets; @FILE reads a file, - reads stdin.")
    ] = "{}",
    missed: Annotated[
        Literal["coalesce", "skip"],
        typer.Option(
            metavar="POLICY", help="Of instants missed by over a minute: coalesce runs the latest, skip none."
        ),
    ] = "coalesce",
    catch_up: Annotated[
        int, typer.Option(metavar="N", help="Run the latest N missed instants, each once.")
    ] = 0,
    overlap: Annotated[
        Literal["allow", "skip"],
        typer.Option(metavar="POLICY", help="skip leaves an instant out while the last job waits or runs."),
    ] = "allow",
    limit_key: Annotated[str | None, option("KEY", "Limits, rates and pauses count its jobs by it.")] = None,
    priority: Annotated[
        Priority | None, option("PRIORITY", "high, normal or low; else the processor's.")
    ] = None,
    replace: Annotated[bool, flag("Take the place of a schedule of that name.", "--replace")] = False,
    as_json: JsonObject = False,
) -> None:
    """Add a schedule, and say when it is due first.

    Example: `jsworker schedules add nightly write-report --cron "0 3 * * MON-FRI" --tz Europe/Berlin`
    """
    policies = {"payload": read_payload(payload), "missed": missed, "catch_up": catch_up, "overlap": overlap}
    schedule = _rule(cron, tz, every, policies)
    options = {"replace": replace, "priority": priority, "limit_key": limit_key}
    of_kind = kind_of(kind)
    first = ask_client(lambda client: client.schedules.add(name, of_kind, schedule, **options))  # type: ignore[arg-type] # each by its name
    if as_json:
        print_json({"name": name, "next_at": first})
    else:
        print_line(f"{cell(name)} is due at {moment(first)}")
    warn_unless_served(kind_name(of_kind))


def _rule(cron: str | None, tz: str, every: float | None, policies: Mapping[str, Any]) -> Schedule:
    if (cron is None) == (every is None):
        raise WrongUsage("schedules add takes either --cron RULE or --every SECONDS")
    try:
        return Cron(cron, tz, **policies) if cron is not None else Every(seconds=every or 0.0, **policies)
    except ValueError as error:
        step = "SECONDS" if every is None else f"{every:g}"
        words = re.sub(r"Every\(.*?\)", f"--every {step}", str(error)).replace("cron rule", "--cron", 1)
        raise in_options(words, "tz", "missed", "catch_up", "overlap") from None


@app.command()
def pause(name: Name) -> None:
    """Pause a schedule until it is resumed, even if its workers are restarted.

    Example: `jsworker schedules pause nightly`
    """
    ask_client(lambda client: client.schedules.pause(name))
    print_line(f"{cell(name)} is paused")


@app.command()
def resume(name: Name) -> None:
    """Resume a schedule; due times during the pause are skipped.

    Example: `jsworker schedules resume nightly`
    """
    print_line(f"{cell(name)} is due at {moment(ask_client(lambda client: client.schedules.resume(name)))}")


@app.command("run-now")
def run_now(name: Name) -> None:
    """Enqueue a job of a schedule now, in addition to its due times, and print its id.

    Example: `jsworker schedules run-now nightly`
    """
    print_stored(str(ask_client(lambda client: client.schedules.run_now(name)).id))


@app.command()
def remove(name: Name) -> None:
    """Remove a schedule; its jobs stay. A class's schedule returns with the next worker that has the class.

    Example: `jsworker schedules remove nightly`
    """
    ask_client(lambda client: client.schedules.remove(name))
    print_line(f"{cell(name)} is removed")
