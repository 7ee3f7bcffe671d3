"""Processors: back-off, and payloads on their way into a row and back."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    AliasGenerator,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    SecretBytes,
    SecretStr,
    computed_field,
    field_serializer,
    field_validator,
)
from pydantic.alias_generators import to_camel
from typing_extensions import TypedDict

from jsworker.client.enqueueing import payload_text
from jsworker.core import strict_json
from jsworker.core.errors import InvalidJson, InvalidName, InvalidPayload, InvalidTarget
from jsworker.core.processor import (
    Backoff,
    JobProcessor,
    payload_type,
    read_payload,
    read_payload_text,
    read_result,
    write_payload,
)

unhurried = settings(deadline=None)  # the machine may be busy

Q = TypeVar("Q")
R = TypeVar("R")


class Repo(BaseModel):
    url: str
    depth: int = 1


class Analyze(JobProcessor[Repo]):
    def process(self, job: Any) -> None: ...


class Untyped(JobProcessor):
    def process(self, job: Any) -> None: ...


def processor_of(payload: Any) -> type[JobProcessor[Any]]:
    class Typed(JobProcessor[payload]):
        def process(self, job: Any) -> None: ...

    return Typed


def there_and_back(processor: type[JobProcessor[Any]], payload: Any) -> Any:
    return read_payload(processor, strict_json.loads(write_payload(processor, payload)))


class TestBackoff:
    def test_waits_grow_up_to_the_longest(self) -> None:
        backoff = Backoff(first=1, factor=3, longest=20, jitter=0)
        assert [backoff.delay(attempt) for attempt in range(1, 6)] == [1, 3, 9, 20, 20]

    def test_jitter_varies_the_wait_both_ways_within_its_share(self) -> None:
        waits = [Backoff(first=100, jitter=0.2).delay(1) for _ in range(500)]
        assert all(80 <= wait <= 120 for wait in waits)
        assert min(waits) < 95
        assert max(waits) > 105

    @unhurried
    @given(
        st.floats(0, 1e6), st.floats(0, 1e300), st.floats(0, 1e6), st.floats(0, 1), st.integers(-5, 10_000)
    )
    def test_no_attempt_waits_less_than_nothing_or_longer_than_the_longest(
        self, first: float, factor: float, longest: float, jitter: float, attempt: int
    ) -> None:
        assert 0 <= Backoff(first, factor, longest, jitter).delay(attempt) <= longest * (1 + jitter)

    def test_small_growth_goes_on_after_many_attempts(self) -> None:
        backoff = Backoff(first=1, factor=1.01, longest=600, jitter=0)
        assert backoff.delay(65) < backoff.delay(66) < backoff.delay(600) < 600
        assert backoff.delay(10_000_000) == 600

    def test_attempts_below_one_count_as_the_first(self) -> None:
        assert Backoff(jitter=0).delay(0) == Backoff(jitter=0).delay(1) == 1

    @pytest.mark.parametrize(
        ("value", "fault"),
        [
            ({"first": -1}, "backoff first=-1 must be a finite number of seconds, 0 or more"),
            (
                {"first": timedelta(minutes=1)},
                "backoff first=datetime.timedelta(seconds=60) must be a finite number of seconds, 0 or more",
            ),
            ({"factor": math.nan}, "backoff factor=nan must be a finite number, 0 or more"),
            ({"factor": "2"}, "backoff factor='2' must be a finite number, 0 or more"),
            ({"longest": math.inf}, "backoff longest=inf must be a finite number of seconds, 0 or more"),
            ({"longest": None}, "backoff longest=None must be a finite number of seconds, 0 or more"),
            ({"jitter": 1.5}, "backoff jitter=1.5 must be from 0 to 1"),
        ],
    )
    def test_nonsense_is_refused(self, value: dict[str, Any], fault: str) -> None:
        with pytest.raises(ValueError, match=re.escape(fault)):
            Backoff(**value)


class TestKind:
    def test_the_class_name_in_kebab_case_unless_given(self) -> None:
        class CloneAll(Untyped): ...

        class Named(Untyped):
            kind = "other"

        class Child(Named): ...

        assert [CloneAll.kind, Named.kind, Child.kind] == ["clone-all", "other", "child"]

    def test_a_bad_kind_is_refused_at_the_class(self) -> None:
        with pytest.raises(InvalidName, match=r"kind 'a\.b' must match"):

            class Dotted(Untyped):
                kind = "a.b"


class TestMisspelledSettings:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("max_attemps", "max_attempts"),
            ("max_attempt", "max_attempts"),
            ("maxAttempts", "max_attempts"),
            ("time_out", "timeout"),
            ("tiemout", "timeout"),
            ("back_off", "backoff"),
            ("max_memory_gb", "max_memory_mb"),
        ],
    )
    def test_one_is_refused_at_the_class_with_what_is_meant(self, name: str, meant: str) -> None:
        says = f"misspelled.Job: {name} is no setting of a processor: did you mean {meant}?"
        with pytest.raises(TypeError, match=re.escape(says)):
            type("Job", (Untyped,), {name: 3, "__module__": "misspelled"})

    def test_attributes_of_ones_own_are_taken(self) -> None:
        names = "retries limits rates kinds timeouts timeout_ms timed_out http_timeout limiter limit_key"
        names += " rate_limit date max_retries unique_key scheduler priorities expires _time_out TIME_OUT"

        class Own(Untyped):
            locals().update(dict.fromkeys(names.split(), 3))

            class Limits: ...

            def time_out(self) -> None: ...

            @property
            def back_off(self) -> int:
                return 3

        assert Own.kind == "own"


@dataclass
class Point:
    x: int


class Parts(TypedDict):
    name: str


class Base(JobProcessor[Q], Generic[Q]):
    def process(self, job: Any) -> None: ...


class Two(Base[R], Generic[Q, R]): ...


class Envelope(BaseModel, Generic[Q]):
    sender: str
    content: Q


NAMED = """
from jsworker import JobProcessor
from pydantic import BaseModel

