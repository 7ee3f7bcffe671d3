"""Back-off of restarts."""

import pytest

from jsworker.runtime.supervisor.restart import Restarts


def delays(*lives: float, heartbeat_interval: float = 5.0) -> list[float]:
    restarts = Restarts(heartbeat_interval)
    return [restarts.delay_after(life) for life in lives]


def test_short_lives_double_the_delay_up_to_half_a_minute() -> None:
    expected = [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert delays(*[1.0] * 8) == [pytest.approx(delay, rel=0.2) for delay in expected]


def test_a_long_life_begins_anew_and_at_once() -> None:
    assert delays(1.0, 1.0, 61.0, 1.0)[2:] == [0.0, pytest.approx(0.5, rel=0.2)]


def test_quick_heartbeats_make_quick_restarts() -> None:
    assert delays(1.0, 1.0, heartbeat_interval=0.5) == [
        pytest.approx(0.05, rel=0.2),
        pytest.approx(0.1, rel=0.2),
    ]
    assert delays(6.5, heartbeat_interval=0.5) == [0.0]
    assert delays(1.0, heartbeat_interval=50.0) == [pytest.approx(0.5, rel=0.2)]


def test_the_delays_of_a_fleet_differ() -> None:
    assert len({delays(1.0)[0] for _ in range(20)}) > 1
