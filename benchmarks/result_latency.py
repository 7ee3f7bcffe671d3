"""What waiting for a result adds: from the job's end in its row to the return of ``handle.result()``.

Run by hand: ``python -m benchmarks.result_latency [--jobs N] [--rate N] [--seconds-a-job S]``. The time in
the row is taken before the commit, so that the commit itself is part of what is measured.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

from benchmarks.measures.jsworker_processes import workers
from benchmarks.servers import running_servers
from jsworker import Job, JobClient, JobHandle, JobProcessor, load_settings

_WARM_UP_JOBS = 20


class Sleep(JobProcessor[dict[str, float]]):
    """Takes as long as its payload says."""

    async def process(self, job: Job[dict[str, float]]) -> None:
        """Sleep."""
        await asyncio.sleep(job.payload["seconds"])


async def added(client: JobClient, *, jobs: int, rate: float, seconds: float) -> list[float]:
    """Enqueue jobs at a rate, wait for each, and return the seconds that waiting has added to each."""
    clock = asyncio.get_running_loop().time
    returned: dict[JobHandle, float] = {}

    async def wait(handle: JobHandle) -> None:
        await handle.result(60)
        returned[handle] = time.time()

    began = clock()
    async with asyncio.TaskGroup() as waiting:
        for number in range(jobs):
            await asyncio.sleep(began + number / rate - clock())
            waiting.create_task(wait(await client.enqueue(Sleep, {"seconds": seconds})))
    ends = {handle: (await client.get(handle.id)).finished_at for handle in returned}
    return [returned[handle] - end.timestamp() for handle, end in ends.items() if end is not None]


async def _measure(variables: dict[str, str], jobs: int, rate: float, seconds: float) -> list[float]:
    overrides = {name.removeprefix("JSWORKER_").lower(): value for name, value in variables.items()}
    async with JobClient(load_settings(**overrides)) as client:
        await added(client, jobs=_WARM_UP_JOBS, rate=rate, seconds=seconds)
        return await added(client, jobs=jobs, rate=rate, seconds=seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on servers of its own and print the median and the 99th percentile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds-a-job", type=float, default=0.0)
    given = parser.parse_args(arguments)
    with running_servers() as servers:
        variables = servers.new_jsworker()
        target = "benchmarks.result_latency:Sleep"
        with workers(1, [target], variables):
            took = asyncio.run(_measure(variables, given.jobs, given.rate, given.seconds_a_job))
    percentiles = statistics.quantiles(took, n=100)
    print(f"result() added {1000 * percentiles[49]:.1f} ms p50, {1000 * percentiles[98]:.1f} ms p99")  # noqa: T201


if __name__ == "__main__":
    main()
