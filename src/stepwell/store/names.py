"""The names of files in a run, the same on every tier. Parsing is exact: what does not match is somebody else's."""

from __future__ import annotations

import operator
import re

from stepwell.errors import UsageError

RUN_FILE = "run.json"
ATTEMPTS = "attempts"
LAYOUTS = "layouts"
STEPS = "steps"
TELEMETRY = "telemetry"
MANIFEST = "manifest.json"
CONDEMNED = "condemned"
TEMPORARY_SUFFIX = ".tmp"

STEP_MAX = 10**12 - 1
_KEY = re.compile(r"(\d{12})-(\d{4}|[1-9]\d{4,8})")
_ATTEMPT = re.compile(r"(\d{4}|[1-9]\d{4,8})\.json")
_PACK = re.compile(r"node(\d{5})-(\d{2,4})\.safetensors")
_LAYOUT = re.compile(r"([0-9a-f]{32})\.safetensors")
_PROBE = re.compile(r"probe-\d+-[ab]")
_PIN = re.compile(r"pin-[0-9a-f]{16}")


def step_key(step: int, attempt: int) -> str:
    """The name of a step's folder. Raises `UsageError` for what `step_number` does not take."""
    return f"{step_number(step):012d}-{attempt:04d}"


def step_number(step: object) -> int:
    """A step as a plain int: numpy's integers and torch's tensors of one integer count, truth values do not.

    Raises `UsageError` for anything but a whole number in 0 … 10¹² - 1.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= STEP_MAX:
        raise UsageError("a step is a whole number", expected=f"0 to {STEP_MAX}", found=repr(step))
    return number


def parse_step_key(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a folder name, or None when the name is not exactly a key."""
    match = _KEY.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def attempt_file(attempt: int) -> str:
    return f"{attempt:04d}.json"


def parse_attempt_file(name: str) -> int | None:
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def pack_file(node: int, index: int) -> str:
    return f"node{node:05d}-{index:02d}.safetensors"


def is_pack_file(name: str) -> bool:
    return _PACK.fullmatch(name) is not None


def layout_file(layout_hash: str) -> str:
    return f"{layout_hash}.safetensors"


def parse_layout_file(name: str) -> str | None:
    match = _LAYOUT.fullmatch(name)
    return match[1] if match else None


def is_pin(name: str) -> bool:
    return _PIN.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """True for a file that a crash may leave behind and that nothing ever refers to."""
    if not (name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)):
        return False
    inner = name[1 : -len(TEMPORARY_SUFFIX)]
    return (
        inner in (RUN_FILE, MANIFEST)
        or is_pack_file(inner)
        or parse_layout_file(inner) is not None
        or parse_attempt_file(inner) is not None
        or _PROBE.fullmatch(inner) is not None
    )


def temporary(name: str) -> str:
    return f".{name}{TEMPORARY_SUFFIX}"
