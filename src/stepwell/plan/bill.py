"""The whole bill: from a question (model, job, failures, storage) to figures, an interval, and whether it is feasible.

Nothing here reads a file or a clock; equal questions have equal answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stepwell.errors import UsageError
from stepwell.plan import interval as intervals
from stepwell.plan.inspect import Found
from stepwell.plan.layout import Files, Layout, files, metadata_seconds
from stepwell.plan.ledger import Ledger
from stepwell.plan.models import Model
from stepwell.plan.reduction import reductions
from stepwell.plan.state import Lora, Recipe, StateBytes, state_bytes
from stepwell.plan.tiers import Tier

LLAMA3_GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
FAILURE_BAND = 3.0
BLOCK_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 16 << 20)
COLLECTIVE_TIMEOUT_SECONDS = 600.0  # what torch's process groups with NCCL wait by default
FLAT_LOSS = 0.005
GOODPUT_LOW = 0.8
STORAGE_FAILURE_FRACTION = 0.01


@dataclass(frozen=True)
class Question:
    """All that an answer depends on; times in seconds, sizes in bytes, rates in bytes per second.

    Attributes:
        model, recipe, layout, tiers: what is saved, by whom, and the tiers in the order in which a save goes through.
        mtbf_seconds: of the whole job; or `gpu_mtbf_seconds` of each GPU, or `node_mtbf_seconds` of each node; with
            none of them the published rate of a large run is taken, with a band of ×3 and ÷3.
        node_failure_fraction: of all failures, those that lose a node's memory and disks.
        restart_seconds: detect, reschedule, start; the time to read the state is added.
        rpo_seconds: the most work that a failure may take; None asks for no bound.
        overhead_max: the most that blocked / interval may be.
        interval_seconds: start to start, when the user has chosen one; None asks for it.
        asynchronous: the trainer waits for the copy into memory only; else until tier 0 has it.
        copy_bytes_per_second: of each GPU into host memory (or from host memory, for CPU jobs).
        slowdown_fraction: by which steps are slower while a save is written in the background.
        cpu_seconds_per_gb: what writing costs the node's processors.
        preemption_notice_seconds: what the scheduler grants before it kills; None when it does not.
        job_count: jobs like this one that share the storage and save at the same time.
        keep, milestones: steps kept along the way, and for good.
        headroom_fraction: of the capacity that stays free.
        redundancy: raw over usable bytes of the storage: 1.25 for 8 + 2 erasure coding, 3 for three copies.
        reduction: "none", "compression", "derivation" or "both": what is taken off the bytes that are written.
        gpu_price_per_hour: for the cost of waiting; 0 when not given.
        checkpoint: one that exists; its bytes are taken instead of what model and recipe come to.
    """

    model: Model
    recipe: Recipe
    layout: Layout
    tiers: tuple[Tier, ...]
    tool: str = "stepwell"
    mtbf_seconds: float | None = None
    gpu_mtbf_seconds: float | None = None
    node_mtbf_seconds: float | None = None
    node_failure_fraction: float = 0.5
    restart_seconds: float = 600.0
    rpo_seconds: float | None = None
    overhead_max: float = 0.05
    interval_seconds: float | None = None
    asynchronous: bool = True
    slots: int = 2
    copy_bytes_per_second: float = 10e9
    slowdown_fraction: float = 0.01
    cpu_seconds_per_gb: float = 0.35
    node_memory_bytes: int = 1_000_000_000_000
    preemption_notice_seconds: float | None = None
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS
    job_count: int = 1
    keep: int = 3
    milestones: int = 0
    headroom_fraction: float = 0.2
    redundancy: float = 1.0
    reduction: str = "none"
    ema_bytes: int = 0
    lora: Lora | None = None
    gpu_price_per_hour: float = 0.0
    days: float = 30.0
    checkpoint: Found | None = None


@dataclass(frozen=True)
class Bound:
    """A limit on the interval: `seconds`, and in words where it comes from."""

    name: str
    seconds: float
    words: str


@dataclass(frozen=True)
class Plan:
    """The answer to a question.

    `remedies` are there when `feasible` is False: what would make it feasible. `down_seconds` is what each failure
    takes beside half an interval: the restart, and the lag until a save counts.
    """

    question: Question
    ledger: Ledger
    state: StateBytes
    files: Files
    interval_seconds: float
    optimum_seconds: float
    lower: tuple[Bound, ...]
    upper: tuple[Bound, ...]
    chosen_because: str
    feasible: bool
    remedies: tuple[str, ...]
    waste: intervals.Waste
    flat_seconds: tuple[float, float]
    down_seconds: float
    sensitivity: dict[str, float] = field(default_factory=dict)

    @property
    def goodput_fraction(self) -> float:
        return self.waste.useful


def answer(question: Question) -> Plan:
    """Work out the bill. Raises `UsageError` for inputs that make no sense."""
    _check(question)
    ledger = Ledger()
    state, written = _state(question, ledger)
    _failures(question, ledger)
    _path(question, ledger, written)
    return _interval(question, ledger, state, written)


def _check(q: Question) -> None:
    for name in (
        "mtbf_seconds", "gpu_mtbf_seconds", "node_mtbf_seconds", "rpo_seconds", "interval_seconds",
        "copy_bytes_per_second", "preemption_notice_seconds", "days",
    ):  # fmt: skip
        value = getattr(q, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name.removesuffix('_seconds').replace('_', ' ')}: above zero", found=value)
    for name in ("overhead_max", "node_failure_fraction", "headroom_fraction"):
        value = getattr(q, name)
        if not 0 <= value < 1 and not (name == "node_failure_fraction" and value == 1):
            raise UsageError(f"{name.replace('_', ' ')}: a fraction", expected="from 0 to below 1", found=value)
    if not (q.redundancy >= 1 and math.isfinite(q.redundancy)):
        raise UsageError("redundancy: raw over usable bytes", expected="1 or more", found=q.redundancy)
    if q.overhead_max == 0:
        raise UsageError("an overhead of nothing cannot be reached", expected="above 0, as in 5%")
    if sum(one is not None for one in (q.mtbf_seconds, q.gpu_mtbf_seconds, q.node_mtbf_seconds)) > 1:
        raise UsageError("the failure rate is said twice", expected="of the job, of a GPU or of a node")
    if not q.tiers:
        raise UsageError("a plan needs storage", expected="as in nvme+parallel")


def _state(q: Question, ledger: Ledger) -> tuple[StateBytes, Files]:
    if q.checkpoint is not None:
        ledger.put("rank_count", q.layout.gpus, "1", "assumed", "you said so")
        ledger.compute("node_count", "1", "ceil(rank_count / gpus_per_node)", "layout",
                       gpus_per_node=q.layout.gpus_per_node)  # fmt: skip
        size = q.checkpoint.state_bytes
        ledger.put("weight_bytes", 0, "B", "assumed", "which bytes of a checkpoint are weights is not known")
        ledger.put("state_bytes", size, "B", "measured", f"{q.checkpoint.path}, a {q.checkpoint.tool} checkpoint")
        state = StateBytes(size, 0, 0, 0, 0, q.checkpoint.parameter_count)
        return state, _written(q, ledger, state)
    state = state_bytes(q.model, q.recipe, ema_bytes=q.ema_bytes, lora=q.lora, rank_count=q.layout.gpus)
    source = q.model.source
    ledger.put("parameter_count", q.model.parameter_count, "1", "published", source)
    ledger.put("trained_count", state.trained_count, "1", "published", source)
    ledger.put("rank_count", q.layout.gpus, "1", "assumed", "you said so")
    ledger.compute(
        "node_count", "1", "ceil(rank_count / gpus_per_node)", "layout", gpus_per_node=q.layout.gpus_per_node
    )
    precision = f"precision and optimizer: {q.recipe.words}"
    ledger.compute("weight_bytes", "B", "weight_bytes_each * trained_count", precision,
                   weight_bytes_each=q.recipe.weight_bytes)  # fmt: skip
    ledger.compute("master_bytes", "B", "master_bytes_each * trained_count", precision,
                   master_bytes_each=q.recipe.master_bytes)  # fmt: skip
    ledger.put("moment_bytes", state.moments, "B", "published", precision)
    ledger.compute("ema_bytes", "B", "ema_bytes_each * trained_count", "moving average of the weights",
                   ema_bytes_each=q.ema_bytes)  # fmt: skip
    ledger.put("host_bytes", state.host, "B", "assumed", "random generators 16 kB and loader 64 kB for each rank")
    ledger.compute(
        "state_bytes", "B", "weight_bytes + master_bytes + moment_bytes + ema_bytes + host_bytes",
        "unique bytes: each value once, gradients excluded",
    )  # fmt: skip
    return state, _written(q, ledger, state)


def _written(q: Question, ledger: Ledger, state: StateBytes) -> Files:
    written = files(q.tool, q.layout, q.model, state)
    taken, words = _reduced(q, state)
    ledger.put("replicated_count", written.replicated, "1", "computed", f"how often {q.tool} writes each byte")
    ledger.compute(
        "written_bytes", "B", "state_bytes * replicated_count * (1 - reduced_fraction)",
        f"one save by {q.tool}; {words}", reduced_fraction=taken,
    )  # fmt: skip
    layout = f"the layout that {q.tool} writes"
    ledger.put("file_count", written.file_count, "1", "computed", layout)
    ledger.put("writer_count", written.writer_count, "1", "computed", layout)
    ledger.put("writer_bytes_max", written.writer_bytes_max, "B", "computed", layout)
    ledger.put("imbalance", written.imbalance, "1", "computed", "busiest writer over the mean writer")
    ledger.put("metadata_op_count", written.metadata_op_count, "1", "computed", layout)
    if written.replicated > 1:
        ledger.warn(
            "replicas",
            f"{q.tool} writes every byte {written.replicated} times: let one rank of each replica group write",
        )
    if written.imbalance > 1.3:
        ledger.warn(
            "imbalance", f"the busiest writer has {written.imbalance:.1f} times the mean: the save waits for it"
        )
    if q.layout.nodes > 1 and written.writer_count == 1:
        ledger.warn("one-writer", f"{q.tool} gathers everything on one rank, whose node's link is then the limit")
    return written


def _reduced(q: Question, state: StateBytes) -> tuple[float, str]:
    """(fraction taken off, in words)."""
    if q.reduction == "none":
        return 0.0, "nothing taken off"
    ways = {one.name: one for one in reductions(state, weight_bytes_each=q.recipe.weight_bytes)}
    if q.reduction not in ways or q.checkpoint is not None:
        raise UsageError(
            "this state cannot be reduced so",
            found=q.reduction,
            expected=" or ".join(ways) if q.checkpoint is None else "a model and a precision, whose parts are known",
        )
    return ways[q.reduction].fraction, f"{q.reduction}: {ways[q.reduction].words}"


def _failures(q: Question, ledger: Ledger) -> None:
    if q.mtbf_seconds is not None:
        ledger.put("mtbf_seconds", q.mtbf_seconds, "s", "assumed", "you said so: of the whole job")
    elif q.node_mtbf_seconds is not None:
        ledger.compute("mtbf_seconds", "s", "node_mtbf_seconds / node_count", "independent nodes",
                       node_mtbf_seconds=q.node_mtbf_seconds)  # fmt: skip
    elif q.gpu_mtbf_seconds is not None:
        ledger.compute("mtbf_seconds", "s", "gpu_mtbf_seconds / rank_count", "independent GPUs",
                       gpu_mtbf_seconds=q.gpu_mtbf_seconds)  # fmt: skip
    else:
        ledger.put(
            "gpu_hours_per_failure", round(LLAMA3_GPU_HOURS_PER_FAILURE), "1", "published",
            "Llama 3 405B: 419 unplanned interruptions in 54 days of 16 384 GPUs (arXiv 2407.21783)",
        )  # fmt: skip
        value = LLAMA3_GPU_HOURS_PER_FAILURE * 3600 / q.layout.gpus
        ledger.compute(
            "mtbf_seconds", "s", "gpu_hours_per_failure * 3600 / rank_count",
            "scaled from that run; yours may be 3 times better or worse: measure it",
            low=value / FAILURE_BAND, high=value * FAILURE_BAND,
        )  # fmt: skip
        ledger.warn("mtbf-assumed", "the failure rate is that of one published run; say --mtbf when you know yours")


def _path(q: Question, ledger: Ledger, written: Files) -> None:
    """The way of one save: copy, tier 0, every tier after it; and the way back."""
    nodes = q.layout.nodes
    writer_nodes = min(nodes, written.writer_count)
    ledger.put("copy_bytes_per_second", q.copy_bytes_per_second, "B/s", "assumed",
               "device to host for each GPU, pinned memory; half of what PCIe 4.0 x16 carries")  # fmt: skip
    ledger.put("gpu_bytes_max", written.gpu_bytes_max, "B", "computed", f"what one GPU hands over with {q.tool}")
    ledger.compute("copy_seconds", "s", "gpu_bytes_max / copy_bytes_per_second", "all GPUs copy at once")
    ledger.put("job_count", q.job_count, "1", "assumed", "jobs that save at the same time")
    previous = "copy_seconds" if q.asynchronous else ""
    for tier in q.tiers:
        write = f"bytes_per_second{{write,{tier.name}}}"
        kind = "measured" if tier.origin == "measured" else tier.origin
        share = 1 if tier.local else q.job_count
        ledger.put(write, tier.write_rate(nodes, writer_nodes) / share, "B/s", kind, tier.source)  # type: ignore[arg-type]
        ledger.put(f"bytes_per_second{{read,{tier.name}}}", tier.read_rate(nodes) / share, "B/s", kind, tier.source)  # type: ignore[arg-type]
        meta = metadata_seconds(
            written.metadata_op_count, tier.ops_per_second * (nodes if tier.local else 1),
            written.serial_op_count, tier.latency_seconds,
        )  # fmt: skip
        ledger.compute(
            f"metadata_seconds{{{tier.name}}}", "s", "max(metadata_op_count / ops_per_second, serial_ops * latency)",
            tier.source, ops_per_second=tier.ops_per_second * (nodes if tier.local else 1),
            serial_ops=written.serial_op_count, latency=tier.latency_seconds,
        )  # fmt: skip
        ledger.compute(
            f"transfer_seconds{{{tier.name}}}", "s", "written_bytes / bytes_per_second + metadata_seconds",
            "one save at the tier's rate", bytes_per_second=ledger[write], metadata_seconds=meta,
        )  # fmt: skip
        ledger.compute(
            f"durable_seconds{{{tier.name}}}", "s", "before + transfer_seconds",
            "entry of save() until it is committed there",
            before=ledger[previous] if previous else 0.0, transfer_seconds=ledger[f"transfer_seconds{{{tier.name}}}"],
        )  # fmt: skip
        previous = f"durable_seconds{{{tier.name}}}"
    safe = next((tier for tier in q.tiers if not tier.local), None)
    if safe is None:
        ledger.warn("not-node-safe", "no tier survives the loss of a node: a failed node's share is gone")
        safe = q.tiers[-1]
    first = q.tiers[0]
    ledger.compute("persist_seconds", "s", "transfer_seconds", f"snapshot until committed on {first.name}",
                   transfer_seconds=ledger[f"transfer_seconds{{{first.name}}}"])  # fmt: skip
    ledger.compute("node_safe_seconds", "s", "durable_seconds", f"until committed on {safe.name}",
                   durable_seconds=ledger[f"durable_seconds{{{safe.name}}}"])  # fmt: skip
    if q.asynchronous:
        ledger.compute("blocked_seconds", "s", "copy_seconds", "asynchronous: the trainer waits for the copy alone")
    else:
        ledger.compute("blocked_seconds", "s", "persist_seconds", "synchronous: the trainer waits for tier 0")
    ledger.compute(
        "save_cost_seconds", "s", "blocked_seconds + slowdown_fraction * background_seconds",
        "what a save takes from training", slowdown_fraction=q.slowdown_fraction,
        background_seconds=(ledger[previous] - ledger["blocked_seconds"]) if q.asynchronous else 0.0,
    )  # fmt: skip
    ledger.put("reading_groups", q.layout.reading_groups, "1", "computed", "groups of ranks that each read all of it")
    ledger.put("weight_readers", q.layout.weight_readers, "1", "computed", "ranks that each read the same weights")
    ledger.compute(
        "restart_read_bytes", "B", "reading_groups * state_bytes + (weight_readers - 1) * weight_bytes",
        "read at once by all when the job restarts",
    )  # fmt: skip
    ledger.compute(
        "read_seconds", "s", "restart_read_bytes / bytes_per_second",
        f"a restart after a node failure reads from {safe.name}",
        bytes_per_second=ledger[f"bytes_per_second{{read,{safe.name}}}"],
    )  # fmt: skip
    ledger.compute("restart_seconds", "s", "detect_and_reschedule_seconds + read_seconds", "being down",
                   detect_and_reschedule_seconds=q.restart_seconds)  # fmt: skip


def _interval(q: Question, ledger: Ledger, state: StateBytes, written: Files) -> Plan:
    cost, mtbf = ledger["save_cost_seconds"], ledger["mtbf_seconds"]
    lag = ledger["node_safe_seconds"]
    # A failure takes half an interval and the lag in the mean: the lag is lost work of fixed length, as a restart is.
    down = ledger["restart_seconds"] + max(0.0, lag - cost)
    young = ledger.compute("interval_young_seconds", "s", "young(save_cost_seconds, mtbf_seconds)", "Young 1974")
    del young
    ledger.compute("interval_daly_seconds", "s", "daly(save_cost_seconds, mtbf_seconds)", "Daly 2006")
    best = ledger.compute(
        "interval_optimum_seconds", "s", "optimum(save_cost_seconds, mtbf_seconds)",
        "minimum of the exact expected wall time",
    ) + cost  # fmt: skip
    _two_levels(q, ledger)
    lower, upper = _bounds(q, ledger)
    low, high = max(lower, key=lambda b: b.seconds), min(upper, key=lambda b: b.seconds) if upper else None
    if q.interval_seconds is not None:
        chosen, because = q.interval_seconds, "you have chosen it"
    elif best < low.seconds:
        chosen, because = low.seconds, low.words
    elif high is not None and best > high.seconds:
        chosen, because = max(high.seconds, 0.0), high.words
    else:
        chosen, because = best, "it is the optimum: saving more often costs more than it spares"
    feasible = chosen >= low.seconds * (1 - 1e-9) and (high is None or chosen <= high.seconds * (1 + 1e-9))
    if high is not None and low.seconds > high.seconds * (1 + 1e-9):
        feasible = False
        if q.interval_seconds is None:
            chosen, because = (
                low.seconds,
                f"no interval satisfies both bounds; this is the shortest possible: {low.words}",
            )
    remedies = () if feasible else _remedies(q, ledger, low, high, chosen)
    work = max(chosen - cost, 1e-9)
    split = intervals.waste(work, cost, mtbf, down)
    ledger.put("interval_seconds", chosen, "s", "computed", f"start to start; {because}")
    ledger.put("goodput_fraction", split.useful, "1", "computed",
               "exact expectation with the lag counted as down time; see docs/planning.md")  # fmt: skip
    ledger.put("waste_save_fraction", split.save, "1", "computed", "saves that counted")
    ledger.put("waste_rework_fraction", split.rework, "1", "computed", "work done again")
    ledger.put("waste_restart_fraction", split.restart, "1", "computed", "down, and the lag's work done again")
    if split.useful < GOODPUT_LOW:
        useful = f"only {100 * split.useful:.2g} % of the time is useful"
        ledger.warn("goodput", f"{useful}: failures come too often for these saves and restarts")
    ledger.compute("overhead_fraction", "1", "blocked_seconds / interval_seconds", "blocked over the whole interval")
    ledger.compute(
        "loss_seconds_max", "s", "interval_seconds + node_safe_seconds", "worst lost work, without the outage"
    )
    ledger.compute("loss_seconds_mean", "s", "interval_seconds / 2 + node_safe_seconds", "mean lost work")
    flat = intervals.flat_range(cost, mtbf, down, lost_fraction=FLAT_LOSS) if cost > 0 else (0.0, best)
    _demand(q, ledger, written)
    _capacity(q, ledger)
    return Plan(
        q, ledger, state, written, chosen, best, tuple(lower), tuple(upper), because, feasible, tuple(remedies),
        split, (flat[0] + cost, flat[1] + cost), down, intervals.sensitivity(work, cost, mtbf, down),
    )  # fmt: skip


def _two_levels(q: Question, ledger: Ledger) -> None:
    """Where a near tier and a node-safe one differ: how often to save near, and each how many-th save far."""
    shared = next((tier for tier in q.tiers if not tier.local), None)
    if shared is None or not q.tiers[0].local or not 0 < q.node_failure_fraction < 1:
        return
    near = ledger["blocked_seconds"] + q.slowdown_fraction * ledger["persist_seconds"]
    far = max(ledger["save_cost_seconds"] - near, 1e-9)
    rate = 1 / ledger["mtbf_seconds"]
    node_rate = rate * q.node_failure_fraction
    found = intervals.two_levels(
        near_save_seconds=near, far_save_seconds=far, near_failures_per_second=rate - node_rate,
        node_failures_per_second=node_rate, far_lag_seconds=ledger["node_safe_seconds"],
    )  # fmt: skip
    where = f"two levels: near every interval, every far_every-th of them to {shared.name} too (first order)"
    ledger.put("two_level_interval_seconds", found.interval_seconds, "s", "computed", where)
    ledger.put("two_level_far_every", found.far_every, "1", "computed", where)
    last = q.tiers[-1]
    if len(q.tiers) > 2 and last is not shared:
        ledger.put("storage_failure_fraction", STORAGE_FAILURE_FRACTION, "1", "assumed",
                   f"of all failures, those that lose {shared.name}")  # fmt: skip
        lost = rate * STORAGE_FAILURE_FRACTION
        onward = max(q.slowdown_fraction * ledger[f"transfer_seconds{{{last.name}}}"], 1e-9)
        _, second, third, _ = intervals.three_levels(
            save_seconds=(max(near, 1e-9), far, onward), failures_per_second=(rate - node_rate, node_rate, lost)
        )
        where = (
            f"three levels: every second_every-th save to {shared.name}, every third_every-th of these to {last.name}"
        )
        ledger.put("three_level_second_every", second, "1", "computed", where)
        ledger.put("three_level_third_every", third, "1", "computed", where)


def _bounds(q: Question, ledger: Ledger) -> tuple[list[Bound], list[Bound]]:
    """(lower, upper) bounds on the interval, start to start."""
    lower = [
        Bound(
            "overhead",
            ledger.compute("interval_overhead_seconds", "s", "blocked_seconds / overhead_max",
                           "blocked / interval stays under the budget", overhead_max=q.overhead_max),
            f"the trainer may be blocked for at most {100 * q.overhead_max:.3g} % of the interval",
        )
    ]  # fmt: skip
    for tier in q.tiers:
        name = f"interval_bandwidth_seconds{{{tier.name}}}"
        seconds = ledger.compute(name, "s", "transfer_seconds", "a tier must take one save before the next one comes",
                                 transfer_seconds=ledger[f"transfer_seconds{{{tier.name}}}"])  # fmt: skip
        lower.append(Bound(f"bandwidth of {tier.name}", seconds, f"{tier.name} needs that long for one save"))
    if q.asynchronous:
        seconds = ledger.compute("interval_slots_seconds", "s", "persist_seconds / slot_count",
                                 "more slots add no bandwidth, fewer add waiting", slot_count=q.slots)  # fmt: skip
        lower.append(Bound("slots", seconds, "a slot must be free"))
    upper = []
    if q.rpo_seconds is not None:
        seconds = ledger.compute("interval_rpo_seconds", "s", "rpo_seconds - node_safe_seconds",
                                 "lost work stays under what is tolerated", rpo_seconds=q.rpo_seconds)  # fmt: skip
        upper.append(Bound("tolerated loss", seconds, "the tolerated loss, less the time until a save counts"))
    return lower, upper


def _remedies(q: Question, ledger: Ledger, low: Bound, high: Bound | None, chosen: float) -> list[str]:
    from stepwell.units import format_rate, format_seconds

    found = []
    written, lag = ledger["written_bytes"], ledger["node_safe_seconds"]
    if high is not None and low.seconds > high.seconds and q.rpo_seconds is not None:
        needed = 2 * written / q.rpo_seconds
        found.append(
            f"storage of at least {format_rate(needed)} (2 × bytes / tolerated loss) where a save is node-safe"
        )
        found.append(f"a tolerated loss of at least {format_seconds(low.seconds + lag)}")
    if q.interval_seconds is not None and chosen < low.seconds:
        found.append(f"an interval of at least {format_seconds(low.seconds)}: {low.words}")
    if q.interval_seconds is not None and high is not None and chosen > high.seconds > 0:
        found.append(f"an interval of at most {format_seconds(high.seconds)}: {high.words}")
    if not q.asynchronous:
        found.append("asynchronous saves: the trainer then waits for the copy alone")
    if q.layout.nodes > 1 and ledger["writer_count"] == 1:
        found.append("a tool that writes from every node")
    return found


def _demand(q: Question, ledger: Ledger, written: Files) -> None:
    ledger.compute("demand_mean_bytes_per_second", "B/s", "written_bytes / interval_seconds",
                   "the mean; an asynchronous save may take the whole interval, so it asks for no more")  # fmt: skip
    ledger.compute("demand_synchronous_bytes_per_second", "B/s", "written_bytes / (overhead_max * interval_seconds)",
                   "peak = bytes / the time that a synchronous save may take", overhead_max=q.overhead_max)  # fmt: skip
    which = "demand_mean_bytes_per_second" if q.asynchronous else "demand_synchronous_bytes_per_second"
    ledger.compute("demand_bytes_per_second", "B/s", which, "asynchronous" if q.asynchronous else "synchronous")
    if q.rpo_seconds is not None:
        ledger.compute("demand_rpo_bytes_per_second", "B/s", "2 * written_bytes / rpo_seconds",
                       "the least that can keep the tolerated loss: interval = lag = half of it",
                       rpo_seconds=q.rpo_seconds)  # fmt: skip
    for block in BLOCK_BYTES:
        ledger.compute(f"iops{{{block}}}", "1/s", "demand_bytes_per_second / block_bytes", "requests of this size",
                       block_bytes=block)  # fmt: skip
    ledger.put("node_bytes", written.node_bytes_max, "B", "computed", "what the busiest node writes in a save")
    ledger.compute("node_bytes_per_second", "B/s", "node_bytes / interval_seconds", "of the busiest node, in the mean")
    ledger.compute(
        "node_copy_bytes_per_second", "B/s", "copy_bytes_per_second * gpus_of_a_node",
        "into its memory while a snapshot is taken", gpus_of_a_node=min(q.layout.gpus_per_node, q.layout.gpus),
    )  # fmt: skip
    for tier in q.tiers:
        through = "its own disks" if tier.local else "its network card"
        ledger.compute(
            f"node_bytes_per_second{{{tier.name}}}", "B/s", "node_bytes / transfer_seconds",
            f"through {through} while a save is written to {tier.name}",
            transfer_seconds=ledger[f"transfer_seconds{{{tier.name}}}"],
        )  # fmt: skip
    ledger.put(
        "cpu_seconds_per_gb", q.cpu_seconds_per_gb, "1", "measured",
        "Stepwell's whole process tree in its own benchmark, on a fast and on a slow machine; see docs/performance.md",
        low=0.17, high=0.53,
    )  # fmt: skip
    ledger.compute("node_cpu_seconds", "s", "node_bytes / 1e9 * cpu_seconds_per_gb", "processor time for one save")
    if q.asynchronous:
        ledger.compute("slot_bytes", "B", "slot_count * state_bytes / node_count", "host memory of each node",
                       slot_count=q.slots)  # fmt: skip
        if ledger["slot_bytes"] > 0.5 * q.node_memory_bytes:
            from stepwell.units import format_bytes

            ledger.warn(
                "host-memory",
                f"{q.slots} slots take {format_bytes(ledger['slot_bytes'])} of each node's "
                f"{format_bytes(q.node_memory_bytes)}: use fewer slots or more nodes",
            )
    if ledger["blocked_seconds"] > q.collective_timeout_seconds:
        ledger.warn(
            "collective-timeout", "a rank is blocked longer than the others wait in a collective: raise the timeout"
        )
    if q.preemption_notice_seconds is not None:
        needed = ledger.compute("preemption_seconds", "s", "node_safe_seconds", "one last save until it is node-safe")
        if needed > q.preemption_notice_seconds:
            ledger.warn("preemption", "a last save does not fit into the notice: lost work is up to an interval")


def _capacity(q: Question, ledger: Ledger) -> None:
    ledger.compute(
        "capacity_bytes", "B", "written_bytes * (keep + in_flight + milestones) / (1 - headroom_fraction)",
        "before erasure coding or replication", keep=q.keep, in_flight=1, milestones=q.milestones,
        headroom_fraction=q.headroom_fraction,
    )  # fmt: skip
    ledger.compute("raw_capacity_bytes", "B", "capacity_bytes * redundancy", "with erasure coding or copies",
                   redundancy=q.redundancy)  # fmt: skip
    ledger.compute("saves_per_day", "1", "86400 / interval_seconds", "")
    ledger.compute("bytes_per_day", "B", "written_bytes * saves_per_day", "all nodes together")
    local = next((tier for tier in q.tiers if tier.local), None)
    if local is not None and local.capacity_bytes:
        ledger.compute("drive_writes_per_day", "1", "bytes_per_day / node_count / capacity",
                       "endurance: what each node's own drives take", capacity=local.capacity_bytes)  # fmt: skip
        if ledger["drive_writes_per_day"] > 1:
            often = f"{ledger['drive_writes_per_day']:.1f} drive writes per day on {local.name}"
            ledger.warn("endurance", f"{often}: look at its rating (1 to 3 are usual)")
    for tier in q.tiers:
        if tier.price_per_tb:
            ledger.compute(f"price_per_month{{{tier.name}}}", tier.currency,
                           "capacity_bytes / 1e12 * price_per_tb + bytes_per_second / 1e9 * price_per_gbs",
                           f"your prices of {tier.price_date or 'no date given'}", price_per_tb=tier.price_per_tb,
                           price_per_gbs=tier.price_per_gbs,
                           bytes_per_second=ledger["demand_bytes_per_second"])  # fmt: skip
        if tier.kind == "object":
            parts = max(1, math.ceil(ledger["written_bytes"] / ledger["file_count"] / (64 << 20)))
            ledger.compute(f"puts_per_save{{{tier.name}}}", "1", "file_count * (parts + 2)",
                           "multipart uploads in parts of 64 MiB: begin, parts, complete", parts=parts)  # fmt: skip
            if tier.price_per_million_puts:
                ledger.compute(
                    f"put_price_per_month{{{tier.name}}}", tier.currency, "puts * saves_per_day * 30 / 1e6 * price",
                    "your price of requests", puts=ledger[f"puts_per_save{{{tier.name}}}"],
                    price=tier.price_per_million_puts,
                )  # fmt: skip
    if q.gpu_price_per_hour:
        ledger.compute(
            "idle_price", "USD", "days * saves_per_day * blocked_seconds * rank_count * gpu_price / 3600",
            "GPUs that wait for saves: only one part of the waste", days=q.days, gpu_price=q.gpu_price_per_hour,
        )  # fmt: skip


def with_storage_rate(question: Question, bytes_per_second: float) -> Question:
    """The same question with the node-safe tier, or the last, at that rate for the whole job."""
    index = next((i for i, tier in enumerate(question.tiers) if not tier.local), len(question.tiers) - 1)
    tier, nodes = question.tiers[index], question.layout.nodes
    rate = bytes_per_second / nodes if tier.local else bytes_per_second * question.job_count
    changed = replace(tier, write_bytes_per_second=rate, node_bytes_per_second=max(tier.node_bytes_per_second, rate))
    return replace(question, tiers=(*question.tiers[:index], changed, *question.tiers[index + 1 :]))
