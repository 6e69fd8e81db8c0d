"""Kills an agent at each of its effects: one Python process that forks a victim for each kill.

`python -m tests.crash.matrix PLAN.json` prints one line of JSON with the count of kills and every broken promise. The
victim is a fork with an agent in it (`core.CoreAgent`), killed by a real SIGKILL; the trainer's memory, which is the
slot and what it was told, outlives it. Then a second agent takes over, either for the same trainer, which hands its
pending save over again, or for a new trainer that restores and goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.crash.core import KEEP, CoreAgent, NoSync, Trainer, new_trainer
from tests.crash.promises import leftovers, order, violations

from stepwell.errors import NotARunError
from stepwell.policies import Keep
from stepwell.restore import catalogue as catalogues
from stepwell.store import names
from stepwell.testing.ops import KillingOps, RecordingOps, ops_from_environment, read_effects
from stepwell.tiers.base import FileOps, OsFileOps


@dataclass(frozen=True)
class Plan:
    """What to kill. `moment` is before, after or torn (writes only); of such effects every `stride`-th from `first` on.

    `heir` is who goes on: "same" is the trainer whose agent was killed, "new" one that restores. `steps_before` are
    saved in an attempt before, from whose step `parent_step` the victim's trainer goes on. `faults` is what the file
    system cannot do, in the grammar of `STEPWELL_FAULT`.
    """

    moment: str
    heir: str
    faults: str = ""
    steps: tuple[int, ...] = (1, 2, 3, 4)
    wide_from: int = 3
    keep_last: int = KEEP.last
    keep_every: int | None = None
    steps_before: tuple[int, ...] = ()
    parent_step: int | None = None
    first: int = 0
    stride: int = 1

    @property
    def parent(self) -> str | None:
        """The key of the step that the victim's trainer goes on from."""
        return None if self.parent_step is None else names.step_key(self.parent_step, 1)

    @property
    def keep(self) -> Keep:
        return Keep(last=self.keep_last, every=self.keep_every)


@dataclass
class Told:
    """What reached the trainer before its agent died, and how that ended."""

    trainer: Trainer
    keys: list[str]
    status: int


def run_agent(root: str, trainer: Trainer, ops: FileOps) -> Told:
    """Play a trainer against an agent in a fork; what the trainer learns comes back through a pipe as it learns it."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receiving)

            def tell(name: str, value: object) -> None:
                os.write(sending, json.dumps([name, value]).encode() + b"\n")

            CoreAgent(root, ops, trainer, tell).play()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        lines = [json.loads(line) for line in pipe if line.endswith("\n")]
    _, status = os.waitpid(pid, 0)
    learned = {name: value for name, value in lines if name in ("attempt", "snapshot_step", "committed_step")}
    keys = [value for name, value in lines if name == "committed"]
    return Told(replace(trainer, **learned), keys, status)


def bare_ops(faults: str) -> FileOps:
    """The file system of the plan, without waits for the disk."""
    os.environ["STEPWELL_FAULT"] = faults
    try:
        return ops_from_environment(NoSync(OsFileOps()))
    finally:
        del os.environ["STEPWELL_FAULT"]


def effect_kinds(plan: Plan, folder: str) -> list[str]:
    """The victim's effects, in order, when nobody kills it."""
    with prepared(plan, folder) as (root, trainer, _):
        path = root + ".effects"
        status = run_agent(root, trainer, RecordingOps(bare_ops(plan.faults), path)).status
        assert status == 0, "the story fails without a kill"
        return [effect.kind for effect in read_effects(path)]


