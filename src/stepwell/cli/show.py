"""`stepwell show`: everything that is known of one step."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from stepwell.cli._output import (
    Column,
    Row,
    age,
    console,
    count_of,
    indented,
    json_option,
    local_time,
    print_facts,
    print_json,
    print_table,
)
from stepwell.cli._runs import NEWEST, branch_of, choose, in_words, open_run, run_argument, step_json
from stepwell.cli._values import grouped, short, type_name, values_of
from stepwell.errors import DamagedError
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.restore.read import OpenStep, open_step
from stepwell.state import RNG_NAME, matches
from stepwell.store import names
from stepwell.units import format_bytes, format_seconds

LISTED_MAX = 20  # more tensors or values than that are shown by groups, unless a pattern asks for them
TELEMETRY_LINE_BYTES_MAX = 1 << 20


@click.command()
@run_argument
@click.argument("step", default=NEWEST)
@click.option(
    "--tensors", "patterns", multiple=True, metavar="PATTERN", help="List these, as in 'model.*'; repeatable."
)
@click.option(
    "--allow-pickle", is_flag=True, help="Read pickled values too. A pickle can run any code: trust the file."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context, run: str, step: str, patterns: tuple[str, ...], allow_pickle: bool, as_json: bool
) -> None:
    """Show one step: origin, tensors, values, timings.

    STEP is the newest unless given. Headers and plain values are read and checked, tensors are not (`stepwell verify`
    reads all). Exits with 1 when the step is damaged or incomplete.
    """
    catalogue = open_run(run)
    chosen = choose(catalogue, step)
    telemetry = _telemetry(catalogue.root, chosen.key)
    problem = chosen.problem
    opened: OpenStep | None = None
    values: dict[str, Any] | None = None
    if problem is None:
        try:
            opened = open_step(catalogue.root, chosen)
            values = values_of(opened, allow_pickle=allow_pickle)
        except DamagedError as error:
            problem = str(error)
    try:
        if as_json:
            print_json("show", _document(catalogue, chosen, problem, opened, values, telemetry, patterns))
        else:
            _print(console(), catalogue, chosen, problem, opened, values, telemetry, patterns)
    finally:
        if opened is not None:
            opened.close()
    ctx.exit(0 if problem is None else 1)


def _telemetry(root: str, key: str) -> dict[str, Any] | None:
    """The record that the agent wrote when it saved this step; None when there is none."""
    folder = os.path.join(root, names.TELEMETRY)
    found = None
    mark = f'"{key}"'.encode()
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if not name.endswith(".jsonl") or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            while line := file.readline(TELEMETRY_LINE_BYTES_MAX):
                if mark not in line:
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # a crash may cut the last line
                if isinstance(record, dict) and record.get("event") == "save" and record.get("key") == key:
                    found = record
    return found


def _document(
    catalogue: Catalogue,
    step: Step,
    problem: str | None,
    opened: OpenStep | None,
    values: dict[str, Any] | None,
    telemetry: dict[str, Any] | None,
    patterns: Sequence[str],
) -> dict[str, Any]:
    manifest = step.manifest
    return {
        "run": catalogue.root,
        **step_json(step),
        "problem": problem,
        "host": _host(catalogue, step),
        "writer": manifest.writer if manifest else None,
        "durable_seconds": manifest.durable_seconds if manifest else None,
        "tensor_count": manifest.tensor_count if manifest else None,
        "values_bytes": manifest.values_bytes if manifest else None,
        "layout": manifest.layout if manifest else None,
        "packs": [{"name": one.name, "bytes": one.bytes} for one in manifest.packs] if manifest else [],
        "tensors": [_tensor_json(opened, i) for i in _selected(opened, patterns)] if opened else None,
        "values": None
        if values is None
        else [{"name": name, "type": type_name(value), "text": short(value)} for name, value in values.items()],
        "telemetry": telemetry,
    }


def _tensor_json(opened: OpenStep, index: int) -> dict[str, Any]:
    layout, spec = opened.layout, opened.layout.specs[index]
    alias = layout.alias_of[index]
    return {
        "name": layout.names[index],
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "bytes": spec.nbytes,
        "library": spec.kind,
        "device": spec.device,
        "same_as": layout.names[alias] if alias >= 0 else None,
    }


def _selected(opened: OpenStep, patterns: Sequence[str]) -> list[int]:
    every = range(len(opened.layout.names))
    return [i for i in every if not patterns or matches(opened.layout.names[i], patterns)]


def _host(catalogue: Catalogue, step: Step) -> str | None:
    return next((one.host for one in catalogue.attempts if one.attempt == step.attempt), None)


def _print(
    out: Console,
    catalogue: Catalogue,
    step: Step,
    problem: str | None,
    opened: OpenStep | None,
    values: dict[str, Any] | None,
    telemetry: dict[str, Any] | None,
    patterns: Sequence[str],
) -> None:
    branch = {"newest": "the newest", "lineage": "in the lineage", "abandoned": "abandoned"}[branch_of(step)]
    out.print(Text.assemble((f"step {step.step}", "bold"), f" of attempt {step.attempt}, {branch}"))
    if problem is not None:
        out.print(Text(indented(problem, "  ", first="✗ "), style="bold red"))
    manifest = step.manifest
    if manifest is not None:
        values_text = f", plain values {format_bytes(manifest.values_bytes)}" if manifest.values_bytes else ""
        state_text = f"{format_bytes(manifest.state_bytes)} in {count_of(manifest.tensor_count, 'tensor')}{values_text}"
        durable = format_seconds(manifest.durable_seconds)
        print_facts(
            out,
            [
                ("key", step.key),
                ("saved", f"{local_time(manifest.created)} ({age(manifest.created)}), durable after {durable}"),
                ("parent", in_words(manifest.parent) if manifest.parent else "none: the first step of its branch"),
                ("host", _host(catalogue, step) or ""),
                ("metrics", ", ".join(f"{name} {value:.6g}" for name, value in step.metrics.items())),
                ("state", state_text),
                *(
                    (("packs" if i == 0 else ""), f"{one.name}  {format_bytes(one.bytes)}")
                    for i, one in enumerate(manifest.packs)
                ),
                ("timings", _timings(telemetry) if telemetry else ""),
                ("written by", manifest.writer),
            ],
        )
    if opened is not None:
        out.print()
        _print_tensors(out, opened, patterns)
        if not patterns:
            out.print()
            _print_values(out, values)


def _timings(telemetry: dict[str, Any]) -> str:
    """The stages of the save in the order in which they happened."""
    seconds = {
        name.removesuffix("_seconds"): value
        for name, value in telemetry.items()
        if name.endswith("_seconds") and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return ", ".join(f"{name.replace('_', ' ')} {format_seconds(value)}" for name, value in seconds.items() if value)


def _print_tensors(out: Console, opened: OpenStep, patterns: Sequence[str]) -> None:
    layout = opened.layout
    chosen = _selected(opened, patterns)
    if not chosen:
        out.print("no tensor" + (" of such a name" if patterns else ""))
        return
    if len(chosen) <= LISTED_MAX or patterns:
        rows = [Row(_tensor_cells(opened, i)) for i in chosen]
        columns = (Column("tensor"), Column("dtype"), Column("shape", right=True), Column("size", right=True))
        print_table(out, columns, rows)
        return
    index_of = {layout.names[i]: i for i in chosen}
    rows = []
    for pattern, names_there in grouped(index_of).items():
        members = [index_of[name] for name in names_there]
        dtypes = Counter(layout.specs[i].dtype for i in members)
        size = sum(layout.specs[i].nbytes for i in members if layout.alias_of[i] < 0)
        words = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        rows.append(Row((pattern, str(len(members)), format_bytes(size), words)))
    columns = (Column("tensors"), Column("count", right=True), Column("size", right=True), Column("dtypes"))
    print_table(out, columns, rows)
    out.print(Text("--tensors '*' lists them all", style="dim"))


def _tensor_cells(opened: OpenStep, index: int) -> tuple[str, str, str, str]:
    layout, spec, alias = opened.layout, opened.layout.specs[index], opened.layout.alias_of[index]
    size = f"same as {layout.names[alias]}" if alias >= 0 else format_bytes(spec.nbytes)
    return layout.names[index], spec.dtype, "×".join(map(str, spec.shape)) or "scalar", size


def _print_values(out: Console, values: dict[str, Any] | None) -> None:
    if values is None:
        out.print("plain values: some are pickled, none is shown; --allow-pickle reads them, if you trust the file")
        return
    shown = list(values.items())
    rng = values.get(RNG_NAME)
    if isinstance(rng, dict):
        shown = [(name, value) for name, value in shown if name != RNG_NAME]
    rows = [Row((name, type_name(value), short(value))) for name, value in shown[:LISTED_MAX]]
    if rows:
        print_table(out, (Column("value"), Column("type"), Column("")), rows)
    if len(shown) > LISTED_MAX:
        out.print(Text(f"... and {len(shown) - LISTED_MAX} more; --json lists them all", style="dim"))
    if isinstance(rng, dict):
        out.print(f"random number generators: {', '.join(map(str, rng)) or 'none'}")
