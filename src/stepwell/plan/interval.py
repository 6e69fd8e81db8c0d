"""How often to save, and what is lost to failures: closed forms, in seconds throughout.

One failure process with mean time between failures M, memoryless, for the whole job; failures also strike during saves
and restarts. A segment is τ seconds of work and then a save that costs δ; after a failure a restart takes R and the
segment begins again. `interval` here is always τ, the work between two saves; start to start it is τ + δ.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval (CACM 17, 1974). J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps (FGCS 22, 2006): the exact expected wall time
is his equation for exponential failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stepwell.errors import UsageError

GOLDEN = (math.sqrt(5) - 1) / 2
EXPONENT_MAX = 700.0  # beyond it exp() overflows: nothing would ever be finished


def young_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """√(2 δ M): the optimum to first order, valid while δ is far below M."""
    _check(save_seconds, mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """√(2δM)·[1 + ⅓√(δ/2M) + δ/(18M)] − δ for δ < 2M, else M: within a fraction of a percent of the optimum."""
    _check(save_seconds, mtbf_seconds)
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def optimum_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """The τ that minimises `wall_per_work`, to 12 digits; R does not move it.

    Setting the derivative to zero gives (1 − τ/M)·e^((τ+δ)/M) = 1, whose one root in (0, M) is found by bisection.
    """
    _check(save_seconds, mtbf_seconds)
    if save_seconds == 0:
        return 0.0

    def too_long(x: float) -> bool:  # x = τ/M; in logarithms, so that nothing overflows
        return math.log1p(-x) + x + save_seconds / mtbf_seconds < 0

    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if middle == 1.0 or too_long(middle) else (middle, high)
    return low * mtbf_seconds


def wall_per_work(interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float) -> float:
    """Expected wall seconds for each second of work: M·e^(R/M)·(e^((τ+δ)/M) − 1)/τ; infinite where that overflows."""
    _check(save_seconds, mtbf_seconds, restart_seconds)
    if interval_seconds <= 0:
        return math.inf
    segment = (interval_seconds + save_seconds) / mtbf_seconds
    if segment + restart_seconds / mtbf_seconds > EXPONENT_MAX:
        return math.inf
    return mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(segment) / interval_seconds


def goodput_fraction(
    interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float
) -> float:
    """Useful over wall time: the inverse of `wall_per_work`."""
    return 1 / wall_per_work(interval_seconds, save_seconds, mtbf_seconds, restart_seconds)


@dataclass(frozen=True)
class Waste:
    """Where wall time goes, as fractions that sum to 1 with `useful`.

    `save`: saves that counted. `rework`: work, and saves, done again after failures. `restart`: being down.
    """

    useful: float
    save: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        return self.save + self.rework + self.restart


def waste(interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float) -> Waste:
    """The split of the exact expectation.

    Of a finished segment s = τ + δ the expected wall time is M·e^(R/M)·(e^(s/M) − 1); τ of it is useful, δ the save.
    e^(s/M) − 1 failures strike it, and the restart after each takes M·(e^(R/M) − 1) with those that fail themselves:
    together the share 1 − e^(−R/M). What is left was worked for nothing.
    """
    wall = wall_per_work(interval_seconds, save_seconds, mtbf_seconds, restart_seconds) * interval_seconds
    if not math.isfinite(wall) or wall == 0:
        return Waste(0.0, 0.0, 1.0, 0.0)
    useful, save = interval_seconds / wall, save_seconds / wall
    restart = -math.expm1(-restart_seconds / mtbf_seconds)
    return Waste(useful, save, max(0.0, 1 - useful - save - restart), restart)


def flat_range(
    save_seconds: float, mtbf_seconds: float, restart_seconds: float, *, lost_fraction: float = 0.005
) -> tuple[float, float]:
    """The intervals around the optimum whose goodput is at most `lost_fraction` (of 1) below the best."""
    best = optimum_seconds(save_seconds, mtbf_seconds)
    floor = goodput_fraction(best, save_seconds, mtbf_seconds, restart_seconds) - lost_fraction

    def good(interval: float) -> bool:
        return goodput_fraction(interval, save_seconds, mtbf_seconds, restart_seconds) >= floor

    low = _border(good, best, 0.0)
    high = best or mtbf_seconds * 1e-9
    while good(high) and high < 1e6 * mtbf_seconds:
        high *= 2
    return low, _border(good, best, high)


def _border(good: Callable[[float], bool], inside: float, outside: float) -> float:
    """Where `good` ends between a point where it holds and one where it does not."""
    for _ in range(100):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if good(middle) else (inside, middle)
    return inside


@dataclass(frozen=True)
class Levels:
    """Two levels: a near save every `interval_seconds`, every `far_every`-th of them also to where a node's loss
    cannot reach it."""

    interval_seconds: float
    far_every: int
    waste_fraction: float


def two_level_waste(
    interval_seconds: float,
    far_every: int,
    *,
    near_save_seconds: float,
    far_save_seconds: float,
    near_failures_per_second: float,
    node_failures_per_second: float,
    far_lag_seconds: float,
    restart_seconds: float = 0.0,
) -> float:
    """Fraction of time lost, to first order: c₁/t + c₂/(k·t) + λ₁·t/2 + λ₂·(k·t/2 + P₂) + (λ₁ + λ₂)·R."""
    t, k = interval_seconds, far_every
    rework = near_failures_per_second * t / 2 + node_failures_per_second * (k * t / 2 + far_lag_seconds)
    restarts = (near_failures_per_second + node_failures_per_second) * restart_seconds
    return near_save_seconds / t + far_save_seconds / (k * t) + rework + restarts


def two_levels(
    *,
    near_save_seconds: float,
    far_save_seconds: float,
    near_failures_per_second: float,
    node_failures_per_second: float,
    far_lag_seconds: float = 0.0,
    restart_seconds: float = 0.0,
) -> Levels:
    """The best pair: k = √(c₂λ₁/(c₁λ₂)), t = √(2(c₁ + c₂/k)/(λ₁ + λ₂k)), with k the better whole number beside it."""
    _check(near_save_seconds, 1.0, far_save_seconds)
    if near_failures_per_second <= 0 or node_failures_per_second <= 0:
        raise UsageError("both kinds of failures need a rate above zero")

    def best_interval(k: int) -> float:
        cost = near_save_seconds + far_save_seconds / k
        return math.sqrt(2 * cost / (near_failures_per_second + node_failures_per_second * k))

    def wasted(k: int) -> float:
        return two_level_waste(
            best_interval(k), k,
            near_save_seconds=near_save_seconds, far_save_seconds=far_save_seconds,
            near_failures_per_second=near_failures_per_second, node_failures_per_second=node_failures_per_second,
            far_lag_seconds=far_lag_seconds, restart_seconds=restart_seconds,
        )  # fmt: skip

    if near_save_seconds == 0:
        ideal = 1e6
    else:
        ratio = far_save_seconds * near_failures_per_second / (near_save_seconds * node_failures_per_second)
        ideal = min(1e6, math.sqrt(ratio))
    k = min({max(1, math.floor(ideal)), max(1, math.ceil(ideal))}, key=wasted)
    return Levels(best_interval(k), k, wasted(k))


def three_levels(
    *, save_seconds: tuple[float, float, float], failures_per_second: tuple[float, float, float]
) -> tuple[float, int, int, float]:
    """(t, k₂, k₃, waste): a save every t, every k₂-th to the second level, every k₃-th of those to the third.

    Waste is c₁/t + c₂/(k₂t) + c₃/(k₂k₃t) + t/2·(λ₁ + λ₂k₂ + λ₃k₂k₃), to first order; found by trying whole numbers
    around the stationary point, in which each level balances its own cost with its own failures.
    """
    (c1, c2, c3), (l1, l2, l3) = save_seconds, failures_per_second
    if min(c1, c2, c3, l1, l2, l3) <= 0:
        raise UsageError("three levels need a cost and a failure rate above zero for each")

    def solve(k2: int, k3: int) -> tuple[float, int, int, float]:
        cost, rate = c1 + c2 / k2 + c3 / (k2 * k3), l1 + l2 * k2 + l3 * k2 * k3
        return math.sqrt(2 * cost / rate), k2, k3, math.sqrt(2 * cost * rate)

    def around(value: float) -> range:
        return range(max(1, math.floor(value) - 1), max(1, math.ceil(value)) + 2)

    ideal2, ideal3 = math.sqrt(c2 * l1 / (c1 * l2)), math.sqrt(c3 * l2 / (c2 * l3))
    return min((solve(k2, k3) for k2 in around(ideal2) for k3 in around(ideal3)), key=lambda one: one[3])


def sensitivity(
    interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float, *, change: float = 0.1
) -> dict[str, float]:
    """By how much the wasted fraction falls when one input gets better by `change`, the interval chosen anew for it.

    Keys: `save_seconds`, `mtbf_seconds`, `restart_seconds`, and `interval_seconds` for only choosing the optimum.
    """
    now = waste(interval_seconds, save_seconds, mtbf_seconds, restart_seconds).total

    def best(save: float, mtbf: float, restart: float) -> float:
        return waste(optimum_seconds(save, mtbf) or 1e-9, save, mtbf, restart).total

    def kept(save: float, mtbf: float, restart: float) -> float:
        return min(best(save, mtbf, restart), waste(interval_seconds, save, mtbf, restart).total)

    return {
        "save_seconds": now - kept(save_seconds * (1 - change), mtbf_seconds, restart_seconds),
        "mtbf_seconds": now - kept(save_seconds, mtbf_seconds * (1 + change), restart_seconds),
        "restart_seconds": now - kept(save_seconds, mtbf_seconds, restart_seconds * (1 - change)),
        "interval_seconds": now - best(save_seconds, mtbf_seconds, restart_seconds),
    }


def _check(save_seconds: float, mtbf_seconds: float, more_seconds: float = 0.0) -> None:
    if not (save_seconds >= 0 and more_seconds >= 0 and mtbf_seconds > 0):
        raise UsageError(
            "times are not negative, and the mean time between failures is above zero",
            found=f"save {save_seconds} s, mean time between failures {mtbf_seconds} s, {more_seconds} s",
        )
