"""A plan in words: titles, sizes, formulas with the numbers in them."""

from __future__ import annotations

import re

from stepwell.plan.bill import Plan
from stepwell.plan.reduction import reductions
from stepwell.plan.simulate import Outcome
from stepwell.units import format_bytes, format_rate, format_seconds
from stepwell.vocabulary import Figure


def title_of(plan: Plan) -> str:
    """What is planned, in a line."""
    q = plan.question
    layout = q.layout
    named = (("TP", layout.tensor), ("PP", layout.pipeline), ("EP", layout.expert), ("CP", layout.context))
    shape = " ".join([layout.sharding, *(f"{name}{degree}" for name, degree in named if degree > 1)])
    what = q.model.name if q.checkpoint else f"{q.model.name} · {q.recipe.name}"
    nodes = f"{layout.nodes:,} node{'' if layout.nodes == 1 else 's'}"
    storage = "+".join(tier.name for tier in q.tiers)
    return f"{what} · {layout.gpus:,} GPUs in {nodes} ({shape}) · {storage} · {q.tool}"


def percent(fraction: float) -> str:
    """`5 %`, `0.3 %`."""
    return f"{100 * fraction:.3g} %"


def both_bytes(count: float) -> str:
    """`988 GB (920 GiB)`: where people confuse the two."""
    return f"{format_bytes(count)} ({format_bytes(count, binary=True)})"


def answer_facts(plan: Plan) -> list[tuple[str, str]]:
    """(name, text) of each part of the answer."""
    q, ledger, waste = plan.question, plan.ledger, plan.waste
    low, high = (format_seconds(one) for one in plan.flat_seconds)
    blocked, safe = format_seconds(ledger["blocked_seconds"]), format_seconds(ledger["node_safe_seconds"])
    tier = next((tier.name for tier in q.tiers if not tier.local), q.tiers[-1].name)
    mean, most = format_seconds(ledger["loss_seconds_mean"]), format_seconds(ledger["loss_seconds_max"])
    tolerated = f" (tolerated: {format_seconds(q.rpo_seconds)})" if q.rpo_seconds else ""
    share, budget = percent(ledger["overhead_fraction"]), percent(q.overhead_max)
    often, down = format_seconds(ledger["mtbf_seconds"]), format_seconds(ledger["restart_seconds"])
    parts = f"saves {percent(waste.save)}, work done again {percent(waste.rework)}, down {percent(waste.restart)}"
    return [
        ("save every", f"{format_seconds(plan.interval_seconds)}: {plan.chosen_because}"),
        ("as good", f"{low} to {high} costs less than half a point more"),
        ("blocks", f"{blocked} each, {share} of the interval (at most {budget})"),
        ("is safe", f"{safe} after save() began, on {tier}"),
        ("lost work", f"{mean} in the mean, at most {most}{tolerated}"),
        ("a failure", f"every {often}, down {down} each time"),
        ("useful time", f"{percent(waste.useful)}; {parts}"),
        ("what helps", _what_helps(plan)),
        ("two levels", _levels(plan)),
    ]


def _levels(plan: Plan) -> str:
    """What saving near more often than far would be."""
    ledger = plan.ledger
    if "two_level_far_every" not in ledger or ledger["two_level_far_every"] == 1:
        return ""  # every save goes all the way
    shared = next(tier.name for tier in plan.question.tiers if not tier.local)
    often, near = format_seconds(ledger["two_level_interval_seconds"]), plan.question.tiers[0].name
    text = f"or every {often} to {near}, and each {ledger['two_level_far_every']}. of these to {shared}"
    if "three_level_third_every" in ledger:
        text += f", each {ledger['three_level_third_every']}. of those to {plan.question.tiers[-1].name}"
    return text


def _what_helps(plan: Plan) -> str:
    words = {
        "save_seconds": "saves that cost 10 % less",
        "mtbf_seconds": "10 % fewer failures",
        "restart_seconds": "restarts 10 % faster",
        "interval_seconds": "the optimal interval",
    }
    name, gain = max(plan.sensitivity.items(), key=lambda item: item[1])
    return f"most: {words[name]} (+{100 * gain:.2g} points)" if gain > 1e-6 else ""


