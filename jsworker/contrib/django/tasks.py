"""A backend for Django's tasks: each is a job of kind ``django-task``, enqueued in the open transaction.

For ``django.tasks`` of Django 6.0 and its backport ``django-tasks``. A task's queue is the limit key of its
job, so that limits and pauses can be set for each queue; a task's priority above 0 is high, below 0 low.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar, Final
from uuid import UUID

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.utils import timezone
from django.utils.module_loading import import_string
from pydantic import BaseModel

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError:  # before Django 6.0
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

from jsworker.contrib.django.configuration import database_alias
from jsworker.contrib.django.enqueueing import enqueue, jobs_client
from jsworker.contrib.django.middleware import fresh_connections
from jsworker.core.contents import Contents, owner_of_payload
from jsworker.core.errors import Fail, JobFailed
from jsworker.core.job import Job
from jsworker.core.priorities import Priority
from jsworker.core.processor import JobProcessor

_STATUS: Final = {
    "scheduled": TaskResultStatus.READY,
    "queued": TaskResultStatus.READY,
    "processing": TaskResultStatus.RUNNING,
    "completed": TaskResultStatus.SUCCESSFUL,
}
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_UNINDENTED: Final = re.compile(r"^[^\s:]+", re.MULTILINE)
_UNKNOWN_ERROR: Final = "jsworker.JobFailed"


class TaskCall(BaseModel):
    """The payload: the task, its arguments and its options."""

    task: str
    positional: list[Any]
    named: dict[str, Any]
    backend: str
    queue_name: str
    priority: int
    run_after: datetime | None = None


class _Error(TaskError):
    """An error of a task; its class may be local to a function, or not installed here."""

    @property
    def exception_class(self) -> type[BaseException]:
        try:
            found: type[BaseException] = super().exception_class
        except (ImportError, ValueError):
            return JobFailed
        return found


class JsworkerBackend(BaseTaskBackend):
    """The backend: ``TASKS = {"default": {"BACKEND": "jsworker.contrib.django.tasks.JsworkerBackend"}}``.

    ``OPTIONS``: ``MAX_ATTEMPTS`` is how many attempts of each task may end in an error.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue a task in the transaction that is open on the jobs' database."""
        self.validate_task(task)
        if not _is_of_an_app(task.module_path):
            raise InvalidTask(f"task {task.module_path} must be in an app of INSTALLED_APPS")
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        call = TaskCall(
            task=task.module_path,
            positional=normalize_json(list(args)),
            named=normalize_json(dict(kwargs)),
            backend=self.alias,
            queue_name=task.queue_name,
            priority=task.priority,
            run_after=run_after,
        )
        enqueued = enqueue(
            DjangoTask,
            call,
            limit_key=task.queue_name,
            priority=_priority_of(task.priority),
            run_at=run_after,
            max_attempts=self.options.get("MAX_ATTEMPTS"),
        )
        result = TaskResult(
            task=task,
            id=str(enqueued.id),
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=call.positional,
            kwargs=call.named,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the state of a task, with its result or its errors.

        Raises:
            TaskResultDoesNotExist: no task has this id.
            KeyMissing, ContentRefused: its payload or result is encrypted, and cannot be decrypted.
        """
        from jsworker.contrib.django.models import StoredJob  # noqa: PLC0415 -- not before the apps are loaded

        try:
            job = StoredJob.objects.using(database_alias()).get(id=UUID(result_id), kind=DjangoTask.kind)
        except (StoredJob.DoesNotExist, ValueError, TypeError, AttributeError):
            raise TaskResultDoesNotExist(result_id) from None
        payload, returned = _contents_of(job)
        call = TaskCall.model_validate(payload)
        failed = [each for each in job.timeline.all() if each.error is not None]
        workers = [each.worker_id or "" for each in failed]
        if last := job.worker_id or job.completed_by:
            workers.append(last)
        result = TaskResult(
            task=_task_of(call),
            id=str(job.id),
            status=_STATUS.get(job.status, TaskResultStatus.FAILED),
            enqueued_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            last_attempted_at=job.claimed_at,
            args=call.positional,
            kwargs=call.named,
            backend=call.backend,
            errors=[
                _Error(exception_class_path=_class_of(each.error), traceback=each.error) for each in failed
            ],
            worker_ids=[""] * (job.attempts - len(workers)) + workers,
        )
        object.__setattr__(result, "_return_value", returned)
        return result

    def check(self, **kwargs: Any) -> Iterable[CheckMessage]:
        """Check that jobs can be read."""
        yield from super().check(**kwargs)
        if not apps.is_installed("jsworker.contrib.django"):
            yield Error(
                f"TASKS[{self.alias!r}] needs 'jsworker.contrib.django' among INSTALLED_APPS",
                id="jsworker.E002",
            )


class DjangoTask(JobProcessor[TaskCall]):
    """Calls tasks of Django."""

    kind = "django-task"
    middleware: ClassVar = (fresh_connections,)

    def process(self, job: Job[TaskCall]) -> Any:
        """Call the task and return its result; a coroutine function runs in an event loop of its own."""
        call = job.payload
        task = _task_of(call)
        result = task.get_backend().get_result(str(job.id))
        task_started.send(JsworkerBackend, task_result=result)
        context = [TaskContext(task_result=result)] if task.takes_context else []
        returned = task.call(*context, *call.positional, **call.named)
        try:
            value = normalize_json(returned)
        except (TypeError, ValueError, RecursionError) as error:  # another attempt would fail likewise
            raise Fail(f"the result of the task cannot be stored: {error}") from error
        for name, found in (("status", TaskResultStatus.SUCCESSFUL), ("finished_at", timezone.now())):
            object.__setattr__(result, name, found)
        object.__setattr__(result, "_return_value", value)
        task_finished.send(JsworkerBackend, task_result=result)
        return value

    async def on_failed(self, job: Job[TaskCall], error: BaseException) -> None:
        """Send the signal ``task_finished`` for the failed task."""

        def tell() -> None:
            result = _task_of(job.payload).get_backend().get_result(str(job.id))
            task_finished.send(JsworkerBackend, task_result=result)

        async with fresh_connections(job, self):
            try:
                raise error  # noqa: TRY301 -- only so that it is being handled
            except BaseException:  # noqa: BLE001 -- receivers read it, such as that of Django, which logs it
                await sync_to_async(tell)()


def _contents_of(job: Any) -> tuple[Any, Any]:
    client = jobs_client()
    contents = Contents.of(client.settings, client.codec)
    owner = owner_of_payload(job.id, job.waiting_key, is_scheduled=job.scheduled_for is not None)
    return (
        contents.decode_value(job.payload, "payload", job.kind, owner),
        contents.decode_value(job.result, "result", job.kind, job.id),
    )


def _task_of(call: TaskCall) -> Any:
    """Return the task to call; Fail: the name is not that of a task in an app, so it must not be called."""
    if not _is_of_an_app(call.task):
        raise Fail(f"task {call.task} is in no app of INSTALLED_APPS")
    try:
        found = import_string(call.task)
    except ImportError as error:
        raise Fail(f"task {call.task} cannot be imported: {error}") from error
    if not isinstance(found, Task):
        raise Fail(f"{call.task} is no task of Django, but of type {type(found).__name__}")
    return found.using(
        priority=call.priority, queue_name=call.queue_name, run_after=call.run_after, backend=call.backend
    )


def _is_of_an_app(path: str) -> bool:
    """Return whether a task may be imported: a producer of jobs must not be able to import any module."""
    return apps.get_containing_app_config(path) is not None


def _priority_of(number: int) -> Priority:
    return "normal" if number == 0 else "high" if number > 0 else "low"


def _class_of(error: str) -> str:
    """Return the path of an error's class: the first line that follows the frames of the last traceback."""
    _, found, behind = error.rpartition(_TRACEBACK)
    if not found or not (named := _UNINDENTED.search(behind) or _UNINDENTED.match(error)):
        return _UNKNOWN_ERROR
    return named[0] if "." in named[0] else f"builtins.{named[0]}"
