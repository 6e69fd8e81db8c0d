"""From samples to tables on the terminal, markdown, JSON and plots."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table as RichTable

from stepwell.units import format_bytes, format_rate, format_seconds

from . import plots
from .stats import Sample, Spread, series, spread
from .targets import FIO, Verdict, verdicts

TITLES = {
    "memcpy": "memcpy (floor)",
    "stepwell-eager": "Stepwell eager",
    "stepwell-prepared": "Stepwell eager, prepared",
    "stepwell-lazy": "Stepwell lazy",
    "torch-save": "torch.save + fsync",
    "safetensors": "safetensors + fsync",
    "dcp-1": "dcp.save, 1 thread",
    "dcp-4": "dcp.save, 4 threads",
    "dcp-async-thread": "dcp.async_save, thread",
    "dcp-async-process": "dcp.async_save, process",
    "torch-save-thread": "torch.save in a thread",
    "torch-save-shm": "torch.save to /dev/shm, copied",
}


@dataclass(frozen=True)
class Table:
    """A titled table of text; the first column is left-aligned."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [f"### {self.title}", ""]
        lines += [_line(self.head), _line(("---", *("---:" for _ in self.head[1:])))]
        return "\n".join(lines + [_line(row) for row in self.rows]) + "\n"

    def on_terminal(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", box=None, pad_edge=False)
        for index, name in enumerate(self.head):
            table.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def about(folder: Path, rounds: Mapping[str, int], scale: float) -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    # The folder need not exist yet; the file system is that of its nearest parent that does.
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next(str(parent) for parent in (folder, *folder.parents) if str(parent) in mounts)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "file_system": mounts[mount],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("stepwell", "torch", "safetensors", "numpy")},
        "fio": _fio_version(),
        "rounds": dict(rounds),
        "scale": scale,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _fio_version() -> str:
    if not shutil.which("fio"):
        return "not installed"
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def keep(results: Path, about: Mapping[str, Any], samples: Sequence[Sample], failures: Mapping[str, str]) -> None:
    """Write the samples; called after each round, so that a run that is broken off leaves what it has."""
    document = {"about": about, "samples": [asdict(one) for one in samples], "failures": failures}
    results.mkdir(parents=True, exist_ok=True)
    (results / "samples.json").write_text(json.dumps(document, indent=1) + "\n")


def render(results: Path) -> int:
    """Make tables and plots from `samples.json`. Returns 1 when a contestant had failed, else 0."""
    document = json.loads((results / "samples.json").read_text())
    samples = [Sample(**sample) for sample in document["samples"]]
    judged = verdicts(samples)
    tables = [*state_tables(samples), target_table(judged)]
    notes = _notes(document)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    for table in tables:
        console.print(table.on_terminal(), "")
    for note in notes:
        console.print(f"- {note}", highlight=False)
    text = "\n".join([table.markdown() for table in tables] + [f"- {note}" for note in notes]) + "\n"
    (results / "table.md").write_text(text)
    summary = {"about": document["about"], "figures": _summary(samples), "targets": [_as_json(one) for one in judged]}
    (results / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plots.draw(results, samples, TITLES)
    console.print(f"\nwritten to {results}", highlight=False)
    return 1 if document["failures"] else 0


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "verdict": verdict.word}


def _summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    keys = dict.fromkeys((one.state, one.contestant, one.kind, figure) for one in samples for figure in one.figures)
    rows = []
    for state, contestant, kind, figure in keys:
        found = spread(series(samples, state, contestant, kind, figure).values())
        if found:
            names = {"state": state, "contestant": contestant, "kind": kind, "figure": figure}
            rows.append({**names, **asdict(found)})
    return rows


def _cell(found: Spread | None, show: Callable[[float], str]) -> str:
    if found is None:
        return "–"
    least, greatest = show(found.least), show(found.greatest)
    return show(found.median) if least == greatest else f"{show(found.median)} ({least} – {greatest})"


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{value:+.0%}"


