"""What Stepwell is to reach, as ratios paired by round, and whether it did. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .stats import Sample, lowest, median_bound, paired_ratios, series

EAGER, PREPARED, LAZY = "stepwell-eager", "stepwell-prepared", "stepwell-lazy"
DCP = ("dcp-1", "dcp-4", "dcp-async-thread", "dcp-async-process")
DCP_ASYNC = DCP[2:]
MEMCPY, FIO = "memcpy", "fio"

# Below this the bound holds with less than 87 %.
ROUNDS_TO_BE_SURE = 3

ByRound = Mapping[int, float]


@dataclass(frozen=True)
class Verdict:
    """One target. `bound` is the one-sided bound of the median on the side that would miss the target."""

    text: str
    limit: float
    at_most: bool
    measured: float | None = None
    bound: float | None = None
    confidence: float | None = None
    round_count: int = 0
    against: str = ""

    @property
    def word(self) -> str:
        """met: the bound keeps the target; likely: only the median does, or rounds are few; missed; not measured."""
        if self.measured is None or self.bound is None:
            return "not measured"
        if self._keeps(self.bound) and self.round_count >= ROUNDS_TO_BE_SURE:
            return "met"
        return "likely" if self._keeps(self.measured) else "missed"

    def _keeps(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


def judge(
    text: str, limit: float, values: Sequence[float], *, at_most: bool = True, against: str | None = None
) -> Verdict:
    """A target and the values of its rounds; no values mean that it was not measured."""
    if not values:
        return Verdict(text, limit, at_most)
    bound = median_bound(values, upper=at_most)
    return Verdict(text, limit, at_most, median(values), bound.value, bound.confidence, len(values), against or "")


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """Every target of the list, in its order."""

    def get(contestant: str, kind: str, figure: str, state: str = "a") -> ByRound:
        return series(samples, state, contestant, kind, figure)

    def best(names: Sequence[str], kind: str, figure: str, state: str = "a") -> tuple[str | None, ByRound]:
        candidates = {name: get(name, kind, figure, state) for name in names}
        name = lowest(candidates)
        return name, candidates[name] if name else {}

    def versus_dcp(
        text: str, limit: float, contestant: str, kind: str, figure: str, state: str = "a", names: Sequence[str] = DCP
    ) -> Verdict:
        name, values = best(names, kind, figure, state)
        return judge(text, limit, paired_ratios(get(contestant, kind, figure, state), values), against=name)

    def versus(text: str, limit: float, above: ByRound, below: ByRound, *, at_most: bool = True) -> Verdict:
        return judge(text, limit, paired_ratios(above, below), at_most=at_most)

    def plain(text: str, limit: float, values: ByRound) -> Verdict:
        return judge(text, limit, list(values.values()))

    copy = get(MEMCPY, "later", "blocked_seconds")

    def later(figure: str) -> ByRound:
        return get(EAGER, "later", figure)

    speed = "bytes_per_second"
    return [
        versus("(a) eager, blocked, later saves / memcpy", 1.3, later("blocked_seconds"), copy),
        versus_dcp("(a) eager, blocked, later saves / best DCP", 0.8, EAGER, "later", "blocked_seconds"),
        versus(
            "(a) eager, blocked, first save after prepare / memcpy",
            1.5,
            get(PREPARED, "first", "blocked_seconds"),
            copy,
        ),
        versus_dcp("(a) eager, blocked, first save / best DCP's first", 0.7, EAGER, "first", "blocked_seconds"),
        versus_dcp("(a) lazy, blocked / best DCP", 0.1, LAZY, "later", "blocked_seconds"),
        versus_dcp("(c) lazy, blocked / best DCP", 0.1, LAZY, "train", "blocked_seconds", "c"),
        versus_dcp("(c) lazy, lost training seconds / best DCP", 0.5, LAZY, "train", "lost_seconds", "c"),
        versus_dcp("(c) eager, lost training seconds / best DCP", 0.7, EAGER, "train", "lost_seconds", "c"),
        versus("(a) durable bytes/s / fio write", 0.95, later(speed), get(FIO, FIO, f"write_{speed}"), at_most=False),
        versus_dcp("(a) durable seconds / best DCP", 1.0, EAGER, "later", "durable_seconds"),
        plain("(a) CPU of the process tree, s/GB", 0.45, later("cpu_seconds_per_gb")),
        versus_dcp("(a) CPU of the process tree / best DCP", 0.33, EAGER, "later", "cpu_seconds_per_gb"),
        plain("(a) CPU of the agent alone, s/GB", 0.22, later("agent_cpu_seconds_per_gb")),
        plain("(a) peak memory above state and slots, MB", 150, _beside_slots(get)),
        plain(
            "(a) worst heartbeat gap during save and persist, ms", 20, _milliseconds(later("heartbeat_worst_seconds"))
        ),
        versus_dcp("(b) blocked / best DCP", 0.03, EAGER, "later", "blocked_seconds", "b"),
        versus_dcp("(b) durable / best DCP", 0.03, EAGER, "later", "durable_seconds", "b"),
        versus_dcp("(b) restore, cold / best DCP", 0.02, EAGER, "restore-cold", "restore_seconds", "b"),
        versus(
            "(b) durable / torch.save + fsync",
            0.6,
            get(EAGER, "later", "durable_seconds", "b"),
            get("torch-save", "later", "durable_seconds", "b"),
        ),
        versus(
            "(a) restore, cold, bytes/s / fio read",
            0.9,
            get(EAGER, "restore-cold", speed),
            get(FIO, FIO, f"read_{speed}"),
            at_most=False,
        ),
        versus_dcp("(a) restore, page cache / dcp.load", 0.35, EAGER, "restore-cached", "restore_seconds"),
        versus("(a) restore, memory tier / memcpy", 1.3, get(EAGER, "restore-memory", "restore_seconds"), copy),
    ]


def _beside_slots(get: Callable[[str, str, str], ByRound]) -> ByRound:
    """Memory that is not the slots, in MB: all shared memory is slots, and was touched because it is used."""
    peak, shared = (get(EAGER, "later", figure) for figure in ("memory_peak_bytes", "shared_memory_peak_bytes"))
    return {number: (peak[number] - shared[number]) / 1e6 for number in peak if number in shared}


def _milliseconds(seconds: ByRound) -> ByRound:
    return {number: value * 1e3 for number, value in seconds.items()}
