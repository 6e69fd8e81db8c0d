"""`stepwell diff`: what differs between two steps of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from stepwell.cli._numbers import magnitudes
from stepwell.cli._output import Column, Row, console, count_of, json_option, print_json, print_table, progress
from stepwell.cli._runs import choose, open_run, run_argument, short_key
from stepwell.cli._values import first_difference, grouped, short, type_name, values_of
from stepwell.restore.catalogue import Catalogue, Step
from stepwell.restore.read import open_step
from stepwell.restore.stream import TensorStream
from stepwell.state import ITEM_BYTES, matches
from stepwell.store.checksum import CHUNK_BYTES

LISTED_MAX = 20


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs.

    `kind`: "form" (another dtype or shape; the texts say which), "bytes", or the step that alone has it. For "bytes"
    `element_count` elements have other bytes; `max_difference` is the largest |a - b| of those where both are finite
    (None for dtypes that are no numbers), `not_finite_count` of them are NaN or infinite on at least one side.
    """

    name: str
    kind: Literal["bytes", "form", "only in the first", "only in the second"]
    first: str | None = None
    second: str | None = None
    element_count: int = 0
    elements: int = 0
    max_difference: float | None = None
    not_finite_count: int = 0


@dataclass(frozen=True)
class ValueDifference:
    """How one plain value differs: both in short form, None where it is missing; `place` is inside the value."""

    name: str
    place: str
    first: str | None
    second: str | None


