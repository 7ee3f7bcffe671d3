"""The pieces of a run, and short real runs of every system."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.figures import JSWORKER, RAW
from benchmarks.measures import enqueue, latency
from benchmarks.measures.jsworker_processes import workers
from benchmarks.processes import SystemFailed, answer_of, last_words, module
from benchmarks.runs import Rounds, drain, idle_worker, order, rate
from benchmarks.servers import Servers
from benchmarks.systems import ALL, jsworker_run, load
from benchmarks.systems.stamps import new_stamps, places


def test_rounds_give_every_system_another_place() -> None:
    turns = [order("abc", turn) for turn in range(3)]

    assert turns == [["a", "b", "c"], ["a", "c", "b"], ["c", "a", "b"]]


@pytest.mark.parametrize("systems", ["ab", "abcd"])
def test_of_an_even_number_each_comes_first_as_often_as_last(systems: str) -> None:
    turns = [order(systems, turn) for turn in range(2 * len(systems))]

    assert {turn[0] for turn in turns} == {turn[-1] for turn in turns} == {*systems}


def test_a_rate_counts_from_five_percent_to_the_last() -> None:
    slow_start = [0.0, *[10.0 + n / 100 for n in range(100)]]

    assert rate(slow_start) == pytest.approx(100.0)


@pytest.mark.parametrize("times", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_no_rate_of_jobs_that_ended_in_one_moment(times: Sequence[float]) -> None:
    with pytest.raises(SystemFailed, match=f"{len(times)} jobs are too few"):
        rate(times)


def test_a_failed_system_is_told_and_not_asked_again() -> None:
    rounds = Rounds("a", ["sound", "broken"], 3, lambda _: None)
    turns = []
    for system in rounds.systems("testing"):
        turns.append(system)
        with rounds.failing(system):
            rounds.add("speed", system, "jobs/s", 1.0)
            if system == "broken":
                raise SystemFailed("out of memory\nin line 2")

    sound, broken = rounds.figures()
    assert turns.count("broken") == 1
    assert (sound.system, sound.values) == ("sound", (1.0, 1.0, 1.0))
    assert (broken.system, broken.values, broken.note) == ("broken", (), "failed: out of memory in line 2")


def test_a_remark_of_one_round_stays() -> None:
    rounds = Rounds("d", ["x"], 2, lambda _: None)
    rounds.add("p50", "x", "ms", 1.0, note="too slow; defaults")
    rounds.add("p50", "x", "ms", 1.0, note="defaults")

    assert rounds.figures()[0].note == "too slow; defaults"


def test_marks_are_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_stamps(tmp_path, 3) as stamps:
        for name, value in stamps.variables.items():
            monkeypatch.setenv(name, value)
        inside = places()
        inside[0] = inside[2] = 5.0
        assert not stamps.all_started()
        inside[1] = 7.0

        assert stamps.all_started()
        assert stamps.start_of(1) == 7.0
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_failed_producer_says_why(bench: Servers) -> None:
    variables = load(RAW).prepare(bench)

    with pytest.raises(SystemFailed, match="no way to produce is called 'quickly'"):
        answer_of(module("benchmarks.producing", RAW, "quickly", "1"), variables, seconds=30.0)


def test_the_last_words_are_no_ruler() -> None:
    assert last_words(b"  | OSError: full\n  +-------\n\n") == "OSError: full"
    assert last_words(b"") == "no word on stderr"


@pytest.mark.thorough
def test_workers_are_there_when_told_and_gone_afterwards(bench: Servers, tmp_path: Path) -> None:
    with new_stamps(tmp_path, 1) as stamps:
        variables = bench.new_jsworker() | stamps.variables
        with workers(2, [jsworker_run.TARGET], variables) as running:
            started = {running.parent, *running.children}
            parents = {psutil.Process(child).ppid() for child in running.children}

            assert len(started) == 3
            assert parents == {running.parent}
        assert not [pid for pid in started if psutil.pid_exists(pid)]


@pytest.mark.thorough
def test_workers_that_end_early_say_why(bench: Servers) -> None:
    with (
        pytest.raises(SystemFailed, match=r"exit code 2: .*no_such_module"),
        workers(1, ["no_such_module:Job"], bench.new_jsworker()),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("system", ALL)
def test_a_backlog_is_drained(bench: Servers, system: str) -> None:

    assert drain(bench, system, 600, seconds=60.0) > 0


@pytest.mark.thorough
def test_two_processes_drain_a_backlog_together(bench: Servers) -> None:
    assert drain(bench, RAW, 600, processes=2, seconds=60.0) > 0


@pytest.mark.thorough
def test_a_killed_worker_is_told_and_not_waited_for(bench: Servers) -> None:
    with idle_worker(bench, RAW, 100) as worker:
        os.kill(worker.processes[0].pid, signal.SIGKILL)

        with pytest.raises(SystemFailed, match="exit code"):
            worker.latencies(1000.0, 20, seconds=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("system", [JSWORKER, RAW, "pgqueuer", "FastStream"])
def test_latencies_are_taken_for_every_job(bench: Servers, system: str) -> None:
    with idle_worker(bench, system, 60) as worker:
        first, second = worker.latencies(100.0, 20), worker.latencies(200.0, 40)

    assert (len(first.start), len(second.start)) == (20, 40)
    assert all(seconds > 0 for seconds in first.start + second.start)
    if first.completed:
        assert all(end > start for start, end in zip(first.start, first.completed, strict=True)), first


def test_percentiles() -> None:
    assert latency.percentiles([float(n) for n in range(1, 102)]) == {
        "p50": 51.0,
        "p99": pytest.approx(100.98),
    }


@pytest.mark.slow
def test_all_ways_of_enqueueing_are_measured() -> None:
    figures = enqueue.measure(1, lambda _: None, single=5, many=40, call=10, systems=[JSWORKER])

    alike = {enqueue.SINGLE, enqueue.in_one_call(40), enqueue.in_calls(10), enqueue.OWN_TRANSACTION}
    assert {figure.name for figure in figures} == alike | {enqueue.RELAY, enqueue.ACCEPTED_AND_PUBLISHED}
    assert all(value > 0 for figure in figures for value in figure.values)
