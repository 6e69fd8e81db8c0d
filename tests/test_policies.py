import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import UsageError
from stepwell.policies import AllOf, AnyOf, Best, Every, History, Keep, LossPlateau, Moment, Overhead, Policy


def moment(step: int = 1, now: float = 1000.0, started: float = 1000.0, **fields: Any) -> Moment:
    return Moment(step=step, now_seconds=now, started_seconds=started, **fields)


def due_steps(policy: Policy, values: Iterable[Mapping[str, float]], *, saves_are_accepted: bool = True) -> list[int]:
    """Run a policy over steps 0, 1, 2, ... with these metrics, one second each; the steps at which it was due."""
    history, due, saved = History.for_policy(policy), [], None
    for step, metrics in enumerate(values):
        history = history.with_metrics(step, metrics)
        now = moment(step, now=1000.0 + step, metrics=metrics, history=history, last_saved_step=saved)
        if saved is not None:
            now = replace(now, last_saved_seconds=1000.0 + saved)
        if policy.decide(now):
            due.append(step)
            saved = step if saves_are_accepted else saved
    return due


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value} for value in values]


class TestEvery:
    def test_steps_are_absolute_and_step_0_is_not_due(self) -> None:
        assert due_steps(Every(steps=3), [{}] * 10) == [3, 6, 9]

    def test_steps_do_not_depend_on_where_a_run_was_resumed(self) -> None:
        assert Every(steps=100).decide(moment(700, last_saved_step=650)) == "every 100 steps"
        assert Every(steps=100).decide(moment(750, last_saved_step=650)) is None

    def test_time_counts_from_the_start_of_the_run_until_something_was_saved(self) -> None:
        policy = Every(minutes=10)
        assert policy.decide(moment(now=1599.9)) is None
        assert policy.decide(moment(now=1600.0)) == "every 10 min; 10 min have passed"

    def test_time_counts_from_the_start_of_the_last_save(self) -> None:
        policy = Every(seconds=90)
        assert policy.decide(moment(now=1600.0, last_saved_seconds=1511.0)) is None
        assert policy.decide(moment(now=1601.0, last_saved_seconds=1511.0)) is not None

    def test_only_steps_are_pure(self) -> None:
        assert Every(steps=3).is_pure_in_step
        assert not Every(minutes=1).is_pure_in_step
        assert not Every(seconds=1).is_pure_in_step

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"steps": 1, "minutes": 1},
            {"minutes": 1, "seconds": 1},
            {"steps": 0},
            {"steps": -5},
            {"steps": 1.5},
            {"steps": True},
            {"steps": "10"},
            {"minutes": 0},
            {"minutes": -1},
            {"minutes": math.nan},
            {"seconds": math.inf},
            {"seconds": "5m"},
        ],
    )
    def test_bad_arguments_are_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="Every"):
            Every(**arguments)

    def test_an_error_says_what_was_given(self) -> None:
        with pytest.raises(UsageError, match=r"exactly one[\s\S]*steps=100, minutes=5[\s\S]*AnyOf"):
            Every(steps=100, minutes=5)


class TestBest:
    def test_due_whenever_the_metric_improves_on_all_before(self) -> None:
        assert due_steps(Best("loss"), losses(3, 4, 2, 2, 2.5, 1)) == [0, 2, 5]
        assert due_steps(Best("loss", "max"), losses(3, 4, 2, 4, 5)) == [0, 1, 4]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_nan_and_infinities_are_never_best_and_hide_nothing(self, bad: float, mode: Any) -> None:
        better, worse = (1, 2) if mode == "min" else (2, 1)
        assert due_steps(Best("loss", mode), losses(bad, worse, bad, better, bad)) == [1, 3]

    def test_a_missing_metric_is_never_due(self) -> None:
        assert due_steps(Best("val"), [{"loss": 1}, {"loss": 0.5, "val": 3}, {"loss": 0.1}, {"val": 2}]) == [1, 3]

    def test_asking_twice_about_a_step_gives_the_same_answer(self) -> None:
        policy, metrics = Best("loss"), {"loss": 1.0}
        history = History.for_policy(policy).with_metrics(5, metrics)
        again = history.with_metrics(5, metrics)
        assert again is history
        assert policy.decide(moment(5, metrics=metrics, history=again)) == "loss is at its best: 1"

    def test_asking_again_without_the_metric_is_not_due(self) -> None:
        history = History.for_policy(Best("loss")).with_metrics(5, {"loss": 1.0})
        assert Best("loss").decide(moment(5, history=history)) is None

    def test_the_history_of_the_restored_lineage_counts(self) -> None:
        history = History.for_policy(Best("loss")).with_metrics(100, {"loss": 0.5}).with_metrics(101, {"loss": 0.7})
        assert Best("loss").decide(moment(101, metrics={"loss": 0.7}, history=history)) is None

    @pytest.mark.parametrize("arguments", [("",), (None,), ("loss", "lowest")])
    def test_bad_arguments_are_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(UsageError, match="Best"):
            Best(*arguments)


