"""Samples, medians, spread, paired ratios and what can be said about them with few rounds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

CONFIDENCE_WANTED = 0.95


@dataclass(frozen=True)
class Sample:
    """What one contestant's turn in one round gave.

    `kind` is what was done: first, later, train, restore-cold, restore-cached, restore-memory, fio. `figures` are
    named with their unit last; what was not measured is not there.
    """

    state: str
    round: int
    contestant: str
    kind: str
    figures: Mapping[str, float]
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some rounds."""

    median: float
    least: float
    greatest: float
    count: int


@dataclass(frozen=True)
class Bound:
    """A one-sided bound of a median, with the confidence that it really has."""

    value: float
    confidence: float


def order(names: Iterable[str], number: int) -> list[str]:
    """Who works when in a round: another one begins each time, and in every second round the order is reversed."""
    names = list(names)
    first = 2 * number % max(1, len(names))
    rotated = names[first:] + names[:first]
    return rotated[::-1] if number % 2 else rotated


def spread(values: Iterable[float]) -> Spread | None:
    """Median and range; None when there is nothing."""
    numbers = sorted(values)
    return Spread(median(numbers), numbers[0], numbers[-1], len(numbers)) if numbers else None


def series(samples: Iterable[Sample], state: str, contestant: str, kind: str, figure: str) -> dict[int, float]:
    """One figure of one contestant by round; several samples of one round count as their median."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if (sample.state, sample.contestant, sample.kind) == (state, contestant, kind) and figure in sample.figures:
            found.setdefault(sample.round, []).append(sample.figures[figure])
    return {number: median(values) for number, values in sorted(found.items())}


def lowest(candidates: Mapping[str, Mapping[int, float]]) -> str | None:
    """The name of the candidate with the lowest median over its rounds.

    One candidate for all rounds: the lowest of each round would pick out the noise of several.
    """
    medians = {name: median(values.values()) for name, values in candidates.items() if values}
    return min(medians, key=lambda name: medians[name]) if medians else None


def paired_ratios(above: Mapping[int, float], below: Mapping[int, float]) -> list[float]:
    """Ratios of the rounds that both have; a divisor of nothing or less gives infinity (it cannot show a gain)."""
    return [above[number] / below[number] if below[number] > 0 else math.inf for number in above if number in below]


def median_bound(values: Sequence[float], *, upper: bool) -> Bound:
    """A bound of the true median by the sign test: no assumption about the distribution.

    The k-th greatest of n values lies below the true median only if at most k - 1 values fall above that median,
    which has probability P(Binomial(n, 1/2) <= k - 1). The greatest k that keeps 95 % is taken; with fewer than five
    values even the extreme one has less, and `confidence` says how much.
    """
    if not values:
        raise ValueError("a bound needs at least one value")
    count = len(values)
    ordered = sorted(values, reverse=upper)
    index, miss = 0, 0.5**count
    while index + 1 < count:
        wider = miss + math.comb(count, index + 1) * 0.5**count
        if wider > 1 - CONFIDENCE_WANTED:
            break
        index, miss = index + 1, wider
    return Bound(ordered[index], 1 - miss)
