"""A contestant's own process: holds one state and one contestant, and does what the parent says over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from .contestants import ENTRIES, Contestant, Saving, Stepwell, durable_already
from .measure import Heartbeat, MemoryPeak, cpu_used
from .states import Tensors, TensorsSpec, Training

# A forked child has torch imported already; a new process would spend seconds on that in every turn.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["benchmarks.worker"])

# What contestants print; DCP's process, for one, logs every request.
LOG = Path(__file__).parent / "out" / "contestants.log"

_ANSWER_SECONDS_MAX = 900
# Work that a contestant still does right after it has said "durable" belongs to its CPU figure.
_SETTLE_SECONDS = 0.3
_FILES_OPEN_MAX = 1 << 16
_TRAIN_STEPS_MIN = 5
_TINY = "warm-up"


class ContestantFailed(Exception):
    """A contestant raised, died or did not answer; the text is its traceback."""


class Child:
    """The parent's end. Only one child works at a time; the parent waits for each answer."""

    def __init__(self, name: str, state: TensorsSpec | float, folder: Path) -> None:
        """Start the process and load the state: the spec of plain tensors, or the scale of the training model."""
        self._job = (name, state, folder)
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(theirs, name, state, folder), name=name)
        self._process.start()
        theirs.close()
        self._descendants: list[psutil.Process] = []
        try:
            self.call("ready")
        except ContestantFailed:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def call(self, command: str, *arguments: object) -> dict[str, Any]:
        """Let the child do something and return its figures. Raises `ContestantFailed`."""
        try:
            self._pipe.send((command, arguments))
            if not self._pipe.poll(_ANSWER_SECONDS_MAX):
                raise ContestantFailed(f"no answer to {command!r} in {_ANSWER_SECONDS_MAX} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ContestantFailed(f"the process died during {command!r}: {error!r}") from error
        if isinstance(answer, str):
            raise ContestantFailed(answer)
        figures: dict[str, Any] = answer
        return figures

    def watch_memory(self) -> MemoryPeak:
        return MemoryPeak(self.pid)

    def restarted(self) -> Child:
        """SIGKILL the process, as a crash would, and start another in its place.

        What the old one started (Stepwell's agent) stays, and is ended with the new one.
        """
        survivors = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        self._process.join()
        self._pipe.close()
        child = Child(*self._job)
        child._descendants = survivors
        return child

    def end(self) -> None:
        """End the process and whatever it started, kindly if it answers."""
        if self._process.is_alive():
            self._descendants += psutil.Process(self.pid).children(recursive=True)
            try:
                self.call("close")
            except ContestantFailed:
                self._process.kill()
            self._process.join()
            self._pipe.close()
        _, alive = psutil.wait_procs(self._descendants, timeout=10)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)


def _serve(pipe: Connection, name: str, state: TensorsSpec | float, folder: Path) -> None:
    LOG.parent.mkdir(exist_ok=True)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # DCP's stager in shared memory opens one for each tensor; only root gets more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, _FILES_OPEN_MAX),) * 2)
    worker = Worker(name, state, folder)
    commands: dict[str, Callable[..., Mapping[str, object]]] = {
        "ready": dict,
        "warm_up": worker.warm_up,
        "open": worker.open,
        "save": worker.save,
        "train": worker.train,
        "restore": worker.restore,
        "close": worker.close,
    }
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            os._exit(1)
        try:
            pipe.send(dict(commands[command](*arguments)))
        except Exception:
            pipe.send(traceback.format_exc())
        if command == "close":
            # Peers leave threads and processes behind that would keep the interpreter from ending.
            os._exit(0)


