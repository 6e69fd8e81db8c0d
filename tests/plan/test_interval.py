"""Closed forms against the ground truth, against brute force, and against each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import UsageError
from stepwell.plan import interval as i

# δ, M, R; Young, Daly, exact optimum; goodput at Daly
TRUTH = [
    (5.0, 11135.0, 600.0, 333.7, 330.4, 330.4, 0.9194),
    (60.0, 11135.0, 600.0, 1155.9, 1116.3, 1116.3, 0.8526),
    (60.0, 86400.0, 600.0, 3219.9, 3180.1, 3180.1, 0.9565),
]
saves = st.floats(0.01, 5000)
mtbfs = st.floats(100, 1e7)
restarts = st.floats(0, 5000)


@pytest.mark.parametrize("row", TRUTH, ids=lambda row: f"save {row[0]:g} s, failure {row[1]:g} s")
def test_the_ground_truth(row: tuple[float, ...]) -> None:
    save, mtbf, restart, young, daly, exact, goodput = row
    assert round(i.young_seconds(save, mtbf), 1) == young
    assert round(i.daly_seconds(save, mtbf), 1) == daly
    assert round(i.optimum_seconds(save, mtbf), 1) == exact
    assert round(i.goodput_fraction(i.daly_seconds(save, mtbf), save, mtbf, restart), 4) == goodput


def test_the_flat_range_of_the_ground_truth() -> None:
    low, high = i.flat_range(60, 11135, 600)
    assert (round(low), round(high)) in {(791, 1567), (792, 1567)}


@given(saves, mtbfs, restarts)
def test_no_other_interval_is_better(save: float, mtbf: float, restart: float) -> None:
    best = i.optimum_seconds(save, mtbf)
    least = i.wall_per_work(best, save, mtbf, restart)
    for factor in (0.25, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 4):
        assert i.wall_per_work(best * factor, save, mtbf, restart) >= least * (1 - 1e-12)


@given(saves, mtbfs, restarts, st.floats(0.1, 10))
def test_the_parts_of_the_waste_make_a_whole(save: float, mtbf: float, restart: float, factor: float) -> None:
    interval = i.optimum_seconds(save, mtbf) * factor
    split = i.waste(interval, save, mtbf, restart)
    assert math.isclose(split.useful + split.total, 1.0, abs_tol=1e-9)
    assert min(split.useful, split.save, split.rework, split.restart) >= 0
    if split.useful > 1e-6:
        assert math.isclose(split.useful, i.goodput_fraction(interval, save, mtbf, restart), rel_tol=1e-9)


@given(saves, mtbfs, restarts)
def test_fewer_failures_and_cheaper_saves_never_hurt(save: float, mtbf: float, restart: float) -> None:
    def best(s: float, m: float, r: float) -> float:
        return i.goodput_fraction(i.optimum_seconds(s, m), s, m, r)

    now = best(save, mtbf, restart)
    assert best(save, mtbf * 1.5, restart) >= now - 1e-12
    assert best(save / 1.5, mtbf, restart) >= now - 1e-12
    assert best(save, mtbf, restart / 1.5) >= now - 1e-12


@given(st.floats(0.01, 100), st.floats(1e4, 1e7))
def test_young_and_daly_come_close_where_they_are_valid(save: float, mtbf: float) -> None:
    exact = i.optimum_seconds(save, mtbf)
    assert math.isclose(i.daly_seconds(save, mtbf), exact, rel_tol=1e-3)
    assert i.young_seconds(save, mtbf) >= exact


@given(saves, mtbfs, restarts)
def test_the_borders_of_the_flat_range_lose_what_they_say(save: float, mtbf: float, restart: float) -> None:
    best = i.goodput_fraction(i.optimum_seconds(save, mtbf), save, mtbf, restart)
    low, high = i.flat_range(save, mtbf, restart, lost_fraction=0.005)
    if best > 0.01:
        assert math.isclose(i.goodput_fraction(low, save, mtbf, restart), best - 0.005, abs_tol=1e-6)
        assert math.isclose(i.goodput_fraction(high, save, mtbf, restart), best - 0.005, abs_tol=1e-6)


@given(st.floats(0.1, 60), st.floats(1, 600), st.floats(1e-6, 1e-3), st.floats(1e-7, 1e-4), st.floats(0, 600))
def test_two_levels_against_brute_force(near: float, far: float, often: float, rarely: float, lag: float) -> None:
    costs = {
        "near_save_seconds": near, "far_save_seconds": far, "near_failures_per_second": often,
        "node_failures_per_second": rarely, "far_lag_seconds": lag,
    }  # fmt: skip
    found = i.two_levels(**costs)
    for k in {1, 2, max(1, found.far_every - 1), found.far_every + 1, 2 * found.far_every}:
        for factor in (0.5, 0.8, 1.0, 1.25, 2.0):
            other = i.two_level_waste(found.interval_seconds * factor, k, **costs)
            assert other >= found.waste_fraction * (1 - 1e-9)


def test_two_levels_follow_the_formulas() -> None:
    found = i.two_levels(
        near_save_seconds=1, far_save_seconds=100, near_failures_per_second=1e-4, node_failures_per_second=1e-6
    )
    assert found.far_every == 100  # √(c₂λ₁/(c₁λ₂))
    assert math.isclose(found.interval_seconds, math.sqrt(2 * (1 + 1) / (1e-4 + 1e-6 * 100)))


def test_three_levels_against_brute_force() -> None:
    costs, rates = (1.0, 20.0, 300.0), (1e-4, 2e-5, 1e-6)
    t, k2, k3, wasted = i.three_levels(save_seconds=costs, failures_per_second=rates)

    def waste(t: float, k2: int, k3: int) -> float:
        cost = costs[0] + costs[1] / k2 + costs[2] / (k2 * k3)
        return cost / t + t / 2 * (rates[0] + rates[1] * k2 + rates[2] * k2 * k3)

    assert math.isclose(wasted, waste(t, k2, k3))
    best = min(waste(t * f, a, b) for f in (0.7, 1.0, 1.4) for a in range(1, 60) for b in range(1, 60))
    assert wasted <= best * (1 + 1e-9)


def test_what_cannot_be() -> None:
    for wrong in ((-1.0, 100.0), (1.0, 0.0), (1.0, -5.0), (math.nan, 100.0)):
        with pytest.raises(UsageError):
            i.optimum_seconds(*wrong)
    assert i.optimum_seconds(0.0, 100.0) == 0.0
    assert i.daly_seconds(250.0, 100.0) == 100.0
    assert i.wall_per_work(1e9, 1.0, 1.0, 1.0) == math.inf and i.waste(1e9, 1.0, 1.0, 1.0).rework == 1.0