class TestOverhead:
    def test_due_once_the_cost_is_that_share_of_the_time_since_the_last_save(self) -> None:
        policy = Overhead(at_most=0.05)
        known: dict[str, Any] = {"save_cost_seconds": 2.0, "last_saved_step": 5, "last_saved_seconds": 1000.0}
        assert policy.decide(moment(now=1039.9, **known)) is None
        assert policy.decide(moment(now=1040.0, **known)) == (
            "a save costs 2 s, at most 5 % of the 40 s since the last one"
        )

    def test_the_first_save_is_due_at_once_and_the_next_waits_for_its_cost(self) -> None:
        assert Overhead().decide(moment()) == "the first save, to measure what one costs"
        assert Overhead().decide(moment(now=9999.0, last_saved_step=1, last_saved_seconds=1000.0)) is None

    def test_a_save_that_costs_nothing_is_not_due_twice_at_the_same_time(self) -> None:
        assert Overhead().decide(moment(save_cost_seconds=0.0, last_saved_step=1, last_saved_seconds=1000.0)) is None

    @pytest.mark.parametrize("share", [0, -0.1, 1, 5, math.nan, True, "5%"])
    def test_bad_arguments_are_refused(self, share: Any) -> None:
        with pytest.raises(UsageError, match="Overhead"):
            Overhead(share)


class TestLossPlateau:
    def test_due_once_for_each_plateau(self) -> None:
        falling, flat = [5.0, 4.0, 3.0, 2.0], [2.0] * 8
        again = [1.0] * 12
        # Windows of two: (5 4) (3 2) fall; the third, (2 2), is the first that is not below the best mean, 2.5 - 1.
        assert due_steps(LossPlateau(window=2, min_improvement=1.0), losses(*falling, *flat)) == [5]
        assert due_steps(LossPlateau(window=2, min_improvement=1.0), losses(*falling, *flat, *again)) == [5, 15]

    def test_noise_inside_a_window_is_not_progress_and_does_not_hide_it(self) -> None:
        noisy = losses(*[value for mean in (10, 9, 8, 8, 8) for value in (mean - 5, mean + 5)])
        assert due_steps(LossPlateau(window=2), noisy) == [7]

    def test_stays_due_until_a_save_is_accepted(self) -> None:
        assert due_steps(LossPlateau(window=2), losses(*[1.0] * 7), saves_are_accepted=False) == [3, 4, 5, 6]

    def test_nan_and_steps_without_the_metric_do_not_count(self) -> None:
        values = [{"loss": 1.0}, {}, {"loss": math.nan}, {"loss": 1.0}, {"other": 9.0}, {"loss": 1.0}, {"loss": 1.0}]
        assert due_steps(LossPlateau(window=2), values) == [6]

    def test_is_followed_inside_combinations(self) -> None:
        policy = AnyOf(AllOf(LossPlateau(window=1), Every(steps=2)), Every(steps=100))
        assert due_steps(policy, losses(*[1.0] * 6)) == [2]

    def test_a_history_that_does_not_follow_it_is_an_error_not_a_no(self) -> None:
        with pytest.raises(UsageError, match=r"History\.for_policy"):
            LossPlateau().decide(moment())

    @pytest.mark.parametrize("arguments", [{"window": 0}, {"min_improvement": -1}, {"metric": ""}, {"window": 2.0}])
    def test_bad_arguments_are_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="LossPlateau"):
            LossPlateau(**arguments)


