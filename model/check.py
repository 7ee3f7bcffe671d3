"""Check the protocol's model with SPIN: it passes, and fails without its protections.

Needs spin (Debian package ``spin``) and gcc. ``make model`` runs it; ``--json FILE`` also writes the figures.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

OWNERSHIP, SCHEDULES, ADMISSION, WORKFLOWS = (
    Path(__file__).with_name(f"{name}.pml") for name in ("ownership", "schedules", "admission", "workflows")
)
MEMORY_MB = 9000
DEPTH = 2_000_000
ENDS = "ltl ends { <> FINAL }"
NO_SWEEPS = "NO_REPUB NO_POLL NO_LOSS"


@dataclass(frozen=True)
class Variant:
    """One run of the checker.

    Attributes:
        name: what is checked, or which protection is taken away.
        flags: names for the C preprocessor; ``K`` is the number of faults in all.
        passes: what must come out.
        progress: check that every behaviour comes to its end, instead of the invariants.
        model: the file.
    """

    name: str
    flags: str
    passes: bool
    progress: bool = False
    model: Path = OWNERSHIP


PROTOCOL = [
    Variant("the protocol, no fault", "K=0", passes=True),
    Variant("the protocol, one fault", "K=1", passes=True),
    Variant("the protocol, two faults", "K=2", passes=True),
    Variant("every behaviour ends the job", "K=1", passes=True, progress=True),
    Variant("two slots of one process", "K=2 SLOTS", passes=True),
    Variant("runs that never end by themselves", "K=2 HANG", passes=True),
    Variant("two stalls at most", "K=2 MAXS=2", passes=True),
    Variant("nobody is ever suspected", "K=2 NO_LATE", passes=True),
    Variant("what failed or was cancelled is retried", "K=1 MAXY=1", passes=True),
    Variant("retried, no sweeps", f"K=1 MAXY=1 {NO_SWEEPS}", passes=True),
    Variant("the outbox alone, no sweeps, a broker that keeps", f"K=2 {NO_SWEEPS}", passes=True),
    Variant("schedules, three faults", "K=3", passes=True, model=SCHEDULES),
    Variant("every instant of a schedule gets its job", "K=3", passes=True, progress=True, model=SCHEDULES),
    Variant("admission, three faults", "K=3", passes=True, model=ADMISSION),
    Variant("every held job ends", "K=3", passes=True, progress=True, model=ADMISSION),
    Variant(
        "every held job ends without faults and sweeps",
        "K=0 NO_SWEEP",
        passes=True,
        progress=True,
        model=ADMISSION,
    ),
    Variant("workflows, three faults", "K=3", passes=True, model=WORKFLOWS),
    Variant("what was cancelled is retried", "K=0 CANCELS=1", passes=True, model=WORKFLOWS),
    Variant(
        "every workflow of which a job is cancelled comes to its end",
        "K=0 CANCELS=1",
        passes=True,
        progress=True,
        model=WORKFLOWS,
    ),
    Variant("every workflow comes to its end", "K=2", passes=True, progress=True, model=WORKFLOWS),
]
"""What must hold."""

ABLATIONS = [
    Variant("RESET without token and predicate", "K=2 RESET_BLIND=1", passes=False),
    Variant("COMPLETE and FAIL without guard", "K=2 COMPLETE_BLIND=1", passes=False),
    Variant("RELEASE that ignores cancel_requested", "K=2 RELEASE_IGNORES_CANCEL=1", passes=False),
    Variant("RESET that ignores cancel_requested", "K=2 RESET_IGNORES_CANCEL=1", passes=False),
    Variant("CANCEL as two statements", "K=2 CANCEL_TWO", passes=False),
    Variant("CLAIM that keeps needs_publish", "K=2 CLAIM_KEEPS_NP", passes=False),
    Variant("CLAIM of a live owner's job", "K=2 CLAIM_LIVE", passes=False),
    Variant("neither REPUBLISH nor idle poll", "K=2 NO_REPUB NO_POLL", passes=False),
    Variant("a read-back that adopts what is in hand", "K=1 SLOTS ADOPT_BLIND", passes=False),
    Variant("no sweeps: MARK without dispatch", f"K=2 {NO_SWEEPS} MARK_BLIND=1", passes=False),
    Variant("no sweeps: no outbox", f"K=2 {NO_SWEEPS} NO_OUTBOX=1", passes=False),
    Variant("no sweeps: ack of an unclear claim", f"K=2 {NO_SWEEPS} ACK_UNCLEAR", passes=False),
    Variant("no sweeps: message id without dispatch", f"K=2 {NO_SWEEPS} MSGID_JOB=1", passes=False),
    Variant("no sweeps: ack of a newer copy", f"K=1 {NO_SWEEPS} COPY_ACK=1", passes=False),
    Variant(
        "no sweeps: RETRY without a new dispatch",
        f"K=1 MAXY=1 {NO_SWEEPS} RETRY_KEEPS_DISPATCH",
        passes=False,
    ),
    Variant("no release of strays: heartbeat by worker id", "K=2 NO_STRAY HB_ID", passes=False),
    Variant("no stale rule: no release of strays", "K=2 NO_LATE NO_STRAY", passes=False),
    Variant("no stale rule: evidence asked for once", "K=2 NO_LATE EV_ONCE=1", passes=False),
    Variant("runs that never end: cancel not heard", "K=2 HANG DEAF", passes=False),
    Variant("FIRE of an instant that had its job", "K=2 NO_LATER", passes=False, model=SCHEDULES),
    Variant("FIRE without the instant that was read", "K=2 NO_SEEN NO_LATER", passes=False, model=SCHEDULES),
    Variant("FIRE without the revision", "K=2 NO_REVISION", passes=False, model=SCHEDULES),
    Variant("changed code that forgets what was fired", "K=2 FORGETS", passes=False, model=SCHEDULES),
    Variant("FIRE as INSERT, then UPDATE", "K=2 INSERT_FIRST NO_LATER", passes=False, model=SCHEDULES),
    Variant("FIRE as UPDATE, then INSERT", "K=2 MOVE_FIRST", passes=False, progress=True, model=SCHEDULES),
    Variant("admission that counts before it locks", "K=0 COUNT_FIRST", passes=False, model=ADMISSION),
    Variant("admission without the lock", "K=0 NO_LOCK", passes=False, model=ADMISSION),
    Variant("a counter that settling gives back", "K=2 COUNTER", passes=False, model=ADMISSION),
    Variant(
        "no sweep: WAKE without lock",
        "K=0 NO_SWEEP NO_WAKE_LOCK",
        passes=False,
        progress=True,
        model=ADMISSION,
    ),
    Variant(
        "no sweep: an owner that dies, and its job with it",
        "K=1 NO_SWEEP",
        passes=False,
        progress=True,
        model=ADMISSION,
    ),
    Variant("FINISH without the generation", "K=2 NO_GENERATION", passes=False, model=WORKFLOWS),
    Variant("NEEDS without the revision", "K=2 NO_REVISION", passes=False, model=WORKFLOWS),
    Variant("RETRY that opens no batch", "K=2 NO_REOPEN", passes=False, progress=True, model=WORKFLOWS),
    Variant(
        "RETRY that holds nothing again", "K=2 NOT_HELD_AGAIN", passes=False, progress=True, model=WORKFLOWS
    ),
    Variant("FINISH and NEEDS without sweep", "K=1 NO_SWEEP", passes=False, progress=True, model=WORKFLOWS),
    Variant(
        "a need that is done with whatever it holds",
        "K=1 PROPAGATED_BLIND",
        passes=False,
        progress=True,
        model=WORKFLOWS,
    ),
    Variant("FINISH in the settle", "K=0 IN_SETTLE NO_SWEEP", passes=False, progress=True, model=WORKFLOWS),
    Variant("NEEDS in FINISH", "K=0 NEEDS_IN_FINISH", passes=False, progress=True, model=WORKFLOWS),
]
"""What must not: each takes a protection away, and where layers cover for each other, those too."""


@dataclass(frozen=True)
class Verdict:
    """What the checker said.

    Attributes:
        states: how many it stored.
        seconds: how long it searched.
    """

    name: str
    expected: bool
    passed: bool
    states: int
    seconds: float


def check(variant: Variant) -> Verdict:
    """Run one variant to its end.

    Raises:
        subprocess.CalledProcessError: spin or gcc failed.
        ValueError: the search did not come to an end.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.pml")
        model.write_text(variant.model.read_text() + (f"\n{ENDS}\n" if variant.progress else ""))
        defines = [f"-D{flag}" for flag in variant.flags.split()]
        _run(["spin", "-a", *defines, model.name], folder)
        kind = [] if variant.progress else ["-DSAFETY"]
        _run(["gcc", "-O2", "-w", *kind, "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c"], folder)
        began = time.monotonic()
        said = _run(["./pan", *(["-a"] if variant.progress else []), "-E", f"-m{DEPTH}", "-w26"], folder)
    return Verdict(
        name=variant.name,
        expected=variant.passes,
        passed=_errors(said) == 0,
        states=int(float(_find(r"([\d.e+]+) states, stored", said))),
        seconds=round(time.monotonic() - began, 1),
    )


