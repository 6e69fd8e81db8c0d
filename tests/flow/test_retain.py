import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.flow.retain import AttemptFacts, RetentionPlan, StepFacts, lineage, newest, plan_retention
from stepwell.policies import Keep, Mode
from stepwell.store.names import step_key


@dataclass
class Run:
    """A run written by hand: `start` begins an attempt, `save` commits steps to it."""

    steps: dict[str, StepFacts] = field(default_factory=dict)
    attempts: list[AttemptFacts] = field(default_factory=list)
    position: str | None = None

    def start(self, resume: str | None = None) -> "Run":
        self.attempts.append(AttemptFacts(number=len(self.attempts) + 1, parent=resume))
        self.position = resume
        return self

    def save(self, *numbers: int, readable: bool = True, size: int = 10, **metrics: float) -> "Run":
        for number in numbers:
            attempt = self.attempts[-1].number
            key = step_key(number, attempt)
            self.steps[key] = StepFacts(key, number, attempt, self.position, metrics, size, readable)
            self.position = key
        return self

    def break_step(self, key: str) -> None:
        self.steps[key] = replace(self.steps[key], parent=None, metrics={}, readable=False)

    def lineage(self, tip: str | None) -> list[str]:
        return lineage(self.steps, tip, self.attempts)

    def newest(self) -> str | None:
        return newest(self.steps, self.attempts)

    def plan(
        self, keep: Keep, *, pinned: Collection[str] = (), protect: Collection[str] = (), tip: str | None = None
    ) -> RetentionPlan:
        return plan_retention(
            self.steps,
            self.attempts,
            keep,
            tip=tip or self.newest(),
            resumed_from=self.attempts[-1].parent if self.attempts else None,
            pinned=pinned,
            protect=protect,
        )

    def execute(self, plan: RetentionPlan) -> None:
        for key in plan.remove:
            del self.steps[key]


def keys(*numbers: int, attempt: int = 1) -> list[str]:
    return [step_key(number, attempt) for number in numbers]


def rolled_back() -> Run:
    """Steps 100 to 1000, then back to 600 and on to 800."""
    run = Run().start().save(*range(100, 1001, 100))
    return run.start(step_key(600, 1)).save(700, 800)


class TestNewest:
    def test_nothing_is_newest_in_an_empty_run(self) -> None:
        assert Run().newest() is None
        assert Run().start().newest() is None

    def test_the_highest_step_of_the_only_attempt(self) -> None:
        assert Run().start().save(1, 2, 10).newest() == step_key(10, 1)

    def test_a_higher_attempt_wins_over_a_higher_step(self) -> None:
        assert rolled_back().newest() == step_key(800, 2)

    def test_an_attempt_without_a_commit_stands_for_the_step_it_resumed_from(self) -> None:
        run = Run().start().save(*range(100, 1001, 100))
        assert run.start(step_key(600, 1)).newest() == step_key(600, 1)

    def test_the_choice_to_go_back_survives_any_number_of_crashes_before_the_first_save(self) -> None:
        run = Run().start().save(*range(100, 1001, 100)).start(step_key(600, 1)).start(step_key(600, 1))
        assert run.newest() == step_key(600, 1)

    def test_an_attempt_that_chose_nothing_is_passed_over(self) -> None:
        run = Run().start().save(100, 200).start(step_key(100, 1)).start(None)
        assert run.newest() == step_key(100, 1)

    def test_a_parent_that_is_gone_is_passed_over(self) -> None:
        run = Run().start().save(100, 200).start(step_key(150, 1))
        assert run.newest() == step_key(200, 1)

    def test_steps_of_an_attempt_whose_own_file_is_lost_still_count(self) -> None:
        run = rolled_back()
        assert newest(run.steps, run.attempts[:1]) == step_key(800, 2)

    def test_a_damaged_step_is_still_a_commit(self) -> None:
        run = rolled_back()
        run.break_step(step_key(800, 2))
        assert run.newest() == step_key(800, 2)


