"""What the checks say of facts that no test can bring about on a real server, or not quickly."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from jsworker.core.settings import Settings
from jsworker.doctor import checks, job_checks, nats_checks, postgresql_checks
from jsworker.doctor.checks import CHECKS
from jsworker.doctor.finding import Finding, counted, listed, seconds
from jsworker.doctor.gather import Facts, Unknown
from jsworker.ownership.database import OLDEST_REVISION, REVISIONS
from jsworker.ownership.queries.job_report import (
    MOST_HELD_KEYS,
    MOST_QUEUES,
    MOST_SCHEDULED_KINDS,
    KeyLimit,
    Late,
    LeftBatches,
    QueuedKind,
    RegisteredWorker,
    SchedulesOfKind,
    SilentOwner,
)
from jsworker.ownership.queries.server_report import Holder, Link, Schema, Server
from jsworker.stream.diagnostics import NatsServer, StreamReport

SERVER = Server(
    role="worker",
    superuser=False,
    role_limit=-1,
    database_limit=-1,
    member_of=[],
    standby=False,
    version=180004,
    connections=7,
    confirming=0,
    unconfirmed=0,
    oldest_database="app",
    ids_used=200_000_000,
    settings={
        "server_version": "18.4",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "default_transaction_read_only": "off",
        "max_connections": "100",
        "superuser_reserved_connections": "3",
        "reserved_connections": "0",
    },
)
LINK = Link(encrypted=True, local=False, sharing="direct")
NATS = NatsServer("nats:4222", "n1", (2, 15, 1), True, False, True)
STREAM = StreamReport(None, (), 1, clustered=False, messages=0, bytes=0)


def having(**changed: str) -> Server:
    return replace(SERVER, settings={**SERVER.settings, **changed})


def worker(concurrency: int = 10, version: str = "1.0") -> RegisteredWorker:
    return RegisteredWorker("alpha", ("resize",), concurrency, version, "running", alive=True)


def a_settings(**values: Any) -> Settings:
    return Settings(**{"database_url": "postgresql://u@h/d"} | values)


def answering(server: Server) -> list[Finding]:
    return list(postgresql_checks.connection(server, "h/d"))


def only(remarks: Iterable[Finding]) -> Finding:
    [remark] = remarks
    return remark


@pytest.mark.parametrize(
    ("judge", "server", "level", "part"),
    [
        (answering, SERVER, "ok", "PostgreSQL 18.4 at h/d answers and is not read-only"),
        (answering, replace(SERVER, version=130011), "warning", "no longer maintained"),
        (answering, replace(SERVER, version=110022), "error", "too old: 12 has"),
        (answering, replace(SERVER, standby=True), "error", "is a standby"),
        (answering, having(default_transaction_read_only="on"), "error", "nothing can be written"),
        (postgresql_checks.durability, having(fsync="off"), "error", "fsync is off"),
        (
            postgresql_checks.durability,
            having(synchronous_commit="off"),
            "error",
            "synchronous_commit is off",
        ),
    ],
)
def test_the_server(judge: Callable[..., Iterable[Finding]], server: Server, level: str, part: str) -> None:
    remark = only(judge(server))
    assert remark.level == level
    assert part in remark.says
    assert bool(remark.do) is (level != "ok")


def test_what_is_committed_is_on_the_disk() -> None:
    for server in (SERVER, having(synchronous_commit="local")):
        assert list(postgresql_checks.durability(server)) == []


def test_commits_that_no_standby_confirms() -> None:
    asked = having(synchronous_standby_names="*")
    slow = only(postgresql_checks.commits(replace(asked, confirming=1, unconfirmed=2)))
    assert slow.level == "error"
    assert slow.says.startswith("2 sessions waiting for a synchronous standby for more than a second")
    for server in (
        SERVER,
        having(synchronous_standby_names=""),
        replace(asked, confirming=1),
        having(synchronous_standby_names="*", synchronous_commit="local"),
    ):
        assert list(postgresql_checks.commits(server)) == []


@pytest.mark.parametrize(
    ("used", "level", "part"),
    [
        (1_600_000_000, "warning", "keeps 75% of PostgreSQL's transaction ids: without any left"),
        (2_144_483_647, "error", "keeps 100% of PostgreSQL's transaction ids: it refuses every write"),
    ],
)
def test_transaction_ids_that_run_out(used: int, level: str, part: str) -> None:
    assert list(postgresql_checks.transaction_ids(SERVER)) == []
    remark = only(postgresql_checks.transaction_ids(replace(SERVER, ids_used=used)))
    assert remark.level == level
    assert remark.says.startswith("database app ")
    assert part in remark.says
    assert "run VACUUM" in (remark.do or "")


@pytest.mark.parametrize("name", ["autovacuum", "track_counts"])
def test_a_server_that_removes_no_dead_rows(name: str) -> None:
    schema = Schema((), {}, (), (), {}, {}, ())
    assert list(postgresql_checks.vacuum(SERVER, schema)) == []
    remark = only(postgresql_checks.vacuum(having(**{name: "off"}), schema))
    assert remark.level == "warning"
    assert remark.says.startswith(f"{name} is off")


def test_a_superuser_may_do_too_much() -> None:
    assert list(postgresql_checks.rights([], SERVER)) == []
    remark = only(postgresql_checks.rights([], replace(SERVER, superuser=True)))
    assert remark.level == "warning"
    assert "role worker is a superuser" in remark.says
    assert remark.do


def test_copies_that_are_away() -> None:
    three = replace(STREAM, replicas=3, clustered=True)
    assert only(nats_checks.replicas(three, a_settings())).level == "ok"
    remark = only(nats_checks.replicas(replace(three, behind=("nats-1",)), a_settings()))
    assert remark.level == "warning"
    assert remark.says.startswith("of 3 copies of the stream, 1 away or behind, on nats-1: ")
    assert remark.do is not None
    assert "Start these nats-servers" in remark.do


def test_what_is_not_stored_is_known_of_the_last_job() -> None:
    assert list(nats_checks.publishing([])) == []
    remark = only(nats_checks.publishing(["alpha"]))
    assert remark.level == "error"
    assert remark.do is not None
    assert "with the next job, and this stays until then" in remark.do


def test_messages_without_a_consumer() -> None:
    facts = Facts(settings=a_settings(), place="h/d", registered=[worker()])
    assert list(nats_checks.subjects({}, facts)) == []
    remark = only(nats_checks.subjects({"jobs.b": 2, "jobs.a": 1}, facts))
    assert remark.level == "warning"
    assert remark.says == "3 messages of 2 subjects that no consumer takes: jobs.a, jobs.b"
    assert remark.do is not None
    assert "Workers remove the messages" in remark.do
    lane = only(nats_checks.subjects({"jobs.resize.high": 1}, facts))
    assert lane.says.endswith(
        "jobs.resize.high, and workers of these kinds are alive: their jobs start late, from the table"
    )
    assert lane.do is not None
    assert "worker.degraded" in lane.do
    assert lane.do.startswith("Workers whose login may do so make it")


SUPPORTED = REVISIONS[REVISIONS.index(OLDEST_REVISION) :]


@pytest.mark.parametrize(
    ("found", "level", "part"),
    [
        (None, "error", "no jsworker schema"),
        ("0001", "error", "this version needs"),
        *((older, "warning", "older than this version's own") for older in SUPPORTED[:-1]),
        (REVISIONS[-1], "ok", "this version's own"),
        ("9999", "info", "newer than this version's own"),
    ],
)
def test_migrations(found: str | None, level: str, part: str) -> None:
    remark = only(postgresql_checks.migration(found))
    assert remark.level == level
    assert part in remark.says


def test_a_prepared_transaction_that_holds_locks() -> None:
    forgotten = Holder("4/7", None, "it's", "app", ["jobs", "job_events"], 90.0, 0)
    remark = only(postgresql_checks.locks([forgotten]))
    assert remark.level == "warning"
    held = "prepared transaction 'it''s' of role app holds locks on job_events, jobs for 90 s"
    assert remark.says.startswith(held)
    assert remark.do is not None
    assert "ROLLBACK PREPARED 'it''s'" in remark.do


class TestConnections:
    def test_the_fleet_that_is_alive_counts(self) -> None:
        fleet = (worker(), worker(), replace(worker(), alive=False))
        remark = only(postgresql_checks.connections(SERVER, LINK, fleet, a_settings(processes=50)))
        assert remark.level == "ok"
        assert "2 worker processes may open up to 86 connections, the server allows 97" in remark.says

    def test_too_large_a_fleet(self) -> None:
        remark = only(postgresql_checks.connections(SERVER, LINK, (worker(38),), a_settings()))
        assert remark.level == "warning"
        assert "1 worker process may open up to 99 connections, the server allows 97" in remark.says

    def test_without_workers_the_settings_count(self) -> None:
        remark = only(
            postgresql_checks.connections(SERVER, LINK, (), a_settings(processes=3, concurrency=10))
        )
        assert "3 worker processes may open up to 129 connections" in remark.says
        assert remark.level == "warning"

    def test_the_limit_of_a_role(self) -> None:
        limited = replace(SERVER, role_limit=20)
        remark = only(postgresql_checks.connections(limited, LINK, (), a_settings()))
        assert (remark.level, remark.says.endswith("the server allows 20")) == ("warning", True)

    def test_behind_a_pooler_they_are_its_business(self) -> None:
        pooled = replace(LINK, sharing="transaction")
        assert (
            only(postgresql_checks.connections(replace(SERVER, role_limit=1), pooled, (), a_settings())).level
            == "ok"
        )


@pytest.mark.parametrize(
    ("sharing", "level"),
    [("direct", "ok"), ("transaction", "ok"), ("unclear", "info"), ("statement", "error")],
)
def test_poolers(sharing: Any, level: str) -> None:
    assert only(postgresql_checks.pooler(replace(LINK, sharing=sharing))).level == level


@pytest.mark.parametrize(("encrypted", "local", "level"), [(0, 0, "warning"), (0, 1, "ok"), (1, 0, "ok")])
def test_encryption(encrypted: int, local: int, level: str) -> None:
    link = Link(encrypted=bool(encrypted), local=bool(local), sharing="direct")
    assert only(postgresql_checks.encryption(link)).level == level
    server = replace(NATS, encrypted=bool(encrypted), local=bool(local))
    assert only(nats_checks.encryption(server)).level == level


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ((2, 9, 25), "error"),
        ((2, 10, 19), "ok"),
        ((2, 10, 21), "warning"),
        ((2, 10, 23), "ok"),
        ((2, 15, 1), "ok"),
    ],
)
def test_versions_of_nats(version: tuple[int, int, int], level: str) -> None:
    assert only(nats_checks.connection(replace(NATS, version=version))).level == level


class TestReplicas:
    def judge(self, **changes: Any) -> list[Finding]:
        return list(nats_checks.replicas(replace(STREAM, **changes), a_settings()))

    def test_one_copy_without_a_cluster(self) -> None:
        assert only(self.judge()).level == "ok"

    def test_one_copy_in_a_cluster(self) -> None:
        remark = only(self.judge(clustered=True))
        assert remark.level == "warning"
        assert "JSWORKER_STREAM_REPLICAS=3" in (remark.do or "")


def test_versions_beside_each_other() -> None:
    fleet = (worker(version="1.0"), worker(version="1.1"))
    found = job_checks.workers(fleet, Facts(settings=a_settings(), place="h/d"))
    assert [remark.level for remark in found] == ["info", "ok"]


@pytest.mark.parametrize(
    ("known", "level"),
    [
        ({}, "info"),
        ({"overdue": Late(0, 0.0), "queues": (), "silent_owners": ()}, "info"),
        ({"overdue": Late(1, 60.0)}, "warning"),
        ({"queues": (QueuedKind("resize", 1, 2.0),)}, "warning"),
        ({"silent_owners": (SilentOwner("alpha", 1, 60.0, registered=True, never_stale=False),)}, "warning"),
    ],
    ids=["unknown", "nothing waits", "overdue", "queued", "running"],
)
def test_no_worker_is_alive(known: dict[str, Any], level: str) -> None:
    facts = Facts(settings=a_settings(), place="h/d", **known)
    remark = only(job_checks.workers((), facts))
    assert (remark.level, "no worker is alive" in remark.says) == (level, True)


def test_drained_workers_serve_nothing_and_are_named() -> None:
    fleet = (replace(worker(), id="a", state="drained"), worker())
    queues = (QueuedKind("resize", 1, 2.0),)
    facts = Facts(settings=a_settings(), place="h/d", queues=queues)
    drained, alive = job_checks.workers(fleet, facts)
    assert (drained.level, drained.says) == ("info", "1 worker process drained by operators: a")
    assert (alive.level, alive.says) == ("ok", "1 worker process alive, for resize")
    drained, none = job_checks.workers(fleet[:1], facts)
    assert (none.level, none.says) == ("warning", "every worker that is alive is drained, and jobs wait")
    assert none.do == "`jsworker undrain ID`."
    waiting = only(job_checks.queues(queues, fleet[:1]))
    assert "no worker claims them" in waiting.says
    assert "or undrain one" in str(waiting.do)


def test_a_worker_that_ends_serves_nothing() -> None:
    queues = (QueuedKind("resize", 1, 2.0),)
    ending = replace(worker(), id="a", state="draining")
    assert "no worker claims them" in only(job_checks.queues(queues, (ending,))).says
    assert "no worker claims them" not in only(job_checks.queues(queues, (ending, worker()))).says


class TestSettings:
    def test_recovery_that_is_off(self) -> None:
        assert list(checks.recovery(a_settings())) == []
        off = list(checks.recovery(a_settings(recovery="off")))
        assert [remark.level for remark in off] == ["warning"] * 4
        without_start = only(checks.recovery(a_settings(recover_on_start=False)))
        assert (without_start.level, "rule start is off" in without_start.says) == ("warning", True)

    def test_a_crash_threshold_of_none(self) -> None:
        remark = only(checks.recovery(a_settings(crash_threshold=None)))
        assert (remark.level, "after 300 s of silence only" in remark.says) == ("info", True)

    def test_a_pod_whose_grace_period_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert only(checks.shutdown(a_settings())).level == "ok"
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        remark = only(checks.shutdown(a_settings()))
        assert (remark.level, "31 s" in remark.says) == ("warning", True)
        assert only(checks.shutdown(a_settings(grace_period=60))).level == "ok"


def test_words() -> None:
    assert [counted(0, "job"), counted(1, "job"), counted(1234, "job")] == ["0 jobs", "1 job", "1,234 jobs"]
    assert counted(1001, "job", bound=1001) == "more than 1,000 jobs"
    assert counted(2, "entry", plural="entries") == "2 entries"
    assert listed("abcdefghij") == "a, b, c, d, e, f, g, h and 2 more"
    assert [seconds(each) for each in (-3600, 0.0123, 1, 42, 119, 120, 7200, 172_800, math.inf)] == [
        *("0 s", "0.012 s", "1 s", "42 s", "119 s", "2 min", "2 h", "2 d", "ever")
    ]


def test_a_check_that_finds_nothing_says_what_holds() -> None:
    facts = Facts(settings=a_settings(), place="h/d", server=SERVER)
    found = only(checks.found_by("postgresql.durability", postgresql_checks.durability, facts))
    says = "a commit is on the disk before it is acknowledged"
    assert found == ("postgresql.durability", "ok", says, None)


@pytest.mark.parametrize("name", CHECKS)
def test_what_holds_begins_in_lower_case_unless_with_a_name(name: str) -> None:
    def finds_nothing() -> list[Finding]:
        return []

    finds_nothing.__doc__ = CHECKS[name].__doc__
    found = only(checks.found_by(name, finds_nothing, Facts(settings=a_settings(), place="h/d")))
    first = found.says.split()[0]
    assert first in {"VACUUM", "PostgreSQL", "NATS"} or first == first.lower()


def test_names_of_checks_are_dotted() -> None:
    assert all(name.count(".") == 1 for name in CHECKS)


@pytest.mark.parametrize(
    ("limit", "level", "says"),
    [
        (None, "warning", "JSWORKER_JOB_TIMEOUT is none: a run that hangs is never taken back"),
        (86_400.0, "info", "a run that hangs ends after 24 h (JSWORKER_JOB_TIMEOUT)"),
    ],
)
def test_kinds_without_a_time_out_of_their_own_are_named(limit: float | None, level: str, says: str) -> None:
    given = Settings(database_url="postgresql://host/jobs", job_timeout=limit)
    worker = RegisteredWorker(
        *("alpha", ("resize", "count"), 1, "1", "running"), alive=True, kinds_without_timeout=("resize",)
    )
    fleet = (worker, replace(worker, alive=False, kinds_without_timeout=("count",)))
    [remark] = job_checks.time_limits(fleet, given)
    assert remark.level == level
    assert remark.says == f"no timeout or progress_timeout of their own: resize; {says}"
    assert list(job_checks.time_limits((), given)) == []


@pytest.mark.parametrize(
    ("limit", "level", "says"),
    [
        (KeyLimit("resize", "acme", 0, 5, 7200.0), None, ""),
        (
            KeyLimit("resize", "acme", 2, 5, 7200.0),
            "warning",
            "5 jobs of key 'acme' of kind resize held for up to 2 h",
        ),
        (KeyLimit("resize", "", 1_000_000, 5, 90.0), "warning", "though any number may begin"),
        (KeyLimit("resize", "acme", 2, 5, 10.0), None, ""),
        (KeyLimit("resize", "acme", 2, 5, 7200.0, unused_for=100.0), None, ""),
        (KeyLimit("resize", "acme", 2, 5, 7200.0, unused_for=150.0), "warning", "though 2 may begin"),
        (
            KeyLimit("resize", "acme", 0, 5, 10.0, 60.0, "ann\n", "429"),
            "info",
            r"key 'acme' of kind resize has been paused for 60 s by ann\n: 429",
        ),
    ],
)
def test_what_is_held_and_may_begin_and_what_is_paused(limit: KeyLimit, level: str | None, says: str) -> None:
    found = list(job_checks.limits((limit,)))
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(says in each.says for each in found)


def declaring(name: str, limit: Mapping[str, Any] | None, **changes: Any) -> RegisteredWorker:
    """Return a worker of kinds resize and count, of which the first has a limit."""
    declared = {} if limit is None else {"resize": limit}
    told: dict[str, Any] = {"id": name, "kinds": ("resize", "count"), "limits": declared}
    return replace(worker(), **told | changes)


TWO = {"max_running": 2, "rate": None, "per": None, "key": "'tenant'"}


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([declaring("beta", TWO)], None),
        ([declaring("beta", None, limits=None)], None),
        ([declaring("beta", None, alive=False)], None),
        ([declaring("beta", None, kinds=("count",))], None),
        (
            [declaring("gamma", None), declaring("beta", TWO)],
            "max_running 2, key 'tenant' (alpha, beta) or none (gamma)",
        ),
        (
            [declaring("b\n", TWO | {"rate": 50, "per": 60.0})],
            r"max_running 2, key 'tenant' (alpha) or max_running 2, rate 50, per 60.0, key 'tenant' (b\n)",
        ),
        (
            [declaring("beta", TWO | {"key": "'account'"})],
            "max_running 2, key 'account' (beta) or max_running 2, key 'tenant' (alpha)",
        ),
    ],
    ids=["alike", "older", "dead", "another kind", "no limit", "a rate", "another key"],
)
def test_limits_on_which_workers_disagree(others: Sequence[RegisteredWorker], says: str | None) -> None:
    found = list(job_checks.declared_limits((declaring("alpha", TWO), *others)))
    assert [each.level for each in found] == ([] if says is None else ["warning"])
    if says is not None:
        assert found[0].says == f"workers declare different limits of kind resize: {says}"


@pytest.mark.parametrize("limits", [[1], 5, {"resize": 5}, {"resize": [1]}])
def test_limits_in_an_unknown_form_count_as_none(limits: Any) -> None:
    others = (declaring("alpha", None), declaring("beta", None, limits=limits))
    assert list(job_checks.declared_limits(others)) == []


def test_a_paused_key_is_named_for_the_shell() -> None:
    paused = KeyLimit("resize", "acme & sons", 0, 5, 10.0, 60.0)
    [found] = job_checks.limits((paused,))
    assert found.do == "`jsworker resume resize 'acme & sons'`, should it go on."
    [found] = job_checks.limits((KeyLimit("resize", "-\u00a0", 0, 5, 10.0, 60.0),))
    assert found.do == r"`jsworker resume resize -- $'-\U000000a0'`, should it go on."


def test_more_keys_than_are_looked_at() -> None:
    full = KeyLimit("resize", "acme", 0, 5, 7200.0)
    [found] = job_checks.limits([full] * MOST_HELD_KEYS)
    assert found.level == "info"
    assert "no more than 1,000 keys with held jobs or a pause were looked at" in found.says
    assert list(job_checks.limits([full] * (MOST_HELD_KEYS - 1))) == []


def test_more_kinds_than_are_looked_at() -> None:
    waiting = QueuedKind("resize", 1, 2.0)
    *_, found = job_checks.queues([waiting] * MOST_QUEUES, (worker(),))
    assert (found.level, found.says.partition(";")[0]) == ("info", "no more than 100 kinds were looked at")
    assert found.do is not None
    assert found.do.startswith("See every kind: `jsworker status --limit 1000`;")
    assert len(list(job_checks.queues([waiting] * (MOST_QUEUES - 1), (worker(),)))) == MOST_QUEUES - 1


@pytest.mark.parametrize(
    ("schedules", "says"),
    [
        (
            SchedulesOfKind("resize", "nightly", 2, 1, 7200.0),
            "schedule nightly of kind resize has been due for 2 h",
        ),
        (
            SchedulesOfKind("other", "nightly", 3, 3, 7200.0),
            "schedule nightly of kind other has been due for 2 h; 2 others of this kind late, too",
        ),
        (
            SchedulesOfKind("other", "nightly", 1, 0, -60.0),
            "schedule nightly enqueues jobs of kind other, which no worker claims",
        ),
        (
            SchedulesOfKind("other", "hourly", 50, 0, -60.0),
            "schedule hourly and 49 others enqueue jobs of kind other, which no worker claims",
        ),
        (
            SchedulesOfKind("resize", "nightly", 2, 0, -60.0, "hourly", 2, 2 * 86_400.0),
            (
                "schedule hourly of kind resize enqueues nothing for 2 d, which had their jobs while "
                "PostgreSQL's clock was ahead; 1 other of this kind, too"
            ),
        ),
        (SchedulesOfKind("resize", "nightly", 1, 0, 5.0), None),
        (SchedulesOfKind("resize", "nightly", 1, 0, -60.0, "nightly", 0, -3600.0), None),
    ],
)
def test_schedules_that_are_late_or_of_kinds_that_nobody_works_on(
    schedules: SchedulesOfKind, says: str | None
) -> None:
    found = list(job_checks.schedules((schedules,), (worker(),)))
    assert [(each.level, each.says) for each in found] == ([] if says is None else [("warning", says)])


def test_schedules_of_more_kinds_than_are_looked_at() -> None:
    some = SchedulesOfKind("resize", "nightly", 1, 0, -60.0)
    [found] = job_checks.schedules([some] * MOST_SCHEDULED_KINDS, (worker(),))
    assert (found.level, found.says) == (
        "info",
        "the schedules of no more than 100 kinds were looked at",
    )
    assert list(job_checks.schedules([some] * (MOST_SCHEDULED_KINDS - 1), (worker(),))) == []


def test_batches_that_nobody_has_looked_after() -> None:
    found = list(job_checks.workflows(LeftBatches(2, 1, 1)))
    assert [each.level for each in found] == ["warning"] * 3
    assert "2 batches of workflows not looked after for a minute" in found[0].says
    assert "1 workflow not finished a minute after the last batch" in found[1].says
    assert "1 job held by needs, of which none is unfinished" in found[2].says
    assert list(job_checks.workflows(LeftBatches(0, 0, 0))) == []


@pytest.mark.parametrize(
    ("because", "cure"),
    [
        ("is not available: FATAL:  sorry, too many clients already", "Raise max_connections "),
        ('is not available: FATAL:  too many connections for role "w"', "Raise max_connections "),
        ("is not available: FATAL:  remaining connection slots are reserved for", "Raise max_connections "),
        ("is not available: out of slots (SQLSTATE 53300)", "Raise max_connections "),
        (
            "is not available: canceling statement due to statement timeout (SQLSTATE 57014)",
            "Raise statement_timeout, ",
        ),
        ('is not available: could not extend file "base/5/1249": … (SQLSTATE 53100)', "Free space "),
        ("is not available: FATAL:  no more connections allowed (max_client_conn)", "Raise the pooler's "),
        ("is not available: FATAL:  query_wait_timeout", "The pooler answers "),
        (
            "is not available: server login has been failing, try again later (server_login_retry)",
            "The pooler answers ",
        ),
        ("is not available: FATAL:  the database system is starting up", "Wait "),
        ("is not available: FATAL:  the database system is shutting down", "Wait "),
        ("is not available: terminated (SQLSTATE 57P01)", "Wait "),
        ('refused the login: database "jobs" does not exist', "Correct the database's name "),
        ("refused the login: no such database: jobs", "Correct the database's name "),
        ('refused the login: permission denied for database "jobs"', "Correct the database's name "),
        ('refused the login: password authentication failed for user "w"', "Check the user "),
        ('refused the login: role "w" does not exist', "Check the user "),
        (
            'refused the login: no pg_hba.conf entry for host "h", user "w", database "jobs"',
            "Check the user ",
        ),
        ("is not available: fe_sendauth: no password supplied", "Check the user "),
        ("is not available: connection failed: Connection refused", "Check the host and port "),
        ("did not answer within 10 s", "Check the host and port "),
    ],
)
def test_a_connection_that_fails_is_mended_by_its_cause(because: str, cure: str) -> None:
    unknown = Unknown(f"PostgreSQL at db:5432/jobs {because}")
    facts = Facts(settings=a_settings(), place="db:5432/jobs", server=unknown)
    name = "postgresql.connection"
    [finding] = checks.found_by(name, CHECKS[name], facts)
    assert finding.do is not None
    assert finding.do.startswith(cure), finding.do
    assert (finding.level, finding.says) == ("error", unknown.because)


@pytest.mark.parametrize(
    ("because", "cure"),
    [
        ("cannot be used: maximum connections exceeded", "Raise max_connections "),
        (
            "closed the connection at once, as it does when its max_connections is reached",
            "Raise max_connections ",
        ),
        ("sent no INFO: With TLS, handshake_first must be auto or false", "Check JSWORKER_NATS_URL, "),
        ("did not answer", "Check JSWORKER_NATS_URL, "),
        ("refused the login: authorization violation", "Check JSWORKER_NATS_URL and the login "),
    ],
)
def test_a_connection_to_nats_that_fails_is_mended_by_its_cause(because: str, cure: str) -> None:
    facts = Facts(settings=a_settings(), place="db:5432/jobs", nats=Unknown(f"NATS at nats:4222 {because}"))
    name = "nats.connection"
    [finding] = checks.found_by(name, CHECKS[name], facts)
    assert finding.do is not None
    assert finding.do.startswith(cure), finding.do
