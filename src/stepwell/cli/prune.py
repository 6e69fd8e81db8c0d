"""`stepwell prune`: remove steps that are not to be kept, and what killed processes left behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from stepwell.agent import protocol as p
from stepwell.agent.observer import Observer, observe, take_lock
from stepwell.agent.place import lock_run, place_of
from stepwell.agent.prune import LOCAL_FILESYSTEMS, NETWORK_GRACE_SECONDS, Pruner
from stepwell.cli._leftovers import Leftover, find_leftovers, remove_leftovers
from stepwell.cli._output import Column, Row, busy, console, count_of, json_option, print_json, print_table
from stepwell.cli._runs import open_run, run_argument, short_key
from stepwell.errors import RunBusyError, StepwellError, UsageError
from stepwell.flow.retain import RetentionPlan, plan_retention
from stepwell.policies import Keep
from stepwell.restore.catalogue import Catalogue
from stepwell.tiers.base import OsFileOps
from stepwell.tiers.posix import PosixTier
from stepwell.tiers.probe import probe
from stepwell.units import format_bytes

STEPS_PER_REQUEST = 200
PRUNE_SECONDS_MAX = 600.0
WHAT_IT_IS = {
    "temporary": "a file that was never finished",
    "uncommitted": "parts of a save that was never committed",
    "condemned": "parts of a pruned step",
    "layout": "a layout that no step has",
}


@dataclass(frozen=True)
class Done:
    """What was carried out, and by whom. Steps that were to go and did not are being read."""

    by: str
    removed: tuple[str, ...]
    leftovers: tuple[Leftover, ...]


@click.command()
@run_argument
@click.option("--last", type=click.IntRange(1), metavar="N", help="Keep the newest N steps (3 with any other rule).")
@click.option("--every", type=click.IntRange(1), metavar="N", help="Keep steps whose number is a multiple of N.")
@click.option("--best", metavar="METRIC:MODE:N", help="Keep the N best by a metric, as in loss:min:2.")
@click.option("--dry-run", "-n", is_flag=True, help="Only say what would be done.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Without a terminal nothing is asked anyway.")
@click.option("--assume-ended", is_flag=True, help="Whoever wrote this run elsewhere has ended: go on without a lock.")
@json_option
def command(
    run: str,
    last: int | None,
    every: int | None,
    best: str | None,
    dry_run: bool,
    yes: bool,
    assume_ended: bool,
    as_json: bool,
) -> None:
    """Remove steps you do not keep, and what killed processes left.

    Committed steps go only when you say what to keep, with --last, --every or --best; a step stays if any of the
    three says so. Without a rule only leftovers go: temporary files, parts of saves that were never committed. The
    newest step, the one that the training resumed from, steps that somebody reads and steps that cannot be read are
    never removed; neither are files that are not Stepwell's.

    A running agent does it itself; leftovers then stay, since they may be a save on its way.
    """
    keep = _keep_of(last, every, best)
    catalogue = open_run(run)
    plan = plan_for(catalogue, keep) if keep else None
    leftovers = find_leftovers(catalogue)
    out = console()
    if not as_json:
        _print_plan(out, plan, leftovers)
    done: Done | None = None
    if not dry_run:
        agent = observe(catalogue.root)
        if agent is None:
            _check_alone(catalogue, assume_ended)
        if not yes:
            _ask(plan, leftovers if agent is None else [])
        if agent is not None:
            with agent, busy("the running agent removes ..."):
                done = _through_agent(agent, keep, plan)
        else:
            with busy("removing ..."):
                done = _by_hand(catalogue, keep, plan)
    if as_json:
        print_json("prune", _document(catalogue, keep, plan, leftovers, done, dry_run))
    elif done is not None:
        _print_done(out, plan, leftovers, done)
    elif not plan and keep is None:
        out.print("No steps are removed unless you say what to keep, as in --last 3.")


def _keep_of(last: int | None, every: int | None, best: str | None) -> Keep | None:
    if last is None and every is None and best is None:
        return None
    rule = None
    if best is not None:
        metric, mode, count = [*best.rsplit(":", 2), "", ""][:3]
        if mode not in ("min", "max") or not count.isdecimal() or not metric:
            raise UsageError("--best names a metric, a mode and a number", expected="as in loss:min:2", found=best)
        rule = (metric, mode, int(count))
    return Keep(last=Keep().last if last is None else last, every=every, best=rule)  # type: ignore[arg-type]


def plan_for(catalogue: Catalogue, keep: Keep) -> RetentionPlan:
    """The plan that the agent would make from the same catalogue."""
    tip = catalogue.newest.key if catalogue.newest else None
    resumed_from = catalogue.attempts[-1].parent if catalogue.attempts else None
    return plan_retention(catalogue.facts(), catalogue.attempt_facts(), keep, tip=tip, resumed_from=resumed_from)


def _check_alone(catalogue: Catalogue, assume_ended: bool) -> None:
    """The lock of the agent holds on one machine and for one user: elsewhere it says nothing."""
    if assume_ended:
        return
    owner = os.stat(catalogue.root).st_uid
    if owner != os.geteuid():
        raise RunBusyError(
            "this run belongs to another user, whose agent cannot be seen from here",
            where=catalogue.root,
            expected=f"user {owner}",
            found=f"user {os.geteuid()}",
            todo="run this as that user; or, when no training writes here any more, say --assume-ended",
        )
    here = socket.gethostname()
    last = catalogue.attempts[-1] if catalogue.attempts else None
    if last is not None and last.host != here:
        raise RunBusyError(
            "the last attempt ran on another machine, and whether it has ended cannot be seen from here",
            where=catalogue.root,
            expected=last.host,
            found=here,
            todo="run this there; or, when no training writes here any more, say --assume-ended",
        )


def _ask(plan: RetentionPlan | None, leftovers: list[Leftover]) -> None:
    parts = [count_of(len(plan.remove), "step")] if plan and plan.remove else []
    parts += [count_of(len(leftovers), "leftover")] if leftovers else []
    if parts and _is_terminal() and not click.confirm(f"Remove {' and '.join(parts)}?", err=True):
        raise StepwellError("nothing was removed, as you said")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _through_agent(agent: Observer, keep: Keep | None, plan: RetentionPlan | None) -> Done:
    removed: list[str] = []
    while keep is not None and plan is not None and plan.remove:
        message = p.Prune(keep.last, keep.every, keep.best, STEPS_PER_REQUEST)
        answer = agent.ask(message, seconds_max=PRUNE_SECONDS_MAX)
        assert isinstance(answer, p.Pruned)
        removed += answer.removed
        if not answer.removed:
            break
    return Done("agent", tuple(removed), ())


def _by_hand(catalogue: Catalogue, keep: Keep | None, shown: RetentionPlan | None) -> Done:
    """Be the agent for a moment: take its lock, look again, and remove what was shown and still holds."""
    lock = take_lock(place_of(catalogue.root))
    run_lock = -1
    try:
        run_lock = lock_run(catalogue.root)
        ops = OsFileOps()
        tier = PosixTier(catalogue.root, ops, probe(catalogue.root, ops))
        pruner = Pruner(tier)
        catalogue = open_run(catalogue.root)
        removed: list[str] = []
        if keep is not None and shown is not None:
            plan = plan_for(catalogue, keep)
            plan = replace(plan, remove=tuple(key for key in plan.remove if key in set(shown.remove)))
            removed = pruner.condemn(plan, catalogue)
            catalogue = open_run(catalogue.root)
        before = [one for one in find_leftovers(catalogue) if one.path.rsplit("/", 1)[-1] not in removed]
        remove_leftovers(tier, [one for one in before if one.kind != "condemned"])
        pruner.sweep()
        if tier.abilities.filesystem not in LOCAL_FILESYSTEMS and _condemned(catalogue):
            time.sleep(NETWORK_GRACE_SECONDS)  # until machines that cache folders have noticed
            pruner.sweep()
        left = {one.path for one in find_leftovers(catalogue)}
        return Done("command", tuple(removed), tuple(one for one in before if one.path not in left))
    finally:
        if run_lock >= 0:
            os.close(run_lock)
        os.close(lock)


def _condemned(catalogue: Catalogue) -> list[Leftover]:
    return [one for one in find_leftovers(catalogue) if one.kind == "condemned"]


def _print_plan(out: Console, plan: RetentionPlan | None, leftovers: list[Leftover]) -> None:
    if plan is not None:
        removed = set(plan.remove)
        rows = [
            Row(
                ("remove" if key in removed else "keep", short_key(key), format_bytes(plan.step_bytes[key]), reason),
                "yellow" if key in removed else "",
            )
            for key, reason in plan.reasons.items()
        ]
        print_table(out, (Column(""), Column("step", right=True), Column("size", right=True), Column("because")), rows)
        kept = count_of(len(plan.reasons) - len(removed), "step")
        out.print(f"{count_of(len(removed), 'step')} to remove ({format_bytes(plan.remove_bytes)}), {kept} to keep")
    if leftovers:
        rows = [Row((one.path, format_bytes(one.bytes), WHAT_IT_IS[one.kind])) for one in leftovers]
        print_table(out, (Column("leftover"), Column("size", right=True), Column("what it is")), rows)


def _print_done(out: Console, plan: RetentionPlan | None, leftovers: list[Leftover], done: Done) -> None:
    freed = format_bytes(_freed_bytes(plan, done))
    who = "The running agent removed" if done.by == "agent" else "Removed"
    parts = [count_of(len(done.removed), "step")] if plan or not done.leftovers else []
    parts += [count_of(len(done.leftovers), "leftover")] if done.leftovers else []
    out.print(Text(f"{who} {' and '.join(parts)}, {freed}.", style="bold"))
    read = _still_read(plan, done)
    if read:
        keys = ", ".join(map(short_key, read))
        out.print(
            f"Left alone because somebody reads {'it' if len(read) == 1 else 'them'}: {keys}. "
            "Try again later; if that reader was killed, delete its pin-* file in the step's folder."
        )
    if done.by == "agent" and leftovers:
        out.print("Leftovers stay while an agent is running: they may be a save on its way.")
    if plan is None:
        out.print("No steps are removed unless you say what to keep, as in --last 3.")


def _freed_bytes(plan: RetentionPlan | None, done: Done) -> int:
    sizes = plan.step_bytes if plan else {}
    return sum(sizes.get(key, 0) for key in done.removed) + sum(one.bytes for one in done.leftovers)


def _still_read(plan: RetentionPlan | None, done: Done) -> list[str]:
    return [key for key in plan.remove if key not in done.removed] if plan else []


def _document(
    catalogue: Catalogue,
    keep: Keep | None,
    plan: RetentionPlan | None,
    leftovers: list[Leftover],
    done: Done | None,
    dry_run: bool,
) -> dict[str, Any]:
    gone = {one.path for one in done.leftovers} if done else set()
    return {
        "run": catalogue.root,
        "dry_run": dry_run,
        "keep": asdict(keep) if keep else None,
        "plan": [
            {"key": key, "stored_bytes": plan.step_bytes[key], "remove": key in set(plan.remove), "reason": reason}
            for key, reason in (plan.reasons.items() if plan else ())
            if plan
        ],
        "leftovers": [
            {"kind": one.kind, "path": one.path, "bytes": one.bytes, "removed": one.path in gone} for one in leftovers
        ],
        "done_by": done.by if done else None,
        "removed": list(done.removed) if done else [],
        "still_read": _still_read(plan, done) if done else [],
        "freed_bytes": _freed_bytes(plan, done) if done else 0,
    }
