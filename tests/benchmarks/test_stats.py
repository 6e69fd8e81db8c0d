"""Medians, pairing and the bound that is claimed with few rounds."""

from __future__ import annotations

import itertools
import math

import pytest
from benchmarks.stats import Sample, lowest, median_bound, order, paired_ratios, series, spread


def sample(number: int, value: float, *, contestant: str = "one", kind: str = "later") -> Sample:
    return Sample("a", number, contestant, kind, {"blocked_seconds": value})


def test_everybody_works_once_a_round_and_neighbours_change() -> None:
    names = list("abcde")
    rounds = [order(names, number) for number in range(5)]
    assert all(sorted(round) == names for round in rounds)
    assert len({round[0] for round in rounds}) >= 4
    assert rounds[1].index("b") - rounds[1].index("a") != rounds[0].index("b") - rounds[0].index("a")
    assert order([], 3) == []


def test_a_series_is_keyed_by_round_and_takes_the_median_within_one() -> None:
    samples = [sample(1, 4.0), sample(0, 1.0), sample(0, 2.0), sample(0, 9.0), sample(0, 7.0, kind="first")]
    assert series(samples, "a", "one", "later", "blocked_seconds") == {0: 2.0, 1: 4.0}
    assert series(samples, "b", "one", "later", "blocked_seconds") == {}
    assert series(samples, "a", "one", "later", "durable_seconds") == {}


def test_spread_of_nothing_is_none() -> None:
    assert spread([]) is None
    found = spread([3.0, 1.0, 2.0, 10.0])
    assert found is not None
    assert (found.median, found.least, found.greatest, found.count) == (2.5, 1.0, 10.0, 4)


def test_ratios_are_paired_by_round_and_unpaired_rounds_are_left_out() -> None:
    assert paired_ratios({0: 2.0, 1: 9.0, 3: 1.0}, {1: 3.0, 0: 4.0, 2: 1.0}) == [0.5, 3.0]


def test_a_divisor_of_nothing_or_less_never_shows_a_gain() -> None:
    assert paired_ratios({0: 1.0, 1: -1.0}, {0: 0.0, 1: -2.0}) == [math.inf, math.inf]


def test_the_best_is_chosen_by_its_median_not_by_its_luckiest_round() -> None:
    candidates = {"lucky once": {0: 0.1, 1: 9.0, 2: 9.0}, "steady": {0: 2.0, 1: 2.0, 2: 2.0}, "absent": {}}
    assert lowest(candidates) == "steady"
    assert lowest({"absent": {}}) is None


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (3, 1), (5, 1), (7, 1), (8, 2), (11, 3), (20, 6)])
def test_which_value_is_the_bound(count: int, rank: int) -> None:
    values = [float(value) for value in range(count)]
    assert median_bound(values, upper=True).value == sorted(values, reverse=True)[rank - 1]
    assert median_bound(values, upper=False).value == sorted(values)[rank - 1]


@pytest.mark.parametrize("count", range(1, 13))
@pytest.mark.parametrize("upper", [True, False])
def test_the_confidence_is_the_share_of_all_outcomes_in_which_the_bound_holds(count: int, upper: bool) -> None:
    # Around a true median of 0 every pattern of signs is equally likely; the sizes do not matter.
    patterns = list(itertools.product([-1.0, 1.0], repeat=count))
    holds = 0
    for pattern in patterns:
        bound = median_bound([sign * (index + 1) for index, sign in enumerate(pattern)], upper=upper)
        holds += bound.value > 0 if upper else bound.value < 0
    confidence = median_bound([0.0] * count, upper=upper).confidence
    assert holds / len(patterns) == pytest.approx(confidence)
    assert confidence >= 0.95 or count < 5


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_bound([], upper=True)
