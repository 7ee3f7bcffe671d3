"""``@job``: what it makes of a function, and what it refuses."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import date
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from jsworker import Backoff, Job, JobProcessor, Limit, job
from jsworker.core.errors import InvalidName, InvalidPayload
from jsworker.core.functions import ClassAttributes, FunctionProcessor
from jsworker.core.processor import read_payload
from jsworker.core.settings import load_settings
from jsworker.worker.pipeline.kinds import Kind, resolve_kinds

T = TypeVar("T", bound=BaseModel)


class Text(BaseModel):
    text: str


@job
async def count_words(text: Text) -> int:
    """Count words."""
    return len(text.text.split())


@job(kind="lines", max_attempts=5, timeout=60.0, limit=Limit(2), backoff=Backoff(first=5.0))
def count_lines(job: Job[Text]) -> dict[str, int]:
    return {"lines": job.payload.text.count("\n")}


@job()
def tidy_up(payload):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 -- without annotations
    return sorted(payload)


@job
def look_at(job):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 -- without annotations
    return job.kind


@job
def next_day(job: Job) -> date:  # type: ignore[type-arg]  # the payload is a dict
    return date.fromisoformat(job.payload["day"])


@job
async def pass_on(value: Any) -> Any:
    return value


def logged(function: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


@job
@logged
async def decorated(text: Text) -> int:
    return len(text.text)


def kind_of(processor: type[JobProcessor[Any]]) -> Kind:
    [kind] = resolve_kinds([processor], load_settings(database_url="postgresql://x@y/z")).values()
    return kind


def run(processor: type[JobProcessor[Any]], payload: Any) -> Any:
    """Call ``process`` as a worker does."""
    given = read_payload(processor, payload)
    it: Any = Job.__new__(Job)
    it.kind, it.payload = processor.kind, given
    found = processor().process(it)
    if kind_of(processor).is_async:
        return asyncio.run(found)
    assert not asyncio.iscoroutine(found)
    return found


@pytest.mark.parametrize(
    ("processor", "kind", "payload", "result"),
    [
        (count_words, "count-words", {"text": "to be"}, 2),
        (count_lines, "lines", {"text": "a\nb"}, {"lines": 1}),
        (tidy_up, "tidy-up", {"b": 1, "a": 2}, ["a", "b"]),
        (look_at, "look-at", {}, "look-at"),
        (next_day, "next-day", {"day": "2030-01-31"}, date(2030, 1, 31)),
        (pass_on, "pass-on", [1, "a"], [1, "a"]),
        (decorated, "decorated", {"text": "abc"}, 3),
    ],
)
def test_a_function_is_a_processor(
    processor: type[JobProcessor[Any]], kind: str, payload: Any, result: Any
) -> None:
    assert issubclass(processor, JobProcessor)
    assert processor.kind == kind
    assert run(processor, payload) == result


def test_payloads_are_checked_by_the_annotation() -> None:
    for processor in (count_words, count_lines):
        with pytest.raises(InvalidPayload, match=r"^payload of kind .*: text: "):
            read_payload(processor, {"text": 7})


def test_keywords_are_class_attributes() -> None:
    assert (count_lines.max_attempts, count_lines.timeout, count_lines.limit) == (5, 60.0, Limit(2))
    assert count_lines.backoff == Backoff(first=5.0)
    kind = kind_of(count_lines)
    assert (kind.limits.max_attempts, kind.limits.timeout) == (5, 60.0)
    assert count_words.max_attempts is JobProcessor.max_attempts


def test_all_class_attributes_are_keywords() -> None:
    assert ClassAttributes.__annotations__.keys() == JobProcessor.__annotations__.keys()


def test_the_class_is_found_where_the_function_was_written() -> None:
    assert (count_words.__module__, count_words.__qualname__) == (__name__, "count_words")
    assert count_words.__doc__ == "Count words."
    assert kind_of(count_words).origin == f"{__name__}:count_words"


def test_the_return_type_is_that_of_the_function() -> None:
    assert kind_of(next_day).result_type.dump_python(date(2030, 1, 31), mode="json") == "2030-01-31"


async def test_the_plain_function_can_be_called() -> None:
    assert await count_words.function(Text(text="to be or")) == 3
    assert await count_words().function(Text(text="to be or")) == 3


def test_a_call_of_the_class_tells_how_the_function_is_called() -> None:
    refused: Any = count_words
    says = r"^count_words is a processor: enqueue it, or call count_words\.function\(…\)$"
    with pytest.raises(TypeError, match=says):
        refused(Text(text="a"))
    with pytest.raises(TypeError, match=says):
        refused(text="a")
    assert str(inspect.signature(count_words)) == "()"
    [kind] = resolve_kinds([count_words()], load_settings(database_url="postgresql://x@y/z")).values()
    assert kind.origin == f"{__name__}:count_words"  # another process can make this instance


def test_it_can_be_subclassed() -> None:
    class CountLinesTwice(count_lines):  # type: ignore[misc, valid-type]  # to a type checker it is a value
        kind = "lines-twice"

    assert (CountLinesTwice.kind, CountLinesTwice.max_attempts) == ("lines-twice", 5)
    assert issubclass(CountLinesTwice, FunctionProcessor)


def two(first: Text, second: Text) -> None: ...


def none() -> None: ...


def only_by_name(*, text: Text) -> None: ...


def unknown(text: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821 -- what is tested


def generic(text: T) -> T:
    return text


def of_generic(job: Job[T]) -> T:
    return job.payload


def many(text: Text) -> Iterator[int]:
    yield 1


async def many_async(text: Text) -> AsyncIterator[int]:
    yield 1


TAKES_ONE = (
    r"^@job: {0} must take the job or its payload alone, as {0}\(job: Job\[Text\]\) or {0}\(text: Text\)$"
)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (two, TAKES_ONE.format("two")),
        (none, TAKES_ONE.format("none")),
        (only_by_name, TAKES_ONE.format("only_by_name")),
        (
            unknown,
            r"^@job: the annotations of unknown cannot be read: NameError: name 'Nowhere' is not defined$",
        ),
        (generic, "^@job: the payload of generic must be a type, not the type variable T$"),
        (of_generic, "^@job: the payload of of_generic must be a type, not the type variable T$"),
        (many, "^@job: many must return its result, not yield$"),
        (many_async, "^@job: many_async must return its result, not yield$"),
        (Text, "^@job decorates a function, not class Text$"),
        (Text(text=""), "^@job decorates a function, not Text$"),
        (len, "^@job decorates a function, not builtin_function_or_method$"),
    ],
)
def test_what_cannot_be_a_processor_is_refused(function: Any, told: str) -> None:
    for decorator in (job, job(max_attempts=3)):
        with pytest.raises(TypeError, match=told):
            decorator(function)


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"max_attempt": 3}, "^@job takes no max_attempt: did you mean max_attempts?"),
        ({"retries": 3}, "^@job takes no retries: class attributes of JobProcessor are taken$"),
        ({"process": 3}, "^@job takes no process: "),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest(attributes: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        job(**attributes)


def test_a_kind_is_checked() -> None:
    with pytest.raises(InvalidName, match=r"^kind 'Count Words' must match"):
        job(kind="Count Words")(count_words.function)


def test_a_name_that_is_no_kind_is_refused_with_what_to_do() -> None:
    nameless: Any = lambda payload: payload  # noqa: E731 -- its name is no kind
    told = r"^@job: <lambda> is no name of a kind: give one, as in @job\(kind='resize-image'\)$"
    with pytest.raises(InvalidName, match=told):
        job(nameless)
    assert job(kind="count")(nameless).kind == "count"
