"""The demo's hold on a training process: start it, follow it, kill it, and look at once at what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stepwell.agent.place import peer_user, place_of
from stepwell.errors import StepwellError
from stepwell.store import names

COMMIT_SECONDS_MAX = 60.0
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, sent as soon as `save()` of `step` had come back, and what was found.

    `committed_at_kill`: the step had its manifest when the signal had been sent; then the kill came too late to hit a
    save. `commit_seconds`: from the signal until the manifest was seen, None when it never came.
    `newest_step`: what there is to resume from, once nobody writes any more.
    """

    step: int
    agent_too: bool
    blocked_seconds: float
    committed_at_kill: bool
    commit_seconds: float | None
    newest_step: int | None

    @property
    def in_the_middle(self) -> bool:
        return not self.committed_at_kill

    @property
    def promise_kept(self) -> bool:
        """An accepted save outlives its trainer, as long as the agent lives."""
        return self.agent_too or self.commit_seconds is not None


class Trainer:
    """A training process of the demo. As a context manager it never outlives its block."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        read_fd, write_fd = os.pipe()
        try:
            with open(log, "ab") as output:
                self.process = subprocess.Popen(
                    module_command("stepwell.demo.child", "--events", str(write_fd), *arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[write_fd],
                    # Threads of torch that wait for one another sleep, not spin: 15 times faster on two busy cores.
                    env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self.pipe = os.fdopen(read_fd, "rb")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """What the process reports, as it comes. Raises `StepwellError` when it ends without having said so."""
        for line in self.pipe:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "end":
                self.process.wait()
                return
            yield event
        code = self.process.wait()
        raise StepwellError(
            "the training process ended before its work was done",
            where=self.log,
            found=f"exit code {code}; its last lines:\n{_tail(self.log)}",
        )

    def kill(self, run: Path, step: int, blocked_seconds: float, agent: int | None) -> Kill:
        """Kill the process, and with `agent`, a pidfd, that one in the same moment; then watch the run.

        The look at the run follows the signal directly: a manifest that is absent then was absent at the signal.
        """
        if agent is not None:
            signal.pidfd_send_signal(agent, signal.SIGKILL)
        os.kill(self.process.pid, signal.SIGKILL)
        committed_at_kill = is_committed(run, step)
        killed = time.monotonic()
        self.process.wait()
        if agent is not None:
            wait_for_end(agent, COMMIT_SECONDS_MAX)
        # An agent that lives finishes the save; the wait is for that. Without one, what is there now is all there is.
        deadline = killed + (COMMIT_SECONDS_MAX if agent is None else 0.0)
        while not (committed := is_committed(run, step)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return Kill(
            step=step,
            agent_too=agent is not None,
            blocked_seconds=blocked_seconds,
            committed_at_kill=committed_at_kill,
            commit_seconds=time.monotonic() - killed if committed else None,
            newest_step=max(committed_steps(run), default=None),
        )


def module_command(module: str, *arguments: str) -> list[str]:
    """How to run a module of this very package in a new process, whatever lies in the current folder.

    `python -m` would look for modules there first: a `random.py` beside the user's run would break torch.
    """
    launcher = (
        "import sys; sys.path = [*filter(None, sys.path), sys.argv.pop(1)]; import runpy; "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    source = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-c", launcher, source, module, *arguments]


def committed_steps(run: Path) -> list[int]:
    """The numbers of all steps that have a manifest, the sign of a commit."""
    try:
        keys = os.listdir(run / names.STEPS)
    except FileNotFoundError:
        return []
    return [key[0] for name in keys if (key := names.parse_step_key(name)) and _has_manifest(run, name)]


def is_committed(run: Path, step: int) -> bool:
    return step in committed_steps(run)


def _has_manifest(run: Path, key: str) -> bool:
    return os.path.lexists(run / names.STEPS / key / names.MANIFEST)


def agent_of(run: Path) -> int | None:
    """A pidfd of the agent that serves this run, or None when there is none. The kernel names it, no file does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(place_of(str(run)).socket)
            return os.pidfd_open(peer_user(connection)[0])
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
            return None


def end_agent(run: Path, seconds_max: float = 30.0) -> None:
    """Ask the run's agent, if there is one, to finish and end, and wait for it."""
    agent = agent_of(run)
    if agent is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(agent, signal.SIGTERM)
        wait_for_end(agent, seconds_max)
    finally:
        os.close(agent)


def wait_for_end(pidfd: int, seconds_max: float) -> None:
    """Wait until a process has ended. Raises `StepwellError` when it takes longer."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(seconds_max * 1000):
        raise StepwellError("a process does not end", expected=f"within {seconds_max:g} s")


def _tail(file: Path, lines: int = 12) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        return str(error)
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
