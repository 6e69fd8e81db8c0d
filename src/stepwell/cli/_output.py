"""What commands print: tables that fit the terminal, JSON documents, errors in one block, progress.

Results go to stdout; errors and progress to stderr. Text that comes from files is made printable first: a tensor's
name must not be able to clear the screen.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from stepwell.errors import StepwellError
from stepwell.units import format_seconds

VERSION = 1
PIPE_WIDTH = 10_000  # nothing is left out for want of width where no person's eyes are
GAP = "  "


def _remember_json(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    ctx.find_root().ensure_object(dict)["json"] = value
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, callback=_remember_json, help="Print one JSON document instead of text."
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with 1, which says that something is damaged: `cli.main` knows better."""
        raise BrokenPipeError


def console(*, to_stderr: bool = False) -> Console:
    """A console on stdout (or stderr) as it is now. Colours only on a terminal; widths as wide as the terminal."""
    stream = sys.stderr if to_stderr else sys.stdout
    made = _Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def printable(text: object) -> str:
    """Text with everything that could steer a terminal, or that cannot be encoded, written as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in str(text)
    )


def print_json(kind: str, body: dict[str, Any]) -> None:
    """One document: `{"format": "stepwell.KIND", "version": 1, ...}`; ASCII, so that it survives every pipe."""
    sys.stdout.write(json.dumps({"format": f"stepwell.{kind}", "version": VERSION, **body}, indent=2) + "\n")
    sys.stdout.flush()


def print_error(error: StepwellError) -> None:
    """An error as one block on stderr."""
    out = console(to_stderr=True)
    first, *rest = str(error).splitlines() or [type(error).__name__]
    out.print(Text.assemble(("stepwell: ", "bold red"), (printable(first), "bold")))
    for line in rest:
        out.print(Text(printable(line)))


def print_error_json(error: StepwellError) -> None:
    """The same for programs, on stdout."""
    parts = {name: getattr(error, name) for name in ("where", "expected", "found", "todo")}
    print_json(
        "error",
        {
            "error": type(error).__name__,
            "what": error.what,
            **{name: None if value is None else str(value) for name, value in parts.items()},
            "exit_code": error.exit_code,
        },
    )


@dataclass(frozen=True)
class Column:
    """One column of a table. An `optional` one is left out where the terminal is too narrow for it."""

    title: str
    right: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Row:
    """The cells of one line, plain text, and the style of the whole line."""

    cells: Sequence[str]
    style: str = ""


@dataclass(frozen=True)
class Line:
    """A line across all columns: a heading, or a remark to the row above."""

    text: str
    style: str = ""


def print_table(out: Console, columns: Sequence[Column], rows: Sequence[Row | Line]) -> list[str]:
    """Print rows under their columns' titles. Returns the titles of the columns that found no room.

    Cells are never cut, since names are there to be copied; a line that is too long is wrapped by the terminal.
    """
    cells = [[printable(cell) for cell in row.cells] for row in rows if isinstance(row, Row)]
    titles = [printable(column.title) for column in columns]
    widths = [max([cell_len(titles[i]), *(cell_len(row[i]) for row in cells)]) for i in range(len(columns))]
    shown = [i for i, column in enumerate(columns) if not column.optional]
    for i in (i for i, column in enumerate(columns) if column.optional):
        if sum(widths[k] + len(GAP) for k in [*shown, i]) - len(GAP) <= out.width:
            shown = sorted([*shown, i])

    def line(texts: Sequence[str]) -> str:
        padded = []
        for i in shown:
            space = " " * (widths[i] - cell_len(texts[i]))
            padded.append(space + texts[i] if columns[i].right else texts[i] + space)
        return GAP.join(padded).rstrip()

    if any(titles[i] for i in shown):
        out.print(Text(line(titles), style="dim"))
    left = iter(cells)
    for row in rows:
        if isinstance(row, Row):
            out.print(Text(line(next(left)), style=row.style))
        else:
            out.print(Text(printable(row.text), style=row.style))
    return [columns[i].title for i in range(len(columns)) if i not in shown]


def print_facts(out: Console, facts: Sequence[tuple[str, str]], *, indent: str = "  ") -> None:
    """Print names and what they are, one to a line; facts without a text are left out."""
    present = [(name, text) for name, text in facts if text]
    width = max((len(name) for name, _ in present), default=0)
    left = len(indent) + width + len(GAP)
    for name, text in present:
        lines = textwrap.wrap(
            printable(text), max(40, out.width - left), break_long_words=False, break_on_hyphens=False
        )
        out.print(Text.assemble((f"{indent}{name:<{width}}{GAP}", "dim"), f"\n{' ' * left}".join(lines)))


def indented(text: str, indent: str, *, first: str | None = None) -> str:
    """Text of several lines below an indent, made printable; `first` takes the place of the first line's indent."""
    lines = [printable(line) for line in text.splitlines()]
    return "\n".join((first if first is not None and i == 0 else indent) + line for i, line in enumerate(lines))


def local_time(created: str) -> str:
    """A time from a document (RFC 3339, UTC) as the clock on the wall shows it here."""
    moment = _parsed(created)
    return printable(created) if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(created: str) -> str:
    """How long ago that was: `3 min 4 s ago`; nothing for a time that is none, or in the future."""
    moment = _parsed(created)
    seconds = -1.0 if moment is None else (datetime.now(timezone.utc) - moment).total_seconds()
    return f"{format_seconds(round(seconds))} ago" if seconds >= 0 else ""


def _parsed(created: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def count_of(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while work goes on, when stderr is a terminal. Gives a function to be called with each count of
    bytes done; it may be called from several threads."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(to_stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A moving sign on stderr, when that is a terminal, while work goes on whose length is not known."""
    if not sys.stderr.isatty():
        yield
        return
    with console(to_stderr=True).status(what):
        yield
