"""Where an error was raised: in the user's own code, wherever that lies."""

import json
from pathlib import Path

import pytest

import jsworker
from jsworker.tracebacks import raised_at

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