class Worker:
    """What a contestant's process can be told to do; each command returns figures with their unit last."""

    def __init__(self, name: str, state: TensorsSpec | float, folder: Path) -> None:
        self._entry = next(entry for entry in ENTRIES if entry.name == name)
        self._folder = folder
        self._state: Tensors | Training = Tensors(state) if isinstance(state, TensorsSpec) else Training(state)
        self._contestant: Contestant | None = None
        self._heartbeat = Heartbeat()

    def warm_up(self, tiny: TensorsSpec) -> dict[str, float]:
        """Save a state of one tensor, so that imports and set-up on first use are not in the measured save."""
        folder = self._folder / _TINY
        folder.mkdir()
        contestant = self._entry.make(Tensors(tiny), folder)
        contestant.save(0).wait()
        contestant.close()
        shutil.rmtree(folder)
        return {}

    def open(self) -> dict[str, float]:
        """Make the contestant, after closing the one before."""
        if self._contestant is not None:
            self._contestant.close()
        start = time.perf_counter()
        self._contestant = self._entry.make(self._state, self._folder)
        return {"open_seconds": time.perf_counter() - start}

    def _opened(self) -> Contestant:
        if self._contestant is None:
            raise RuntimeError("open comes first")
        return self._contestant

    def save(self, step: int) -> dict[str, Any]:
        """One save on an otherwise idle trainer (a lazy one trains one step, since its copy ends there)."""
        contestant = self._opened()
        self._heartbeat.restart()
        time.sleep(_SETTLE_SECONDS)
        idle_seconds = self._heartbeat.worst_seconds()
        cpu, beats = cpu_used(os.getpid()), self._heartbeat.cpu_seconds
        self._heartbeat.restart()
        start = time.perf_counter()
        saving = contestant.save(step)
        returned_seconds = time.perf_counter() - start
        if self._entry.lazy:
            self._state.train_step()
        saving.wait()
        durable_seconds = time.perf_counter() - start
        heartbeat_seconds = self._heartbeat.worst_seconds()
        time.sleep(_SETTLE_SECONDS)
        used = cpu_used(os.getpid())
        tree_seconds = used.tree_seconds - cpu.tree_seconds - (self._heartbeat.cpu_seconds - beats)
        gigabytes = self._state.byte_count / 1e9
        figures = {
            "blocked_seconds": _blocked(saving, returned_seconds),
            "durable_seconds": durable_seconds,
            "bytes_per_second": self._state.byte_count / durable_seconds,
            "cpu_seconds_per_gb": tree_seconds / gigabytes,
            "heartbeat_worst_seconds": heartbeat_seconds,
            "heartbeat_idle_seconds": idle_seconds,
        }
        if self._entry.stepwell:
            figures["agent_cpu_seconds_per_gb"] = (used.agent_seconds - cpu.agent_seconds) / gigabytes
        if isinstance(contestant, Stepwell):
            contestant.settle()
        return figures

    def train(self, step: int) -> dict[str, float]:
        """Train with one save at the beginning until it is durable, then the same number of steps without."""
        contestant, durable_at, failures = self._opened(), list[float](), list[Exception]()
        start = time.perf_counter()
        saving = contestant.save(step)
        returned = time.perf_counter()

        def wait() -> None:
            try:
                saving.wait()
            except Exception as error:
                failures.append(error)
            durable_at.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        times = [returned]
        while len(times) <= _TRAIN_STEPS_MIN or waiter.is_alive():
            self._state.train_step()
            times.append(time.perf_counter())
        waiter.join()
        if failures:
            raise failures[0]
        quiet = [time.perf_counter()]
        for _ in times[1:]:
            self._state.train_step()
            quiet.append(time.perf_counter())
        quiet_step_seconds = median(after - before for before, after in pairwise(quiet))
        figures = {
            "blocked_seconds": _blocked(saving, returned - start),
            "durable_seconds": durable_at[0] - start,
            "lost_seconds": (times[-1] - start) - (quiet[-1] - quiet[0]),
            "step_seconds": quiet_step_seconds,
            "step_count": float(len(quiet) - 1),
        }
        busy = [after - before for before, after in pairwise(times) if before < durable_at[0]]
        if busy and saving.wait is not durable_already:
            figures["step_slowdown"] = median(busy) / quiet_step_seconds - 1
        return figures

    def restore(self) -> dict[str, Any]:
        """Restore into a state of zeros and check every byte that came back."""
        if not isinstance(self._state, Tensors):
            raise TypeError("restores are measured with plain tensors")
        self._state.clear()
        start = time.perf_counter()
        source = self._opened().restore()
        seconds = time.perf_counter() - start
        if not self._state.matches():
            raise RuntimeError("the restored state is not the one that was saved")
        return {"restore_seconds": seconds, "bytes_per_second": self._state.byte_count / seconds, "source": source}

    def close(self) -> dict[str, float]:
        if self._contestant is not None:
            self._contestant.close()
        return {}


def _blocked(saving: Saving, returned_seconds: float) -> float:
    return saving.blocked_seconds() if saving.blocked_seconds else returned_seconds
