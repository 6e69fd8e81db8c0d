"""Which tiers: each combination worked out for the same job, with what speaks for it and against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepwell.errors import UsageError
from stepwell.plan.bill import Plan, Question, answer
from stepwell.plan.tiers import tiers_named
from stepwell.units import format_rate, format_seconds

COMBINATIONS = ("nvme", "nfs", "parallel", "object", "nvme+nfs", "nvme+parallel", "nvme+object", "nvme+parallel+object")


@dataclass(frozen=True)
class Recovery:
    """After one kind of failure: from where, how long the outage is, how much work is lost at most; None where the
    state is gone."""

    failure: str
    tier: str
    down_seconds: float | None
    lost_seconds_max: float | None


@dataclass(frozen=True)
class Choice:
    """A combination of tiers with its plan, and in words what it assumes, what speaks for it, what against it."""

    storage: str
    plan: Plan
    ceiling: str
    reasons_for: tuple[str, ...]
    reasons_against: tuple[str, ...]


def recoveries(plan: Plan) -> list[Recovery]:
    """For a process, a node, and the loss of the first shared tier."""
    q, ledger = plan.question, plan.ledger
    nodes = q.layout.nodes
    found = []
    first = q.tiers[0]
    read = ledger["restart_read_bytes"] / (first.read_rate(nodes) / (1 if first.local else q.job_count))
    found.append(
        Recovery(
            "a process or a GPU", f"memory or {first.name}", q.restart_seconds + read,
            plan.interval_seconds + ledger[f"durable_seconds{{{first.name}}}"],
        )
    )  # fmt: skip
    shared = [tier for tier in q.tiers if not tier.local]
    for failure, tiers in (("a node and its disks", shared), ("the shared storage", shared[1:])):
        if not tiers:
            found.append(Recovery(failure, "nowhere", None, None))
            continue
        tier = tiers[0]
        read = ledger["restart_read_bytes"] / (tier.read_rate(nodes) / q.job_count)
        lost = plan.interval_seconds + ledger[f"durable_seconds{{{tier.name}}}"]
        found.append(Recovery(failure, tier.name, q.restart_seconds + read, lost))
    return found


def choices(question: Question) -> list[Choice]:
    """Every combination of default tiers: the feasible and node-safe first, then by useful time to a whole percent,
    then those with a near tier, which spares the shared one at restarts, then fewer tiers."""
    found = []
    for storage in COMBINATIONS:
        tiers = tuple(tiers_named(storage, question.layout.nodes))
        try:
            plan = answer(replace(question, tiers=tiers))
        except UsageError:
            continue
        found.append(_judged(storage, plan))
    return sorted(
        found,
        key=lambda choice: (
            not choice.plan.feasible,
            all(tier.local for tier in choice.plan.question.tiers),
            -round(choice.plan.goodput_fraction, 2),
            not choice.plan.question.tiers[0].local,
            len(choice.plan.question.tiers),
        ),
    )


def remedies(plan: Plan) -> list[str]:
    """What would make an infeasible plan feasible, another combination of tiers included."""
    if plan.feasible:
        return []
    found = list(plan.remedies)
    best = choices(plan.question)[0]
    if best.plan.feasible and any(not tier.local for tier in best.plan.question.tiers):
        found.append(f"{best.storage} ({best.ceiling})")
    return found


def _judged(storage: str, plan: Plan) -> Choice:
    q, ledger = plan.question, plan.ledger
    kinds = {tier.kind for tier in q.tiers}
    good, bad = [], []
    safe = ledger["node_safe_seconds"]
    if plan.feasible:
        good.append(
            f"{100 * plan.goodput_fraction:.3g} % useful time, saving every {format_seconds(plan.interval_seconds)}"
        )
    else:
        bad.append("no interval satisfies the bounds")
    if kinds == {"nvme"}:
        bad.append("a node that is lost takes its share of the state with it")
    else:
        good.append(f"survives a node {format_seconds(safe)} after save()")
    if "nvme" in kinds and len(kinds) > 1:
        good.append("a save is durable and a process is back at the speed of the local disks")
    elif "nvme" not in kinds:
        bad.append("every restart reads from the shared system, all ranks at once")
    if kinds == {"object"}:
        bad.append("each request waits tens of milliseconds: fewer, larger objects only")
    if "object" in kinds:
        good.append("cheap to keep milestones; let a lifecycle rule move or delete old ones, and abort stale uploads")
    if "nfs" in kinds:
        bad.append("one server: its link and its metadata rate are the ceiling for all jobs together")
    if "parallel" in kinds:
        bad.append("shared with other jobs: ask for its quiet and its busy rate")
    slowest = max(q.tiers, key=lambda tier: ledger[f"transfer_seconds{{{tier.name}}}"])
    rate = ledger[f"bytes_per_second{{write,{slowest.name}}}"]
    ceiling = f"assumes {format_rate(rate)} of {slowest.name} ({slowest.origin}); measure it with stepwell bench"
    return Choice(storage, plan, ceiling, tuple(good), tuple(bad))
