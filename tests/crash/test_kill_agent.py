"""SIGKILL of an agent at each of its effects (write, fsync, rename, link, …): no torn step, none lost, nothing left.

Case 12 (a resume picks a half-written folder) and case 20 (a prune takes the last good step) are among what is looked
for after each kill; see `promises.violations`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.crash.matrix import Plan

POOR = "no-link;no-direct;short-writes:3000"
ROLLBACK = {"steps_before": (1, 2, 3, 4), "parent_step": 2, "steps": (3, 4, 5), "wide_from": 4}
# With the least number of kills that each must come to: 450 together, and test_kill_processes.py adds 80.
PLANS = {
    "one-agent-even": (Plan("before", "same", stride=2), 60),
    "one-agent-odd": (Plan("before", "same", first=1, stride=2), 60),
    "both-even": (Plan("before", "new", stride=2), 60),
    "both-odd": (Plan("before", "new", first=1, stride=2), 60),
    "torn-writes": (Plan("torn", "same"), 18),
    "poor-file-system": (Plan("torn", "new", POOR), 45),
    "poor-file-system-after": (Plan("after", "same", POOR, stride=3), 47),
    "rollback": (Plan("before", "new", stride=2, **ROLLBACK), 50),  # type: ignore[arg-type]
    "rollback-after": (Plan("after", "same", first=1, stride=2, **ROLLBACK), 50),  # type: ignore[arg-type]
}
LONG_STORY = {"steps": tuple(range(0, 18, 2)), "wide_from": 8, "keep_every": 6}
# The same for the long suite, per story and by whether writes are torn: 4 614 together, so that with those above and
# those of test_kill_processes.py there are more than 5 000.
STORIES: dict[str, tuple[str, dict[str, object], int, int]] = {
    "simple": ("", {}, 44, 6),
    "poor": (POOR, {}, 50, 15),
    "rollback": ("", ROLLBACK, 34, 4),
    "rollback-poor": (POOR, ROLLBACK, 40, 12),
    "long": ("", LONG_STORY, 79, 11),
    "long-poor": (POOR, LONG_STORY, 97, 33),
}
LONG_PLANS = {
    f"{moment}-{heir}-{name}-{first}": (
        Plan(moment, heir, faults, first=first, stride=3, **story),  # type: ignore[arg-type]
        torn_min if moment == "torn" else kills_min,
    )
    for moment in ("before", "after", "torn")
    for heir in ("same", "new")
    for first in range(3)
    for name, (faults, story, kills_min, torn_min) in STORIES.items()
}
KILLS_MIN = 5000


def carry_out(plan: Plan, folder: Path) -> int:
    """Run a plan in a process of its own; returns how many kills there were, all without a broken promise."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.crash.matrix", str(folder / "plan.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == {}, done.stderr[-4000:]
    return int(result["kills"])


@pytest.mark.parametrize("name", PLANS)
def test_killing_the_agent_at_every_effect(tmp_path: Path, name: str) -> None:
    plan, kills_min = PLANS[name]
    assert carry_out(plan, tmp_path) >= kills_min


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LONG_PLANS)
def test_killing_the_agent_at_every_effect_of_longer_stories(tmp_path: Path, name: str) -> None:
    plan, kills_min = LONG_PLANS[name]
    assert carry_out(plan, tmp_path) >= kills_min


def test_the_least_numbers_come_to_what_is_claimed() -> None:
    normal = sum(kills_min for _, kills_min in PLANS.values())
    assert normal >= 450
    assert normal + sum(kills_min for _, kills_min in LONG_PLANS.values()) >= KILLS_MIN
