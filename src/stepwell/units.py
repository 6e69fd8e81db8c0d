"""Sizes, times and rates as people write and read them.

One convention: decimal prefixes (kB, MB, GB) unless binary ones (KiB, MiB, GiB) are asked for, three significant
digits, a space before the unit. A bare number is never accepted where a unit is meant. What is read is exact: `0.1s` is
the float 0.1, and no size passes through a float.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

from stepwell.errors import UsageError

_DECIMAL_PREFIXES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_BINARY_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_BYTES_BY_UNIT = {
    **{unit: 1000**power for power, unit in enumerate(_DECIMAL_PREFIXES)},
    **{unit: 1024**power for power, unit in enumerate(_BINARY_PREFIXES)},
    "KB": 1000,
}

_MICROSECONDS_BY_UNIT = {
    "us": Decimal(1),
    "µs": Decimal(1),
    "ms": Decimal(1_000),
    "s": Decimal(1_000_000),
    "m": Decimal(60_000_000),
    "min": Decimal(60_000_000),
    "h": Decimal(3_600_000_000),
    "d": Decimal(86_400_000_000),
}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)
_TIME_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ]+)\s*")


def format_bytes(count: float, *, binary: bool = False) -> str:
    """Write a number of bytes: `2.42 GB`, with `binary` `2.25 GiB`; below one kilobyte it is exact: `999 B`."""
    base, units = (1024, _BINARY_PREFIXES) if binary else (1000, _DECIMAL_PREFIXES)
    sign, count = ("-", -count) if count < 0 else ("", count)
    if not math.isfinite(count):
        return f"{sign}{count} B"
    power = 0
    # 999.6 kB reads "1.00 MB": the unit is chosen after rounding. 1000 to 1023 KiB are written with four digits.
    while power < len(units) - 1 and round(count / base**power) >= base:
        power += 1
    if power == 0:
        return f"{sign}{round(count)} B"
    return f"{sign}{_three_digits(count / base**power)} {units[power]}"


def format_rate(bytes_per_second: float) -> str:
    """Write a rate in bytes per second: `480 MB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """Write a duration: `1.2 ms`, `12.3 s`, `3 min 4 s`, `2 h 5 min`, `3 d 4 h`."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    # Each unit is tried with the rounded number, so that 999.96 ms reads "1 s" and 59.96 s reads "1 min".
    for factor, limit, unit in ((1e6, 1000.0, "µs"), (1e3, 1000.0, "ms"), (1.0, 60.0, "s")):
        shown = float(f"{seconds * factor:.3g}")
        if shown < limit:
            return f"{shown:g} {unit}"
    if round(seconds) < 3_600:
        return _two_units(round(seconds), 60, "min", "s")
    if round(seconds / 60) < 24 * 60:
        return _two_units(round(seconds / 60), 60, "h", "min")
    return _two_units(round(seconds / 3_600), 24, "d", "h")


def parse_bytes(text: str) -> int:
    """Read a size with its unit: `8 GiB`, `2.5GB`, `512 kB`.

    Returns bytes, exact, or the nearest whole byte where there is a fraction (`1.1 GiB`). Raises `UsageError` for a
    bare number and an unknown unit; `Gb` and `gb` are not guessed at.
    """
    match = _SIZE.fullmatch(text)
    if not match or match[2] not in _BYTES_BY_UNIT:
        raise UsageError(
            "not a size",
            expected="a number and one of " + " ".join(_BYTES_BY_UNIT) + ", as in 8 GiB",
            found=repr(text),
            todo="write the unit; a bare number is not accepted",
        )
    count: int = round(Fraction(match[1]) * _BYTES_BY_UNIT[match[2]])
    return count


def parse_seconds(text: str) -> float:
    """Read a duration with its units: `90s`, `5m`, `3h`, `250 ms`, `1h30m`, `3 min 4 s`.

    Returns seconds. Units go from the largest to the smallest, each at most once. Raises `UsageError` for a bare
    number, an unknown unit and any other order.
    """
    total, position, last_unit = Decimal(0), 0, Decimal("Infinity")
    while match := _TIME_PART.match(text, position):
        unit = _MICROSECONDS_BY_UNIT.get(match[2])
        if unit is None or unit >= last_unit:
            break
        total, position, last_unit = total + Decimal(match[1]) * unit, match.end(), unit
    if not position or position != len(text):
        raise UsageError(
            "not a duration",
            expected="a number and one of us ms s m h d, as in 90s, 5m or 1h30m",
            found=repr(text),
            todo="write the unit; a bare number is not accepted",
        )
    return float(total / 1_000_000)


def _three_digits(value: float) -> str:
    decimals = 2 if round(value, 2) < 10 else 1 if round(value, 1) < 100 else 0
    return f"{value:.{decimals}f}"


def _two_units(count: int, per_whole: int, whole_unit: str, part_unit: str) -> str:
    whole, part = divmod(count, per_whole)
    return f"{whole} {whole_unit} {part} {part_unit}" if part else f"{whole} {whole_unit}"
