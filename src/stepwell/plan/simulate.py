"""Playing a plan: failures, saves and recoveries of many runs, seeded, for what closed forms can only approximate.

A run works, saves every interval, and is struck by two kinds of failures: those that lose a node (the state is then
read from where a save is node-safe) and those that do not (the nearest tier has it). A save counts only once it is
durable there; the trainer goes on meanwhile. Failures strike at any time, also during saves and restarts.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from stepwell.plan.bill import Plan

RUNS = 64
FAILURES_PER_RUN = 100
CONFIDENCE_Z = 1.96  # 64 runs: the normal quantile is within 2 % of Student's


@dataclass(frozen=True)
class Story:
    """What is played; all in seconds.

    `interval_seconds` is start to start, of which `cost_seconds` is lost to the save. After it begins, a save takes
    `near_lag_seconds` until a failure that spares the node finds it, and `far_lag_seconds` until any failure does.
    `down_near_seconds` and `down_far_seconds` are the outages.
    """

    interval_seconds: float
    cost_seconds: float
    mtbf_seconds: float
    node_failure_fraction: float
    near_lag_seconds: float
    far_lag_seconds: float
    down_near_seconds: float
    down_far_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Goodput's mean over the runs with its 95 % confidence interval, and what was seen on the way."""

    goodput_fraction: float
    low: float
    high: float
    failure_count: int
    node_failure_count: int
    lost_seconds_mean: float
    lost_seconds_max: float
    run_count: int
    seed: int


def story_of(plan: Plan) -> Story:
    ledger, question = plan.ledger, plan.question
    first = question.tiers[0]
    nodes = question.layout.nodes
    read_near = ledger["restart_read_bytes"] / (first.read_rate(nodes) / (1 if first.local else question.job_count))
    return Story(
        interval_seconds=plan.interval_seconds,
        cost_seconds=ledger["save_cost_seconds"],
        mtbf_seconds=ledger["mtbf_seconds"],
        node_failure_fraction=question.node_failure_fraction,
        near_lag_seconds=ledger[f"durable_seconds{{{first.name}}}"],
        far_lag_seconds=ledger["node_safe_seconds"],
        down_near_seconds=question.restart_seconds + read_near,
        down_far_seconds=ledger["restart_seconds"],
    )


def simulate(story: Story, *, seed: int = 0, runs: int = RUNS, failures_per_run: int = FAILURES_PER_RUN) -> Outcome:
    """Play `runs` independent runs of about `failures_per_run` failures each; equal seeds give equal outcomes."""
    played = [_play(story, random.Random(seed * 1_000_003 + number), failures_per_run) for number in range(runs)]
    # The ratio of the sums, not the mean of ratios: that one is biased as long as runs are finite.
    mean = sum(one.done for one in played) / sum(one.wall for one in played)
    spread = math.sqrt(sum((one.done - mean * one.wall) ** 2 for one in played) / (runs - 1))
    half = CONFIDENCE_Z * spread * math.sqrt(runs) / sum(one.wall for one in played)
    lost_all = [lost for one in played for lost in one.lost]
    failures = sum(one.failures for one in played)
    node_failures = sum(one.node_failures for one in played)
    return Outcome(
        mean, mean - half, mean + half, failures, node_failures,
        sum(lost_all) / len(lost_all) if lost_all else 0.0, max(lost_all, default=0.0), runs, seed,
    )  # fmt: skip


@dataclass
class _Run:
    done: float = 0.0  # seconds of useful work that is not lost
    wall: float = 0.0
    lost: list[float] = field(default_factory=list)
    failures: int = 0
    node_failures: int = 0

    def strike(self, node: bool) -> None:
        self.failures += 1
        self.node_failures += node


def _play(story: Story, chance: random.Random, failures_max: int) -> _Run:
    """One run, from failure to failure: how far it got in between follows from arithmetic."""
    interval = story.interval_seconds
    work = interval - story.cost_seconds
    run = _Run()
    up_since = base = far_work = 0.0  # since when it is up, with how much work behind it, and how much of that is far
    failure = chance.expovariate(1 / story.mtbf_seconds)
    while run.failures < failures_max:
        up = failure - up_since
        reached = base + up // interval * work + min(up % interval, work)
        near_work = base + _counted(up, interval, work, story.near_lag_seconds) * work
        far_count = _counted(up, interval, work, story.far_lag_seconds)
        if far_count:
            far_work = base + far_count * work
        node = chance.random() < story.node_failure_fraction
        run.strike(node)
        kept = far_work if node else max(near_work, far_work)
        down = story.down_far_seconds if node else story.down_near_seconds
        back = failure + down
        failure += chance.expovariate(1 / story.mtbf_seconds)
        while failure < back:  # struck again while it was starting
            node = chance.random() < story.node_failure_fraction
            run.strike(node)
            if node:
                kept, down = min(kept, far_work), story.down_far_seconds
            back = failure + down
            failure += chance.expovariate(1 / story.mtbf_seconds)
        run.lost.append(reached - kept)
        far_work = min(far_work, kept)
        base, up_since = kept, back
    run.done, run.wall = base, up_since
    return run


def _counted(up: float, interval: float, work: float, lag: float) -> int:
    """Saves that count after being up for `up`: the i-th starts at i·interval − (interval − work)."""
    first = work + lag
    return 0 if up < first else int((up - first) // interval) + 1
