"""The doctor's checks, made when somebody asks for them, and its repairs."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.datastructures import FormData

from jsworker.dashboard.visit import Done, Question, Visit
from jsworker.doctor.checks import examine
from jsworker.doctor.finding import Finding, error
from jsworker.doctor.gather import gather
from jsworker.doctor.repairs import REPAIRS, repair
from jsworker.ownership.transitions.audit import AuditEntry

_LONGEST_SECONDS: Final = 10.0
_KEPT_SECONDS: Final = 10.0
_AREAS: Final = {"postgresql": "PostgreSQL", "nats": "NATS"}


class _Examination:
    """One examination at a time, for all viewers: pages that wait for one would keep others from reading."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._found: list[Finding] = []
        self._at = float("-inf")

    async def findings(self, visit: Visit) -> list[Finding] | None:
        """Return the findings of all checks, which may be 10 s old; None: the checks are running now."""
        if self._lock.locked():
            return None
        async with self._lock:
            if time.monotonic() - self._at > _KEPT_SECONDS:
                self._found = await _examine(visit)
                self._at = time.monotonic()
            return self._found


_EXAMINATIONS: WeakKeyDictionary[Starlette, _Examination] = WeakKeyDictionary()


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return the findings, if they are asked for."""
    if visit.get("examine") != "yes":
        return {"areas": None, "counts": {}, "is_busy": False}
    examination = _EXAMINATIONS.setdefault(visit.site.app, _Examination())
    areas: dict[str, list[Finding]] = {}
    counts = dict.fromkeys(("error", "warning", "info", "ok"), 0)
    found = await examination.findings(visit)
    for finding in found or ():
        area = finding.check.partition(".")[0]
        areas.setdefault(_AREAS.get(area, area.title()), []).append(finding)
        counts[finding.level] += 1
    return {"areas": None if found is None else areas, "counts": counts, "is_busy": found is None}


async def _examine(visit: Visit) -> list[Finding]:
    try:
        async with asyncio.timeout(_LONGEST_SECONDS):
            return examine(await gather(visit.site.client.settings, "dashboard"))
    except TimeoutError:
        says = f"the examination took longer than {_LONGEST_SECONDS:g} s and was ended"
        late = error(says, "Run `jsworker doctor`, which waits for as long as it takes.")
        return [late._replace(check="doctor.time")]


async def ask(visit: Visit, form: FormData) -> Question:
    """Return the question before the doctor mends what is safe to mend."""
    del form
    return Question(
        verb="Repair",
        says="Stream and consumers are made or changed as a worker does at its start, what is overdue is"
        " queued and published, and workers try refused rows again at once.",
        values=[],
        back=visit.url("doctor", {"examine": "yes"}),
    )


async def act(visit: Visit, form: FormData) -> Done:
    """Mend what is safe to mend, and say what was done."""
    del form
    client = visit.site.client
    back = visit.url("doctor", {"examine": "yes"})
    try:
        async with asyncio.timeout(_LONGEST_SECONDS):
            facts = await gather(client.settings)
    except TimeoutError:
        says = f"nothing was mended: the examination took longer than {_LONGEST_SECONDS:g} s"
        return Done(f"{says}; `jsworker doctor --fix` waits for as long as it takes", back)
    # The audit's entry is written first: a repair without an entry is worse than an entry without a repair.
    entry = AuditEntry("doctor.repair", {"checks": [*REPAIRS]}, actor=visit.access.name)
    await client.database.in_transaction(lambda opened: entry.note(opened, changed=0))
    done = await repair(facts, seconds=_LONGEST_SECONDS)
    changed = sum(each.level == "ok" and each.check != "fix.nothing" for each in done)
    await client.database.in_transaction(
        lambda opened: entry.note(opened, changed=changed, others=len(done) - changed)
    )
    _EXAMINATIONS.pop(visit.site.app, None)
    return Done("; ".join(each.says for each in done), back)