class TestLineage:
    def test_from_the_tip_down_across_attempts(self) -> None:
        assert rolled_back().lineage(step_key(800, 2)) == [
            *keys(800, 700, attempt=2),
            *keys(600, 500, 400, 300, 200, 100),
        ]

    def test_of_an_abandoned_step_is_its_own(self) -> None:
        assert rolled_back().lineage(step_key(900, 1)) == keys(900, 800, 700, 600, 500, 400, 300, 200, 100)

    def test_without_attempts_the_parents_in_the_steps_are_enough(self) -> None:
        run = rolled_back()
        assert lineage(run.steps, step_key(800, 2)) == run.lineage(step_key(800, 2))

    def test_goes_on_through_pruned_steps(self) -> None:
        run = rolled_back()
        for key in (*keys(700, attempt=2), *keys(600, 300)):
            del run.steps[key]
        assert run.lineage(step_key(800, 2)) == [*keys(800, attempt=2), *keys(500, 400, 200, 100)]

    def test_goes_on_through_an_attempt_that_was_pruned_altogether(self) -> None:
        run = rolled_back().start(step_key(800, 2)).save(900)
        for key in keys(700, 800, attempt=2):
            del run.steps[key]
        assert run.lineage(step_key(900, 3)) == [*keys(900, attempt=3), *keys(600, 500, 400, 300, 200, 100)]

    def test_goes_on_through_a_step_that_cannot_be_read(self) -> None:
        run = rolled_back()
        run.break_step(step_key(700, 2))
        assert run.lineage(step_key(800, 2))[1:3] == [step_key(700, 2), step_key(600, 1)]

    def test_of_nothing_is_empty_and_of_a_missing_tip_its_ancestors(self) -> None:
        assert rolled_back().lineage(None) == []
        assert rolled_back().lineage(step_key(250, 1)) == keys(200, 100)
        assert rolled_back().lineage("no key") == []

    def test_parents_that_go_in_circles_end(self) -> None:
        run = Run().start(step_key(5, 2)).save(1, 5).start(step_key(5, 1)).save(2, 5)
        assert run.lineage(step_key(5, 2)) == [*keys(5, 2, attempt=2), *keys(5, 1)]


