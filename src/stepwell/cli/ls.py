"""`stepwell ls`: the steps of a run, branch by branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from stepwell.agent import protocol as p
from stepwell.agent.observer import status_of
from stepwell.cli._leftovers import find_leftovers
from stepwell.cli._output import (
    Column,
    Line,
    Row,
    age,
    console,
    count_of,
    indented,
    json_option,
    local_time,
    print_json,
    print_table,
    printable,
)
from stepwell.cli._runs import branch_of, in_words, open_run, restore_takes, run_argument, step_json
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.store.manifest import AttemptDocument
from stepwell.units import format_bytes

MARKS = {"newest": "▶", "lineage": "●", "abandoned": "○"}
STYLES = {"newest": "bold green", "lineage": "", "abandoned": "dim"}
DAMAGE_MARK = "✗"


@click.command()
@run_argument
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, as_json: bool) -> None:
    """List the steps of a run: branches, newest, damaged ones.

    Steps stand under the attempt (the start of the training) that saved them, oldest first. ▶ is the newest: the one
    that a restart goes on from. ● led to it. ○ was abandoned when a later attempt went back to an earlier step.
    ✗ cannot be read. Only manifests and file sizes are looked at: `stepwell verify` reads every byte.
    Exits with 1 when something is damaged or incomplete.
    """
    catalogue = open_run(run)
    agent = status_of(catalogue.root)
    takes = restore_takes(catalogue)
    ok = not catalogue.problems and all(step.problem is None for step in catalogue.steps)
    if as_json:
        print_json("ls", _document(catalogue, agent, takes, ok))
    else:
        _print(console(), run, catalogue, agent, takes)
    ctx.exit(0 if ok else 1)


def _document(catalogue: Catalogue, agent: p.StatusIs | None, takes: Step | None, ok: bool) -> dict[str, Any]:
    newest = catalogue.newest
    return {
        "run": catalogue.root,
        "run_id": catalogue.run.run,
        "ok": ok,
        "newest": newest.key if newest else None,
        "restore_takes": takes.key if takes else None,
        "stored_bytes": sum(step.stored_bytes for step in catalogue.steps),
        "steps": [step_json(step) for step in catalogue.steps],
        "attempts": [
            {
                "attempt": one.attempt,
                "resumed_from": one.parent,
                "host": one.host,
                "pid": one.pid,
                "created": one.created,
            }
            for one in catalogue.attempts
        ],
        "run_findings": list(catalogue.problems),
        "agent": None
        if agent is None
        else {"pid": agent.pid, "trainer_pid": agent.trainer_pid, "pending": agent.pending},
    }


def _print(out: Console, run: str, catalogue: Catalogue, agent: p.StatusIs | None, takes: Step | None) -> None:
    steps = catalogue.steps
    stored = format_bytes(sum(step.stored_bytes for step in steps))
    out.print(Text.assemble((printable(run), "bold"), f"  {count_of(len(steps), 'step')}, {stored}"))
    metrics = _metric_names(steps)
    columns = [
        Column(""),
        Column("step", right=True),
        Column("saved"),
        Column("size", right=True),
        *(Column(name, right=True, optional=True) for name in metrics),
        Column(""),
    ]
    rows, empty_attempts = _rows(catalogue, metrics)
    if rows:
        left_out = print_table(out, columns, rows)
        if left_out:
            out.print(Text(f"not shown for want of width: {printable(', '.join(left_out))}", style="dim"))
    if empty_attempts:
        what = "attempt has" if empty_attempts == 1 else "attempts have"
        out.print(Text(f"{empty_attempts} {what} no step (any more)", style="dim"))
    for problem in catalogue.problems:
        out.print(Text(indented(problem, "  ", first="✗ "), style="red"))
    _print_conclusion(out, catalogue, takes)
    _print_activity(out, catalogue, agent)


def _metric_names(steps: Sequence[Step]) -> list[str]:
    """Every metric once; those of the newest steps first, since columns are left out from the right."""
    found: dict[str, None] = {}
    for step in reversed(steps):
        found.update(dict.fromkeys(step.metrics))
    return list(found)


def _rows(catalogue: Catalogue, metrics: Sequence[str]) -> tuple[list[Row | Line], int]:
    """The lines of the table, and how many attempts were left out because none of their steps is there."""
    documents = {document.attempt: document for document in catalogue.attempts}
    numbers = sorted(documents.keys() | {step.attempt for step in catalogue.steps})
    rows: list[Row | Line] = []
    empty = 0
    for number in numbers:
        steps = [step for step in catalogue.steps if step.attempt == number]
        if not steps and number != numbers[-1]:
            empty += 1
            continue
        rows.append(Line(_heading(number, documents.get(number), first=number == 1), "cyan"))
        if not steps:
            rows.append(Line("   no step committed yet", "dim"))
        for step in steps:
            rows += _step_rows(step, metrics)
    return rows, empty


def _heading(number: int, document: AttemptDocument | None, *, first: bool) -> str:
    if document is None:
        return f"attempt {number}: its record is missing or damaged"
    parts = [f"attempt {number}", f"{local_time(document.created)} on {document.host}"]
    if document.parent is not None:
        parts.append(f"resumed from {in_words(document.parent)}")
    elif not first:
        parts.append("started afresh")
    return ", ".join(parts)


def _step_rows(step: Step, metrics: Sequence[str]) -> list[Row | Line]:
    branch = branch_of(step)
    words = [] if branch == "lineage" else [branch]
    mark, style = MARKS[branch], STYLES[branch]
    if step.problem is not None:
        mark, style = DAMAGE_MARK, "bold red"
        words.append("INCOMPLETE" if step.problem.startswith("incomplete copy") else "DAMAGED")
    values = step.metrics
    row = Row(
        (
            mark,
            str(step.step),
            local_time(step.created) if step.created else "",
            format_bytes(step.stored_bytes) if step.manifest else "",
            *(f"{values[name]:.4g}" if name in values else "" for name in metrics),
            ", ".join(words),
        ),
        style,
    )
    if step.problem is None:
        return [row]
    return [row, *(Line(f"   {line}", "red") for line in step.problem.splitlines())]


def _print_conclusion(out: Console, catalogue: Catalogue, takes: Step | None) -> None:
    newest = catalogue.newest
    if newest is None:
        out.print("No committed step yet: restore() returns None.")
    elif takes is None:
        out.print(Text("restore() would find no step that it could read.", style="bold red"))
    elif takes.key != newest.key:
        out.print(
            Text.assemble(
                (f"The newest, {in_words(newest.key)}, cannot be read: ", "bold red"),
                f"restore() takes {in_words(takes.key)} (saved {age(takes.created)}).",
            )
        )
    else:
        out.print(f"restore() takes {in_words(takes.key)}, saved {age(takes.created)}.")


def _print_activity(out: Console, catalogue: Catalogue, agent: p.StatusIs | None) -> None:
    """What goes on now, or was left behind."""
    if agent is not None:
        trainer = f"trainer {agent.trainer_pid} is connected" if agent.trainer_pid is not None else "no trainer"
        pending = f", {count_of(agent.pending, 'order')} not finished" if agent.pending else ""
        out.print(Text(f"agent {agent.pid} is running here: {trainer}{pending}", style="dim"))
        return
    leftovers = find_leftovers(catalogue)
    if leftovers:
        size = format_bytes(sum(one.bytes for one in leftovers))
        out.print(
            Text(
                f"{count_of(len(leftovers), 'leftover')} of unfinished saves or prunes, {size}; "
                f"`stepwell prune` removes them once nobody writes here",
                style="dim",
            )
        )
