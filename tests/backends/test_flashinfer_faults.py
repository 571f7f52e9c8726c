"""What becomes of a group when FlashInfer fails on some of its ranks: the same on all, soon, and nothing leaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from fault_scenarios import SCENARIOS, WORLD_SIZE, Scenario, worker

#: No rank may take longer than this over any scenario.
LIMIT = 30.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], tuple[str, float]]:
    """(scenario, rank) -> (outcome, seconds)."""
    folder = tmp_path_factory.mktemp("faults")
    ranks = mp.spawn(worker, args=(str(folder / "store"), str(folder)), nprocs=WORLD_SIZE, join=False)
    try:
        finished = ranks.join(timeout=240)
    finally:
        for process in ranks.processes:
            process.kill()
    found = {}
    for rank in range(WORLD_SIZE):
        for line in (folder / str(rank)).read_text().splitlines():
            index, outcome, seconds = json.loads(line)
            found[index, rank] = (outcome, seconds)
    assert finished is not None
    return found


def fits(scenario: Scenario, outcome: str) -> bool:
    """`|` stands between words that must all be there; an outcome without it must be equal."""
    words = scenario.expected.split("|")
    return outcome == words[0] if len(words) == 1 else all(word in outcome for word in words)


@pytest.mark.slow
def test_the_table_of_faults(outcomes, capfd):
    rows = []
    for index, scenario in enumerate(SCENARIOS):
        seen = [outcomes.get((index, rank), ("did not finish", LIMIT)) for rank in scenario.ranks]
        good = all(fits(scenario, outcome) and seconds < LIMIT for outcome, seconds in seen)
        different = dict.fromkeys(outcome for outcome, _ in seen)
        rows.append((good, scenario, " // ".join(different), max(seconds for _, seconds in seen)))
    with capfd.disabled():
        print(f"\n{'':4} {'fault':52} {'expected':60} {'s':>5}  seen", file=sys.stderr)
        for good, scenario, told, seconds in rows:
            mark = "ok" if good else "BAD"
            print(f"{mark:4} {scenario.fault:52} {scenario.expected[:60]:60} {seconds:5.1f}  {told}", file=sys.stderr)
    assert not [scenario.fault for good, scenario, _, _ in rows if not good]


def test_scenarios_are_told_apart():
    assert len({(s.fault, s.run) for s in SCENARIOS}) == len(SCENARIOS)
    assert Path(__file__).with_name("fault_scenarios.py").exists()
