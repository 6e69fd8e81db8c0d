"""Kills real trainers and real agents at each message and each effect.

`python -m tests.crash.processes JOB.json` prints one line of JSON with the count of kills and every broken promise. The
trainer is a fork of this process, so that it costs no start of Python, and uses `Checkpointer` as a script does; its
agent is the real one, started by it. The victim kills itself where `STEPWELL_FAULT` says.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass

import psutil
from tests.crash.core import KEEP, make_state
from tests.crash.promises import leftovers, violations

import stepwell
from stepwell.agent.place import place_of
from stepwell.checkpointer import Checkpointer
from stepwell.testing.ops import VARIABLE

STEPS = 4
SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Told:
    """What a trainer told the outside: the step it restored, the steps it had accepted, the keys it was promised."""

    status: int
    restored: int | None
    accepted: list[int]
    keys: list[str]
    counters: dict[str, int]

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL


def train(root: str, until: int, tell: object) -> None:
    """The training script: restore, and save each step; every second one is waited for."""
    assert callable(tell)
    with Checkpointer(root, keep=KEEP, on_error="raise") as ckpt:
        state = make_state(-1, wide=False)
        restored = ckpt.restore(state)
        tell("restored", restored.step if restored else None)
        saves = []
        for step in range(restored.step + 1 if restored else 1, until + 1):
            saves.append(ckpt.save(step, make_state(step, wide=False)))
            if saves[-1].skipped:
                raise RuntimeError(f"step {step} was skipped: {saves[-1].reason}")
            tell("accepted", step)
            if step % 2 == 0:
                saves[-1].wait()
                tell("committed", saves[-1].key)
        for save in saves:
            save.wait()
            tell("committed", save.key)
        tell("counters", {"agent_restarts": ckpt.counters.agent_restarts, "failed": ckpt.counters.failed})


def run_trainer(root: str, fault: str, until: int = STEPS) -> Told:
    """Run the script in a fork until it ends, or until it hangs (then its stacks go to stderr and it is killed)."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receiving)
            os.environ[VARIABLE] = fault

            def tell(name: str, value: object) -> None:
                os.write(sending, json.dumps([name, value]).encode() + b"\n")

            train(root, until, tell)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(sending)
    data, deadline = b"", time.monotonic() + SECONDS_MAX
    with os.fdopen(receiving, "rb", 0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = pipe.read(65536)
            if not piece:
                break
            data += piece
        else:
            os.kill(pid, signal.SIGABRT)  # faulthandler prints where it hangs
    _, status = os.waitpid(pid, 0)
    lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    return Told(
        status=status,
        restored=next((value for name, value in lines if name == "restored"), None),
        accepted=[value for name, value in lines if name == "accepted"],
        keys=[value for name, value in lines if name == "committed"],
        counters=next((value for name, value in lines if name == "counters"), {}),
    )


def failpoints(folder: str) -> list[str]:
    """Every message of an undisturbed run, as `NAME:N`, and then the number of the agent's effects."""
    trace = os.path.join(folder, "trace")
    told = run_trainer(os.path.join(folder, "traced"), f"trace:{trace}")
    assert told.status == 0, "the story fails without a kill"
    wait_until_alone(os.path.join(folder, "traced"))
    counts: Counter[str] = Counter()
    found = []
    with open(trace) as file:
        for line in file:
            kind, name = line.rstrip("\n").split(" ", 1)
            if kind == "message":
                counts[name] += 1
                found.append(f"kill-at:{name}:{counts[name]}")
            else:
                counts["effect"] += 1
                found.append(f"kill:{counts['effect']}:before")
    return found


def wait_until_alone(root: str) -> str | None:
    """Wait for the agent of a run to end by itself; what is still there when it does not."""
    deadline = time.monotonic() + SECONDS_MAX
    fd = os.open(place_of(root).lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
        else:
            return "its lock is held"
    finally:
        os.close(fd)
    while time.monotonic() < deadline:  # the lock goes a moment before the process does
        left = [process.pid for process in psutil.process_iter() if serves(process, root)]
        if not left:
            return None
        time.sleep(0.02)
    return f"processes {left}"


def serves(process: psutil.Process, root: str) -> bool:
    """True for an agent of this run that is not merely waiting to be reaped."""
    try:
        return root in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def one_kill(victim: str, fault: str, root: str) -> tuple[bool, list[str]]:
    """Kill somebody once. Returns whether it came to the kill, and every broken promise."""
    once = root + ".struck"
    both = ";both" if victim == "both" else ""
    first = run_trainer(root, f"{fault}{both};once:{once}")
    struck = os.path.exists(once)
    if not struck:
        alone = wait_until_alone(root)
        return False, [] if first.status == 0 and alone is None else [f"without a kill: {first} {alone}"]
    wrong = []
    if victim == "agent":  # the trainer goes on with another agent and notices nothing
        if first.status != 0:
            wrong.append(f"the trainer did not survive its agent: {first}")
        last = first
    else:
        if not first.killed and not (victim == "both" and first.status == 0 and len(set(first.keys)) == STEPS):
            wrong.append(f"the trainer was to be killed: {first}")
        if victim == "both":  # the trainer may have closed already, while its agent was still pruning
            wrong += [f"after the kill: {text}" for text in violations(root, first.keys)]
        last = run_trainer(root, "", STEPS + 1)
        if last.status != 0:
            wrong.append(f"the restarted trainer failed: {last}")
        promised = max(first.accepted if victim == "trainer" else map(_step_of, first.keys), default=None)
        if promised is not None and (last.restored is None or last.restored < promised):
            wrong.append(f"step {promised} was promised, and step {last.restored} restored")
    wrong += _in_the_end(root, [*first.keys, *last.keys])
    if victim == "agent" and (leftovers(root) or os.path.exists(place_of(root).socket)):
        # It was killed after its last promise, and nobody came to look since.
        last = run_trainer(root, "", STEPS + 1)
        wrong += _in_the_end(root, last.keys)
    wrong += [f"in the end: {name} is left, and nothing needs it" for name in leftovers(root)]
    if os.path.exists(place_of(root).socket):
        wrong.append("in the end the socket is left")
    return True, wrong


def _in_the_end(root: str, keys: list[str]) -> list[str]:
    """What is wrong once the last trainer has closed: an agent that stays, a broken promise, a step that is missing."""
    left = wait_until_alone(root)
    wrong = [] if left is None else [f"in the end there is {left}"]
    wrong += [f"in the end: {text}" for text in violations(root, keys)]
    newest, last = max((step.step for step in stepwell.steps(root)), default=None), max(map(_step_of, keys), default=-1)
    return wrong if newest == last else [*wrong, f"in the end the newest step is {newest}, not {last}"]


def _step_of(key: str) -> int:
    return int(key.split("-")[0])


def main(victim: str, kinds: list[str], first: int, stride: int) -> dict[str, object]:
    """Kill `victim` at every `stride`-th failpoint whose name begins with one of `kinds`; nothing stays on the disk."""
    # In memory if possible: a kill leaves the page cache as it is, so nothing is gained by waiting for a disk.
    with tempfile.TemporaryDirectory(prefix="sw", dir="/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        chosen = [name for name in failpoints(folder) if name.startswith(tuple(kinds))][first::stride]
        kills, found = 0, {}
        for number, fault in enumerate(chosen):
            struck, wrong = one_kill(victim, fault, os.path.join(folder, str(number)))
            kills += struck
            if wrong:
                found[fault] = wrong
        return {"chosen": len(chosen), "kills": kills, "broken": found}


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    with open(sys.argv[1]) as file:
        print(json.dumps(main(**json.load(file))))
