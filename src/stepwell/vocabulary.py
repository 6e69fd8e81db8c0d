"""The words that `plan`, `bench`, `watch` and `doctor` share: figures, warnings, the document around them.

A figure says what it is worth, in which unit, and where it comes from, so that one tool can use what another found.
Ids come from `FIELDS`; a figure of one tier or block size has that in braces: `durable_seconds{nvme}`.
"""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import Any, Literal

import msgspec

VERSION = 1
Kind = Literal["computed", "measured", "published", "assumed"]
Confidence = Literal["high", "medium", "low"]

# The fixed fields: unit and meaning. Tools add fields of their own, never another meaning for one of these.
FIELDS: dict[str, tuple[str, str]] = {
    "state_bytes": ("B", "unique logical state"),
    "written_bytes": ("B", "issued to a tier by one save"),
    "device_bytes": ("B", "seen by the tier's device"),
    "file_count": ("1", "files of one save"),
    "metadata_op_count": ("1", "metadata operations of one save"),
    "rank_count": ("1", "processes of the job"),
    "node_count": ("1", "machines of the job"),
    "slot_count": ("1", "staging buffers of each node"),
    "interval_seconds": ("s", "from the start of a save to the start of the next"),
    "blocked_seconds": ("s", "the trainer waited"),
    "persist_seconds": ("s", "snapshot complete until committed on tier 0"),
    "durable_seconds": ("s", "entry of save() until committed on a tier"),
    "node_safe_seconds": ("s", "entry of save() until it survives the node"),
    "overhead_fraction": ("1", "blocked / interval"),
    "loss_seconds_max": ("s", "interval + node_safe: the most work that a failure takes"),
    "mtbf_seconds": ("s", "mean time between failures of the whole job"),
    "restart_seconds": ("s", "detect, reschedule and read"),
    "bytes_per_second": ("B/s", "with direction, tier and regime"),
    "request_bytes_mean": ("B", "at the device"),
    "straggler_ratio": ("1", "slowest / median rank"),
    "goodput_fraction": ("1", "useful / wall time"),
}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number with its origin.

    Attributes:
        id: a name from `FIELDS`, or one of the tool's own.
        value: in `unit`; None where there is none (an interval that no bound limits).
        unit: `B`, `B/s`, `s`, `1`, `1/s`, or a currency per something.
        kind: computed by `formula`; measured here; published by `source`; assumed, to be replaced by who knows better.
        formula: in terms of the names in `inputs`; empty for what is not computed.
        inputs: the value of each name in the formula.
        source: where the formula or the number comes from.
        low, high: the band, where there is one.
    """

    id: str
    value: float | int | None
    unit: str
    kind: Kind
    formula: str = ""
    inputs: dict[str, float | int] = {}
    source: str = ""
    low: float | int | None = None
    high: float | int | None = None


class Notice(msgspec.Struct, frozen=True):
    """Something that the reader should know, with a code that scripts can look for."""

    code: str
    text: str


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `inputs` is what the user said, `answer` what the tool says, `figures` why."""

    format: str
    version: int = VERSION
    created: str
    command: list[str]
    inputs: dict[str, Any]
    answer: dict[str, Any]
    figures: list[Figure]
    warnings: list[Notice]


def document(
    tool: str,
    *,
    inputs: dict[str, Any],
    answer: dict[str, Any],
    figures: list[Figure],
    warnings: list[Notice],
    command: list[str] | None = None,
) -> Document:
    """A document of `stepwell.TOOL`, stamped with the time and the command line."""
    return Document(
        format=f"stepwell.{tool}",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=sys.argv if command is None else command,
        inputs=inputs,
        answer=answer,
        figures=figures,
        warnings=warnings,
    )


def schema() -> dict[str, Any]:
    """The JSON schema of every document, generated from the classes above."""
    return msgspec.json.schema(Document)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n")
