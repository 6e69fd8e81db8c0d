"""Right figures about checkpoint storage, each beside what the planner makes of it.

`python -m tests.plan.ground_truth` writes the table of docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stepwell.plan import interval as i
from stepwell.plan.bill import LLAMA3_GPU_HOURS_PER_FAILURE, Plan, Question, answer
from stepwell.plan.layout import Layout, files, metadata_seconds, mlperf_bytes
from stepwell.plan.models import Model, from_count, from_text
from stepwell.plan.reduction import reductions
from stepwell.plan.state import RECIPES, Lora, bytes_per_parameter, recipe_named, state_bytes
from stepwell.plan.tiers import Tier, default_tier

GB, GIB, TB, TIB = 1e9, 2**30, 1e12, 2**40


@dataclass(frozen=True)
class Row:
    """`right` is the figure, `ours` works it out; they agree to `within` (a share of `right`)."""

    topic: str
    what: str
    right: float
    ours: Callable[[], float]
    unit: str
    within: float = 0.005


def full(count: float) -> float:
    return state_bytes(from_count("", round(count)), recipe_named("adamw-bf16"), rank_count=0).total


def state_of(name: str, recipe: str = "adamw-bf16") -> float:
    return state_bytes(from_text(name), recipe_named(recipe), rank_count=0).total


def each(recipe: str) -> Callable[[], float]:
    return lambda: bytes_per_parameter(RECIPES[recipe], from_text("llama3-8b"))


def storage(rate: float) -> tuple[Tier, ...]:
    return (
        replace(
            default_tier("parallel", 1), write_bytes_per_second=rate, read_bytes_per_second=rate,
            node_bytes_per_second=rate, ops_per_second=1e12, latency_seconds=0.0,
        ),
    )  # fmt: skip


def plan_of(model: Model, **more: object) -> Plan:
    base = Question(model, recipe_named("adamw-bf16"), Layout(512), storage(20e9), mtbf_seconds=11_135.0)
    return answer(replace(base, **more))  # type: ignore[arg-type]


def sync_peak() -> float:
    """What a synchronous save of a full 7B state asks for when 5 % of 5 minutes is the budget."""
    plan = plan_of(from_count("7b", 7 * 10**9), asynchronous=False, interval_seconds=300.0, tiers=storage(1e12))
    return float(plan.ledger["demand_bytes_per_second"])


def lora(name: str) -> float:
    adapter = state_bytes(from_text(name), recipe_named("adamw-fp32"), lora=Lora(16), rank_count=0)
    return adapter.trained_count


def mlperf(name: str, world: int, part: int) -> Callable[[], float]:
    return lambda: mlperf_bytes(from_text(name), world)[part] / GIB


def deepspeed(name: str, layout: Layout) -> Callable[[], float]:
    def count() -> float:
        model = from_text(name)
        return files("deepspeed", layout, model, state_bytes(model, recipe_named("adamw-bf16"))).file_count

    return count


def dcp_ops() -> float:
    model = from_text("llama3-8b")
    state = state_bytes(model, recipe_named("adamw-bf16"))
    found = files("dcp", Layout(1024), model, state, threads=2)
    return found.metadata_op_count - 3  # the row counts 2 048 files; the 2 049th is `.metadata`


def reduced(name: str) -> Callable[[], float]:
    def taken() -> float:
        state = state_bytes(from_count("", 10**9), recipe_named("adamw-bf16"), rank_count=0)
        return 100 * next(one.fraction for one in reductions(state, weight_bytes_each=2) if one.name == name)

    return taken


def capacity() -> float:
    model = from_text("mlperf-70b")
    plan = plan_of(model, keep=3, milestones=14)
    return float(plan.ledger["capacity_bytes"])


def drive_writes() -> float:
    nvme = replace(default_tier("nvme", 1), write_bytes_per_second=1e12)
    question = Question(
        from_count("7b", 7 * 10**9), recipe_named("adamw-bf16"), Layout(8), (nvme,), interval_seconds=300.0,
        mtbf_seconds=1e6,
    )  # fmt: skip
    return float(answer(question).ledger["drive_writes_per_day"])


def rpo_rate() -> float:
    plan = plan_of(from_text("llama3-70b"), rpo_seconds=600.0)
    return float(plan.ledger["demand_rpo_bytes_per_second"])


def flat(side: int) -> Callable[[], float]:
    return lambda: i.flat_range(60, 11_135, 600)[side]


def goodput(save: float, mtbf: float) -> Callable[[], float]:
    return lambda: i.goodput_fraction(i.daly_seconds(save, mtbf), save, mtbf, 600)


ROWS = [
    Row("1 claims", "7B, full resumable state", 98 * GB, lambda: full(7e9), "B"),
    Row("1 claims", "70B, full resumable state", 980 * GB, lambda: full(70e9), "B"),
    Row("1 claims", "7B in 60 s", 1.63 * GB, lambda: full(7e9) / 60, "B/s"),
    Row("1 claims", "30 GB in 60 s", 0.50 * GB, lambda: 30 * GB / 60, "B/s"),
    Row("1 claims", "50 GB in 60 s", 0.83 * GB, lambda: 50 * GB / 60, "B/s"),
    Row("1 claims", "100B, full", 1.4 * TB, lambda: full(100e9), "B"),
    Row("1 claims", "100B in 180 s", 7.8 * GB, lambda: full(100e9) / 180, "B/s"),
    Row("1 claims", "parameters that 20 GB/s writes in 180 s", 257e9, lambda: 20e9 * 180 / each("adamw-bf16")(), "1"),
    Row("1 claims", "7B every 5 min, 5 %, synchronous", 6.5 * GB, sync_peak, "B/s", 0.01),
    Row("1 claims", "8 GB/s in requests of 1 MiB", 7629, lambda: 8e9 / (1 << 20), "1/s"),
    Row("1 claims", "8 GB/s in requests of 64 KiB", 122_070, lambda: 8e9 / (64 << 10), "1/s"),
    Row("1 claims", "8 GB/s in requests of 4 KiB", 1_953_125, lambda: 8e9 / (4 << 10), "1/s"),
    Row("1 claims", "compression of the whole state, %", 26, reduced("compression"), "1", 0.01),
    Row("1 claims", "compression and derived weights, %", 36, reduced("both"), "1", 0.01),
    Row("2 bytes", "fp32, Adam", 12, each("adamw-fp32"), "B"),
    Row("2 bytes", "fp32, momentum", 8, each("sgd-fp32"), "B"),
    Row("2 bytes", "bf16, fp32 master, Adam", 14, each("adamw-bf16"), "B"),
    Row("2 bytes", "the same, weights derived", 12, each("adamw-bf16-derived"), "B"),
    Row("2 bytes", "bf16, fp32 moments, no master", 10, each("adamw-bf16-nomaster"), "B"),
    Row("2 bytes", "pure bf16 Adam", 6, each("adamw-bf16-pure"), "B"),
    Row("2 bytes", "FSDP2 mixed precision", 12, each("adamw-fsdp"), "B"),
    Row("2 bytes", "8-bit Adam, bf16 weights", 4 + 2 * 4 / 256, each("adamw-8bit"), "B"),
    Row("2 bytes", "the same with master", 8 + 2 * 4 / 256, each("adamw-8bit-master"), "B"),
    Row("2 bytes", "LoRA r=16 on q, v of a 7B: parameters", 8_388_608, lambda: lora("llama2-7b"), "1", 0),
    Row("2 bytes", "LoRA r=16 on q, v of Llama-3-8B: parameters", 6_815_744, lambda: lora("llama3-8b"), "1", 0),
    Row("2 models", "MLPerf 8B", 8_030_261_248, lambda: from_text("mlperf-8b").parameter_count, "1", 0),
    Row("2 models", "MLPerf 70B", 69_882_617_856, lambda: from_text("mlperf-70b").parameter_count, "1", 0),
    Row("2 models", "MLPerf 405B", 405_853_388_800, lambda: from_text("mlperf-405b").parameter_count, "1", 0),
    Row("2 models", "real Llama-3-70B", 70.55e9, lambda: from_text("llama3-70b").parameter_count, "1"),
    Row("2 models", "MLPerf 8B, model, GiB", 14.96, mlperf("mlperf-8b", 8, 0), "1"),
    Row("2 models", "MLPerf 8B, optimizer, GiB", 89.75, mlperf("mlperf-8b", 8, 1), "1"),
    Row("2 models", "MLPerf 70B, model, GiB", 130.17, mlperf("mlperf-70b", 64, 0), "1"),
    Row("2 models", "MLPerf 70B, optimizer, GiB", 781.03, mlperf("mlperf-70b", 64, 1), "1"),
    Row("2 models", "MLPerf 405B, model, GiB", 755.96, mlperf("mlperf-405b", 512, 0), "1"),
    Row("2 models", "MLPerf 405B, optimizer, GiB", 4536.23, mlperf("mlperf-405b", 512, 1), "1"),
    Row("2 models", "70B nominal", 980 * GB, lambda: state_of("70b"), "B"),
    Row("2 models", "70B of MLPerf", 978 * GB, lambda: state_of("mlperf-70b"), "B"),
    Row("2 models", "70B real", 988 * GB, lambda: state_of("llama3-70b"), "B"),
    Row("2 models", "BLOOM weights", 352.5 * GB, lambda: state_of("bloom-176b", "weights-bf16"), "B"),
    Row("2 models", "BLOOM full, TiB", 2.24, lambda: state_of("bloom-176b") / TIB, "1"),
    Row("2 models", "GPU-hours for each failure", 50_677, lambda: LLAMA3_GPU_HOURS_PER_FAILURE, "1"),
    Row("2 models", "hours between failures of 16 384 GPUs", 3.09, lambda: LLAMA3_GPU_HOURS_PER_FAILURE / 16384, "1"),
    Row("3 files", "MLPerf 8B", 16, deepspeed("mlperf-8b", Layout(8, sharding="zero3")), "1", 0),
    Row("3 files", "MLPerf 70B", 128, deepspeed("mlperf-70b", Layout(64, sharding="zero3", tensor=8)), "1", 0),
    Row("3 files", "MLPerf 405B", 1544,
        deepspeed("mlperf-405b", Layout(512, sharding="zero1", tensor=8, pipeline=32)), "1", 0),
    Row("3 files", "DCP operations, 1 024 ranks, 2 048 files", 9221, dcp_ops, "1", 0),
    Row("3 files", "65 536 files × 5 operations, 5 000/s", 65.5, lambda: metadata_seconds(65_536 * 5, 5e3, 1, 0), "s"),
    Row("4 interval", "Young, δ 5 s, M 11 135 s", 333.7, lambda: i.young_seconds(5, 11_135), "s"),
    Row("4 interval", "Daly, δ 5 s", 330.4, lambda: i.daly_seconds(5, 11_135), "s"),
    Row("4 interval", "exact, δ 5 s", 330.4, lambda: i.optimum_seconds(5, 11_135), "s"),
    Row("4 interval", "goodput, δ 5 s", 0.9194, goodput(5, 11_135), "1", 0.0001),
    Row("4 interval", "Young, δ 60 s", 1155.9, lambda: i.young_seconds(60, 11_135), "s"),
    Row("4 interval", "Daly, δ 60 s", 1116.3, lambda: i.daly_seconds(60, 11_135), "s"),
    Row("4 interval", "exact, δ 60 s", 1116.3, lambda: i.optimum_seconds(60, 11_135), "s"),
    Row("4 interval", "goodput, δ 60 s", 0.8526, goodput(60, 11_135), "1", 0.0001),
    Row("4 interval", "Young, δ 60 s, M 1 day", 3219.9, lambda: i.young_seconds(60, 86_400), "s"),
    Row("4 interval", "Daly, δ 60 s, M 1 day", 3180.1, lambda: i.daly_seconds(60, 86_400), "s"),
    Row("4 interval", "exact, δ 60 s, M 1 day", 3180.1, lambda: i.optimum_seconds(60, 86_400), "s"),
    Row("4 interval", "goodput, δ 60 s, M 1 day", 0.9565, goodput(60, 86_400), "1", 0.0001),
    Row("4 interval", "flat range from", 791, flat(0), "s"),
    Row("4 interval", "flat range to", 1567, flat(1), "s"),
    Row("4 interval", "988 GB, 10 min tolerated: bandwidth", 3.29 * GB, rpo_rate, "B/s"),
    Row("4 capacity", "0.978 TB, 3 + 1 + 14 kept, 20 % free", 22.0 * TB, capacity, "B"),
    Row("4 capacity", "98 GB every 5 min on 7.68 TB: writes per day", 3.7, drive_writes, "1", 0.01),
]  # fmt: skip


def in_words(value: float, unit: str) -> str:
    """A figure as the table shows it."""
    if unit in ("B", "B/s"):
        from stepwell.plan.words import value_in_words

        return value_in_words(value, unit)
    text = f"{value:,.0f}" if value >= 1e5 or value == int(value) else f"{value:,.6g}"
    return text if unit == "1" else f"{text} {unit}"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| | figure | right | planner | difference |", "|---|---|---:|---:|---:|"]
    for row in ROWS:
        ours = row.ours()
        difference = (ours - row.right) / row.right
        shown = "0" if abs(difference) < 5e-6 else f"{100 * difference:+.2g} %"
        right, found = in_words(row.right, row.unit), in_words(ours, row.unit)
        lines.append(f"| {row.topic} | {row.what} | {right} | {found} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
