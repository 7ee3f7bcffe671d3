"""Shapes of documents: which keys an object may have, and what may stand there."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


class Shape:
    """Anything at all."""

    def faults(self, given: Any, where: str) -> Iterator[str]:  # noqa: ARG002 -- for those who look
        """Say what does not fit."""
        yield from ()

    def keys(self, given: Any, path: Path = ()) -> Iterator[Path]:  # noqa: ARG002 -- the same
        """Yield the path of every key that the shape knows by name."""
        yield from ()


@dataclass(frozen=True)
class Fields(Shape):
    """An object of these keys and no other."""

    required: Mapping[str, Shape] = field(default_factory=dict)
    optional: Mapping[str, Shape] = field(default_factory=dict)

    def faults(self, given: Any, where: str) -> Iterator[str]:
        if not isinstance(given, Mapping):
            yield f"{where}: {given!r} is no object"
            return
        known = {**self.required, **self.optional}
        yield from (f"{where}.{key}: missing" for key in self.required.keys() - given.keys())
        for key, value in given.items():
            yield from (
                known[key].faults(value, f"{where}.{key}") if key in known else [f"{where}.{key}: unknown"]
            )

    def keys(self, given: Any, path: Path = ()) -> Iterator[Path]:
        for key, value in given.items():
            yield (*path, key)
            yield from {**self.required, **self.optional}[key].keys(value, (*path, key))


@dataclass(frozen=True)
class Each(Shape):
    """A list with something in it, all of one shape."""

    of: Shape

    def faults(self, given: Any, where: str) -> Iterator[str]:
        if not isinstance(given, list) or not given:
            yield f"{where}: {given!r} is no list, or an empty one"
            return
        for index, one in enumerate(given):
            yield from self.of.faults(one, f"{where}[{index}]")

    def keys(self, given: Any, path: Path = ()) -> Iterator[Path]:
        for index, one in enumerate(given):
            yield from self.of.keys(one, (*path, index))


@dataclass(frozen=True)
class Keyed(Shape):
    """An object whose keys are the writer's own, its values of one shape."""

    of: Shape

    def faults(self, given: Any, where: str) -> Iterator[str]:
        if not isinstance(given, Mapping):
            yield f"{where}: {given!r} is no object"
            return
        for key, one in given.items():
            yield from self.of.faults(one, f"{where}[{key!r}]")


@dataclass(frozen=True)
class Value(Shape):
    """A value of exactly this type."""

    type: type

    def faults(self, given: Any, where: str) -> Iterator[str]:
        if type(given) is not self.type:
            yield f"{where}: {given!r} is no {self.type.__name__}"


class Text(Shape):
    """A string that matches as a whole."""

    def __init__(self, pattern: str = "(?s:.+)") -> None:
        self._pattern = re.compile(pattern)

    def faults(self, given: Any, where: str) -> Iterator[str]:
        if not isinstance(given, str) or not self._pattern.fullmatch(given):
            yield f"{where}: {given!r} does not match {self._pattern.pattern}"
