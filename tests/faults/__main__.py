"""``python -m tests.faults``: kill, stop, cut and forge for a while, then tell what came of the jobs."""

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.faults.campaign import Plan, run
from tests.faults.defaults import at_defaults
from tests.faults.nemeses import CLUSTER, KILLS, OTHERS
from tests.faults.report import print_report, surroundings, write_json


def main() -> int:
    """Return 0 for a good verdict, 1 for a bad one."""
    options = _arguments()
    console = Console()
    if options.defaults:
        return _at_defaults(options, console)
    plan = Plan(
        seed=options.seed,
        seconds=options.seconds,
        kills=options.kills,
        only=tuple(options.only),
        pods=options.pods,
        children=options.children,
        rate=options.rate,
        cluster=options.cluster,
        kill_seconds=options.every,
        slowed=options.slowed,
    )
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"jsworker-faults-{plan.seed}-", dir=options.keep))
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0)
        result = asyncio.run(
            run(plan, folder, lambda what, share: bar.update(task, description=what, completed=share))
        )
    print_report(result, console)
    if options.json:
        write_json(result, options.json)
    if result["ok"] and not options.keep:
        shutil.rmtree(folder)
    else:
        write_json(result, folder / "result.json")
        console.print(f"seed {plan.seed}; history and logs: {folder}", markup=False, soft_wrap=True)
    return 0 if result["ok"] else 1


def _at_defaults(options: argparse.Namespace, console: Console) -> int:
    with tempfile.TemporaryDirectory(prefix="jsworker-faults-defaults-") as folder:
        result = {**asyncio.run(at_defaults(Path(folder))), "seed": options.seed, **surroundings()}
    console.print(
        f"at default settings a killed pod's jobs ran again after {result['without_restart_seconds']} s"
    )
    console.print(f"and after {result['with_restart_seconds']} s of its next life when it is started again")
    if options.json:
        write_json({"defaults": result}, options.json)
    return 0 if result["ok"] else 1


def _arguments() -> argparse.Namespace:
    names = ["none", *KILLS, *OTHERS, *CLUSTER]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the kill phase")
    parser.add_argument("--kills", type=int, help="faults of the kill phase, instead of its length")
    parser.add_argument("--every", type=float, default=1.2, help="seconds from one kill to the next")
    parser.add_argument(
        "--slowed", type=float, default=1.0, help="factor for the fleet's times, for a crowded machine"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of dice and workload")
    parser.add_argument(
        "--only", nargs="*", default=[], choices=names, metavar="NEMESIS", help=", ".join(names)
    )
    parser.add_argument("--pods", type=int, default=2, help="parents")
    parser.add_argument("--children", type=int, default=2, help="worker processes of each parent")
    parser.add_argument("--rate", type=float, default=25.0, help="jobs a second")
    parser.add_argument(
        "--cluster", action="store_true", help="three nats-servers, and what can be done to them"
    )
    parser.add_argument(
        "--defaults", action="store_true", help="default settings in real time: a pod is killed"
    )
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument(
        "--keep", type=Path, help="keep history and logs below this folder, of a good run too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
