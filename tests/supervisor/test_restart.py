"""Back-off of restarts."""

import pytest

from jsworker.supervisor.children import Place


def delays(*lives: float, heartbeat_interval: float = 5.0, worked: bool = True) -> list[float]:
    place = Place(1, heartbeat_interval)
    return [place.restart_delay(life, worked=worked) for life in lives]


def test_the_first_death_of_a_child_that_has_worked_costs_no_time() -> None:
    assert delays(1.0) == [0.0]


def test_further_deaths_in_a_row_double_the_delay_up_to_half_a_minute() -> None:
    expected = [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert delays(*[1.0] * 9) == [pytest.approx(delay, rel=0.2) for delay in expected]


def test_a_child_that_never_worked_is_waited_for_from_the_first_death_on() -> None:
    assert delays(1.0, 1.0, 1.0, worked=False) == [pytest.approx(delay, rel=0.2) for delay in (0.5, 0.5, 1)]


def test_a_long_life_begins_anew_and_at_once() -> None:
    assert delays(1.0, 1.0, 61.0, 1.0)[2:] == [0.0, pytest.approx(0.5, rel=0.2)]
    assert delays(61.0, worked=False) == [pytest.approx(0.5, rel=0.2)]


def test_quick_heartbeats_make_quick_restarts() -> None:
    assert delays(1.0, 1.0, 1.0, heartbeat_interval=0.5)[1:] == [
        pytest.approx(0.05, rel=0.2),
        pytest.approx(0.1, rel=0.2),
    ]
    assert delays(1.0, 6.5, heartbeat_interval=0.5)[1:] == [0.0]
    assert delays(1.0, 1.0, heartbeat_interval=50.0)[1:] == [pytest.approx(0.5, rel=0.2)]


def test_the_delays_of_a_fleet_differ() -> None:
    assert len({delays(1.0, 1.0)[1] for _ in range(20)}) > 1
