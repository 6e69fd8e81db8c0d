"""SIGKILL of real trainers, real agents and both, at each message and each effect.

Beside what `promises.violations` looks for: what the trainer had accepted survives it, a trainer whose agent is killed
goes on and loses nothing (case 23), and in the end no process, lock, socket or file is left (case 33's kind).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

Job = dict[str, object]

# With the least number of kills that each must come to.
JOBS: dict[str, tuple[Job, int]] = {
    "trainer": ({"victim": "trainer", "kinds": ["kill-at:trainer"], "first": 0, "stride": 1}, 20),
    "agent-messages": ({"victim": "agent", "kinds": ["kill-at:agent"], "first": 0, "stride": 1}, 20),
    "agent-effects": ({"victim": "agent", "kinds": ["kill:"], "first": 0, "stride": 9}, 13),
    "both-messages": ({"victim": "both", "kinds": ["kill-at:"], "first": 0, "stride": 3}, 13),
    "both-effects": ({"victim": "both", "kinds": ["kill:"], "first": 4, "stride": 9}, 13),
}
LONG_JOBS: dict[str, Job] = {
    f"{victim}-{kind.strip(':')}-{first}": {"victim": victim, "kinds": [kind], "first": first, "stride": 4}
    for victim, kind in (("agent", "kill:"), ("both", "kill:"), ("both", "kill-at:"), ("trainer", "kill-at:trainer"))
    for first in range(4)
}


def carry_out(job: Job, folder: Path) -> int:
    """Do a job in a process of its own; returns how many kills there were, all without a broken promise."""
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.crash.processes", str(folder / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == {}, done.stderr[-4000:]
    assert result["kills"] >= 0.8 * result["chosen"], "messages differ a little from run to run, not more"
    return int(result["kills"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", JOBS)
def test_killing_processes(tmp_path: Path, name: str) -> None:
    job, kills_min = JOBS[name]
    assert carry_out(job, tmp_path) >= kills_min


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG_JOBS)
def test_killing_processes_everywhere(tmp_path: Path, name: str) -> None:
    assert carry_out(LONG_JOBS[name], tmp_path) >= 4
