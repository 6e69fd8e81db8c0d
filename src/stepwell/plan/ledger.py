"""The bill: figures in the order in which they were worked out, each from a formula that is kept with its inputs.

A formula is evaluated from its own text, so what `--explain` shows is what was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

from stepwell.plan import interval
from stepwell.vocabulary import Figure, Kind, Notice

Number = float | int

# What a formula may call. Nothing here has an effect.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "min": min,
    "max": max,
    "round": round,
    "young": interval.young_seconds,
    "daly": interval.daly_seconds,
    "optimum": interval.optimum_seconds,
    "goodput": interval.goodput_fraction,
}


class Ledger:
    """Figures by id, in order, and warnings. Ids used as names in formulas are plain identifiers."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.notices: list[Notice] = []

    def __getitem__(self, figure_id: str) -> Any:
        """The value of a figure. Raises `KeyError` for one that is not there."""
        return self.figures[figure_id].value

    def __contains__(self, figure_id: str) -> bool:
        return figure_id in self.figures

    def __iter__(self) -> Iterator[Figure]:
        return iter(self.figures.values())

    def put(
        self,
        figure_id: str,
        value: Number | None,
        unit: str,
        kind: Kind,
        source: str,
        *,
        low: Number | None = None,
        high: Number | None = None,
    ) -> Any:
        """Enter a number that is not computed here; returns it."""
        self.figures[figure_id] = Figure(
            id=figure_id, value=value, unit=unit, kind=kind, source=source, low=low, high=high
        )
        return value

    def compute(
        self,
        figure_id: str,
        unit: str,
        formula: str,
        source: str,
        *,
        low: Number | None = None,
        high: Number | None = None,
        **given: Number,
    ) -> Any:
        """Enter what `formula` comes to; its names are figures of this ledger, or `given`. Returns the value."""
        inputs = {name: given[name] if name in given else self._number(name, formula) for name in names_of(formula)}
        value = evaluate(formula, inputs)
        self.figures[figure_id] = Figure(
            id=figure_id, value=value, unit=unit, kind="computed", formula=formula, inputs=inputs, source=source,
            low=low, high=high,
        )  # fmt: skip
        return value

    def warn(self, code: str, text: str) -> None:
        self.notices.append(Notice(code, text))

    def _number(self, name: str, formula: str) -> Number:
        value = self.figures[name].value if name in self.figures else None
        if value is None:
            raise KeyError(f"{name!r} in {formula!r} is no figure with a value")
        return value


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def names_of(formula: str) -> list[str]:
    """The names of a formula that stand for numbers, each once, in order."""
    return [name for name in _compiled(formula).co_names if name not in FUNCTIONS]


def evaluate(formula: str, inputs: dict[str, Number]) -> Any:
    """The value of one of our own formulas; never hand it text from outside."""
    return eval(_compiled(formula), {"__builtins__": {}, **FUNCTIONS}, dict(inputs))
