"""What the demo prints: a moving bar where a terminal is attached, a line now and then where none is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table

from stepwell.demo.compare import Part
from stepwell.units import format_bytes

INDENT = 3
WIDTH_MAX = 96  # longer lines are hard to read


class Show:
    """Prints to one stream. `say` wraps; what users may copy, such as commands, is never wrapped."""

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream, highlight=False)
        self.console.width = min(self.console.width, WIDTH_MAX)

    def title(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(Rule(f"[bold]{escape(text)}[/]", align="left"))
        else:
            self.console.print(text)

    def heading(self, number: int, of: int, text: str) -> None:
        self.console.print()
        self.console.print(f"[bold cyan]{number}/{of}[/] [bold]{escape(text)}[/]")

    def say(self, text: str, style: str = "") -> None:
        self.console.print(_indented(f"[{style}]{escape(text)}[/]" if style else escape(text)))

    def raw(self, text: str, style: str = "") -> None:
        line = " " * INDENT + text
        self.console.print(f"[{style}]{escape(line)}[/]" if style else escape(line), soft_wrap=True)

    def blank(self) -> None:
        self.console.print()

    @contextmanager
    def steps(self, first: int, total: int) -> Iterator[Callable[[int, float], None]]:
        """Follow a training from step `first` to `total`; call what it gives with each step and its loss."""
        if not self.console.is_terminal:
            marks = {first + (total - first) * quarter // 4 for quarter in (1, 2, 3, 4)}

            def line(step: int, loss: float) -> None:
                if step in marks:
                    self.raw(f"step {step:4d} of {total}   loss {loss:.4f}")

            yield line
            return
        columns = (
            TextColumn(" " * (INDENT - 1)),
            BarColumn(bar_width=30),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total, completed=first - 1, loss="–")
            yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.4f}")

    def comparison(self, parts: list[Part]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for part in parts:
            count = f"{part.tensor_count} tensors" if part.tensor_count else f"{part.value_count} numbers"
            size = format_bytes(part.bytes) if part.tensor_count else ""
            verdict = "[bold red]DIFFERENT[/]" if part.difference else "[green]identical[/]"
            table.add_row(" " * INDENT + part.name, count, size, verdict)
        self.console.print(table)
        for part in parts:
            if part.difference:
                self.say(part.difference, "red")


def _indented(markup: str) -> Table:
    grid = Table.grid()
    grid.add_column(width=INDENT)
    grid.add_column()
    grid.add_row("", markup)
    return grid
