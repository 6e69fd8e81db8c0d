"""What the demo prints: a moving bar where a terminal is attached, a line now and then where none is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stepwell.demo.compare import Part
from stepwell.units import format_bytes

INDENT = "   "
WIDTH_MAX = 96  # longer lines are hard to read


class Show:
    """Prints to one stream. `say` wraps; `raw` never does, for what a reader may copy."""

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream, highlight=False)
        self.width = min(self.console.width, WIDTH_MAX)

    def heading(self, text: str, style: str = "bold") -> None:
        self.console.print()
        self._lines(textwrap.wrap(text, self.width), style)

    def say(self, text: str, style: str = "", bullet: str = "") -> None:
        first = INDENT + bullet
        rest = " " * len(first)
        self._lines(textwrap.wrap(text, self.width, initial_indent=first, subsequent_indent=rest), style)

    def raw(self, text: str, style: str = "") -> None:
        self._lines([INDENT + text], style)

    def _lines(self, lines: Sequence[str], style: str) -> None:
        for line in lines:
            self.console.print(escape(line), style=style or None, soft_wrap=True)

    @contextmanager
    def steps(self, first: int, total: int) -> Iterator[Callable[[int, float], None]]:
        """Follow a training from step `first` to `total`; call what it gives with each step and its loss."""
        if not self.console.is_terminal:
            marks = {first + (total - first) * quarter // 4 for quarter in (1, 2, 3, 4)}

            def line(step: int, loss: float) -> None:
                if step in marks:
                    self.raw(f"step {step} of {total}, loss {loss:.4f}")

            yield line
            return
        columns = (
            TextColumn(INDENT[1:]),
            BarColumn(bar_width=28),
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total, completed=first - 1, loss="–")
            yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.4f}")

    def comparison(self, columns: Mapping[str, Sequence[Part]]) -> None:
        """A table with a row per part of the state and a column per state that was compared."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("")
        table.add_column("")
        table.add_column("", justify="right")
        for title in columns:
            table.add_column(title, header_style="dim")
        for row in zip(*columns.values()):
            part = row[0]
            size = format_bytes(part.bytes) if part.bytes else ""
            count, kind = (part.tensor_count, "tensor") if part.tensor_count else (part.value_count, "value")
            table.add_row(
                INDENT + part.name, f"{count} {kind}{'s' if count > 1 else ''}", size, *(_verdict(one) for one in row)
            )
        self.console.print(table)
        for title, parts in columns.items():
            for part in parts:
                if part.difference:
                    self.say(f"{title}: {part.difference}", "red")


def _verdict(part: Part) -> str:
    return "[bold red]DIFFERENT[/]" if part.difference else "[green]identical[/]"