class TestCombinations:
    def test_any_and_all(self) -> None:
        assert due_steps(AnyOf(Every(steps=2), Every(steps=3)), [{}] * 7) == [2, 3, 4, 6]
        assert due_steps(AllOf(Every(steps=2), Every(steps=3)), [{}] * 13) == [6, 12]

    def test_the_reason_names_all_that_are_due(self) -> None:
        assert AnyOf(Every(steps=2), Every(steps=3), Every(steps=5)).decide(moment(6)) == "every 2 steps; every 3 steps"
        assert AllOf(Every(steps=2), Every(steps=3)).decide(moment(6)) == "every 2 steps; every 3 steps"

    def test_pure_only_when_every_part_is(self) -> None:
        assert AnyOf(Every(steps=2), AllOf(Every(steps=3))).is_pure_in_step
        assert not AnyOf(Every(steps=2), AllOf(Every(minutes=3))).is_pure_in_step
        assert not AllOf(Every(steps=2), Best("loss")).is_pure_in_step
        assert not AnyOf(Overhead()).is_pure_in_step
        assert not AnyOf(LossPlateau()).is_pure_in_step

    @pytest.mark.parametrize("kind", [AnyOf, AllOf])
    @pytest.mark.parametrize("parts", [(), (None,), (Best,), ([Every(steps=1)],), (Every(steps=1), "loss")])
    def test_what_is_not_a_policy_is_refused(self, kind: Any, parts: tuple[Any, ...]) -> None:
        with pytest.raises(UsageError, match=kind.__name__):
            kind(*parts)

    def test_a_policy_of_the_users_own_takes_part(self) -> None:
        class Primes:
            is_pure_in_step = True

            def decide(self, moment: Moment) -> str | None:
                return "prime" if moment.step in (2, 3, 5, 7) else None

        assert due_steps(AnyOf(Primes(), Every(steps=4)), [{}] * 9) == [2, 3, 4, 5, 7, 8]

    def test_policies_are_values(self) -> None:
        policy = AnyOf(Every(steps=2), Best("loss"))
        assert policy == AnyOf(Every(steps=2), Best("loss"))
        assert hash(policy) == hash(AnyOf(Every(steps=2), Best("loss")))
        assert pickle.loads(pickle.dumps(policy)) == policy
        with pytest.raises(FrozenInstanceError):
            policy.policies = ()  # type: ignore[misc]


class TestHistory:
    def test_with_metrics_leaves_the_old_history_as_it_was(self) -> None:
        policy = LossPlateau(window=3)
        before = History.for_policy(policy).with_metrics(1, {"loss": 2.0})
        kept = pickle.loads(pickle.dumps(before))
        before.with_metrics(2, {"loss": 1.0, "more": 3.0})
        assert before == kept

    @given(st.lists(st.floats(), max_size=30))
    def test_the_extremes_are_those_of_the_finite_values(self, values: list[float]) -> None:
        history = History()
        for step, value in enumerate(values):
            history = history.with_metrics(step, {"loss": value})
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            assert "loss" not in history.metrics
        else:
            summary = history.metrics["loss"]
            assert (summary.lowest.value, summary.lowest.step) == (min(finite), values.index(min(finite)))
            assert (summary.highest.value, summary.highest.step) == (max(finite), values.index(max(finite)))


class TestKeep:
    def test_best_may_come_as_a_list(self) -> None:
        assert Keep(best=["loss", "min", 2]).best == ("loss", "min", 2)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "arguments",
        [
            {"last": 0},
            {"last": None},
            {"last": 1.0},
            {"every": 0},
            {"every": True},
            {"best": "loss"},
            {"best": ("loss", "min")},
            {"best": ("loss", "least", 2)},
            {"best": ("", "min", 2)},
            {"best": ("loss", "min", 0)},
        ],
    )
    def test_bad_arguments_are_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="Keep"):
            Keep(**arguments)