class TestPlan:
    def test_the_last_ones_stay(self) -> None:
        run = Run().start().save(1, 2, 3, 4, 5)
        plan = run.plan(Keep(last=2))
        assert plan.remove == tuple(keys(1, 2, 3))
        assert plan.remove_bytes == 30

    def test_order_is_by_number_not_by_name_or_time(self) -> None:
        # Case 19 and 21: step 10 is newer than step 9, whatever the order in which they are found.
        run = Run().start().save(8, 9, 10)
        run.steps = dict(reversed(run.steps.items()))
        assert run.plan(Keep(last=1)).remove == tuple(keys(8, 9))

    def test_the_union_of_last_every_and_best_stays(self) -> None:
        run = Run().start()
        for number, loss in ((500, 5.0), (600, 1.0), (700, 3.0), (800, 2.0), (900, 9.0), (1000, 8.0), (1100, 7.0)):
            run.save(number, loss=loss)
        plan = run.plan(Keep(last=1, every=500, best=("loss", "min", 2)))
        assert plan.remove == tuple(keys(700, 900))
        assert plan.reasons[step_key(600, 1)] == "among the best 2 by loss (1)"
        assert plan.reasons[step_key(1000, 1)] == "a multiple of 500"
        assert plan.reasons[step_key(1100, 1)] == "among the last 1, the newest step"
        assert plan.reasons[step_key(900, 1)] == "not kept by Keep(last=1, every=500, best=('loss', 'min', 2))"

    def test_best_can_mean_highest(self) -> None:
        run = Run().start().save(1, acc=0.9).save(2, acc=0.5).save(3, acc=0.1)
        assert run.plan(Keep(last=1, best=("acc", "max", 1))).remove == tuple(keys(2))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_steps_without_a_finite_metric_are_not_best(self, bad: float) -> None:
        run = Run().start().save(1, loss=7.0).save(2, loss=bad).save(3).save(4)
        assert run.plan(Keep(last=1, best=("loss", "min", 3))).remove == tuple(keys(2, 3))

    def test_of_equally_good_steps_the_newer_stays(self) -> None:
        run = Run().start().save(1, 2, loss=1.0).save(3)
        assert run.plan(Keep(last=1, best=("loss", "min", 1))).remove == tuple(keys(1))

    def test_the_best_of_long_ago_goes_when_it_is_beaten_although_its_neighbours_are_gone(self) -> None:
        run, keep = Run().start(), Keep(last=1, best=("loss", "min", 1))
        for number, loss in ((1, 5.0), (2, 6.0), (3, 7.0), (4, 1.0)):
            run.save(number, loss=loss)
            run.execute(run.plan(keep))
        assert list(run.steps) == keys(4)

    def test_going_back_destroys_nothing_that_keep_would_keep(self) -> None:
        run = rolled_back().save(900, 1000)
        plan = run.plan(Keep(last=2))
        # The abandoned branch 700 to 1000 keeps its own last two; the lineage counts 1000-2 and 900-2.
        assert plan.remove == (*keys(100, 200, 300, 400, 500, 600, 700, 800), *keys(700, 800, attempt=2))
        assert plan.reasons[step_key(900, 1)] == f"among the last 2 of the abandoned branch {step_key(1000, 1)}"

    def test_an_abandoned_branch_over_two_attempts_counts_once(self) -> None:
        run = Run().start().save(100, 200, 300).start(step_key(300, 1)).save(400)
        run.start(step_key(100, 1)).save(200)
        assert run.plan(Keep(last=1)).remove == tuple(keys(100, 200, 300))
        assert run.plan(Keep(last=2)).remove == tuple(keys(200))

    def test_the_step_resumed_from_stays_until_there_are_as_many_newer_ones(self) -> None:
        run, keep = Run().start().save(100, 200, 300).start(step_key(100, 1)), Keep(last=2)
        assert step_key(100, 1) not in run.plan(keep).remove
        run.save(200)
        assert step_key(100, 1) not in run.plan(keep).remove
        run.save(300)
        assert step_key(100, 1) in run.plan(keep).remove

    def test_the_step_resumed_from_stays_while_newer_ones_cannot_be_read(self) -> None:
        run = Run().start().save(100, 200).start(step_key(200, 1)).save(300)
        run.break_step(step_key(300, 2))
        assert run.plan(Keep(last=1)).remove == tuple(keys(100))

    def test_the_step_resumed_from_stays_although_its_place_in_the_lineage_is_lost(self) -> None:
        run, keep = Run().start().save(100, 200, 300, 400).start(step_key(100, 1)), Keep(last=2)
        run.save(500)
        run.save(600, readable=False)
        run.steps = {key: replace(facts, parent=None) for key, facts in run.steps.items()}

        def plan() -> RetentionPlan:
            return plan_retention(run.steps, [], keep, tip=run.newest(), resumed_from=step_key(100, 1))

        assert plan().remove == tuple(keys(200))
        run.position = None
        run.save(700)
        assert plan().remove == tuple(keys(100, 200))

    def test_the_newest_stays_although_the_caller_names_another_tip(self) -> None:
        run = Run().start().save(*range(100, 1001, 100)).start(step_key(600, 1))
        assert run.newest() == step_key(600, 1)
        plan = plan_retention(run.steps, run.attempts, Keep(last=1), tip=step_key(1000, 1))
        assert plan.remove == tuple(keys(100, 200, 300, 400, 500, 700, 800, 900))

    def test_what_cannot_be_read_stays_and_counts_for_nothing(self) -> None:
        run = Run().start().save(1000, 2000, 3000, 4000, loss=1.0)
        run.break_step(step_key(2000, 1))
        run.break_step(step_key(4000, 1))
        plan = run.plan(Keep(last=1))
        assert plan.remove == tuple(keys(1000))
        assert "cannot be read" in plan.reasons[step_key(2000, 1)]

    def test_pinned_and_protected_steps_stay(self) -> None:
        run = Run().start().save(1, 2, 3, 4)
        plan = run.plan(Keep(last=1), pinned=keys(1), protect={*keys(2), "not a step of this run"})
        assert plan.remove == tuple(keys(3))
        assert plan.reasons[step_key(1, 1)] == "pinned by a reader"
        assert plan.reasons[step_key(2, 1)] == "in use"

    def test_an_empty_run_has_an_empty_plan(self) -> None:
        assert str(Run().plan(Keep())) == "0 to remove (0 B), 0 to keep"

    def test_a_plan_reads_as_a_list_with_reasons(self) -> None:
        run = Run().start().save(1, 2, size=2_416_000_000)
        assert str(run.plan(Keep(last=1))).splitlines() == [
            "remove  000000000001-0001   2.42 GB  not kept by Keep(last=1)",
            "keep    000000000002-0001   2.42 GB  among the last 1, the newest step",
            "1 to remove (2.42 GB), 1 to keep",
        ]


