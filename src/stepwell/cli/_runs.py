"""The RUN and STEP arguments of the commands, and what several commands say about steps."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from stepwell.errors import NoSuchStepError, NotARunError, UsageError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.store import names

NEWEST = "newest"
_SHORT_KEY = re.compile(r"(\d{1,12})-(\d{1,9})")
_NEAR_MAX = 8

run_argument = click.argument("run", type=click.Path())


def open_run(run: str) -> Catalogue:
    """The catalogue of a run. Raises `NotARunError`, which names a run near by when there is one."""
    try:
        return catalogues.read(run)
    except NotARunError as error:
        above = _run_above(run)
        near = [name for name in _listed(run) if catalogues.is_run(os.path.join(run, name))]
        if near:
            error.found = "runs below it: " + ", ".join(near[:_NEAR_MAX]) + (", ..." if len(near) > _NEAR_MAX else "")
            error.todo = f"name one of them, as in {os.path.join(run, near[0])}"
        elif above is not None:
            error.found = f"something inside the run {above}"
            error.todo = f"name the run itself: {above}"
        elif not os.path.exists(run):
            error.found = "no such folder"
        elif not os.path.isdir(run):
            error.found = "a file"
        else:
            error.todo = "name the folder that was given to stepwell.Checkpointer"
        raise


def _run_above(path: str) -> str | None:
    """The run that this path lies in, for someone who has named a step's folder or run.json."""
    folder = os.path.abspath(path)
    for _ in range(3):
        folder = os.path.dirname(folder)
        if catalogues.is_run(folder):
            return folder
    return None


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def choose(catalogue: Catalogue, step: str) -> Step:
    """The step that a user means by `600`, `600-2`, `000000000600-0002` or `newest`.

    A bare number means the current lineage's step of that number, if there is one. Raises `NoSuchStepError`,
    `UsageError`.
    """
    if step == NEWEST:
        newest = catalogue.newest
        if newest is None:
            raise NoSuchStepError("the run has no committed step", where=catalogue.root)
        return newest
    short = _SHORT_KEY.fullmatch(step)
    if short:
        return catalogue.find(names.step_key(int(short[1]), int(short[2])))
    if not step.isdecimal():
        raise UsageError(
            "not a step", expected="a number (600), a number and an attempt (600-2), or newest", found=repr(step)
        )
    return catalogue.find(step)


def short_key(key: str) -> str:
    """`600-2` for `000000000600-0002`: short enough to read out, and taken by every command."""
    parsed = names.parse_step_key(key)
    return f"{parsed[0]}-{parsed[1]}" if parsed else key


def in_words(key: str) -> str:
    """`step 600 of attempt 2`."""
    parsed = names.parse_step_key(key)
    return f"step {parsed[0]} of attempt {parsed[1]}" if parsed else key


def branch_of(step: Step) -> str:
    """Where a step stands: `newest`, `lineage` (a restore came through it, or would) or `abandoned`."""
    return NEWEST if step.newest else "lineage" if step.in_lineage else "abandoned"


def restore_takes(catalogue: Catalogue, damaged: set[str] | None = None) -> Step | None:
    """The step that a restore would give now: the first of its candidates that is whole as far as is known."""
    known = damaged or set()
    return next((step for step in catalogue.fallbacks() if step.problem is None and step.key not in known), None)


def step_json(step: Step) -> dict[str, Any]:
    """The facts of a step that every document gives in the same form."""
    manifest = step.manifest
    return {
        "key": step.key,
        "step": step.step,
        "attempt": step.attempt,
        "branch": branch_of(step),
        "parent": step.parent,
        "created": manifest.created if manifest else None,
        "state_bytes": manifest.state_bytes if manifest else None,
        "stored_bytes": step.stored_bytes if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
        "problem": step.problem,
    }
