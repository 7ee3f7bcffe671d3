"""Enqueue: a form for a job, made from the model of its payload if its processor is known."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import FormData

from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.errors import UsageError
from jsworker.core.names import check_kind
from jsworker.core.priorities import PRIORITIES
from jsworker.core.processor import payload_type
from jsworker.core.strict_json import dumps
from jsworker.dashboard.payload_form import WHOLE, fields_of, form_fields, read_form
from jsworker.dashboard.visit import Done, Question, Visit
from jsworker.ownership.transitions.audit import AuditEntry

_OPTIONS: Final = ("unique_key", "limit_key", "priority", "delay")


async def ask(visit: Visit, form: FormData) -> Question:
    """Return the form for a job of a kind; without a kind, the form that asks for one."""
    return _question(visit, form, {})


def _question(visit: Visit, form: Mapping[str, Any], errors: Mapping[str, str]) -> Question:
    kind = str(form.get("kind") or "").strip()
    known = visit.site.processors
    fields = form_fields(fields_of(known.get(kind)), form if form.get("confirmed") else None, errors)
    return Question(
        verb="Enqueue a job",
        says="",
        values=[("kind", kind)] if kind else [],
        back=visit.url("jobs"),
        fields="fields_enqueue.html",
        names={
            "kind": kind,
            "kinds": sorted(known),
            "fields": fields,
            "given": {name: str(form.get(name) or "") for name in _OPTIONS},
            "priorities": PRIORITIES,
        },
        is_possible=bool(kind),
        error=(errors.get(WHOLE) or errors.get("") or "some fields are wrong") if errors else "",
    )


async def act(visit: Visit, form: FormData) -> Done | Question:
    """Enqueue the job; or return the form again, with what is wrong."""
    kind = str(form.get("kind") or "").strip()
    client = visit.site.client
    try:
        payload, errors = read_form(visit.site.processors.get(kind), form)
        if errors:
            return _question(visit, form, errors)
        check_kind(kind)
        unique_key = str(form.get("unique_key") or "") or None
        options = _options(form)
        processor = visit.site.processors.get(kind)
        if processor is not None:
            payload = payload_type(processor).validate_json(dumps(payload), by_alias=True, by_name=True)
        # The audit's entry is written first: a job without an entry is worse than an entry without a job.
        entry = AuditEntry("enqueue", {"kind": kind, "unique_key": unique_key}, actor=visit.access.name)
        await client.database.in_transaction(lambda opened: entry.note(opened, changed=0))
        handle = await client.enqueue(processor or kind, payload, unique_key=unique_key, **options)
        await client.database.in_transaction(
            lambda opened: entry.note(opened, changed=int(handle.created), others=int(not handle.created))
        )
    except (UsageError, ValueError) as error:
        return _question(visit, form, {"": str(error)})
    says = (
        f"Job {handle.id} is enqueued" if handle.created else f"Job {handle.id} holds the unique key already"
    )
    return Done(says, visit.url("job", id=handle.id))


def _options(form: Mapping[str, Any]) -> EnqueueOptions:
    found = EnqueueOptions()
    if delay := str(form.get("delay") or "").strip():
        found["delay"] = float(delay)
    if limit_key := str(form.get("limit_key") or ""):
        found["limit_key"] = limit_key
    priority = form.get("priority")
    if priority in PRIORITIES:
        found["priority"] = priority
    return found
