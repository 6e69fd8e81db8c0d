"""`stepwell verify`: read every byte and say what is damaged."""

from __future__ import annotations

import os

import click

from stepwell.cli._output import Line, Row, Table, console, count_of, json_option, print_json, progress
from stepwell.cli._runs import choose, in_words, open_run, restore_takes, run_argument, short_key, step_json
from stepwell.errors import PersistError, UsageError
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.restore.verify import verify_step
from stepwell.store import names
from stepwell.units import format_bytes


@click.command()
@run_argument
@click.argument("step", required=False)
@click.option("--all", "all_steps", is_flag=True, help="All steps: what is done without STEP, said in so many words.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, step: str | None, all_steps: bool, as_json: bool) -> None:
    """Read every byte of a run and say what is damaged, and what restore would take.

    Without STEP all steps are read: manifest, layout, pack headers, tensors and plain values, each against its
    checksum. Nothing is changed. Exits with 1 when something is damaged or incomplete.
    """
    if step is not None and all_steps:
        raise UsageError("a STEP and --all contradict each other", found=f"{step} --all")
    catalogue = open_run(run)
    chosen = list(catalogue.steps) if step is None else [choose(catalogue, step)]
    _check_readable(catalogue, chosen)
    out = console()
    table = Table(out, VERDICTS_COLUMNS, widths=_widths(chosen))
    findings: dict[str, list[str]] = {}
    pruned: set[str] = set()
    for number, one in enumerate(chosen, 1):
        with progress(f"step {short_key(one.key)} ({number} of {len(chosen)})", one.stored_bytes) as advance:
            found = [finding.text for finding in verify_step(catalogue.root, one, advance)]
        if found and not os.path.lexists(os.path.join(catalogue.root, names.STEPS, one.key, names.MANIFEST)):
            pruned.add(one.key)  # a pruner took it away while it was read: that is no damage
            found = []
        findings[one.key] = found
        if not as_json:
            table.print(_verdict_rows(one, found, one.key in pruned))
    damaged = {key for key, found in findings.items() if found}
    takes = restore_takes(catalogue, damaged | pruned)
    ok = not damaged and not catalogue.problems
    if as_json:
        print_json(
            "verify",
            {
                "run": catalogue.root,
                "ok": ok,
                "read_bytes": sum(one.stored_bytes for one in chosen),
                "steps": [
                    {**step_json(one), "ok": not findings[one.key], "findings": findings[one.key]}
                    for one in chosen
                    if one.key not in pruned
                ],
                "run_findings": list(catalogue.problems),
                "newest": catalogue.newest.key if catalogue.newest else None,
                "restore_takes": takes.key if takes else None,
            },
        )
    else:
        Table(out, ()).print([Line(f"run  {problem}", "red") for problem in catalogue.problems])
        _print_conclusion(table, catalogue, chosen, findings, takes)
    ctx.exit(0 if ok else 1)
