"""The steps of a run: each runs once for its job, and later runs get its stored result."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from pydantic import PydanticUserError, TypeAdapter
from pydantic_core import to_json

from jsworker.core import fault_points, strict_json
from jsworker.core.clock import boottime, wait_in_seconds
from jsworker.core.errors import InvalidJson, InvalidStep
from jsworker.core.names import check_step_name, shown
from jsworker.ownership.transitions import steps
from jsworker.ownership.transitions.steps import FoundStep
from jsworker.worker.pipeline import child_jobs
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.outcomes import Asleep, InvalidResult, check_size, reading_own_content
from jsworker.worker.pipeline.run_writes import LeaseServices, until_answered, write_owned
from jsworker.worker.pipeline.threads import retrieve_error, start_thread, wait_for_loop

_MOST: Final = 1000
"""The most steps of one job, to stop an endless loop that makes a new step name in each turn."""


class Steps:
    """Runs the steps of one run, and stores their results."""

    def __init__(self, run: Run, services: LeaseServices) -> None:
        self._run = run
        self._services = services
        self._used: set[str] = set()

    async def step(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what the function returned in this run or an earlier one."""
        with self._step(name, function) as step:
            if (found := await self._find(step)).is_done:
                return self._read(step, found)
            started = boottime()
            if inspect.iscoroutinefunction(function):
                return await self._kept(step, await function(*args, **kwargs), started)
            return await self._in_thread(step, partial(function, *args, **kwargs), started)

    def step_in_thread(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Do the same in a processor's own thread, which runs plain functions itself."""
        wait_for = partial(wait_for_loop, self._services.loop)
        if inspect.iscoroutinefunction(function):
            return wait_for(self.step(name, function, args, kwargs))
        with self._step(name, function) as step:
            if (found := wait_for(self._find(step))).is_done:
                return self._read(step, found)
            started = boottime()
            value = function(*args, **kwargs)
            return wait_for(
                self._kept(step, wait_for(value) if isinstance(value, Coroutine) else value, started)
            )

    async def sleep(self, after: Any, name: str) -> None:
        """Return if the sleep is over, else end the run until it is."""
        seconds = wait_in_seconds(after, f"sleep {shown(name)} for")
        with self._step(name, None) as step:
            found = await self._find(step)
            if not found.is_done:
                found = await self._keep(step, None, sleeps=seconds)
            left = found.sleeps or 0.0
            if left > 0:
                # If the processor swallows this error, the run still ends asleep when the processor returns.
                self._run.unfinished = Asleep(left, f"sleeps: {name}")
                raise self._run.unfinished

    @contextmanager
    def _step(self, name: str, function: Callable[..., Any] | None) -> Iterator["NamedStep"]:
        """Reserve a step name in this run; if the block raises, the name may be used again."""
        name = check_step_name(name)
        step = NamedStep(name, function)
        if name in self._used:
            raise InvalidStep(f"step {shown(name)} is used twice in one run: each needs a name of its own")
        self._used.add(name)
        try:
            with child_jobs.within_step(self._run, name):
                yield step
        except BaseException:
            self._used.discard(name)
            raise

    def free_names(self, names: set[str]) -> None:
        """Let the run use the names of steps again; it gets the results that they have stored."""
        self._used -= names

    async def _find(self, step: "NamedStep") -> FoundStep:
        """Return what is known of a step; raise InvalidStep if its name or number shows a mistake."""
        found = await self._looked_up(step)
        if not found.is_done and found.steps >= _MOST:
            raise InvalidStep(
                f"step {shown(step.name)}: the job has {found.steps} steps; {_MOST} is the most"
            )
        if found.is_done and (found.sleeps is None) is step.is_sleep:
            one, other = ("sleep", "step") if step.is_sleep else ("step", "sleep")
            raise InvalidStep(f"{one} {shown(step.name)}: an earlier run has used this name for a {other}")
        return found

    async def _looked_up(self, step: "NamedStep") -> FoundStep:
        services = self._services

        async def find(tries: int) -> FoundStep:
            # The size of the result is unknown: each try allows time for one more result of the largest size.
            return await steps.find_step(
                services.database,
                worker_id=services.worker_id,
                held=self._run.held,
                name=step.name,
                seconds=services.database.seconds_for(tries * self._most_bytes),
            )

        return await until_answered(self._run, find)

    async def _in_thread(self, step: "NamedStep", call: Callable[[], Any], started: float) -> Any:
        """Run a plain function in a thread and wait for its end even if cancelled, or it might run twice."""
        run = self._run
        thread_name = f"jsworker {run.kind.name} {run.id} step {shown(step.name)}"
        _, ended = start_thread(thread_name, call, f"step {shown(step.name)}")
        cancelled: asyncio.CancelledError | None = None
        kept: Any = None
        run.has_thread = True
        run.steps_in_threads += 1
        try:
            while not ended.done():
                try:
                    await asyncio.wait({ended})
                except asyncio.CancelledError as error:
                    if not ended.done() and self._services.loop_ends():  # the thread goes on, as a function's
                        run.abandoned = True
                    if run.abandoned:
                        raise
                    cancelled = error
            value = ended.result()
            if not inspect.isawaitable(value):
                kept = await self._kept(step, value, started)
        finally:
            if ended.done():
                run.leave_thread()
        if cancelled is not None:
            raise cancelled
        if inspect.isawaitable(value):  # from a lambda that calls a coroutine function
            kept = await self._kept(step, await value, started)
        return kept

    async def _kept(self, step: "NamedStep", value: Any, started: float) -> Any:
        """Store a step's result, even if the run is cancelled, and return it as later runs will read it."""
        text, kept = self._written(step, value)
        if fault_points.armed():
            await fault_points.reach("after_step_before_keep")
            await fault_points.reach(fault_points.after_step(step.name))
        keeping = asyncio.ensure_future(self._keep(step, text))
        try:
            await asyncio.wait({keeping})
            found = keeping.result()
        except asyncio.CancelledError:
            keeping.add_done_callback(retrieve_error)
            await asyncio.wait({keeping}, timeout=self._services.database.seconds_for(len(text or "")))
            raise
        finally:
            keeping.cancel()
        if self._services.events.wants("job.step"):
            seconds = boottime() - started
            self._services.events.emit("job.step", **self._run.facts(), step=step.name, seconds=seconds)
        return kept if found.result == text else self._read(step, found)

    def _written(self, step: "NamedStep", value: Any) -> tuple[str | None, Any]:
        """Return a result as it is stored, and as it will be read."""
        text = step.write(value)
        if text is None:
            return None, None
        contents = self._services.contents
        try:
            stored = contents.encode(text, step.column, self._run.kind.name, self._run.id)
            check_size(stored, "result", self._most_bytes)
            # jsonb changes plain content; encoded content is one string.
            if contents.codec is not None:
                return stored, step.read(text)
            return stored, step.read_value(strict_json.as_stored(text))
        except InvalidJson as error:
            raise step.refused(error) from None

    def _read(self, step: "NamedStep", found: FoundStep) -> Any:
        text = found.result
        if text is not None:
            with reading_own_content():
                text = self._services.contents.decode(text, step.column, self._run.kind.name, self._run.id)
        return step.read(text)

    async def _keep(self, step: "NamedStep", text: str | None, *, sleeps: float | None = None) -> FoundStep:
        values = {"name": step.name, "result": text, "sleeps": sleeps}
        keep = partial(write_owned, self._run, self._services, steps.keep_step, **values)
        if await until_answered(self._run, lambda tries: keep(tries=tries)):
            return FoundStep(True, text, sleeps, 0)
        # The answer to an earlier try was lost, or its caller did not wait for it.
        return await self._find(step)

    @property
    def _most_bytes(self) -> int:
        return self._services.settings.max_result_bytes


class NamedStep:
    """A step and its function; a sleep has none."""

    def __init__(self, name: str, function: Callable[..., Any] | None) -> None:
        self.name = name
        self.column = f"step {name}"  # the name under which ``Contents`` encodes its result
        self.is_sleep = function is None
        if not (self.is_sleep or callable(function)):
            if isinstance(function, Coroutine):
                function.close()  # else Python warns that it was never awaited
            raise TypeError(
                f"step {shown(name)} takes a function and its arguments: job.step(name, call, order)"
            )
        self._type = strict_json.ANYTHING if function is None else self._result_type(function)

    def write(self, value: Any) -> str | None:
        """Return a result as JSON text; raise InvalidResult if it has no such form."""
        if value is None:
            return None
        try:
            if self._type is strict_json.ANYTHING:
                return strict_json.write_result(value, self._type)
            return strict_json.write(value, self._type, "result", round_trip=True)
        except InvalidJson as error:
            raise self.refused(error) from None

    def refused(self, error: InvalidJson) -> InvalidResult:
        """Return InvalidResult for a result that cannot be stored: another run would fail likewise."""
        named = "" if str(error).startswith("step ") else f"step {shown(self.name)}: "
        result = InvalidResult(f"{named}{error}")
        result.without_content = error.without_content
        return result

    def read(self, text: str | None) -> Any:
        """Return a stored result as the function's return type; raise InvalidJson if it does not fit."""
        if text is None:
            return None
        if self._type is strict_json.ANYTHING:
            return strict_json.loads(text)
        try:
            return strict_json.read_result(text, self._type)
        except InvalidJson as error:
            raise InvalidJson(f"step {shown(self.name)}: {error}") from None

    def read_value(self, value: Any) -> Any:
        """Do the same with a result's JSON value."""
        # As text: strict models take dates, UUIDs, tuples ... in their JSON form from JSON text only.
        return value if self._type is strict_json.ANYTHING else self.read(to_json(value).decode())

    def _result_type(self, function: Callable[..., Any]) -> TypeAdapter[Any]:
        try:
            return strict_json.result_type(function)
        except PydanticUserError:
            raise InvalidStep(
                f"step {shown(self.name)}: the return type of its function has no JSON form"
            ) from None
