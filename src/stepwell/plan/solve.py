"""The one unknown from the rest: which bandwidth, interval, number of GPUs or tolerated loss just works."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepwell.errors import UsageError
from stepwell.plan.bill import Plan, Question, answer, with_storage_rate

UNKNOWNS = ("bandwidth", "interval", "gpus", "rpo")
BANDWIDTH_MAX = 1e15
GPUS_MAX = 1_048_576


@dataclass(frozen=True)
class Solution:
    """`value` of the unknown in `unit`, and the plan with it; None where nothing works, with the reason in words."""

    unknown: str
    value: float | None
    unit: str
    words: str
    plan: Plan | None


def solve(question: Question, unknown: str) -> Solution:
    """Solve for "bandwidth" (least B/s of the node-safe tier), "interval" (shortest seconds), "gpus" (most of them) or
    "rpo" (least seconds of tolerated loss). Feasibility is monotone in each, so bisection finds the border.

    Raises `UsageError` for another unknown, and for "bandwidth" without a bound that asks for any.
    """
    if unknown not in UNKNOWNS:
        raise UsageError("cannot be solved for", found=unknown, expected=" or ".join(UNKNOWNS))
    return {"bandwidth": _bandwidth, "interval": _shortest, "gpus": _gpus, "rpo": _rpo}[unknown](question)


def _bandwidth(question: Question) -> Solution:
    if question.rpo_seconds is None and question.interval_seconds is None:
        raise UsageError(
            "any bandwidth would do",
            todo="say --rpo or --interval: without a bound a slower storage only makes saves rarer",
        )

    def works(rate: float) -> bool:
        return answer(with_storage_rate(question, rate)).feasible

    if not works(BANDWIDTH_MAX):
        return Solution("bandwidth", None, "B/s", "no bandwidth makes it feasible; see the remedies", answer(question))
    rate = _border(works, BANDWIDTH_MAX, 1.0)
    return Solution("bandwidth", rate, "B/s", "the least that the node-safe storage must take, for this job alone",
                    answer(with_storage_rate(question, rate)))  # fmt: skip


def _shortest(question: Question) -> Solution:
    plan = answer(replace(question, interval_seconds=None))
    low = max(plan.lower, key=lambda bound: bound.seconds)
    return Solution("interval", low.seconds, "s", f"the shortest: {low.words}",
                    answer(replace(question, interval_seconds=low.seconds)))  # fmt: skip


def _gpus(question: Question) -> Solution:
    layout = question.layout
    unit = layout.tensor * layout.pipeline * layout.context * layout.expert * layout.replicas

    def with_gpus(units: int) -> Question:
        return replace(question, layout=replace(layout, gpus=units * unit))

    def works(units: int) -> bool:
        return answer(with_gpus(units)).feasible

    if not works(1):
        return Solution("gpus", None, "1", f"not even {unit} GPUs are feasible with this storage", answer(with_gpus(1)))
    low, high = 1, 2
    while high * unit <= GPUS_MAX and works(high):
        low, high = high, high * 2
    if high * unit > GPUS_MAX:
        return Solution("gpus", GPUS_MAX, "1", "and more were not tried: this storage can stay", answer(question))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return Solution("gpus", low * unit, "1", "the most that this storage carries", answer(with_gpus(low)))


def _rpo(question: Question) -> Solution:
    plan = answer(replace(question, rpo_seconds=None))
    low = max(plan.lower, key=lambda bound: bound.seconds)
    interval = low.seconds if question.interval_seconds is None else question.interval_seconds
    least = interval + plan.ledger["node_safe_seconds"]
    return Solution("rpo", least, "s", f"the least that can be promised: {low.words}",
                    answer(replace(question, rpo_seconds=least * (1 + 1e-9))))  # fmt: skip


def _border(works: Callable[[float], bool], good: float, bad: float) -> float:
    """Where `works` begins, on a logarithmic scale; `good` works, `bad` is far below."""
    for _ in range(80):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if works(middle) else (good, middle)
        if good / bad < 1 + 1e-9:
            break
    return good