_Column = tuple[str, str, str, Callable[[float], str]]
_SAVE_COLUMNS: tuple[_Column, ...] = (
    ("blocked, first", "first", "blocked_seconds", format_seconds),
    ("blocked, later", "later", "blocked_seconds", format_seconds),
    ("durable", "later", "durable_seconds", format_seconds),
    ("CPU s/GB", "later", "cpu_seconds_per_gb", _number(2)),
    ("of it agent", "later", "agent_cpu_seconds_per_gb", _number(2)),
    ("peak memory", "later", "memory_peak_bytes", format_bytes),
    ("files", "later", "file_count", _number(0)),
    ("bytes", "later", "written_bytes", format_bytes),
    ("heartbeat gap", "later", "heartbeat_worst_seconds", format_seconds),
    ("idle", "later", "heartbeat_idle_seconds", format_seconds),
)
_RESTORE_COLUMNS: tuple[_Column, ...] = (
    ("cold", "restore-cold", "restore_seconds", format_seconds),
    ("from page cache", "restore-cached", "restore_seconds", format_seconds),
    ("from the memory tier", "restore-memory", "restore_seconds", format_seconds),
)
_TRAIN_COLUMNS: tuple[_Column, ...] = (
    ("blocked", "train", "blocked_seconds", format_seconds),
    ("durable", "train", "durable_seconds", format_seconds),
    ("lost per save", "train", "lost_seconds", format_seconds),
    ("steps meanwhile", "train", "step_slowdown", _percent),
    ("a step", "train", "step_seconds", format_seconds),
)


def state_tables(samples: Sequence[Sample]) -> list[Table]:
    """One table for the disk, two for each state of plain tensors, one for training; only what has samples."""
    names = {"a": "(a) 384 tensors", "b": "(b) many small tensors", "c": "(c) GPT with Adam, training meanwhile"}
    tables = []
    for state, title in names.items():
        if state == "c":
            groups = [("", _TRAIN_COLUMNS)]
        else:
            groups = [(": saving", _SAVE_COLUMNS), (": restoring", _RESTORE_COLUMNS)]
        for suffix, columns in groups:
            rows = _rows(samples, state, columns)
            if rows:
                tables.append(Table(title + suffix, ("", *(column[0] for column in columns)), rows))
    speeds = [
        spread(series(samples, "a", FIO, FIO, f"{direction}_bytes_per_second").values())
        for direction in ("write", "read")
    ]
    if any(speeds):
        rate = [_cell(one, format_rate) for one in speeds]
        tables.insert(0, Table("The disk", ("", "write", "read"), (("fio, 8 MiB, O_DIRECT", *rate),)))
    return tables


def _rows(samples: Sequence[Sample], state: str, columns: Sequence[_Column]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for contestant, title in TITLES.items():
        found = [
            (spread(series(samples, state, contestant, kind, figure).values()), show)
            for _, kind, figure, show in columns
        ]
        if any(one for one, _ in found):
            rows.append((title, *(_cell(one, show) for one, show in found)))
    return tuple(rows)


def target_table(judged: Sequence[Verdict]) -> Table:
    """Every target with its median, its bound and the confidence that few rounds allow."""
    rows = []
    for one in judged:
        sign = "≤" if one.at_most else "≥"
        if one.measured is None or one.bound is None or one.confidence is None:
            rows.append((one.text, f"{sign} {one.limit:g}", "–", "–", "–", one.word))
            continue
        against = f" ({one.against})" if one.against else ""
        bound = f"{sign} {one.bound:.3g} at {one.confidence:.0%}"
        rows.append(
            (one.text + against, f"{sign} {one.limit:g}", f"{one.measured:.3g}", bound, str(one.round_count), one.word)
        )
    return Table("Targets", ("", "target", "median", "bound", "rounds", ""), tuple(rows))


def _notes(document: Mapping[str, Any]) -> list[str]:
    machine, samples = document["about"], document["samples"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    memory = format_bytes(machine["memory_bytes"])
    dropped = sorted({one["notes"]["dropped"] for one in samples if "dropped" in one["notes"]})
    notes = [
        f"{machine['date']}: {machine['cores']} cores ({machine['cpu']}), {memory} of memory, "
        f"{machine['file_system']}, Linux {machine['kernel']}, Python {machine['python']}, {versions}, "
        f"fio: {machine['fio']}.",
        "Medians over the rounds, least and greatest in brackets; ratios are paired by round, bounds by the sign test.",
        "Peak memory is that of the process tree and of shared memory above the state itself; page cache is not in it, "
        "nor is the CPU that the kernel spends on writing it back.",
    ]
    if dropped:
        notes.append(f"Cold: the page cache was dropped by {' or '.join(dropped)}.")
    if machine["fio"] == "not installed":
        notes.append("fio is not installed: the ceiling of the disk was not measured.")
    if machine["scale"] != 1:
        notes.append(f"Scaled to {machine['scale']:g} of the full states: for trying out, not for comparing.")
    notes += [f"{name} failed: {text.strip().splitlines()[-1]}" for name, text in document["failures"].items()]
    return notes
