"""The protocol survives a concurrent random walk, and every mutant of it is found out by the checker."""

import secrets

import pytest

from tests.faults.records import prepare
from tests.faults.walk.mutants import MUTANTS, Mutant
from tests.faults.walk.walk import Options, walk
from tests.support.servers import TEMPLATE, TestServers, copy_database

SEEDS = (11, 12, 13, 14, 15, 16)


def new_database(servers: TestServers) -> str:
    url = copy_database(servers.postgres, f"walk_{secrets.token_hex(6)}", TEMPLATE)
    prepare(url)
    return url


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("sweeps", [True, False])
async def test_the_protocol_survives(servers: TestServers, seed: int, *, sweeps: bool) -> None:
    options = Options(seed=seed, sweeps=sweeps, loses_messages=sweeps)
    verdict = await walk(new_database(servers), options)
    assert verdict.ok, {rule: verdict.findings[rule][:3] for rule in verdict.broken}


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_a_mutant_is_found_out(
    servers: TestServers, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    mutant.apply(monkeypatch)
    for seed in SEEDS:
        verdict = await walk(new_database(servers), mutant.options(seed))
        print(f"seed {seed}: {verdict.broken}")  # noqa: T201 -- the seed of a red run
        if not verdict.ok:
            break
    assert set(verdict.broken) & mutant.found_as, f"{mutant.name} broke {verdict.broken} with seeds {SEEDS}"