class Named(JobProcessor["T"]):
    async def process(self, job):
        return job.payload.value

class Several(JobProcessor["list[T]"]):
    async def process(self, job): ...

class Dangling(JobProcessor["P"]):
    async def process(self, job): ...

class T(BaseModel):
    value: {type}
"""


class TestPayloadType:
    def test_it_is_found_through_subclasses_and_generic_parents(self) -> None:
        class Child(Analyze): ...

        class OfBase(Base[Repo]): ...

        class OfTwo(Two[int, Repo]): ...

        for processor in (Analyze, Child, OfBase, OfTwo):
            assert read_payload(processor, {"url": "u"}) == Repo(url="u")

    def test_it_is_found_inside_of_generic_types(self) -> None:
        class Enveloped(JobProcessor[Envelope[Q]], Generic[Q]):
            def process(self, job: Any) -> None: ...

        class Listed(JobProcessor[list[Q | None]], Generic[Q]):
            def process(self, job: Any) -> None: ...

        class Twice(Enveloped[R], Generic[Q, R]): ...

        class OfEnvelope(Enveloped[Repo]): ...

        class OfList(Listed[Repo]): ...

        class OfTwice(Twice[int, Repo]): ...

        class Bare(JobProcessor[Envelope], Generic[R]):  # type: ignore[type-arg]  # left open on purpose
            def process(self, job: Any) -> None: ...

        class OfBare(Bare[Repo]): ...

        for processor in (OfEnvelope, OfTwice):
            assert read_payload(processor, {"sender": "s", "content": {"url": "u"}}).content == Repo(url="u")
        assert read_payload(Enveloped, {"sender": "s", "content": 1}).content == 1
        assert read_payload(OfList, [{"url": "u"}, None]) == [Repo(url="u"), None]
        assert read_payload(OfBare, {"sender": "s", "content": 1}).content == 1

    def test_names_that_are_not_of_the_payload_may_be_for_type_checkers_alone(self) -> None:
        class OfRepo(Two["SeenByTypeCheckers", Repo]): ...  # type: ignore[name-defined]

        class OfResult(Fixed["SeenByTypeCheckers"]): ...  # type: ignore[name-defined]

        for processor in (OfRepo, OfResult):
            assert read_payload(processor, {"url": "u"}) == Repo(url="u")
            assert read_result(processor, {"url": "u"}) == {"url": "u"}

    def test_left_open_it_is_a_dict(self) -> None:
        class Open(Base): ...  # type: ignore[type-arg]  # left open on purpose

        for processor in (Untyped, Open, Base):
            assert read_payload(processor, {"any": ["thing"]}) == {"any": ["thing"]}
            with pytest.raises(InvalidPayload, match="the whole value: Input should be an object"):
                read_payload(processor, [1])

    def test_names_are_looked_up_in_the_module_of_the_class_that_gives_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        for name, of_field in (("named_text", "str"), ("named_number", "int")):
            (tmp_path / f"{name}.py").write_text(NAMED.format(type=of_field))
        (tmp_path / "named_heir.py").write_text("import named_text\nclass Heir(named_text.Named): ...\n")
        text, number, heir = map(import_module, ("named_text", "named_number", "named_heir"))
        assert read_payload(text.Named, {"value": "a"}) == text.T(value="a")
        assert read_payload(heir.Heir, {"value": "a"}) == text.T(value="a")
        assert read_payload(text.Several, [{"value": "a"}]) == [text.T(value="a")]
        assert read_payload(number.Named, {"value": 1}) == number.T(value=1)
        assert read_payload(number.Several, [{"value": 1}]) == [number.T(value=1)]
        with pytest.raises(InvalidTarget, match=r"^the payload type of Dangling cannot be used: .* 'P' is"):
            payload_text(text.Dangling, {})

    def test_it_is_built_once(self) -> None:
        assert payload_type(Analyze) is payload_type(Analyze)


class Results(JobProcessor[Q], Generic[Q]):
    def process(self, job: Any) -> Q:
        raise NotImplementedError


class Fixed(JobProcessor[Repo], Generic[Q]):
    def process(self, job: Any) -> Q:
        raise NotImplementedError


@dataclass
class Wrapped(Generic[Q]):
    content: Q


class BareResults(JobProcessor[Q], Generic[Q]):
    def process(self, job: Any) -> Wrapped:  # type: ignore[type-arg]  # left open on purpose
        raise NotImplementedError


class Pages(Results[R], Generic[R, Q]):
    def process(self, job: Any) -> "Envelope[list[R | None]]":  # type: ignore[override]
        raise NotImplementedError


M = TypeVar("M", bound=BaseModel)


class Models(JobProcessor[M], Generic[M]):
    async def process(self, job: Any) -> M:
        raise NotImplementedError


class ManyModels(JobProcessor[M], Generic[M]):
    def process(self, job: Any) -> Envelope[list[M]]:
        raise NotImplementedError


class TestReturnType:
    def test_type_variables_stand_for_what_the_class_gives(self) -> None:
        class OfRepo(Results[Repo]): ...

        class OfModel(Models[Repo]): ...

        class OfSeveral(Results[list[R]], Generic[R, Q]): ...

        class Several(OfSeveral[Repo, int]): ...

        class OfPages(Pages[Repo, int]): ...

        repo: dict[str, Any] = {"url": "u", "depth": 2}
        page = {"sender": "s", "content": [repo, None]}
        for processor in (OfRepo, OfModel):
            assert read_result(processor, repo) == Repo(url="u", depth=2)
        assert read_result(Several, [repo]) == [Repo(url="u", depth=2)]
        assert read_result(OfPages, page).content == [Repo(url="u", depth=2), None]

    def test_left_open_they_stand_for_any_value(self) -> None:
        class Open(Models): ...  # type: ignore[type-arg]  # left open on purpose

        for processor in (Models, Open):
            assert read_result(processor, {"url": "u"}) == {"url": "u"}

        class OfBare(BareResults[Repo]): ...

        assert read_result(OfBare, {"content": 1}) == Wrapped(1)
        page = read_result(ManyModels, {"sender": "s", "content": [{"url": "u"}]})
        assert (page.sender, page.content) == ("s", [{"url": "u"}])


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str = Field(alias="URL")
    branch: str = Field("main", validation_alias="ref")
    depth: int = Field(1, serialization_alias="levels")
    raw: Json[list[int]] = Field(default_factory=list)

    @computed_field  # type: ignore[prop-decorator]  # the decorator pydantic documents
    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


NAMES = AliasGenerator(serialization_alias=to_camel)


class ByAlias(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    order_id: int = Field(alias="orderId")
    max_cents: int | None = Field(None, serialization_alias="maxCents")
    sent_to: str | None = Field(None, validation_alias=AliasChoices("to", "recipient"))


class Generated(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, alias_generator=NAMES, extra="forbid")
    order_id: int
    max_cents: int | None = None


class Populated(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True, alias_generator=to_camel)
    order_id: int
    inner: list[Generated] = []


@dataclass
class AliasedPoint:
    max_x: Annotated[int, Field(alias="maxX")]
    __pydantic_config__ = ConfigDict(serialize_by_alias=True)


class AliasedParts(TypedDict):
    __pydantic_config__ = ConfigDict(serialize_by_alias=True)  # type: ignore[misc]
    max_x: Annotated[int, Field(serialization_alias="maxX")]


class AliasedA(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    of_kind: Literal["a"] = Field("a", alias="kind")


class AliasedB(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    of_kind: Literal["b"] = Field("b", alias="kind")


MOVED = {"from": 1, "external_id": 2, "partner_id": 3}


class Move(BaseModel):
    """Comes back by its aliases alone: each but the first one is the name of another field."""

    model_config = ConfigDict(serialize_by_alias=True)
    source: int = Field(alias="from")
    id: int = Field(alias="external_id")
    external_id: int = Field(alias="partner_id")


class Circle(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, alias_generator=to_camel)
    kind: Literal["circle"] = "circle"
    max_tries: int = 3


class Draw(BaseModel):
    """Comes back by aliases alone, because its validator reads by them."""

    model_config = ConfigDict(serialize_by_alias=True)
    shape: Circle

    @field_validator("shape", mode="before")
    @classmethod
    def pick(cls, shape: Any) -> Any:
        return Circle.model_validate(shape) if isinstance(shape, dict) else shape


ALIASED = [
    (ByAlias, ByAlias(orderId=7, max_cents=500, to="x"), '{"order_id":7,"max_cents":500,"sent_to":"x"}'),
    (Generated, Generated(order_id=7, max_cents=500), '{"order_id":7,"max_cents":500}'),
    (
        Populated,
        Populated(order_id=7, inner=[Generated(order_id=1)]),
        '{"order_id":7,"inner":[{"order_id":1,"max_cents":null}]}',
    ),
    (AliasedPoint, AliasedPoint(3), '{"maxX":3}'),
    (AliasedParts, {"max_x": 3}, '{"max_x":3}'),
    (Annotated[AliasedA | AliasedB, Field(discriminator="of_kind")], AliasedB(kind="b"), '{"kind":"b"}'),
    (Move, Move.model_validate(MOVED), '{"from":1,"external_id":2,"partner_id":3}'),
    (Draw, Draw(shape=Circle(maxTries=9)), '{"shape":{"kind":"circle","maxTries":9}}'),
]


class Named(BaseModel):
    first: str
    last: str

    @computed_field  # type: ignore[prop-decorator]  # the decorator pydantic documents
    @property
    def whole(self) -> str:
        return f"{self.first} {self.last}"


class Rule(BaseModel):
    policy: Literal["allow", "forbid"] = "forbid"

    @computed_field  # type: ignore[prop-decorator]  # the decorator pydantic documents
    @property
    def total(self) -> int:
        return 1


class Partial(BaseModel):
    name: str
    note: str = Field("", exclude=True)


class WithoutNeeded(BaseModel):
    note: str = Field(exclude=True)


class OneWay(BaseModel):
    at: datetime

    @field_serializer("at")
    def write(self, at: datetime) -> str:
        return f"{at:%d. %B %Y}"


class Tuples(Enum):
    A = (1, 2)


UNREAD = "a worker could not read it again: "


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    id: UUID
    since: datetime
    tags: tuple[str, ...]
    seen: set[int]


class Choice(BaseModel):
    kind: Literal["a"]


class Other(BaseModel):
    kind: Literal["b"]


class Shy(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def refuse(cls, number: int) -> int:
        if number < 10:
            raise ValueError("line one\nline two")
        return number


MASKED = "a secret, which would be stored as asterisks: store a reference to it, for example its name"


class Lossy(BaseModel):
    model_config = ConfigDict(extra="allow")

    any: Any = None
    more: dict[str, Any] = {}
    number: float = 1.0
    login: SecretStr = SecretStr("")
    own: SecretStr = SecretStr("")
    text: str = ""

    @field_serializer("own")
    def write(self, own: SecretStr) -> str:
        return own.get_secret_value()


class NotedKeys(BaseModel):
    any: dict[int | str, int]


class TestPayloads:
    @pytest.mark.parametrize(
        ("payload", "stored"),
        [(Repo(url="u"), '{"url":"u","depth":1}'), ({"url": "u", "depth": "2"}, '{"url":"u","depth":2}')],
    )
    def test_a_model_or_what_it_can_be_made_from(self, payload: Any, stored: str) -> None:
        assert write_payload(Analyze, payload) == stored

    def test_dataclasses_typed_dicts_and_lists(self) -> None:
        assert there_and_back(processor_of(Point), Point(3)) == Point(3)
        assert there_and_back(processor_of(Parts), {"name": "n"}) == {"name": "n"}
        assert there_and_back(processor_of(list[int]), [1, 2]) == [1, 2]

    def test_aliases_computed_fields_and_json_text_come_back(self) -> None:
        processor = processor_of(Aliased)
        given = Aliased.model_validate({"URL": "x/y", "ref": "dev", "raw": "[1, 2]"})
        assert there_and_back(processor, given) == given
        assert there_and_back(processor, {"URL": "x/y", "ref": "dev", "raw": "[1, 2]"}) == given

    @pytest.mark.parametrize(("payload_type", "given", "stored"), ALIASED)
    def test_fields_are_written_by_the_names_by_which_they_are_read(
        self, payload_type: Any, given: Any, stored: str
    ) -> None:
        processor = processor_of(payload_type)
        assert write_payload(processor, given) == stored
        assert there_and_back(processor, given) == given
        if isinstance(given, BaseModel):
            assert payload_text("typed", given) == stored

    @pytest.mark.parametrize(("returned", "given", "stored"), ALIASED)
    def test_so_are_results_and_steps(self, returned: Any, given: Any, stored: str) -> None:
        adapter = strict_json.adapter_of(returned)
        for text in (
            strict_json.write_result(given, adapter),
            strict_json.write(given, adapter, "result", round_trip=True),
        ):
            assert text == stored
            assert strict_json.read_result(text, adapter) == given

    def test_results_that_refuse_their_computed_fields_are_stored_without_them(self) -> None:
        adapter = strict_json.adapter_of(list[Aliased])
        given = [Aliased.model_validate({"URL": "x/y", "raw": "[1, 2]"})]
        assert strict_json.read_result(strict_json.write_result(given, adapter), adapter) == given
        text = strict_json.write_result(Named(first="a", last="b"), strict_json.adapter_of(Named))
        assert json.loads(text) == {"first": "a", "last": "b", "whole": "a b"}

    def test_results_that_are_read_with_their_computed_fields_keep_them(self) -> None:
        text = strict_json.write_result(Rule(), strict_json.adapter_of(Rule))
        assert json.loads(text) == {"policy": "forbid", "total": 1}

    def test_a_model_for_a_kind_by_name_has_no_computed_fields(self) -> None:
        given = Aliased.model_validate({"URL": "x/y", "raw": "[1, 2]"})
        assert read_payload_text(processor_of(Aliased), payload_text("typed", given)) == given

    @pytest.mark.parametrize(
        ("payload_type", "given", "fault"),
        [
            (dict[tuple[int, int], int], {(1, 2): 3}, f"{UNREAD}1,2.[key]: Input should be a valid array"),
            (OneWay, OneWay(at=datetime(2026, 1, 2, tzinfo=UTC)), f"{UNREAD}at: Input should be a valid d"),
            (dict[str, Tuples], {"a": Tuples.A}, f"{UNREAD}a: Input should be (1, 2)"),
            (WithoutNeeded, WithoutNeeded(note="lost"), f"{UNREAD}note: Field required"),
        ],
    )
    def test_what_a_worker_could_not_read_again_is_refused(
        self, payload_type: Any, given: Any, fault: str
    ) -> None:
        with pytest.raises(InvalidPayload, match=re.escape(f"payload of kind typed: {fault}")) as caught:
            write_payload(processor_of(payload_type), given)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert "note" not in caught.value.without_content

    def test_a_field_with_exclude_has_its_default(self) -> None:
        assert there_and_back(processor_of(Partial), Partial(name="n", note="here")) == Partial(name="n")

    def test_a_strict_model_comes_back(self) -> None:
        given = Strict(id=UUID(int=7), since=datetime(2026, 1, 2, tzinfo=UTC), tags=("a", "b"), seen={1})
        assert there_and_back(processor_of(Strict), given) == given

    def test_a_strict_model_stays_strict(self) -> None:
        fields = {"id": str(UUID(int=7)), "since": "2026-01-02T00:00:00Z", "tags": [1], "seen": [1]}
        with pytest.raises(InvalidPayload, match=r"tags\.0: Input should be a valid string$"):
            read_payload(processor_of(Strict), fields)

    def test_python_values_in_a_dict_are_stored_in_their_json_form(self) -> None:
        payload = {"at": datetime(2026, 1, 2, tzinfo=UTC), "ids": (UUID(int=1),)}
        assert there_and_back(Untyped, payload) == {
            "at": "2026-01-02T00:00:00Z",
            "ids": ["00000000-0000-0000-0000-000000000001"],
        }

    @pytest.mark.parametrize(
        ("processor", "value", "fault"),
        [
            (Analyze, {"depth": 1}, "payload of kind analyze: url: Field required"),
            (
                Analyze,
                {"depth": "s3cret"},
                "payload of kind analyze: url: Field required (and 1 more)",
            ),
            (
                processor_of(Annotated[Choice | Other, Field(discriminator="kind")]),
                {"kind": "s3cret\n"},
                "payload of kind typed: the whole value: Input tag is none of the expected tags",
            ),
            (
                processor_of(Aliased),
                {"URL": "u", "evil\nkey": "s3cret"},
                r"payload of kind typed: evil\nkey: Extra inputs are not permitted",
            ),
            (
                processor_of(Shy),
                {"number": 1},
                r"payload of kind typed: number: Value error, line one\nline two",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused_in_one_line_without_the_value(
        self, processor: type[JobProcessor[Any]], value: Any, fault: str
    ) -> None:
        with pytest.raises(InvalidPayload) as caught:
            read_payload(processor, value)
        assert str(caught.value) == fault
        assert caught.value.__suppress_context__  # no traceback shows pydantic's error with its input

    @pytest.mark.parametrize(
        ("payload", "fault"),
        [
            ({"a": object()}, "payload holds a value of type object, which is no JSON (at a)"),
            ({"a": math.nan}, "payload holds nan, which is not a finite number (at a)"),
            ({"a": [math.inf]}, "payload holds inf, which is not a finite number (at a[0])"),
            ({"a": b"\xff"}, "payload holds a value of type bytes, which is no JSON (at a)"),
            ({"a": "\0"}, r"payload holds \u0000, which PostgreSQL cannot store (at a)"),
        ],
    )
    def test_what_cannot_be_stored_is_refused(self, payload: Any, fault: str) -> None:
        with pytest.raises(InvalidJson) as caught:
            write_payload(Untyped, payload)
        assert str(caught.value) == fault

    @pytest.mark.parametrize("by_name", [False, True])
    @pytest.mark.parametrize(
        ("fields", "fault"),
        [
            ({"any": math.nan}, "nan, which is not a finite number (at any)"),
            ({"more": {"a": [1.0, -math.inf]}}, "-inf, which is not a finite number (at more.a[1])"),
            ({"number": math.nan}, "nan, which is not a finite number (at number)"),
            ({"extra": math.nan}, "nan, which is not a finite number (at extra)"),
            ({"login": "hunter2"}, f"{MASKED} (at login)"),
            ({"any": [SecretBytes(b"hunter2")]}, f"{MASKED} (at any[0])"),
        ],
    )
    def test_what_pydantic_would_lose_is_refused(
        self, fields: dict[str, Any], fault: str, *, by_name: bool
    ) -> None:
        payload = Lossy(**fields)
        with pytest.raises(InvalidJson) as caught:
            payload_text("typed" if by_name else processor_of(Lossy), payload)
        assert str(caught.value) == f"payload holds {fault}"

    @pytest.mark.parametrize(
        "payload_type", [dict[Any, int], Mapping[int | str, int], list[Any], object, Lossy, NotedKeys]
    )
    def test_keys_that_are_the_same_in_json_are_refused(self, payload_type: Any) -> None:
        keys: dict[Any, int] = {1: 2, "1": 3}
        payload: Any = keys
        if payload_type == list[Any]:
            payload = [keys]
        if payload_type in (Lossy, NotedKeys):
            payload = payload_type(any=keys)
        with pytest.raises(InvalidJson) as caught:
            payload_text(processor_of(payload_type), payload)
        assert str(caught.value) == "payload holds a key twice in one object: '1'"

    def test_what_only_looks_lost_is_stored(self) -> None:
        given = Lossy(any=None, more={"none": [None]}, own=SecretStr("hunter2"), text="*" * 10)
        text = payload_text(processor_of(Lossy), given)
        assert read_payload_text(processor_of(Lossy), text) == given
        assert payload_text("typed", given) == text

    @pytest.mark.parametrize("depth", [101, 1000])
    def test_what_is_too_deep_is_refused(self, depth: int) -> None:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        with pytest.raises(InvalidJson, match="nests deeper than 100 levels"):
            write_payload(Untyped, {"a": value})

    def test_a_circle_is_refused(self) -> None:
        circle: dict[str, Any] = {}
        circle["again"] = circle
        with pytest.raises(InvalidJson, match="nests deeper than 100 levels"):
            write_payload(Untyped, circle)
