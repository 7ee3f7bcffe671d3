"""Figures as text, which a worker process sends to its supervisor and which Prometheus reads."""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric, Sample
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from pydantic import TypeAdapter

_FAMILIES: Final = TypeAdapter(list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]])
"""Name, documentation and type of each family, and its samples: name, labels, value."""

LONGEST_UNPACKED: Final = 8 * 2**20
"""The most bytes that are unpacked."""


def packed(registry: CollectorRegistry) -> str:
    """Return everything that a registry holds, as one short line of ASCII."""
    families = []
    for family in registry.collect():
        # The time of a counter's creation is left out: it tells only when the process started.
        samples = [sample[:3] for sample in family.samples if not sample.name.endswith("_created")]
        families.append((family.name, family.documentation, family.type, samples))
    return b64encode(zlib.compress(json.dumps(families).encode(), 1)).decode()


def unpacked(line: str) -> list[Metric]:
    """Return the figures of a line that ``packed`` returned; raise ValueError for any other line."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(b64decode(line, validate=True), LONGEST_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"no packed figures: {error}") from None
    if not unpacking.eof:
        raise ValueError(f"more than {LONGEST_UNPACKED} bytes, or cut off")
    families = []
    for name, documentation, kind, samples in _FAMILIES.validate_json(text):
        family = Metric(name, documentation, kind)
        family.samples = [Sample(*sample) for sample in samples]
        families.append(family)
    return families


def merged(processes: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Return the figures of several processes as one, each sample labelled with its ``process``."""
    families: dict[str, Metric] = {}
    for process, own in processes.items():
        for family in own:
            shared = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                shared.add_sample(sample.name, {**sample.labels, "process": process}, sample.value)
    return list(families.values())


def exposition(families: Iterable[Metric], *, as_openmetrics: bool) -> tuple[bytes, str]:
    """Return figures in the OpenMetrics format, or in Prometheus's older one, and the content type."""
    given = SimpleNamespace(collect=lambda: families)
    if as_openmetrics:
        shown: bytes = openmetrics.generate_latest(given)  # type: ignore[no-untyped-call]  # the library's own lack
        return shown, openmetrics.CONTENT_TYPE_LATEST
    # prometheus-client 0.23 is typed to take its own registry, but calls only this method of it.
    return generate_latest(given), CONTENT_TYPE_PLAIN_0_0_4  # type: ignore[arg-type, unused-ignore]
