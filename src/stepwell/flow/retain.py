"""Which steps belong together, which is the newest, and which may go. Pure: facts in, a printable plan out.

Within one attempt the steps are a chain in the order of their numbers; an attempt hangs on the step that it resumed
from. That is enough to follow a lineage through steps that were pruned in the middle, or whose manifest cannot be read:
their keys still say where they were.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stepwell.policies import Keep
from stepwell.store.names import parse_step_key
from stepwell.units import format_bytes


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step that has a manifest.

    `parent` is the key of the step saved before it, or resumed from; None at the start of a run and when it is unknown.
    `readable` is False when the manifest cannot be read or parts are missing.
    """

    key: str
    step: int
    attempt: int
    parent: str | None
    metrics: Mapping[str, float]
    bytes: int
    readable: bool


@dataclass(frozen=True)
class AttemptFacts:
    """One start of the trainers; `parent` is the key of the step it resumed from, None when it started anew."""

    number: int
    parent: str | None


@dataclass(frozen=True)
class RetentionPlan:
    """What to remove, oldest first, and why each step goes or stays. Nothing has been done yet.

    `reasons` and `step_bytes` have every step of the run, in the order attempt, step.
    """

    remove: tuple[str, ...]
    reasons: Mapping[str, str]
    step_bytes: Mapping[str, int]

    @property
    def remove_bytes(self) -> int:
        """Bytes of files that removing these steps frees."""
        return sum(self.step_bytes[key] for key in self.remove)

    def __str__(self) -> str:
        removed = set(self.remove)
        lines = [
            f"{'remove' if key in removed else 'keep  '}  {key}  {format_bytes(self.step_bytes[key]):>8}  {reason}"
            for key, reason in self.reasons.items()
        ]
        kept_count = len(self.reasons) - len(removed)
        lines.append(f"{len(removed)} to remove ({format_bytes(self.remove_bytes)}), {kept_count} to keep")
        return "\n".join(lines)


def newest(steps: Mapping[str, StepFacts], attempts: Sequence[AttemptFacts]) -> str | None:
    """The step that a restart goes on from: the highest step of the highest attempt that has one.

    While the highest attempts have none, it is the step that the highest of them resumed from: whoever went back from
    step 1000 to 600 and crashed before the next save gets 600 again, not the abandoned 1000. An attempt that has no
    commit and did not resume from a step that is still there says nothing, and the one below it is asked.

    A step counts as soon as its manifest is there, readable or not: the caller sees a damaged newest step, says so, and
    goes down `lineage`. Returns a key of `steps`, or None when there is none.
    """
    tips: dict[int, StepFacts] = {}
    for facts in steps.values():
        if facts.attempt not in tips or facts.step > tips[facts.attempt].step:
            tips[facts.attempt] = facts
    parents = {attempt.number: attempt.parent for attempt in attempts}
    for number in sorted(tips.keys() | parents.keys(), reverse=True):
        if number in tips:
            return tips[number].key
        parent = parents[number]
        if parent is not None and parent in steps:
            return parent
    return None


def lineage(steps: Mapping[str, StepFacts], tip: str | None, attempts: Sequence[AttemptFacts] = ()) -> list[str]:
    """The steps that led to `tip`, tip first; all are keys of `steps`. Linear in the number of steps.

    `attempts` carry the line on when the first steps of an attempt, which name the one resumed from, were pruned; pass
    them whenever they are known. A tip that is not there itself still has its ancestors. The line ends where an
    attempt's parent is unknown or does not come before it (a damaged run cannot make it go in circles).
    """
    return _Chains(steps, attempts).walk(tip)