@contextmanager
def prepared(plan: Plan, folder: str) -> Iterator[tuple[str, Trainer, list[str]]]:
    """A run with what the attempt before left in it, the victim's trainer, and the keys promised so far."""
    place = tempfile.mkdtemp(dir=folder)
    root = os.path.join(place, "run")
    trainer = new_trainer(steps=plan.steps, wide_from=plan.wide_from, keep=plan.keep)
    try:
        if plan.steps_before:
            pattern = os.path.join(folder, "before")
            if not os.path.isdir(pattern):
                before = replace(trainer, identity="before", steps=plan.steps_before, keep=Keep(last=100))
                assert run_agent(pattern, before, bare_ops(plan.faults)).status == 0
            shutil.copytree(pattern, root)
        keys_before = [names.step_key(step, 1) for step in plan.steps_before]
        yield root, replace(trainer, parent=plan.parent), keys_before
    finally:
        os.close(trainer.slot_fd)
        shutil.rmtree(place)


def one_kill(plan: Plan, at: int, folder: str) -> list[str]:
    """Kill the victim at its `at`-th effect, look, let the heir finish and save once more, and look again."""
    with prepared(plan, folder) as (root, trainer, keys_before):
        told = run_agent(root, trainer, KillingOps(bare_ops(plan.faults), at, plan.moment))
        if not (os.WIFSIGNALED(told.status) and os.WTERMSIG(told.status) == signal.SIGKILL):
            return [f"it was to be killed and ended with status {told.status}"]
        wrong = [f"after the kill: {text}" for text in broken(plan, root, keys_before, told.keys)]
        heir = told.trainer if plan.heir == "same" else _restarted(plan, root, trainer)
        heir = replace(heir, steps=(*plan.steps, plan.steps[-1] + 1))
        after = run_agent(root, heir, bare_ops(plan.faults))
        if after.status != 0:
            return [*wrong, f"the next agent ended with status {after.status}"]
        if after.trainer.committed_step != heir.steps[-1]:
            wrong.append(f"the next agent committed step {after.trainer.committed_step} last, not {heir.steps[-1]}")
        wrong += [f"in the end: {text}" for text in broken(plan, root, keys_before, [*told.keys, *after.keys])]
        return wrong + [f"in the end: {name} is left, and nothing needs it" for name in leftovers(root)]


def broken(plan: Plan, root: str, keys_before: list[str], keys: list[str]) -> list[str]:
    """The promises, and with an older branch: what was abandoned and what was resumed from are still there."""
    wrong = violations(root, keys, plan.keep_last, plan.parent)
    if plan.parent is not None:
        there = {step.key for step in catalogues.read(root).steps}
        abandoned = [key for key in keys_before if key > plan.parent][-plan.keep_last :]
        wrong += [f"{key} of the abandoned branch is lost" for key in abandoned if key not in there]
        newer = [key for key in there if order(key)[0] > 1]
        if plan.parent not in there and len(newer) < plan.keep_last:
            wrong.append(f"{plan.parent} was resumed from and is gone, with only {newer} after it")
    return wrong


def _restarted(plan: Plan, root: str, trainer: Trainer) -> Trainer:
    """A new process of the training script: it restores the newest step, or the one it was told to go back to."""
    try:
        newest = catalogues.read(root).newest
    except NotARunError:
        newest = None
    if newest is None or (plan.parent is not None and newest.attempt == 1):
        return replace(trainer, identity="restarted")
    step = newest.step
    return replace(trainer, identity="restarted", parent=newest.key, snapshot_step=step, committed_step=step)


def main(plan: Plan) -> dict[str, object]:
    """Carry out a plan; nothing of it stays on the disk."""
    # A short path, since a socket is made beside the run; and a disk, for O_DIRECT.
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as folder:
        kinds = effect_kinds(plan, folder)
        chosen = [at for at, kind in enumerate(kinds, 1) if plan.moment != "torn" or kind == "pwrite"]
        chosen = chosen[plan.first :: plan.stride]
        found = {at: wrong for at in chosen if (wrong := one_kill(plan, at, folder))}
        return {"effects": len(kinds), "kills": len(chosen), "broken": found}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(main(Plan(**json.load(file)))))
