"""The end of a worker, step by step: drain, hand back, publish, and only then end the heartbeat."""

import asyncio
from typing import Final

from jsworker.stream.puller import Puller
from jsworker.worker.components import Components
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import StopReason

_LEAST_FLUSH_SECONDS: Final = 0.5


class Shutdown:
    """Ends what ``Components`` does. A component that fails keeps none of the others from ending."""

    def __init__(self, context: WorkerContext, components: Components, forced: asyncio.Event) -> None:
        """Prepare the end; ``forced`` is set when running jobs are not to be waited for any more."""
        self._context = context
        self._components = components
        self._settings = context.settings
        self._forced = forced

    async def work(self) -> int:
        """Take every step and return how many runs did not end; others take their jobs back later."""
        self._components.heartbeat.state = "draining"
        await self._stop_pulling()
        await self._drain()
        left = await self._hand_back()
        await self._publish_the_rest()
        await self._end_loops()
        return left

    async def stop_puller(self, puller: Puller) -> None:
        """Stop pulling one kind."""
        try:
            await puller.stop()
        except Exception as error:  # noqa: BLE001 -- what killed its loop; the rest is still to be stopped
            self._context.died("pull loop", error)

    async def _stop_pulling(self) -> None:
        """What was delivered and not claimed goes back at once; claims on their way are still decided."""
        components = self._components
        components.pipeline.slots.close()
        await components.retention.stop()
        # All at once: each waits for seconds when NATS has frozen.
        await asyncio.gather(*(self.stop_puller(puller) for puller in components.pipeline.pullers))
        await components.table.stop()
        for consumer in components.pipeline.consumers:
            await consumer.flush()
        components.pipeline.hand_back_waiting("the worker was stopped before the job began")

    async def _drain(self) -> None:
        for run in self._context.in_flight.runs.values():
            run.drain()
        forced = asyncio.create_task(self._forced.wait())
        drained = asyncio.create_task(self._components.pipeline.wait(self._settings.shutdown_timeout))
        await asyncio.wait({forced, drained}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (forced, drained):
            waiting.cancel()
        await asyncio.gather(forced, drained, return_exceptions=True)

    async def _hand_back(self) -> int:
        """Cancel what still runs, release what has really ended, and leave the rest to the stale rule."""
        for run in self._context.in_flight.runs.values():
            run.signal(StopReason.SHUTDOWN)
        # Twice the statement time-out: what the rule about GRACE_PERIOD leaves for it.
        if not await self._components.pipeline.wait(self._settings.statement_timeout):
            for run in self._context.in_flight.runs.values():
                run.cancel_again()
            await self._components.pipeline.wait(self._settings.statement_timeout)
        return await self._components.pipeline.abandon()

    async def _publish_the_rest(self) -> None:
        """Send released jobs to the others now, not with their next relay tick.

        Not the whole outbox: a process that takes too long to end is killed, and other relays publish it as
        well.
        """
        components = self._components
        await components.reconciliation.stop()
        await components.scans.stop()
        await components.repairs.stop()
        await components.dead_owners.close()
        # Cut short, a batch would keep what it has taken from the others for five seconds.
        components.publisher.end()
        # One time-out for all of them: a forced end has left little of the time that the parent allows.
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self._settings.statement_timeout
        await components.relay.finish(ends_at - clock())
        try:
            async with asyncio.timeout_at(ends_at):
                await components.publisher.publish_latest()
        except TimeoutError:
            pass  # what was taken is due again in five seconds
        except Exception as error:  # noqa: BLE001 -- what killed its loop, perhaps; other workers publish too
            self._context.died("relay", error)
        await components.pipeline.dead_letters.close(ends_at - clock())
        await self._context.stream.flush(timeout=max(ends_at - clock(), _LEAST_FLUSH_SECONDS))

    async def _end_loops(self) -> None:
        """Heartbeat last: a long drain must not look like a death."""
        components = self._components
        for consumer in components.pipeline.consumers:
            await consumer.close()
        await components.pipeline.tracing.close()
        await components.pipeline.settler.close()
        await components.probes.stop()
        await components.presences.stop()
        await components.fences.stop()
        await components.beats.stop()
        if self._context.health.up:
            with self._context.health.noting():
                await components.heartbeat.seen("stopped")
