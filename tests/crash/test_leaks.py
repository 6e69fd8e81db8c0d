"""Nothing piles up when agents or trainers die again and again: no descriptor, no thread, no memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tests.helpers import agents_of, assert_is_step, open_files, state_of, wait_until

import stepwell
from stepwell.agent.observer import status_of

KILLS = 6


def slot_files(pid: int) -> list[str]:
    """The slots that a process holds open."""
    held = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "stepwell-slot" in os.readlink(f"/proc/{pid}/fd/{name}"):
                held.append(name)
    return held


def slot_maps(pid: int | str) -> int:
    """How often a slot is mapped in a process."""
    return Path(f"/proc/{pid}/maps").read_text().count("stepwell-slot")


def test_a_trainer_whose_agent_is_killed_again_and_again(run: Path) -> None:
    """Case 23: each time the trainer notices, starts another agent, and loses nothing; and it does not grow."""
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=2), on_error="raise") as ckpt:
        sizes = []
        for round_number in range(KILLS):
            for step in range(3 * round_number, 3 * round_number + 3):
                ckpt.save(step, state_of(step)).wait(timeout=60)
            sizes.append((open_files(), threading.active_count(), slot_maps("self")))
            (agent,) = agents_of(run)
            restarts = ckpt.counters.agent_restarts
            agent.kill()
            agent.wait(10)
            wait_until(lambda: ckpt._linked and ckpt.counters.agent_restarts == restarts + 1)  # noqa: B023
        assert sizes[-1] <= sizes[1], sizes
        assert ckpt.counters.failed == ckpt.counters.skipped == 0
    wait_until(lambda: not agents_of(run))
    assert_is_step(stepwell.load(run), 3 * KILLS - 1)


TRAINER = """
import os, signal, sys, stepwell
from pathlib import Path
from tests.helpers import state_of
with stepwell.Checkpointer(Path(sys.argv[1]), on_error="raise") as ckpt:
    state = state_of(0)
    restored = ckpt.restore(state)
    first = restored.step + 1 if restored else 0
    for step in range(first, first + 3):
        ckpt.save(step, state_of(step)).wait(timeout=60)
    print(restored.step if restored else -1, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def holdings(agent: psutil.Process) -> tuple[int, int, int, int]:
    """Slots held, slots mapped, descriptors and threads of an agent."""
    return len(slot_files(agent.pid)), slot_maps(agent.pid), agent.num_fds(), agent.num_threads()


def test_an_agent_whose_trainers_are_killed_again_and_again(run: Path) -> None:
    """The agent keeps the slots of the trainer that died for the next one to restore from, and no older ones."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    sizes, agents = [], set()
    for _ in range(KILLS):
        command = [sys.executable, "-c", TRAINER, str(run)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL, done.stderr
        (agent,) = agents_of(run)
        agents.add(agent.pid)
        wait_until(lambda: not (status := status_of(str(run))) or not status.pending)
        if len(sizes) >= 2:  # it may still prune, or part from who just asked: what counts is that it comes back down
            wait_until(lambda: holdings(agent) <= sizes[1])  # noqa: B023  used at once
        sizes.append(holdings(agent))
    assert len(agents) == 1, "each trainer met the agent that was there"
    assert sizes[-1][0] <= 4


def test_a_lingering_agent_ends_when_it_is_told_to(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while nobody is connected: it goes at once, and with it lock, socket and memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", TRAINER, str(run)], env=environment, capture_output=True, timeout=60)
    (agent,) = agents_of(run)
    agent.terminate()
    agent.wait(20)
    assert not psutil.pid_exists(agent.pid)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(state_of(0))
        assert restored is not None and (restored.step, restored.tier) == (2, "0"), "from disk, since memory is gone"
