"""The rounds: who works when, on what, and how the disk and the memory are left for the next."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from . import measure
from .contestants import ENTRIES, FIRST, Entry
from .states import SharedTensors, Tensors, large_shapes, small_shapes
from .stats import Sample, order
from .targets import EAGER, FIO
from .worker import Child, ContestantFailed

# From page cache, (b) says nothing that it does not say cold, and DCP takes 20 s for each.
_RESTORES = {"a": ("memory", "cold", "cached"), "b": ("memory", "cold")}
_PRUNE_SECONDS_MAX = 60.0
_TRAIN_PAIRS = 2
_TRAIN_WARM_UPS = 2
_SHOWN = ("blocked_seconds", "durable_seconds", "cpu_seconds_per_gb", "lost_seconds", "restore_seconds")
_log = Console(stderr=True, highlight=False)


@dataclass
class Bench:
    """What was asked for, and what has been measured so far. `folder` is made and removed by the bench."""

    folder: Path
    rounds: dict[str, int]
    only: tuple[str, ...]
    scale: float
    after_round: Callable[[Bench], None]
    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def add(self, state: str, number: int, contestant: str, kind: str, answer: dict[str, Any]) -> None:
        figures = {name: float(value) for name, value in answer.items() if not isinstance(value, str)}
        notes = {name: value for name, value in answer.items() if isinstance(value, str) and value}
        self.samples.append(Sample(state, number, contestant, kind, figures, notes))
        shown = "  ".join(f"{name.removesuffix('_seconds')} {figures[name]:.3g}" for name in _SHOWN if name in figures)
        minutes, rest = divmod(int(time.monotonic() - self.began), 60)
        where = f"{minutes:3d}:{rest:02d}  ({state}) round {number + 1}/{self.rounds[state]}"
        _log.print(f"{where}  {contestant:18s} {kind:15s} {shown}", soft_wrap=True)

    def fail(self, state: str, contestant: str, error: Exception) -> None:
        """A contestant that fails is left out from then on, and said to have failed; the others go on."""
        self.failures[f"{state}/{contestant}"] = str(error).strip().splitlines()[-1]
        _log.print(f"({state}) {contestant} FAILED and is left out:\n{error}", style="red")

    def wants(self, state: str, contestant: str) -> bool:
        return (not self.only or contestant in self.only) and f"{state}/{contestant}" not in self.failures


def run(bench: Bench) -> None:
    """Measure every state that has rounds; samples and failures are left in `bench`."""
    if bench.scale == 1:
        measure.touch_memory()
    measures = {"a": _plain_tensors, "b": _plain_tensors, "c": _training}
    try:
        for state in bench.rounds:
            measures[state](bench, state)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)


def _entries(bench: Bench, state: str, number: int) -> dict[str, Entry]:
    return {
        entry.name: entry
        for entry in ENTRIES
        if state in entry.states and bench.wants(state, entry.name) and number < entry.rounds_max
    }


def _plain_tensors(bench: Bench, state: str) -> None:
    shared = SharedTensors((large_shapes if state == "a" else small_shapes)(bench.scale))
    tiny = SharedTensors({"t": (1024,)})
    for number in range(bench.rounds[state]):
        entries = _entries(bench, state, number)
        ceiling = [FIO] if state == "a" and _has_fio(bench, state) else []
        for name in order([*entries, *ceiling], number):
            measure.empty(bench.folder)
            try:
                if name == FIO:
                    _fio_turn(bench, state, number, shared.spec.byte_count)
                else:
                    _turn(bench, state, number, entries[name], shared, tiny)
            except (ContestantFailed, OSError, subprocess.SubprocessError) as error:
                bench.fail(state, name, error)
                Tensors(shared.spec).fill()
        bench.after_round(bench)
    shared.close()
    tiny.close()


def _has_fio(bench: Bench, state: str) -> bool:
    return bench.wants(state, FIO) and shutil.which("fio") is not None


def _fio_turn(bench: Bench, state: str, number: int, byte_count: int) -> None:
    rate = measure.fio_bytes_per_second(bench.folder / "ceiling", "write", byte_count)
    bench.add(state, number, FIO, FIO, {"write_bytes_per_second": rate})


def _fio_reads(bench: Bench, state: str, number: int) -> None:
    """`fio` on the very pack that is restored: what else was just written may be cached outside of this machine."""
    pack = max(measure.files_below(bench.folder), key=lambda path: path.stat().st_size)
    measure.drop_caches(bench.folder)
    rate = measure.fio_bytes_per_second(pack, "read", pack.stat().st_size)
    bench.add(state, number, FIO, FIO, {"read_bytes_per_second": rate})


def _turn(bench: Bench, state: str, number: int, entry: Entry, shared: SharedTensors, tiny: SharedTensors) -> None:
    """A fresh process: its saves, then its restores."""
    child = Child(entry.name, shared.spec, bench.folder)
    try:
        if FIRST not in entry.saves:
            child.call("warm_up", tiny.spec)
        with child.watch_memory() as memory:
            opened = child.call("open")
            for step, kind in enumerate(entry.saves):
                _clear_disk(bench.folder, entry)
                answer = child.call("save", step)
                if entry.floor:
                    answer = {"blocked_seconds": answer["blocked_seconds"]}
                else:
                    answer |= opened | _files(bench.folder) | memory.figures()
                bench.add(state, number, entry.name, kind, answer)
        if entry.stepwell:
            _clear_disk(bench.folder, entry)
        for kind in entry.restores:
            if kind not in _RESTORES[state]:
                continue
            notes = {}
            if kind == "memory":
                child = child.restarted()
            opened = child.call("open")
            ceiling = kind == "cold" and state == "a" and entry.name == EAGER and _has_fio(bench, state)
            if ceiling and not number % 2:
                _fio_reads(bench, state, number)
            if kind == "cold":
                notes["dropped"] = measure.drop_caches(bench.folder)
            elif kind == "cached":
                measure.fill_caches(bench.folder)
            bench.add(state, number, entry.name, f"restore-{kind}", child.call("restore") | opened | notes)
            if ceiling and number % 2:
                _fio_reads(bench, state, number)
    finally:
        child.end()


def _clear_disk(folder: Path, entry: Entry) -> None:
    """Take away the save before, or wait until Stepwell has done so by itself; then wait until the disk is quiet."""
    if entry.stepwell:
        deadline = time.monotonic() + _PRUNE_SECONDS_MAX
        while len(list(folder.glob("run/steps/*"))) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        measure.empty(folder)
    os.sync()


def _files(folder: Path) -> dict[str, float]:
    sizes = [path.stat().st_size for path in measure.files_below(folder)]
    return {"file_count": len(sizes), "written_bytes": sum(sizes)}


def _training(bench: Bench, state: str) -> None:
    """All children stay over the rounds; what touches memory for the first time is not measured here."""
    children: dict[str, Child] = {}
    try:
        for number in range(bench.rounds[state]):
            entries = _entries(bench, state, number)
            for name in order(entries, number):
                folder = bench.folder / name
                try:
                    if name not in children:
                        measure.empty(folder)
                        children[name] = Child(name, bench.scale, folder)
                        children[name].call("open")
                        for step in range(_TRAIN_WARM_UPS):
                            children[name].call("train", step)
                    for pair in range(_TRAIN_PAIRS):
                        _clear_disk(folder, entries[name])
                        answer = children[name].call("train", _TRAIN_WARM_UPS + number * _TRAIN_PAIRS + pair)
                        bench.add(state, number, name, "train", answer | _files(folder))
                except ContestantFailed as error:
                    bench.fail(state, name, error)
            bench.after_round(bench)
    finally:
        for child in children.values():
            child.end()
