"""``jsworker limits``, ``pause`` and ``resume``: what is set and shown, and wrong numbers in one line."""

import re

import pytest

from tests.ownership.rows import HELD, Sql, ago, insert_job, read_job, read_value

from .commands import Cli

TIME = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def _worker(sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.workers"
        " (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)"
        " VALUES (%s, 'h', 1, %s, 1, '1', '5 s', 'running', now() + interval '1 hour')"
        " ON CONFLICT DO NOTHING",
        ["worker-of-limits", ["sync", "count-lines"]],
    )


def table_of(cli: Cli, *arguments: str) -> list[str]:
    return [" ".join(line.split()) for line in cli("limits", *arguments).ok().lines]


def test_from_set_to_reset(cli: Cli) -> None:
    assert cli("limits").err == "there are no limits\n"
    assert cli("limits", "set", "sync", "--running", 2).ok().lines == [
        "kind sync: at most 2 at once, no rate; before: not limited"
    ]
    of_key = "at most 2 at once, 50 begin per 60 s"
    assert cli("limits", "set", "sync", "--key", "tenant-7", "--rate", 50, "--per", 60).ok().lines == [
        f"key 'tenant-7' of kind sync: {of_key}; before: at most 2 at once, no rate"
    ]
    listed = {each["key"]: each for each in cli("limits", "list", "--json").ok().json}
    assert (listed[""]["max_running"], listed[""]["rate"], listed[""]["set_by"]) == (2, None, "operator")
    assert (listed["tenant-7"]["rate"], listed["tenant-7"]["per"]) == (50, 60.0)
    assert table_of(cli) == [
        "KIND KEY RUNNING LIMIT RATE HELD FOR SET BY PAUSED",
        "sync (each key) 0 2 operator",
        "sync tenant-7 0 2 50 per 60 s operator",
    ]
    assert cli("limits", "reset", "sync", "--key", "tenant-7").ok().lines == [
        f"key 'tenant-7' of kind sync: at most 2 at once, no rate, as its kind; before: {of_key}"
    ]
    assert cli("limits", "reset", "sync", "--key", "tenant-7").refused(1) == (
        "no operator has set a limit of key 'tenant-7' of kind sync"
    )


def test_what_runs_and_is_held_is_counted(cli: Cli, sql: Sql) -> None:
    cli("limits", "set", "count-lines", "--running", 1).ok()
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key) VALUES ('count-lines', 't'), ('count-lines', 'idle')"
    )
    insert_job(sql, "processing", limit_key="t")
    insert_job(sql, "scheduled", **HELD | {"held_at": ago(7200.5)}, limit_key="t")
    assert table_of(cli)[1:] == ["count-lines (each key) 0 1 operator", "count-lines t 1 1 1 2h"]
    assert len(cli("limits", "list", "--all").ok().lines) == 4


def test_long_names_stay_on_one_line_without_a_terminal(cli: Cli, sql: Sql) -> None:
    kind, key = "k" * 64, "t" * 255
    sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, %s)", [kind, key])
    assert table_of(cli, "list", "--all")[1:] == [f"{kind} {key}"]


def test_pause_and_resume(cli: Cli, sql: Sql) -> None:
    assert cli("pause", "sync").ok().lines == ["kind sync is paused"]
    assert (
        cli("pause", "count-lines", "t", "--reason", "429\n", "--seconds", 3600)
        .ok()
        .lines[0]
        .startswith("key 't' of kind count-lines is paused until 20")
    )
    [line] = [line for line in cli("limits").ok().lines if line.startswith("count-lines")]
    assert re.search(rf"since {TIME}, until {TIME}, by \S+@\S+: 429\\n$", line)
    # By the database's clock alone: by this process's clock it would end some milliseconds sooner.
    lasts = "SELECT extract(epoch FROM paused_until - paused_at) AS s FROM jsworker.limits WHERE key = 't'"
    assert float(read_value(sql, lasts)) >= 3599.999
    held = insert_job(sql, "scheduled", **HELD | {"held_by": "paused"}, limit_key="t")
    assert cli("resume", "count-lines", "t").ok().lines == ["key 't' of kind count-lines goes on"]
    assert read_job(sql, held)["status"] == "queued"
    assert cli("resume", "count-lines", "t").refused(1) == "key 't' of kind count-lines is not paused"
    assert cli("resume", "sync").ok().lines == ["kind sync goes on"]


def test_a_pause_that_replaces_another_says_what_was_before(cli: Cli, sql: Sql) -> None:
    cli("pause", "sync", "--reason", "ann: endless").ok()
    cli("pause", "sync", "t", "--seconds", 3600).ok()
    [line] = cli("pause", "sync", "--seconds", 2).ok().lines
    assert re.fullmatch(
        rf"kind sync is paused until {TIME}; before: since {TIME}, by \S+@\S+: ann: endless", line
    )
    sql.execute("UPDATE jsworker.limits SET paused_until = now() - interval '1 s'")
    assert cli("pause", "sync").ok().lines == ["kind sync is paused"]


