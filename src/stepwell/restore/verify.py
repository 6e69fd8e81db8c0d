"""Reading everything a run holds and saying what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepwell.errors import DamagedError
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.restore.read import open_step
from stepwell.store import pack


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one step, in words."""

    key: str
    text: str


def verify_step(root: str, step: Step, progress: Callable[[int], None] | None = None) -> list[Finding]:
    """Read every byte of a step against its checksums. Returns what is wrong; an empty list means all is well."""
    if step.problem is not None:
        return [Finding(step.key, step.problem)]
    try:
        opened = open_step(root, step)
        try:
            found = [Finding(step.key, text) for text in opened.damage(progress)]
            for index, header in enumerate(opened.headers):
                if not pack.describes(opened.header_bytes(index), header, opened.layout, index):
                    where = opened.sources[index].where
                    found.append(Finding(step.key, f"{where}: the header does not say what the layout says"))
            return found
        finally:
            opened.close()
    except (DamagedError, OSError) as error:
        return [Finding(step.key, str(error))]


def verify(catalogue: Catalogue, steps: list[Step], progress: Callable[[int], None] | None = None) -> list[Finding]:
    """`verify_step` over some steps, with the run's own problems first."""
    findings = [Finding("run", text) for text in catalogue.problems]
    for step in steps:
        findings += verify_step(catalogue.root, step, progress)
    return findings
