"""When to save, and what to keep. Pure: a policy is asked with everything it needs and answers with a reason or None.

A policy never looks at a clock, a file or its own past; time and the metrics seen so far come with the `Moment`. So the
same moment always gets the same answer, however often it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from stepwell.errors import UsageError
from stepwell.units import format_seconds

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Extreme:
    """The lowest or highest value of a metric, and the step at which it was first seen."""

    value: float
    step: int


@dataclass(frozen=True)
class MetricSummary:
    """What is remembered of one metric: finite values only, and of constant size."""

    last_step: int
    lowest: Extreme
    highest: Extreme


@dataclass(frozen=True)
class PlateauState:
    """How far a `LossPlateau` has got. `since_step` is the step at which the present plateau was noticed, or None."""

    window_sum: float = 0.0
    window_count: int = 0
    best_mean: float | None = None
    since_step: int | None = None


@dataclass(frozen=True)
class History:
    """The metrics seen so far, up to and including the present step. Its size does not grow with the steps.

    Make one with `History.for_policy`, so that it follows what that policy asks about. After a restore, make a new one
    and feed it the metrics of the restored lineage, oldest first; otherwise the first value after it counts as best.
    """

    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    plateaus: Mapping[LossPlateau, PlateauState] = field(default_factory=dict)

    @classmethod
    def for_policy(cls, policy: Policy | None) -> History:
        """An empty history that follows the plateaus that `policy` asks about."""
        found = [part for part in _parts(policy) if isinstance(part, LossPlateau)]
        return cls(plateaus={part: PlateauState() for part in found})

    def with_metrics(self, step: int, metrics: Mapping[str, float]) -> History:
        """This history and the metrics of one more step.

        NaN and infinities are left out. A second call for the same step changes nothing, so a step may be asked about
        several times.
        """
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        fresh = {
            name: _summary_with(self.metrics.get(name), step, value)
            for name, value in finite.items()
            if name not in self.metrics or self.metrics[name].last_step != step
        }
        if not fresh:
            return self
        plateaus = {
            policy: policy._state_with(state, step, finite[policy.metric]) if policy.metric in fresh else state
            for policy, state in self.plateaus.items()
        }
        return replace(self, metrics={**self.metrics, **fresh}, plateaus=plateaus)


@dataclass(frozen=True)
class Moment:
    """Everything that a policy may look at.

    `now_seconds`, `started_seconds` (start of this run) and `last_saved_seconds` (start of the last save that was
    accepted) are of one monotonic clock. `metrics` are those of this step; `history` holds them too.
    `save_cost_seconds` is the mean training time that a save was measured to cost, None before the first measurement.
    """

    step: int
    now_seconds: float
    started_seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    last_saved_step: int | None = None
    last_saved_seconds: float | None = None
    save_cost_seconds: float | None = None
    history: History = field(default_factory=History)

    @property
    def since_save_seconds(self) -> float:
        """Seconds since the start of the last save, or since the start of the run when there was none."""
        start = self.started_seconds if self.last_saved_seconds is None else self.last_saved_seconds
        return self.now_seconds - start


@runtime_checkable
class Policy(Protocol):
    """Says when to save. Those below are the ones there are; any hashable object with these two will do."""

    @property
    def is_pure_in_step(self) -> bool:
        """True when the answer depends on the step alone. Then every rank may decide for itself."""

    def decide(self, moment: Moment) -> str | None:
        """Why to save now, in words, or None."""


@dataclass(frozen=True)
class Every:
    """Due every so many steps, minutes or seconds; give exactly one.

    By steps: at absolute step numbers, `step % steps == 0`, never at step 0. So `Every(steps=100)` saves steps 100,
    200, ... also after a resume, the numbers that `Keep(every=1000)` counts in. The last step of a run is not special:
    save it yourself when its number is another.
    By time: since the start of the last save, or of this run; looked at once per step, so up to one step late.
    """

    steps: int | None = None
    minutes: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = {
            name: value
            for name, value in (("steps", self.steps), ("minutes", self.minutes), ("seconds", self.seconds))
            if value is not None
        }
        if len(given) != 1:
            raise UsageError(
                "Every needs exactly one of steps, minutes and seconds",
                found=", ".join(f"{name}={value!r}" for name, value in given.items()) or "none of them",
                todo="combine two with AnyOf or AllOf",
            )
        if self.steps is not None:
            _check_count("Every(steps=)", self.steps)
        else:
            ((name, value),) = given.items()
            _check_number(f"Every({name}=)", value, above=0.0)

    @property
    def is_pure_in_step(self) -> bool:
        return self.steps is not None

    def decide(self, moment: Moment) -> str | None:
        if self.steps is not None:
            due = moment.step > 0 and moment.step % self.steps == 0
            return f"every {self.steps} steps" if due else None
        interval_seconds = self.seconds if self.seconds is not None else 60.0 * (self.minutes or 0.0)
        if moment.since_save_seconds < interval_seconds:
            return None
        return f"every {format_seconds(interval_seconds)}; {format_seconds(moment.since_save_seconds)} have passed"


@dataclass(frozen=True)
class Best:
    """Due when a metric is better than at every step before.

    Never due at a step without that metric, nor when it is NaN or infinite. The first value counts as best.
    """

    metric: str
    mode: Mode = "min"

    def __post_init__(self) -> None:
        _check_name("Best(metric=)", self.metric)
        _check_mode("Best(mode=)", self.mode)

    @property
    def is_pure_in_step(self) -> bool:
        return False

    def decide(self, moment: Moment) -> str | None:
        summary = moment.history.metrics.get(self.metric)
        if summary is None or self.metric not in moment.metrics:
            return None
        best = summary.lowest if self.mode == "min" else summary.highest
        if best.step != moment.step or best.value != float(moment.metrics[self.metric]):
            return None
        return f"{self.metric} is at its best: {best.value:.6g}"


@dataclass(frozen=True)
class Overhead:
    """Due when a save costs at most this share of the time since the last one.

    The cost is measured: seconds that the trainer was blocked, and its slow-down where that is known. As long as
    nothing is known the first save is due at once, to measure it; further ones wait for the measurement.
    """

    at_most: float = 0.05

    def __post_init__(self) -> None:
        _check_number("Overhead(at_most=)", self.at_most, above=0.0)
        if self.at_most >= 1:
            raise UsageError(
                "Overhead(at_most=) is a share of the training time",
                expected="a number between 0 and 1, as 0.05 for 5 %",
                found=repr(self.at_most),
            )

    @property
    def is_pure_in_step(self) -> bool:
        return False

    def decide(self, moment: Moment) -> str | None:
        cost_seconds, passed_seconds = moment.save_cost_seconds, moment.since_save_seconds
        if cost_seconds is None:
            return "the first save, to measure what one costs" if moment.last_saved_seconds is None else None
        if passed_seconds <= 0 or cost_seconds > self.at_most * passed_seconds:
            return None
        return (
            f"a save costs {format_seconds(cost_seconds)}, at most {100 * self.at_most:.3g} % of the "
            f"{format_seconds(passed_seconds)} since the last one"
        )


@dataclass(frozen=True)
class LossPlateau:
    """Due when a metric that should fall has stopped falling; once for each plateau.

    The metric is averaged over windows of `window` steps. A plateau begins when a whole window's mean is not below the
    best window's mean by more than `min_improvement` (in the metric's own unit), and ends when one is. Steps without
    the metric, or with NaN or an infinity, do not count. Stays due until a save is accepted.
    """

    metric: str = "loss"
    window: int = 500
    min_improvement: float = 0.0

    def __post_init__(self) -> None:
        _check_name("LossPlateau(metric=)", self.metric)
        _check_count("LossPlateau(window=)", self.window)
        _check_number("LossPlateau(min_improvement=)", self.min_improvement, at_least=0.0)

    @property
    def is_pure_in_step(self) -> bool:
        return False

    def decide(self, moment: Moment) -> str | None:
        state = moment.history.plateaus.get(self)
        if state is None:
            raise UsageError(
                "the history does not follow this policy",
                expected=repr(self),
                found=", ".join(map(repr, moment.history.plateaus)) or "a history without plateaus",
                todo="make the history with History.for_policy(policy)",
            )
        since_step, saved_step = state.since_step, moment.last_saved_step
        if since_step is None or (saved_step is not None and saved_step >= since_step):
            return None
        return f"{self.metric} has stopped falling: the best mean of {self.window} steps is {state.best_mean:.6g}"

    def _state_with(self, state: PlateauState, step: int, value: float) -> PlateauState:
        total, count = state.window_sum + value, state.window_count + 1
        if count < self.window:
            return replace(state, window_sum=total, window_count=count)
        mean, best, since_step = total / count, state.best_mean, state.since_step
        if best is None or mean < best - self.min_improvement:
            best, since_step = mean, None
        elif since_step is None:
            since_step = step
        return PlateauState(best_mean=best, since_step=since_step)


@dataclass(frozen=True, init=False)
class AnyOf:
    """Due when at least one of its policies is; the reason names all that are."""

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", _checked_parts("AnyOf", policies))

    @property
    def is_pure_in_step(self) -> bool:
        return all(policy.is_pure_in_step for policy in self.policies)

    def decide(self, moment: Moment) -> str | None:
        reasons = [reason for policy in self.policies if (reason := policy.decide(moment)) is not None]
        return "; ".join(reasons) if reasons else None


@dataclass(frozen=True, init=False)
class AllOf:
    """Due when all of its policies are."""

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", _checked_parts("AllOf", policies))

    @property
    def is_pure_in_step(self) -> bool:
        return all(policy.is_pure_in_step for policy in self.policies)

    def decide(self, moment: Moment) -> str | None:
        reasons = [policy.decide(moment) for policy in self.policies]
        return "; ".join(reason for reason in reasons if reason is not None) if None not in reasons else None


@dataclass(frozen=True)
class Keep:
    """Which committed steps stay: the newest `last`, and those whose number is a multiple of `every`, and the best.

    `best` is (metric, "min" or "max", how many). A step is kept when any of the three says so; which steps are counted,
    and what is never removed whatever this says, is told by `stepwell.flow.retain`.
    """

    last: int = 3
    every: int | None = None
    best: tuple[str, Mode, int] | None = None

    def __post_init__(self) -> None:
        _check_count("Keep(last=)", self.last)
        if self.every is not None:
            _check_count("Keep(every=)", self.every)
        if self.best is None:
            return
        if not isinstance(self.best, (tuple, list)) or len(self.best) != 3:
            raise UsageError(
                "Keep(best=) names a metric, a mode and a number of steps",
                expected='as in ("loss", "min", 2)',
                found=repr(self.best),
            )
        metric, mode, count = self.best
        _check_name("Keep(best=(metric, ...))", metric)
        _check_mode("Keep(best=(..., mode, ...))", mode)
        _check_count("Keep(best=(..., count))", count)
        object.__setattr__(self, "best", (metric, mode, count))


def _summary_with(summary: MetricSummary | None, step: int, value: float) -> MetricSummary:
    here = Extreme(value, step)
    if summary is None:
        return MetricSummary(last_step=step, lowest=here, highest=here)
    return MetricSummary(
        last_step=step,
        lowest=here if value < summary.lowest.value else summary.lowest,
        highest=here if value > summary.highest.value else summary.highest,
    )


def _parts(policy: Policy | None) -> Iterator[Policy]:
    if isinstance(policy, (AnyOf, AllOf)):
        for part in policy.policies:
            yield from _parts(part)
    elif policy is not None:
        yield policy


def _checked_parts(name: str, policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    if not policies:
        raise UsageError(f"{name} needs at least one policy", todo=f"write {name}(Every(steps=100), ...)")
    for policy in policies:
        # A class passes the Protocol's check too: Best where Best("loss") was meant.
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise UsageError(
                f"{name} takes policies, one after the other", expected="Every, Best, ...", found=repr(policy)
            )
    return policies


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is a whole number", expected="1 or more", found=repr(value))


def _check_number(name: str, value: object, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (above < value < math.inf and value >= at_least):  # type: ignore[operator]
        expected = f"more than {above:g}" if above > -math.inf else f"{at_least:g} or more"
        raise UsageError(f"{name} is a number", expected=expected, found=repr(value))


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} is the name of a metric", expected='a text, as in "loss"', found=repr(value))


def _check_mode(name: str, value: object) -> None:
    if value not in ("min", "max"):
        raise UsageError(f"{name} says which values are better", expected='"min" or "max"', found=repr(value))