def _errors(said: str) -> int:
    errors = int(_find(r"errors: (\d+)", said))
    if not errors and re.search("search depth too small|out of memory|Search not completed", said):
        raise ValueError(f"the search did not come to an end:\n{said}")
    return errors


def _find(pattern: str, said: str) -> str:
    found = re.search(pattern, said)
    if found is None:
        raise ValueError(f"no {pattern} in what the checker said:\n{said}")
    return found[1]


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def verdicts(variants: list[Variant]) -> Iterator[Verdict]:
    """Check one variant after the other, under a progress bar."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("model", total=len(variants))
        for variant in variants:
            progress.update(bar, description=variant.name)
            yield check(variant)
            progress.advance(bar)


def show(found: list[Verdict]) -> None:
    """Print the table."""
    table = Table("variant", "must", "does", "states", "seconds")
    for each in found:
        must, does = ("pass" if passes else "fail" for passes in (each.expected, each.passed))
        style = "" if must == does else "bold red"
        table.add_row(each.name, must, does, f"{each.states:,}", f"{each.seconds:.1f}", style=style)
    Console().print(table)


def main() -> None:
    """Check all variants; exit code 1 when one comes out otherwise than it must."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path, help="write the verdicts to this file, too")
    given = options.parse_args()
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing:
        sys.exit(f"make model needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    found = list(verdicts([*PROTOCOL, *ABLATIONS]))
    show(found)
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    sys.exit(any(each.passed != each.expected for each in found))


if __name__ == "__main__":
    main()
