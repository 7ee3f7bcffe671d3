"""Where an error was raised: in the user's own code, wherever that lies."""

import json
from pathlib import Path

import pytest

import jsworker
from jsworker.core.tracebacks import from_users_code, raised_at, traceback_of

PACKAGE = Path(jsworker.__file__).parent


def raised_in(file: Path, code: str) -> BaseException:
    with pytest.raises(ValueError, match="Expecting") as caught:
        exec(compile(code, str(file), "exec"), {"json": json})  # noqa: S102 -- the code stands below
    return caught.value


def test_it_is_the_last_line_of_the_users_own_code() -> None:
    error = raised_in(Path("/app/jobs.py"), "\njson.loads('{')\n")
    assert raised_at(error) == "/app/jobs.py, line 2"


def test_a_folder_whose_name_begins_like_ours_is_the_users() -> None:
    jobs = PACKAGE.with_name("jsworker-app") / "jobs.py"
    assert raised_at(raised_in(jobs, "json.loads('{')")) == f"{jobs}, line 1"


def test_an_error_that_nobody_raised_has_no_place() -> None:
    assert raised_at(ValueError()) == ""


def test_an_error_with_thousands_of_causes_or_members_is_shown_without_them() -> None:
    chain = ValueError("broken")
    for number in range(10_000):
        cause, chain = chain, ValueError(f"broken {number}")
        chain.__cause__ = cause
    many = ExceptionGroup("many", [ValueError("broken")] * 10_000)
    assert traceback_of(chain) == f"{HEADER}ValueError: broken 9999\n"
    assert traceback_of(many) == f"{HEADER}ExceptionGroup: many (10000 sub-exceptions)\n"
    few = ExceptionGroup("few", [ValueError("broken")])
    assert "ValueError: broken\n" in traceback_of(few)


OURS = (
    '  File "/venv/site-packages/jsworker/worker/pipeline/invocation.py", line 35, in _process\n'
    "    value = await (run.kind.processor.process(job))\n"
    "            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
    '  File "/usr/lib/python3.12/asyncio/tasks.py", line 1, in wait\n'
    "    return await fut\n"
)
USERS = (
    '  File "/app/jobs.py", line 3, in process\n'
    "    await client.get()\n"
    '  File "/venv/site-packages/anyio/streams.py", line 9, in receive\n'
    "    raise EndOfStream\n"
)
HEADER = "Traceback (most recent call last):\n"


def test_frames_that_lead_to_the_users_code_are_left_out() -> None:
    trace = f"{HEADER}{OURS}{USERS}anyio.EndOfStream"
    assert from_users_code(trace) == f"{HEADER}{USERS}anyio.EndOfStream"


def test_each_of_several_tracebacks_begins_there() -> None:
    because = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    trace = f'{HEADER}{USERS}OSError{because}{HEADER}{OURS}{USERS}ValueError: File "x", line 1'
    shown = f'{HEADER}{USERS}OSError{because}{HEADER}{USERS}ValueError: File "x", line 1'
    assert from_users_code(trace) == shown


def test_those_in_a_group_too() -> None:
    def inset(text: str) -> str:
        return "".join(f"  | {line}\n" for line in text.splitlines())

    first = f"  + Exception Group {HEADER}"
    group = "  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
    trace = f"{first}{inset(OURS)}{inset(USERS)}{group}"
    assert from_users_code(trace) == f"{first}{inset(USERS)}{group}".rstrip("\n")


@pytest.mark.parametrize(
    "text", ["", "ValueError: boom", f"{HEADER}{OURS}KeyError: 1", f"{HEADER}{OURS}".strip()]
)
def test_what_holds_no_code_of_the_user_stays_whole(text: str) -> None:
    assert from_users_code(text) == text
