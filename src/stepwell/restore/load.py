"""Reading a step without a model: tensors and values as they were saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from stepwell.errors import DamagedError, NoSuchStepError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.catalogue import Step
from stepwell.restore.read import OpenStep, open_step
from stepwell.state import Copy, from_bytes, matches, rebuild
from stepwell.store.names import STEPS


def steps(run: str | os.PathLike[str]) -> list[Step]:
    """The committed steps of a run, by attempt and step. Raises `NotARunError`."""
    return list(catalogues.read(run).steps)


def load(
    run: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    names: str | Iterable[str] | None = None,
    to: Literal["saved", "numpy"] = "saved",
    allow_pickle: bool = False,
) -> Any:
    """The state of a step (the newest by default) in its own nesting, every byte checked, without building a model.

    Objects come back as the dicts that their `state_dict()` gave. Tensors are torch tensors where they were saved as
    such (`to="numpy"` gives arrays; bfloat16 and 8-bit floats then as unsigned integers of their bits), on the host.
    `names="model.*"` reads only what matches. Raises `NotARunError`, `NoSuchStepError`, `DamagedError`.
    """
    patterns = [names] if isinstance(names, str) else None if names is None else list(names)
    opened = _open(run, step)
    try:
        saved = opened.saved(allow_pickle=allow_pickle)
        tensors = read_tensors(opened, patterns, as_numpy=to == "numpy")
        return rebuild(saved, tensors.__getitem__, names=patterns)
    finally:
        opened.close()


def _open(run: str | os.PathLike[str], step: int | str | None) -> OpenStep:
    """Open a step, or the newest; one that is removed at this very moment gives way to the one after it."""
    for look in range(catalogues.LOOKS_MAX):
        catalogue = catalogues.read(run)
        chosen = catalogue.newest if step is None else catalogue.find(step)
        if chosen is None:
            break
        try:
            return open_step(catalogue.root, chosen)
        except DamagedError:
            folder = os.path.join(catalogue.root, STEPS, chosen.key)
            if catalogues.is_committed(folder) or look == catalogues.LOOKS_MAX - 1:
                raise
    raise NoSuchStepError("the run has no committed step", where=os.fspath(run))


def read_tensors(
    opened: OpenStep,
    patterns: list[str] | None,
    *,
    as_numpy: bool,
    progress: Callable[[int], None] | None = None,
) -> dict[int, Any]:
    """The stored tensors of a step whose name (or whose alias's name) matches, by index.

    `progress` is called with bytes that were read and checked; in all they are at most the data bytes of the packs.
    """
    layout = opened.layout
    wanted = {
        (i if alias < 0 else alias)
        for i, alias in enumerate(layout.alias_of)
        if patterns is None or matches(layout.names[i], patterns)
    }
    if not as_numpy and any(layout.specs[i].kind == "torch" for i in wanted):
        import torch  # noqa: F401  asked for by the data: torch tensors were saved
    rooms: dict[int, np.ndarray[Any, Any]] = {}
    copies = []
    for i in sorted(wanted):
        room = np.empty(layout.specs[i].nbytes, dtype=np.uint8)
        rooms[i] = room
        copies.append(Copy(i, room.ctypes.data if room.size else 0, None))
    opened.fill(copies, progress)
    return {i: from_bytes(layout.specs[i], room, as_numpy=as_numpy) for i, room in rooms.items()}
