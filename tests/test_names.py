"""Names of kinds and unique keys, and how foreign text is shown in one line."""

import re
import shutil
import subprocess
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsworker.core.errors import InvalidName
from jsworker.core.names import (
    check_kind,
    check_limit_key,
    check_limit_key_of_row,
    check_step_name,
    check_unique_key,
    kebab_case,
    printable,
    shell_word,
    shown,
)
from jsworker.core.schedule_rules import check_schedule_name

unhurried = settings(deadline=None)  # the machine may be busy


class Named(str, Enum):  # noqa: UP042 -- a StrEnum is formatted by its value
    MEMBER = "a-name"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize("name", ["a", "analyze-repo", "0", "a_b", "x" * 64])
def test_good_kinds(name: str) -> None:
    assert check_kind(name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", "_a", ".a", "A", "ä", "a b", "a\n", "a*", "a>", "a/b", "x" * 65, "a\0", None, 1, b"a"]
)
def test_bad_kinds(name: Any) -> None:
    with pytest.raises(InvalidName, match=r"must match \^\[a-z0-9\]\[a-z0-9_-\]\{0,63\}\$") as caught:
        check_kind(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [Named.MEMBER, Loud("a-name")])
@pytest.mark.parametrize(
    "check",
    [
        check_kind,
        check_unique_key,
        check_step_name,
        check_limit_key,
        check_limit_key_of_row,
        check_schedule_name,
    ],
)
def test_a_checked_name_is_plain_text(check: Callable[[str], str], name: str) -> None:
    assert f"{check(name)}" == "a-name"
    assert type(check(name)) is str


@pytest.mark.parametrize(
    "name", ["a", "page 7", "a@b.example", "https://x.example/a?b=c", "Ä漢\U0001f600", "x" * 255]
)
def test_good_unique_keys(name: str) -> None:
    assert check_unique_key(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * 256, "a\n", "\t", "a\0", "\x1b[31m", "\x85", "\u2028", "\ud800", None, 1, b"a"]
)
def test_bad_unique_keys(name: Any) -> None:
    with pytest.raises(InvalidName, match="must be text of 1 to 255 printable characters") as caught:
        check_unique_key(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["", "x" * 256, "a\n", "a\0", "\x1b[31m", "\x85", "\u2028", "\ud800", None, 1]
)
def test_limit_keys_that_no_row_has(key: Any) -> None:
    with pytest.raises(InvalidName, match=r"limit key .* must be text of 1 to 255 printable"):
        check_limit_key_of_row(key)


@unhurried
@given(st.text())
def test_what_passes_is_one_subject_token(name: str) -> None:
    try:
        check_kind(name)
    except InvalidName:
        return
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name)


@pytest.mark.parametrize(
    ("name", "kebab"),
    [
        ("AnalyzeRepo", "analyze-repo"),
        ("HTTPFetch", "http-fetch"),
        ("Sha256Sum", "sha256-sum"),
        ("_Private", "private"),
        ("Export_CSV", "export_csv"),
        ("X", "x"),
    ],
)
def test_kebab_case(name: str, kebab: str) -> None:
    assert kebab_case(name) == kebab
    assert check_kind(kebab) == kebab


@unhurried
@given(st.text(st.characters() | st.sampled_from("\n\r\x1b\x7f\x85\u2028\u202e\ud800")), st.integers(2, 50))
def test_printable_text_is_one_bounded_line(text: str, limit: int) -> None:
    line = printable(text, limit)
    assert line.isprintable()
    assert len(line) <= limit
    if text.isprintable() and len(text) <= limit:
        assert line == text


def test_printable_text_keeps_its_meaning() -> None:
    assert printable("a\n\x1b[31mü\u202e", 100) == r"a\n\x1b[31mü\u202e"
    assert printable("abcdef", 4) == "abc…"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_word_for_the_shell_is_read_as_it_was() -> None:
    words = [
        "acme",
        "",
        "a b",
        "it's",
        "$HOME`id`",
        "\u00a0a\u00a0",
        "\u202e'\\n\U0001f600\u200b",
        "-x\u3000",
    ]
    script = f"printf '%s\\0' {' '.join(map(shell_word, words))}"
    told = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    ).stdout
    assert told.decode().split("\0")[:-1] == words
    assert all(shell_word(word).isprintable() for word in words)


def test_shown_values_are_quoted_ascii_and_short() -> None:
    assert shown("a\nü") == r"'a\n\xfc'"
    assert len(shown("x" * 1000)) == 80