def test_resuming_says_which_pause_is_left(cli: Cli, sql: Sql) -> None:
    for key in ((), ("t",), ("u",), ("over",)):
        cli("pause", "count-lines", *key)
    sql.execute("UPDATE jsworker.limits SET paused_until = now() - interval '1 s' WHERE key = 'over'")
    cli("pause", "sync", "t")
    assert cli("resume", "count-lines", "t").ok().lines == [
        "key 't' of kind count-lines is resumed; its jobs wait until its kind is resumed, too"
    ]
    assert cli("resume", "count-lines").ok().lines == [
        "kind count-lines goes on, but 1 of its keys is still paused"
    ]
    assert cli("resume", "count-lines", "u").ok().lines == ["key 'u' of kind count-lines goes on"]


def test_what_an_operator_sets_takes_the_place_of_all_numbers_of_a_class(cli: Cli, sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, max_running, rate, per, set_by)"
        " VALUES ('sync', '', 2, 50, 60, 'code')"
    )
    assert cli("limits", "set", "sync", "--running", 5).ok().lines == [
        "kind sync: at most 5 at once, no rate; before: at most 2 at once, 50 begin per 60 s"
    ]
    assert cli("limits", "reset", "sync").ok().lines == [
        "kind sync: not limited, until a worker with its class starts; before: at most 5 at once, no rate"
    ]


def test_json_behind_the_group(cli: Cli) -> None:
    cli("limits", "set", "sync", "--rate", 5).ok()
    [one] = cli("limits", "--json").ok().json
    assert (one["kind"], one["rate"], one["max_running"]) == ("sync", 5, None)
    cli("pause", "count-lines").ok()
    cli("resume", "count-lines").ok()
    found = {each["kind"]: each["free"] for each in cli("limits", "list", "--all", "--json").ok().json}
    assert found == {"count-lines": None, "sync": 5}
    assert "give --json behind the subcommand" in cli("limits", "--json", "reset", "sync").refused(2)
    assert cli("schedules", "--json").ok().json == cli("schedules", "list", "--json").ok().json
    assert "give --json behind the subcommand" in cli("schedules", "--json", "list").refused(2)


def test_a_resumed_kind_leaves_no_empty_line(cli: Cli) -> None:
    cli("pause", "snyc")
    assert "snyc" in "".join(cli("limits").ok().lines)
    cli("resume", "snyc").ok()
    assert "snyc" not in "".join(cli("limits").lines)
    assert [each["kind"] for each in cli("limits", "list", "--all", "--json").ok().json] == ["snyc"]


@pytest.mark.parametrize("command", [("pause", "snyc"), ("limits", "set", "snyc", "--running", 1)])
def test_a_kind_that_nobody_serves_is_told(cli: Cli, command: tuple[object, ...]) -> None:
    done = cli(*command)
    assert len(done.ok_unserved("snyc").lines) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--running", "0"], "'--running': Input should be greater than or equal to 1"),
        (["--running", "-1"], "'--running': Input should be greater than or equal to 1"),
        (["--running", "1000000000"], "'--running': Input should be less than or equal to 1000000"),
        (["--rate", "0"], "'--rate': Input should be greater than or equal to 1"),
        (["--rate", "1000000", "--per", "0.001"], "must be at most 1000000 a second"),
        (["--rate", "1", "--per", "0"], "--per 0.0 must be over 0 and at most"),
        (["--rate", "1", "--per", "nan"], "must be over 0 and at most"),
        (["--running", "1", "--key", ""], "limit key '' must be text of 1 to 255 printable characters"),
        (["--running", "1", "--key", "a" * 256], "must be text of 1 to 255 printable characters"),
        ([], "takes --running N, --rate N or both"),
    ],
)
def test_wrong_numbers(cli: Cli, arguments: list[str], said: str) -> None:
    assert said in cli("limits", "set", "sync", *arguments).refused(2)


def test_wrong_kinds_and_spans(cli: Cli) -> None:
    assert "kind 'A.b' must match" in cli("pause", "A.b").refused(2)
    assert "must be from 1" in cli("pause", "sync", "--seconds", "1e99").refused(2)


def test_a_job_is_enqueued_with_a_key(cli: Cli, sql: Sql) -> None:
    [job_id] = cli("enqueue", "sync", "--limit-key", "tenant-7").ok().lines
    [row] = sql.execute("SELECT limit_key FROM jsworker.jobs WHERE id = %s", [job_id]).fetchall()
    assert row["limit_key"] == "tenant-7"
    assert "limit key" in cli("enqueue", "sync", "--limit-key", "a\0").refused(2)


def test_a_kind_is_listed_behind_very_many_keys_of_another(cli: Cli, sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, max_running, set_by)"
        " SELECT 'a', lpad(CAST(n AS text), 5, '0'), 1, 'operator' FROM generate_series(1, 10001) AS n"
    )
    cli("pause", "sync").ok()
    listed = cli("limits", "list", "--limit", 20_000, "--json").ok().json
    assert [each["key"] for each in listed] == [*(f"{n:05}" for n in range(1, 10_002)), ""]
    assert (listed[-1]["kind"], listed[-1]["paused_at"] is None) == ("sync", False)
    page = cli("limits", "list", "--limit", 1, "--after", "a:10000")
    assert page.errors == ["there may be more: jsworker limits list --limit 1 --after a:10001"]
    assert cli("limits", "list", "--after", "sync:").errors == ["there are no limits behind sync:"]
    line = cli("limits", "list", "--after", "sync").refused(2)
    assert line == "--after 'sync' must be a kind and a key, with a colon between them"