def bill_facts(plan: Plan) -> list[tuple[str, str]]:
    """(name, text) of each item of the bill."""
    q, ledger, files = plan.question, plan.ledger, plan.files
    writers = f"{files.writer_count:,} writer{'' if files.writer_count == 1 else 's'}"
    facts = [
        ("state", _state_words(plan)),
        (
            "a save",
            f"{both_bytes(ledger['written_bytes'])} in {files.file_count:,} files by {writers}, "
            f"{files.metadata_op_count:,} metadata operations",
        ),
        (
            "bandwidth",
            f"{format_rate(ledger['demand_mean_bytes_per_second'])} for saves in the background, "
            f"{format_rate(ledger['demand_synchronous_bytes_per_second'])} for saves that training waits for; a node "
            f"{format_rate(ledger['node_bytes_per_second'])} in the mean",
        ),
    ]
    if q.rpo_seconds:
        least, within = format_rate(ledger["demand_rpo_bytes_per_second"]), format_seconds(q.rpo_seconds)
        facts.append(("for the loss", f"{least} at least, to be node-safe twice in {within}"))
    blocks = ((4 << 10, "4 KiB"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (8 << 20, "8 MiB"))
    facts.append(("requests", ", ".join(f"{ledger[f'iops{{{size}}}']:,.0f}/s of {name}" for size, name in blocks)))
    if q.checkpoint is None and q.reduction == "none":
        ways = reductions(plan.state, weight_bytes_each=q.recipe.weight_bytes)
        facts.append(("could be less", ", ".join(f"{percent(one.fraction)} by {one.name}" for one in ways)))
    for tier in q.tiers:
        write, read = (format_rate(ledger[f"bytes_per_second{{{way},{tier.name}}}"]) for way in ("write", "read"))
        durable = format_seconds(ledger[f"durable_seconds{{{tier.name}}}"])
        metadata = format_seconds(ledger[f"metadata_seconds{{{tier.name}}}"])
        text = f"{write} write, {read} read ({tier.origin}): durable after {durable}, of which metadata {metadata}"
        facts.append((tier.name, text))
    if "slot_bytes" in ledger:
        facts.append(("memory", f"{format_bytes(ledger['slot_bytes'])} of each node for {q.slots} slots"))
    facts.append(("processor", f"{format_seconds(ledger['node_cpu_seconds'])} of each node for a save"))
    read = f"reads {format_bytes(ledger['restart_read_bytes'])} in {format_seconds(ledger['read_seconds'])}"
    facts.append(("a restart", read))
    room = f"{q.keep} kept, 1 on its way, {q.milestones} milestones, {percent(q.headroom_fraction)} free"
    raw = f"; raw {format_bytes(ledger['raw_capacity_bytes'])}" if q.redundancy > 1 else ""
    facts.append(("capacity", f"{both_bytes(ledger['capacity_bytes'])} for {room}{raw}"))
    if "drive_writes_per_day" in ledger:
        facts.append(("endurance", f"{ledger['drive_writes_per_day']:.2g} drive writes per day on each node"))
    if "idle_price" in ledger:
        facts.append(("waiting", f"{ledger['idle_price']:,.0f} in {q.days:.0f} days for GPUs that wait for saves"))
    for figure in ledger:
        if figure.id.startswith(("price_per_month", "put_price_per_month")):
            tier_name = figure.id.partition("{")[2][:-1]
            facts.append(("price", f"{figure.value:,.0f} {figure.unit} a month for {tier_name}"))
    return facts


def _state_words(plan: Plan) -> str:
    ledger, found = plan.ledger, plan.question.checkpoint
    size = both_bytes(ledger["state_bytes"])
    if found is not None:
        return f"{size} in {found.file_count:,} files of {found.tool}, as it lies there"
    count = ledger["trained_count"]
    return f"{size}, {ledger['state_bytes'] / count:.3g} bytes for each of {count / 1e9:.4g} B parameters"


def outcome_words(outcome: Outcome) -> str:
    """What a simulation showed, in a line."""
    low, high = percent(outcome.low), percent(outcome.high)
    return (
        f"{percent(outcome.goodput_fraction)} useful ({low} to {high} at 95 %), {outcome.failure_count:,} failures, "
        f"seed {outcome.seed}"
    )


def in_words(figure: Figure) -> str:
    """A figure's value with its unit as people read it."""
    return value_in_words(figure.value, figure.unit)


def value_in_words(value: float | None, unit: str) -> str:
    if value is None:
        return "none"
    if unit == "B":
        return format_bytes(value)
    if unit == "B/s":
        return format_rate(value)
    if unit == "s":
        return format_seconds(value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return text if unit == "1" else f"{text} {unit}"


def how(figure: Figure) -> str:
    """The formula with the numbers in it, or where a number comes from."""
    if not figure.formula:
        return f"{figure.kind}: {figure.source}" if figure.source else figure.kind
    numbers = figure.formula
    for name in sorted(figure.inputs, key=len, reverse=True):
        numbers = re.sub(rf"\b{name}\b", f"{figure.inputs[name]:.6g}", numbers)
    return f"{figure.formula} = {numbers}" + (f"   [{figure.source}]" if figure.source else "")