@st.composite
def keeps(draw: st.DrawFn) -> Keep:
    modes: list[Mode] = ["min", "max"]
    best = st.tuples(st.just("loss"), st.sampled_from(modes), st.integers(1, 3))
    return Keep(
        last=draw(st.integers(1, 4)),
        every=draw(st.none() | st.integers(1, 6)),
        best=draw(st.none() | best),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Runs with any rollbacks, damage and holes, as years of pruning under changing rules would leave them."""
    run = Run()
    for _ in range(draw(st.integers(1, 5))):
        resume = draw(st.sampled_from([None, *sorted(run.steps)]))
        run.start(resume)
        number = run.steps[resume].step if resume else 0
        for gap in draw(st.lists(st.integers(1, 4), max_size=6)):
            number += gap
            loss = draw(st.sampled_from([None, math.nan, 1.0, 2.0, 3.0]))
            if loss is None:
                run.save(number)
            else:
                run.save(number, loss=loss)
    for key in draw(st.sets(st.sampled_from(sorted(run.steps)), max_size=3)) if run.steps else ():
        run.break_step(key)
    for key in draw(st.sets(st.sampled_from(sorted(run.steps)), max_size=6)) if run.steps else ():
        del run.steps[key]
    return run


@settings(max_examples=300, deadline=None)
@given(runs(), keeps(), st.data())
def test_whatever_happened_a_plan_removes_only_what_nothing_keeps(run: Run, keep: Keep, data: st.DataObject) -> None:
    some = st.sets(st.sampled_from(sorted(run.steps)), max_size=2) if run.steps else st.just(set())
    pinned, protect = data.draw(some), data.draw(some)
    tip = run.newest()
    line = run.lineage(tip)
    readable = [key for key in line if run.steps[key].readable]
    plan = run.plan(keep, pinned=pinned, protect=protect)
    removed = set(plan.remove)

    assert len(removed) == len(plan.remove)
    assert removed <= run.steps.keys()
    assert list(plan.reasons) == sorted(run.steps, key=lambda key: (run.steps[key].attempt, run.steps[key].step))
    assert tip not in removed
    assert all(run.steps[key].readable for key in removed)
    assert not removed & (pinned | protect)
    assert not removed & set(readable[: keep.last])
    if keep.every is not None:
        assert not [key for key in removed if run.steps[key].step % keep.every == 0]
    if keep.best is not None:
        sign = 1 if keep.best[1] == "min" else -1
        values = [sign * run.steps[key].metrics.get("loss", math.nan) for key in readable]
        finite = sorted(value for value in values if math.isfinite(value))
        kept = sorted(
            value for key, value in zip(readable, values, strict=True) if key not in removed and math.isfinite(value)
        )
        assert kept[: keep.best[2]] == finite[: keep.best[2]]

    before = {key: run.lineage(key) for key in run.steps}
    run.execute(plan)
    assert run.newest() == tip
    assert run.plan(keep, pinned=pinned, protect=protect).remove == ()
    # What is left still hangs together as it did.
    for key in run.steps:
        assert run.lineage(key) == [one for one in before[key] if one not in removed]


@settings(max_examples=200, deadline=None)
@given(runs())
def test_every_step_counts_in_the_lineage_or_in_one_branch(run: Run) -> None:
    # With the strictest rule, what stays is the tip of the lineage, one tip of each abandoned branch, and exceptions.
    plan = run.plan(Keep(last=1))
    attempts_with_steps = {facts.attempt for facts in run.steps.values()}
    exceptions = {key for key, facts in run.steps.items() if not facts.readable} | {run.attempts[-1].parent}
    kept = run.steps.keys() - set(plan.remove) - exceptions
    assert len(kept) <= len(attempts_with_steps) + 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4), st.none() | st.integers(1, 6))
def test_pruning_after_each_save_leaves_what_pruning_once_leaves(
    save_counts: list[int], last: int, every: int | None
) -> None:
    """While nobody goes back, `last` and `every` do not depend on how often one prunes."""
    keep, often, once = Keep(last=last, every=every), Run(), Run()
    number = 0
    for save_count in save_counts:
        for run in (often, once):
            run.start(run.newest())
        for _ in range(save_count):
            number += 1
            once.save(number)
            often.save(number)
            often.execute(often.plan(keep))
    # The step resumed from has had its exception; one more plan sees how it ended.
    for run in (often, once):
        run.execute(run.plan(keep))
    assert often.steps.keys() == once.steps.keys()


def test_planning_visits_each_step_a_bounded_number_of_times() -> None:
    """Case 10: counted, not timed. Twice the steps are read at most a little more than twice as often."""

    class Counting(dict[str, StepFacts]):
        reads = 0

        def __getitem__(self, key: str) -> StepFacts:
            self.reads += 1
            return super().__getitem__(key)

    def reads(count: int) -> int:
        run = Run().start()
        for number in range(1, count + 1):
            run.save(number, loss=float(number % 17))
            if number % 50 == 0:
                run.start(step_key(number - 20, run.attempts[-1].number))
        steps = Counting(run.steps)
        keep = Keep(last=3, every=100, best=("loss", "min", 2))
        plan_retention(steps, run.attempts, keep, tip=newest(steps, run.attempts))
        return steps.reads

    assert reads(4000) <= 2.2 * reads(2000)