@click.command()
@run_argument
@click.argument("first", metavar="STEP")
@click.argument("second", metavar="STEP")
@click.option("--names", "patterns", multiple=True, metavar="PATTERN", help="Compare only these, as in 'model.*'.")
@click.option(
    "--allow-pickle", is_flag=True, help="Read pickled values too. A pickle can run any code: trust the file."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    first: str,
    second: str,
    patterns: tuple[str, ...],
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Compare two steps, tensor by tensor.

    Tensors are equal when their bytes are (so -0.0 differs from 0.0); for those that are not, the number of elements
    that differ and the largest difference are given. Plain values are compared with their types. Needs little memory:
    tensors are read in pieces. Exits with 1 when anything differs.
    """
    catalogue = open_run(run)
    steps = choose(catalogue, first), choose(catalogue, second)
    with ExitStack() as stack:
        pair = [open_step(catalogue.root, step) for step in steps]
        for opened in pair:
            stack.callback(opened.close)
        values = [values_of(opened, allow_pickle=allow_pickle) for opened in pair]
        streams = [stack.enter_context(TensorStream(opened, read_ahead=False)) for opened in pair]
        comparison = _Comparison(streams[0], streams[1], patterns)
        with progress("comparing", comparison.total_bytes) as advance:
            tensors = list(comparison.run(advance))
    value_differences = _compare_values(values[0], values[1], patterns)
    equal = not tensors and value_differences == []
    if as_json:
        print_json("diff", _document(catalogue, steps, tensors, value_differences, comparison.equal_count, equal))
    else:
        _print(console(), steps, tensors, value_differences, comparison.equal_count, all_of_them=bool(patterns))
    ctx.exit(0 if equal else 1)


class _Comparison:
    """The tensors of two open steps, compared in the order in which the first one stores them."""

    def __init__(self, first: TensorStream, second: TensorStream, patterns: tuple[str, ...]) -> None:
        self.first, self.second = first, second
        a, b = first.opened.layout, second.opened.layout
        self._a = {name: i for i, name in enumerate(a.names) if not patterns or matches(name, patterns)}
        self._b = {name: i for i, name in enumerate(b.names) if not patterns or matches(name, patterns)}
        common = [name for name in self._a if name in self._b]
        place = {name: (int(a.pack_index[i]), int(a.offsets[i])) for name, i in self._a.items()}
        self._common = sorted(common, key=place.__getitem__)
        self.total_bytes = sum(a.specs[self._a[name]].nbytes for name in common)
        self.equal_count = 0
        # With one layout, tensors lie in the same chunks, and equal checksums of a chunk mean equal bytes.
        self._same_layout = a.hash == b.hash

    def run(self, advance: Any) -> Iterator[TensorDifference]:
        a, b = self.first.opened.layout, self.second.opened.layout
        for name in self._common:
            i, k = self._a[name], self._b[name]
            if (a.specs[i].dtype, a.specs[i].shape) != (b.specs[k].dtype, b.specs[k].shape):
                yield TensorDifference(name, "form", a.specs[i].text, b.specs[k].text)
            else:
                difference = self._bytes(name, i, k, advance)
                if difference is not None:
                    yield difference
                else:
                    self.equal_count += 1
        for name, i in self._a.items():
            if name not in self._b:
                yield TensorDifference(name, "only in the first", first=a.specs[i].text)
        for name, k in self._b.items():
            if name not in self._a:
                yield TensorDifference(name, "only in the second", second=b.specs[k].text)

    def _bytes(self, name: str, i: int, k: int, advance: Any) -> TensorDifference | None:
        spec = self.first.opened.layout.specs[i]
        elements = int(np.prod(spec.shape))
        count, not_finite, largest = 0, 0, None
        # Stepwell aligns tensors; in a file of somebody else's an element may lie across the end of a chunk.
        aligned = int(self.first.opened.layout.offsets[i]) % ITEM_BYTES[spec.dtype] == 0
        for begin, end in self.first.ranges(i) if aligned else _even_ranges(spec.nbytes):
            if not (
                aligned and self._same_layout and self.first.digest_at(i, begin) == self.second.digest_at(k, begin)
            ):
                found = magnitudes(spec.dtype, self.first.read(i, begin, end), self.second.read(k, begin, end))
                count += found.count
                not_finite += found.not_finite_count
                if found.largest is not None:
                    largest = max(found.largest, largest or 0.0)
            advance(end - begin)
        if not count:
            return None
        return TensorDifference(name, "bytes", spec.text, spec.text, count, elements, largest, not_finite)


def _even_ranges(size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, size)


def _compare_values(
    first: dict[str, Any] | None, second: dict[str, Any] | None, patterns: tuple[str, ...]
) -> list[ValueDifference] | None:
    """What differs; None when some values are pickled and were not read."""
    if first is None or second is None:
        return None
    found = []
    for name in [*first, *(name for name in second if name not in first)]:
        if patterns and not matches(name, patterns):
            continue
        if name not in second:
            found.append(ValueDifference(name, "", _told(first[name]), None))
        elif name not in first:
            found.append(ValueDifference(name, "", None, _told(second[name])))
        else:
            place = first_difference(first[name], second[name])
            if place is not None:
                found.append(ValueDifference(name, place.where, place.first, place.second))
    return found


def _told(value: Any) -> str:
    return f"{type_name(value)} {short(value)}"


def _document(
    catalogue: Catalogue,
    steps: tuple[Step, Step],
    tensors: list[TensorDifference],
    values: list[ValueDifference] | None,
    equal_count: int,
    equal: bool,
) -> dict[str, Any]:
    return {
        "run": catalogue.root,
        "first": steps[0].key,
        "second": steps[1].key,
        "equal": equal,
        "equal_tensor_count": equal_count,
        "tensors": [asdict(one) for one in tensors],
        "values": None if values is None else [asdict(one) for one in values],
    }


def _print(
    out: Console,
    steps: tuple[Step, Step],
    tensors: list[TensorDifference],
    values: list[ValueDifference] | None,
    equal_count: int,
    *,
    all_of_them: bool,
) -> None:
    a, b = (short_key(step.key) for step in steps)
    out.print(Text.assemble(("first  ", "dim"), (a, "bold"), ("   second  ", "dim"), (b, "bold")))
    if tensors:
        _print_tensors(out, tensors, all_of_them=all_of_them)
    if values is None:
        out.print("plain values: some are pickled, none was compared; --allow-pickle reads them, if you trust the file")
    elif values:
        rows = [Row((one.name + one.place, one.first or "missing", one.second or "missing")) for one in values]
        print_table(out, (Column("value"), Column("first"), Column("second")), rows)
    if not tensors and values == []:
        out.print(Text(f"equal: {count_of(equal_count, 'tensor')} and all plain values", style="bold green"))
        return
    text = f"{_differ(len(tensors), 'tensor')}, {equal_count:,} equal"
    out.print(Text(text if values is None else f"{text}; {_differ(len(values), 'plain value')}", style="bold"))


def _print_tensors(out: Console, tensors: list[TensorDifference], *, all_of_them: bool) -> None:
    """Those that differ, or, when they are many and no pattern asks for them, groups of them."""
    if len(tensors) <= LISTED_MAX or all_of_them:
        columns = (Column("tensor"), Column("elements", right=True), Column("largest |a-b|", right=True), Column(""))
        print_table(out, columns, [Row((one.name, *_columns(one))) for one in tensors])
        return
    by_name = {one.name: one for one in tensors}
    rows = []
    for pattern, names_there in grouped(by_name).items():
        largest = [d for name in names_there if (d := by_name[name].max_difference) is not None]
        rows.append(Row((pattern, str(len(names_there)), f"{max(largest):.4g}" if largest else "")))
    titles = (Column("tensors"), Column("that differ", right=True), Column("largest |a-b|", right=True))
    print_table(out, titles, rows)
    out.print(Text("--names '*' lists them all", style="dim"))


def _differ(count: int, noun: str) -> str:
    return f"{count_of(count, noun)} {'differs' if count == 1 else 'differ'}"


def _columns(one: TensorDifference) -> tuple[str, str, str]:
    if one.kind == "form":
        return "", "", f"{one.first} and {one.second}"
    if one.kind != "bytes":
        return "", "", f"{one.kind}: {one.first or one.second}"
    share = one.element_count / one.elements
    count = "all" if one.element_count == one.elements else f"{one.element_count:,} ({share:.1%})"
    largest = "" if one.max_difference is None else f"{one.max_difference:.4g}"
    return count, largest, f"{one.not_finite_count:,} not finite" if one.not_finite_count else ""