def plan_retention(
    steps: Mapping[str, StepFacts],
    attempts: Sequence[AttemptFacts],
    keep: Keep,
    *,
    tip: str | None,
    resumed_from: str | None = None,
    pinned: Collection[str] = (),
    protect: Collection[str] = (),
) -> RetentionPlan:
    """Plan which steps to remove.

    `keep` counts along the lineage of `tip` (the step just committed, or `newest`): its newest `last`, multiples of
    `every` (step 0 is one), and the `best`. A step without that metric, or with NaN or an infinity, is never best; of
    equals the newer wins. Each abandoned branch counts for itself, over its own steps only: going back to step 600
    never destroys what came after it.

    Never removed, whatever `keep` says: the tip and the newest step, a step that cannot be read (it counts for nothing
    either), one in `pinned` (by readers) or `protect` (in use by the caller), and the step `resumed_from` until the
    attempts after it have `last` readable steps in the lineage.

    Executing a plan and planning again removes nothing more.
    """
    chains = _Chains(steps, attempts)
    line = chains.walk(tip)
    reasons = _counted(steps, line, keep, "")
    for branch in chains.branches(line):
        reasons.update(_counted(steps, branch, keep, f" of the abandoned branch {branch[0]}"))

    for key in (tip, newest(steps, attempts)):
        _add(reasons, steps, key, "the newest step")
    if resumed_from is not None and resumed_from in steps:
        attempt = steps[resumed_from].attempt
        newer_count = sum(1 for key in line if steps[key].readable and steps[key].attempt > attempt)
        if newer_count < keep.last:
            _add(reasons, steps, resumed_from, f"resumed from, with {newer_count} newer steps so far")
    for key in pinned:
        _add(reasons, steps, key, "pinned by a reader")
    for key in protect:
        _add(reasons, steps, key, "in use")
    for key, facts in steps.items():
        if not facts.readable:
            reasons[key] = ["cannot be read; left for repair or for you to remove"]

    ordered = sorted(steps.values(), key=lambda facts: (facts.attempt, facts.step))
    rule = _describe(keep)
    return RetentionPlan(
        remove=tuple(facts.key for facts in ordered if facts.key not in reasons),
        reasons={facts.key: ", ".join(reasons.get(facts.key, [f"not kept by {rule}"])) for facts in ordered},
        step_bytes={facts.key: facts.bytes for facts in ordered},
    )


class _Chains:
    """The steps of a run as chains: one per attempt, in ascending order, each hanging on a step of a lower attempt."""

    def __init__(self, steps: Mapping[str, StepFacts], attempts: Sequence[AttemptFacts]) -> None:
        self._chains: dict[int, list[StepFacts]] = {}
        for facts in sorted(steps.values(), key=lambda facts: facts.step):
            self._chains.setdefault(facts.attempt, []).append(facts)
        self._parents: dict[int, tuple[int, int]] = {}
        for number, chain in self._chains.items():
            for facts in chain:
                self._hang(number, facts.parent)
        for attempt in attempts:
            self._hang(attempt.number, attempt.parent)

    def _hang(self, number: int, parent: str | None) -> None:
        position = parse_step_key(parent) if parent is not None else None
        # Only a lower attempt can have been resumed from; anything else is a step of the same attempt, or damage.
        if position is not None and position[1] < number:
            self._parents[number] = position

    def walk(self, tip: str | None, seen: Collection[str] = ()) -> list[str]:
        """The steps from `tip` down, up to the first that is in `seen`."""
        line: list[str] = []
        position = parse_step_key(tip) if tip is not None else None
        while position is not None:
            step, attempt = position
            chain = self._chains.get(attempt, [])
            for index in range(bisect_right([facts.step for facts in chain], step) - 1, -1, -1):
                if chain[index].key in seen:
                    return line
                line.append(chain[index].key)
            position = self._parents.get(attempt)
        return line

    def branches(self, line: Sequence[str]) -> list[list[str]]:
        """Every step that is not in `line`, each in exactly one branch, tip first."""
        seen = set(line)
        found = []
        for number in sorted(self._chains, reverse=True):
            tip = self._chains[number][-1].key
            if tip not in seen:
                found.append(self.walk(tip, seen))
                seen.update(found[-1])
        return found


def _counted(steps: Mapping[str, StepFacts], line: Sequence[str], keep: Keep, of_what: str) -> dict[str, list[str]]:
    """The steps of one line, tip first, that `keep` keeps, each with its reasons."""
    readable = [key for key in line if steps[key].readable]
    reasons: dict[str, list[str]] = {}
    for key in readable[: keep.last]:
        reasons.setdefault(key, []).append(f"among the last {keep.last}{of_what}")
    if keep.every is not None:
        for key in readable:
            if steps[key].step % keep.every == 0:
                reasons.setdefault(key, []).append(f"a multiple of {keep.every}{of_what}")
    if keep.best is not None:
        metric, mode, count = keep.best
        sign = 1.0 if mode == "min" else -1.0
        measured = [key for key in readable if math.isfinite(steps[key].metrics.get(metric, math.nan))]
        # The sort is stable, and the line goes from new to old: of equals the newer wins.
        for key in sorted(measured, key=lambda key: sign * steps[key].metrics[metric])[:count]:
            reasons.setdefault(key, []).append(
                f"among the best {count} by {metric} ({steps[key].metrics[metric]:.6g}){of_what}"
            )
    return reasons


def _add(reasons: dict[str, list[str]], steps: Mapping[str, StepFacts], key: str | None, reason: str) -> None:
    if key is not None and key in steps and reason not in reasons.setdefault(key, []):
        reasons[key].append(reason)


def _describe(keep: Keep) -> str:
    parts = [f"last={keep.last}"]
    if keep.every is not None:
        parts.append(f"every={keep.every}")
    if keep.best is not None:
        parts.append(f"best={keep.best}")
    return f"Keep({', '.join(parts)})"
