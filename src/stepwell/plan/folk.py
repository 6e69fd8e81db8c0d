"""Figures that are passed around about checkpoint storage, each beside what the arithmetic says and why.

Claims are paraphrased from what engineers are likely to have read. Each right figure is worked out here, by the same
functions as any other plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepwell.plan import interval as intervals
from stepwell.plan.models import from_count
from stepwell.plan.state import recipe_named, state_bytes
from stepwell.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True)
class Claim:
    """`said`: the folk figure. `right`: ours, worked out. `why`: in a sentence or two."""

    said: str
    right: Callable[[], str]
    why: str


def _state(count: float, recipe: str = "adamw-bf16") -> int:
    return state_bytes(from_count("", round(count)), recipe_named(recipe), rank_count=0).total


def _rate(count: float, seconds: float) -> str:
    return format_rate(count / seconds)


def _seven() -> str:
    full = _state(7e9)
    return f"{format_bytes(full)}: 14 bytes for each parameter; 30 to 50 GB is {30e9 / 7e9:.2g} to {50e9 / 7e9:.2g}"


def _seventy() -> str:
    return f"{format_bytes(_state(70e9))} full; 500 GB to 1 TB is {500e9 / 70e9:.2g} to {1e12 / 70e9:.2g} bytes each"


def _seven_rate() -> str:
    low, high = _rate(30e9, 60), _rate(50e9, 60)
    return f"30 to 50 GB in 60 s is {low} to {high}; the full {format_bytes(_state(7e9))} {_rate(_state(7e9), 60)}"


def _hundred_rate() -> str:
    size = _state(100e9)
    back = 20e9 * 180 / 14
    return f"{format_bytes(size)} in 180 s is {_rate(size, 180)}; 20 GB/s for 180 s is {back / 1e9:.0f} B parameters"


def _seventy_rate() -> str:
    return f"500 GB to 1 TB in 120 s is {_rate(500e9, 120)} to {_rate(1e12, 120)}"


def _five_percent() -> str:
    least = ", ".join(format_seconds(one / 0.05) for one in (60, 120, 180))
    alone = ", ".join(format_seconds(one / 0.05 - one) for one in (60, 120, 180))
    budget = 0.05 * 300
    return (
        f"saves of 60, 120, 180 s then allow intervals from {least} (blocked / interval) or {alone} (blocked / "
        f"(interval + blocked)); at 5 min the budget is {budget:g} s: {_rate(_state(7e9), budget)} for 98 GB"
    )


def _blocks() -> str:
    rate = 8e9
    sizes = ((1e6, "1 MB"), (1 << 20, "1 MiB"), (64 << 10, "64 KiB"), (4 << 10, "4 KiB"))
    return ", ".join(f"{rate / size:,.0f}/s of {name}" for size, name in sizes)


def _eight_cards() -> str:
    return (
        f"30 GB / 300 s is {_rate(30e9, 300)}, times 8 the same state 8 times over; shards of it sum to 30 GB. "
        f"What 5 % "
        f"of 300 s asks for is {_rate(98e9, 15)}"
    )


def _adam() -> str:
    weights, moments, master = 2 * 7e9, 8 * 7e9, 4 * 7e9
    parts = ((weights, "weights"), (moments, "moments"), (master, "master weights"))
    return ", ".join(f"{format_bytes(size)} of {name}" for size, name in parts)


def _loss() -> str:
    interval, lag = 600.0, 60.0
    return (
        f"mean interval/2 + lag, worst interval + lag: for {format_seconds(interval)} and a lag of "
        f"{format_seconds(lag)} "
        f"{format_seconds(interval / 2 + lag)} and {format_seconds(interval + lag)}"
    )


def _handshake() -> str:
    return f"0.3 s in every 300 s is {100 * 0.3 / 300:.1f} %"


def _young() -> str:
    mtbf = 11_135.0
    cost = 0.005 * mtbf
    share = cost / (intervals.optimum_seconds(cost, mtbf) + cost)
    return f"a save of δ = 0.005 M spends {100 * share:.1f} % at its best interval: up to there both agree"


CLAIMS = (
    Claim("a 7B checkpoint is 30 to 50 GB", _seven, "That is the weights and a part of the rest. To resume bit "
          "for bit, "
          "bf16 weights, an fp32 master and Adam's two moments are needed."),
    Claim("a 70B checkpoint is 500 GB to 1 TB", _seventy, "The lower end has no master or half of the moments."),
    Claim("a 7B save in 60 s needs 5 to 1 GB/s", _seven_rate, "A digit was lost: 0.5 to 1."),
    Claim("100 B and more, several TB in 180 s, need over 20 GB/s", _hundred_rate, "The figure fits a model of "
          "more than "
          "twice that size."),
    Claim("70B in 120 s: 5 to 8 GB/s", _seventy_rate, "Right for those sizes; the full state needs the upper end."),
    Claim("a save may take 5 % of the interval", _five_percent, "The rule bounds what blocks training. An asynchronous "
          "save blocks for the copy alone, and may be on its way for the whole interval."),
    Claim("5 % is always a good budget", _young, "Beyond that the optimum spends more on saves, because failures cost "
          "more still."),
    Claim("8 GB/s at 1 MB blocks are 8 000 IOPS, in small blocks a hundred thousand", _blocks, "At 4 KiB it is "
          "millions. "
          "Checkpoints that are written in large requests need few."),
    Claim("bandwidth = C / T, and 8·C / T at the peak for 8 GPUs", _eight_cards, "C / T is the mean. The peak "
          "is C / (the "
          "time that a save may take). Only files that every rank writes whole multiply by the ranks; that is a "
          "mistake "
          "to mend, not a load to buy for."),
    Claim("Adam doubles a 14 GB model to 30 GB", _adam, "Two fp32 moments are four times the bf16 weights; the master "
          "copy is twice them."),
    Claim("the most that is lost is the interval", _loss, "A save counts only when it is committed; until then the one "
          "before it does. The outage comes on top, and is no lost work."),
    Claim("zstd or lz4 take off more than half", lambda: "lz4 nothing; byte planes and zstd 16 % (fp32), 32 % "
          "(bf16), 29 "
          "and 30 % (Adam's moments): 26 % of the whole state, 36 % when derived weights are left out",
          "Trained floats are noise in their low bits. Half and more comes only from zeros, duplicates, frozen "
          "or derivable "
          "parts, small differences."),
    Claim("merge the shards into a tar", lambda: "2 × the bytes are written", "Fewer files help metadata, but a "
          "tar made "
          "afterwards writes everything again: merge while writing."),
    Claim("save only when the metric improves", lambda: "no bound on lost work at all", "That keeps the best "
          "step; it does "
          "not protect against failures. Combine it with a rule of time."),
    Claim("save to tmpfs and copy after training", lambda: "lost work: everything, until it is copied", "Memory "
          "does not "
          "survive the node."),
    Claim("%util near 100 and waits of hundreds of ms show a full disk", lambda: "saturation is throughput that stays "
          "flat while queue and wait rise", "Those thresholds are of spinning disks: %util says nothing about "
          "devices that "
          "work in parallel."),
    Claim("GPU utilisation falls to nearly 0 while saving", lambda: "neither necessary nor sufficient", "A spinning "
          "collective counts as busy. Look at the step time too."),
    Claim("tens of thousands of random-write IOPS are needed", _blocks, "Packed checkpoints are written "
          "sequentially; the "
          "figure matters for many tiny files only."),
    Claim("the optimizer state hardly changes late, save it less often", lambda: "Adam's moments change at every step",
          "Weights of one step with moments of another are not the same training run. Only frozen parts may be kept."),
    Claim("DeepSpeed's auto_compression and ZeRO snapshots save incrementally", lambda: "no such checkpoint feature is "
          "known to us", "Look into the official documentation before relying on it."),
    Claim("handshakes of hundreds of ms add up", _handshake, "It matters at intervals of seconds, or when ranks "
          "wait for "
          "each other in a row."),
    Claim("NFS is enough for 2 to 4 machines", lambda: f"98 GB every 10 min is {_rate(98e9, 600)} in the mean",
          "A number, not a rule: compare your demand with its measured bandwidth and metadata rate."),
    Claim("saves that grow slower mean a queue in the storage", lambda: "one of several causes", "Also: a growing "
          "directory, growing memory, a growing state, a filling disk."),
)  # fmt: skip
