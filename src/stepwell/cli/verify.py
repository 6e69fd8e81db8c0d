"""`stepwell verify`: read every byte and say what is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import click
from rich.console import Console
from rich.text import Text

from stepwell.cli._output import console, count_of, indented, json_option, print_json, progress
from stepwell.cli._runs import choose, in_words, open_run, restore_takes, run_argument, short_key, step_json
from stepwell.errors import StepwellError, UsageError
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.restore.verify import verify_step
from stepwell.store import names
from stepwell.units import format_bytes

_VERDICT_WIDTH = len("INCOMPLETE")


@dataclass(frozen=True)
class Verdict:
    """What reading one step has shown. `pruned`: it was removed while it was read, which is no damage."""

    step: Step
    findings: list[str]
    pruned: bool

    @property
    def word(self) -> str:
        if self.pruned:
            return "pruned"
        if not self.findings:
            return "ok"
        return "INCOMPLETE" if self.findings[0].startswith("incomplete copy") else "DAMAGED"


@click.command()
@run_argument
@click.argument("step", required=False)
@click.option("--all", "all_steps", is_flag=True, help="All steps; the same as naming no STEP.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, step: str | None, all_steps: bool, as_json: bool) -> None:
    """Read every byte of a run and say what is damaged.

    Without STEP all steps are read: manifest, layout, pack headers, tensors and plain values, each against its
    checksum. Nothing is changed. Exits with 1 when something is damaged or incomplete.
    """
    if step is not None and all_steps:
        raise UsageError("a STEP and --all contradict each other", found=f"{step} --all")
    catalogue = open_run(run)
    chosen = list(catalogue.steps) if step is None else [choose(catalogue, step)]
    _check_readable(catalogue, chosen)
    out = console()
    key_width = max((len(short_key(one.key)) for one in chosen), default=0)
    verdicts = []
    for number, one in enumerate(chosen, 1):
        total_bytes = one.state_bytes + (one.manifest.values_bytes if one.manifest else 0)
        with progress(f"step {short_key(one.key)} ({number} of {len(chosen)})", total_bytes) as advance:
            verdict = _verify(catalogue, one, advance)
        verdicts.append(verdict)
        if not as_json:
            _print_verdict(out, verdict, key_width)
    unusable = {verdict.step.key for verdict in verdicts if verdict.findings or verdict.pruned}
    takes = restore_takes(catalogue, unusable)
    ok = not any(verdict.findings for verdict in verdicts) and not catalogue.problems
    if as_json:
        print_json(
            "verify",
            {
                "run": catalogue.root,
                "ok": ok,
                "read_bytes": sum(one.stored_bytes for one in chosen),
                "steps": [
                    {**step_json(one.step), "ok": not one.findings, "findings": one.findings}
                    for one in verdicts
                    if not one.pruned
                ],
                "run_findings": list(catalogue.problems),
                "newest": catalogue.newest.key if catalogue.newest else None,
                "restore_takes": takes.key if takes else None,
                "restore_takes_verified": takes is not None and any(takes.key == one.key for one in chosen),
            },
        )
    else:
        _print_conclusion(out, catalogue, verdicts, takes)
    ctx.exit(0 if ok else 1)


def _verify(catalogue: Catalogue, step: Step, advance: Callable[[int], None]) -> Verdict:
    findings = [finding.text for finding in verify_step(catalogue.root, step, advance)]
    manifest = os.path.join(catalogue.root, names.STEPS, step.key, names.MANIFEST)
    if findings and not os.path.lexists(manifest):
        return Verdict(step, [], pruned=True)
    return Verdict(step, findings, pruned=False)


def _check_readable(catalogue: Catalogue, steps: list[Step]) -> None:
    """A pack that this user may not read is not damaged: say so before anything is called damaged."""
    for step in steps:
        for pack in step.manifest.packs if step.manifest else ():
            path = os.path.join(catalogue.root, names.STEPS, step.key, pack.name)
            if os.path.exists(path) and not os.access(path, os.R_OK):
                raise StepwellError(
                    "a pack cannot be read by this user, so nothing can be said about it",
                    where=path,
                    todo="run it as the user that the files belong to",
                )


def _print_verdict(out: Console, verdict: Verdict, key_width: int) -> None:
    style = {"ok": "green", "pruned": "dim"}.get(verdict.word, "bold red")
    size = format_bytes(verdict.step.stored_bytes) if verdict.step.manifest else ""
    out.print(
        Text.assemble(
            (f"{verdict.word:<{_VERDICT_WIDTH}}", style),
            f"  {short_key(verdict.step.key):>{key_width}}  {size:>7}",
        )
    )
    for finding in verdict.findings:
        out.print(Text(indented(finding, " " * (_VERDICT_WIDTH + 2)), style="red"))


def _print_conclusion(out: Console, catalogue: Catalogue, verdicts: list[Verdict], takes: Step | None) -> None:
    for problem in catalogue.problems:
        out.print(Text(indented(problem, "", first="run: "), style="red"))
    damaged = sum(1 for verdict in verdicts if verdict.findings)
    read = sum(verdict.step.stored_bytes for verdict in verdicts)
    if not verdicts:
        out.print("The run has no committed step.")
        return
    verdict_text = "all whole" if not damaged else f"{damaged} damaged or incomplete"
    out.print(
        Text.assemble(
            f"{count_of(len(verdicts), 'step')}, {format_bytes(read)}: ",
            (verdict_text, "bold red" if damaged else "bold green"),
        )
    )
    newest = catalogue.newest
    if takes is None:
        out.print(Text("restore() would find no step that it could read.", style="bold red"))
        return
    unread = "" if any(takes.key == one.step.key for one in verdicts) else " (not read just now)"
    skipped = f", since {in_words(newest.key)} cannot be read" if newest and newest.key != takes.key else ""
    out.print(f"restore() takes {in_words(takes.key)} now{skipped}{unread}.")
