"""A flame graph is as wide at each function as the samples say, and shows any name."""

import re

import pytest

from benchmarks.flame import below_event_loop, draw, read_samples

START = "main (child.py:1);Runner.run (asyncio/runners.py:118)"
SAMPLES = f"""\
{START};execute (jsworker/pipeline.py:10);process (a.py:1) 30
{START};execute (jsworker/pipeline.py:12) 10
{START};<lambda> (psycopg/cursor.py:7) 40
{START};rare (nats/client.py:1) 0
{START} 20
write (logs.py:5) 300
"""


def test_lines_of_a_function_count_together_and_what_starts_the_loop_is_left_out() -> None:
    below = below_event_loop(read_samples(SAMPLES))
    assert below.samples == 100
    shares = {name: frame.samples for name, frame in below.calls.items()}
    assert shares == {
        "execute (jsworker/pipeline.py)": 40,
        "<lambda> (psycopg/cursor.py)": 40,
        "rare (nats/client.py)": 0,
    }
    assert below.calls["execute (jsworker/pipeline.py)"].calls["process (a.py)"].samples == 30


def test_widths_are_shares_and_names_are_escaped() -> None:
    svg = draw(below_event_loop(read_samples(SAMPLES)), "a < b")
    widths = dict(re.findall(r"<title>([^<]*): [\d.]+%</title><rect [^>]*? width=\"([\d.]+)\"", svg))
    assert {name: round(float(width)) for name, width in widths.items()} == {
        "execute (jsworker/pipeline.py)": 472,
        "process (a.py)": 354,
        "&lt;lambda&gt; (psycopg/cursor.py)": 472,
    }
    assert "<title>a &lt; b</title>" in svg
    assert "#a9d18e" in svg


def test_other_stacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Runner\.run"):
        below_event_loop(read_samples("main (a.py:1);work (b.py:2) 3\n"))
