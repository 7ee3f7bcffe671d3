"""When silence is too long, and when it is not the child's."""

from jsworker.worker.supervision import Silence


def silence_of(*steps: float, timeout: float = 2.0) -> bool:
    silence = Silence(timeout)
    silence.note_tick()
    return [silence.pass_by(step, now=100.0) for step in steps][-1]


def test_silence_adds_up_until_it_is_too_long() -> None:
    assert not silence_of(1.0, 1.0)
    assert silence_of(1.0, 1.0, 0.1)


def test_a_tick_begins_anew() -> None:
    silence = Silence(2.0)
    silence.note_tick()
    silence.pass_by(2.0, now=100.0)
    silence.note_tick()
    assert not silence.pass_by(2.0, now=102.0)


def test_before_the_first_tick_nothing_counts() -> None:
    assert not Silence(2.0).pass_by(1000.0, now=100.0)


def test_a_quiet_phase_counts_from_its_end() -> None:
    silence = Silence(2.0)
    silence.note_tick()
    silence.quiet_until = 150.0
    assert not silence.pass_by(40.0, now=140.0)
    assert not silence.pass_by(1.5, now=150.0)
    assert silence.pass_by(1.0, now=151.0)


def test_before_a_child_holds_jobs_it_may_be_silent_for_longer() -> None:
    silence = Silence(600.0)
    silence.note_tick()
    assert not silence.pass_by(500.0, now=500.0)
    silence.timeout = 2.0
    assert silence.pass_by(0.1, now=500.1)
