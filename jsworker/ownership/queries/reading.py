"""Values that PostgreSQL can store and Python cannot hold are read as what PostgreSQL calls them.

A row may hold ``infinity``, a year before Christ or a number of five thousand digits. Reading
it must not fail: a listing shows it, and its neighbours.
"""

import json
import math
from collections.abc import Callable
from datetime import MAXYEAR, MINYEAR, UTC, datetime, tzinfo
from typing import Any, Final, Self, SupportsIndex

import psycopg
from psycopg.abc import Buffer, Loader
from psycopg.adapt import AdaptersMap
from psycopg.pq import Format
from psycopg.types.json import set_json_loads
from psycopg.types.numeric import FloatLoader

_LONGEST_INTEGER: Final = 4_000
"""Digits; Python refuses to read more than 4,300."""


class FarTime(datetime):
    """A time beyond the years 1 to 9999: compares as the nearest one within, and is written as PostgreSQL does.

    Attributes:
        text: what PostgreSQL calls it.
    """

    text: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the time that PostgreSQL calls this."""
        is_past = text.startswith("-") or text.endswith("BC")
        far = cls(MINYEAR, 1, 1, tzinfo=UTC) if is_past else cls(MAXYEAR, 12, 31, 23, 59, 59, 999_999, UTC)
        far.text = text
        return far

    def __str__(self) -> str:
        """Return what PostgreSQL calls it, and reads again."""
        return self.text

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Callable[[str], Self], tuple[str]]:
        """Let it be copied."""
        return type(self).read, (self.text,)

    def isoformat(self, *_: Any, **__: Any) -> str:
        """Return what PostgreSQL calls it: ISO 8601 has no name for it."""
        return self.text

    def astimezone(self, _zone: tzinfo | None = None) -> Self:
        """Return the same time: it is too far away for a zone to matter."""
        return self


def read_anything(connection: "psycopg.AsyncConnection[Any]") -> None:
    """Let a connection read times, durations and JSON that Python cannot hold, and seconds as floats."""
    for name, loader in _LOADERS.items():
        connection.adapters.register_loader(name, loader)
    connection.adapters.register_loader("numeric", FloatLoader)  # what extract() returns
    connection.adapters.register_dumper(FarTime, _FarTimeDumper)
    set_json_loads(read_json, connection)


def read_json(data: str | bytes) -> Any:
    """Return a JSON value; a number that Python cannot hold becomes a text, as does what is nested too deeply."""
    try:
        return json.loads(data, parse_int=_integer, parse_float=_number)
    except RecursionError:
        return data.decode() if isinstance(data, bytes) else data


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else digits


def _number(digits: str) -> float | str:
    number = float(digits)
    return number if math.isfinite(number) else digits


def _loader(name: str, read_text: Callable[[str], Any]) -> type[Loader]:
    """Return a loader that reads as the driver's own does, and what that refuses by ``read_text``."""
    adapters: AdaptersMap = psycopg.adapters
    own = adapters.get_loader(adapters.types[name].oid, Format.TEXT)
    if own is None:
        raise TypeError(f"the driver reads no {name}")
    usual = own

    class Lenient(psycopg.adapt.Loader):
        def __init__(self, oid: int, context: Any = None) -> None:
            super().__init__(oid, context)
            self._load = usual(oid, context).load

        def load(self, data: Buffer) -> Any:
            if bytes(data[-8:]) != b"infinity":  # which the driver takes for no time at all in an interval
                try:
                    return self._load(data)
                except (psycopg.DataError, OverflowError):
                    pass  # ``suppress`` takes longer than the reading, for each row of a claim
            return read_text(bytes(data).decode())

    return Lenient


class _FarTimeDumper(psycopg.adapt.Dumper):
    oid = psycopg.adapters.types["timestamptz"].oid

    def dump(self, obj: datetime) -> bytes:
        return str(obj).encode()


_LOADERS: Final = {
    "timestamptz": _loader("timestamptz", FarTime.read),
    "interval": _loader("interval", str),
}
