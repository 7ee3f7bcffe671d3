from jsworker.core.settings import load_settings
from jsworker.demo.thresholds import SHORT, shown_thresholds


def test_the_short_times_keep_every_rule() -> None:
    settings = load_settings(database_url="postgresql://localhost/demo", **SHORT)

    assert {name: getattr(settings, name) for name in SHORT} == SHORT


def test_the_times_are_shown_beside_their_defaults() -> None:
    usual = load_settings(database_url="postgresql://localhost/demo")
    shown = {each.name: (each.seconds, each.default_seconds) for each in shown_thresholds()}

    assert shown["stale"] == (SHORT["stale_threshold"], usual.stale_threshold)
    assert shown["ack wait"] == (SHORT["ack_wait"], usual.ack_wait)
    assert all(short < default for short, default in shown.values())
