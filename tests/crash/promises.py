"""What must hold of a run folder after any crash, said once for all crash tests."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
from tests.crash.core import KEEP

from stepwell.errors import DamagedError, NotARunError, StepwellError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.catalogue import Step
from stepwell.restore.load import read_tensors
from stepwell.restore.read import open_step
from stepwell.state import decode_values
from stepwell.store import names


def order(key: str) -> tuple[int, int]:
    """Sorts steps by attempt, then step."""
    parsed = names.parse_step_key(key)
    assert parsed is not None
    return parsed[1], parsed[0]


def violations(
    root: str, promised: Iterable[str], keep_last: int = KEEP.last, resumed_from: str | None = None
) -> list[str]:
    """Every broken promise, in words; `promised` are the keys that a trainer was told are durable.

    Whole or absent: each step that has a manifest reads back whole, filled with its own number. Never lost: of the
    newest `keep_last` steps that are promised or there, none is missing (older ones may have been pruned). Never
    hidden: what a restore takes is the newest of all, or `resumed_from` while the attempt after it has no commit.
    """
    promised = list(promised)
    try:
        catalogue = catalogues.read(root)
    except NotARunError as error:
        return [f"the run is gone, with {promised}: {error}"] if promised else []
    except DamagedError as error:
        return [f"the run is torn: {error}"]
    there = [step.key for step in catalogue.steps]
    wrong = list(catalogue.problems)
    for step in catalogue.steps:
        wrong += wrong_with(root, step)
        if step.attempt not in {attempt.attempt for attempt in catalogue.attempts}:
            wrong.append(f"{step.key}: its attempt is gone, and its number can be taken again")
    protected = sorted({*promised, *there}, key=order)[-keep_last:]
    wrong += [f"{key} was promised and is lost" for key in protected if key not in there]
    newest = catalogue.newest.key if catalogue.newest else None
    expected = max(there, key=order, default=None)
    if resumed_from is not None and len(catalogue.attempts) > 1 and expected is not None and order(expected)[0] == 1:
        expected = resumed_from
    if newest != expected:
        wrong.append(f"a restore takes {newest}, not {expected}")
    for key in promised:
        folder = os.path.join(root, names.STEPS, key)
        inside = os.listdir(folder) if os.path.isdir(folder) else []
        if key not in there and names.CONDEMNED not in inside and any(map(names.is_pack_file, inside)):
            wrong.append(f"{key} was pruned, and nobody will dare to delete its packs")
    return wrong


def wrong_with(root: str, step: Step) -> list[str]:
    """Why this step is torn; nothing when it is whole and every number in it is its own."""
    if step.problem is not None:
        return [f"{step.key}: {step.problem}"]
    try:
        opened = open_step(root, step)
        try:
            tensors = read_tensors(opened, None, as_numpy=True)
            values = decode_values(opened.values, allow_pickle=False)
        finally:
            opened.close()
    except (StepwellError, OSError) as error:
        return [f"{step.key}: {error}"]
    mixed = [i for i, tensor in tensors.items() if not np.all(tensor == step.step)]
    if mixed or step.step not in values:
        return [f"{step.key}: holds something else than step {step.step}: tensors {mixed}, values {values}"]
    return []


def leftovers(root: str) -> list[str]:
    """Files and folders of the run that nothing needs: what a crash left and nobody removed."""
    catalogue = catalogues.read(root)
    known = {step.key for step in catalogue.steps}
    layouts_used = {names.layout_file(step.manifest.layout) for step in catalogue.steps if step.manifest}
    left = []
    for folder, _, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        parts = inside.split(os.sep)
        if parts[0] == names.STEPS and len(parts) == 2 and parts[1] not in known:
            left.append(inside)
        for name in files:
            odd = names.is_temporary(name) or names.is_pin(name) or name == names.CONDEMNED
            if odd or (inside == names.LAYOUTS and name not in layouts_used):
                left.append(os.path.join(inside, name))
    return left
