"""Three plots: blocked against durable, CPU per GB, and what a save costs in training time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .stats import Sample, Spread, series, spread

_INK, _OURS, _DCP, _OTHERS = "#333333", "#0072b2", "#d55e00", "#999999"


def draw(results: Path, samples: Sequence[Sample], titles: Mapping[str, str]) -> None:
    """Write the plots that there are samples for, as PNG files in `results`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

    def find(state: str, kind: str, figure: str) -> dict[str, Spread]:
        found = {
            name: spread(series(samples, state, name, kind, figure).values()) for name in titles if name != "memcpy"
        }
        return {name: one for name, one in found.items() if one is not None}

    for state, what in (("a", "384 tensors"), ("b", "many small tensors")):
        blocked, durable = find(state, "later", "blocked_seconds"), find(state, "later", "durable_seconds")
        if blocked:
            figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(blocked) + 1.6), layout="constrained")
            _bars(axes, titles, blocked, "blocked", offset=-0.2, alpha=1.0)
            _bars(axes, titles, durable, "durable", offset=0.2, alpha=0.35)
            axes.set(xscale="log", xlabel="seconds (log scale; median, line from least to greatest)")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
            axes.set_title(f"How long a save blocks training, and when it is durable: {what}", loc="left")
            figure.savefig(results / f"blocked-durable-{state}.png", dpi=150)
            pyplot.close(figure)
    for state, kind, name, title, label in (
        ("a", "later", "cpu_seconds_per_gb", "CPU of a save, whole process tree", "CPU seconds per GB"),
        ("c", "train", "lost_seconds", "Training time lost per save", "seconds: the loop with a save minus without"),
    ):
        found = find(state, kind, name)
        if found:
            figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(found) + 1.4), layout="constrained")
            _bars(axes, titles, found, "", offset=0.0, alpha=1.0)
            axes.set(xlabel=f"{label} (median, line from least to greatest)")
            axes.set_title(title, loc="left")
            figure.savefig(results / f"{name.removesuffix('_per_gb').replace('_', '-')}.png", dpi=150)
            pyplot.close(figure)


def _bars(
    axes: Any, titles: Mapping[str, str], found: Mapping[str, Spread], label: str, *, offset: float, alpha: float
) -> None:
    """Horizontal bars with their spread; ours, DCP's and the others' in three colours."""
    names = list(found)
    height = 0.38 if label else 0.7
    for row, name in enumerate(names):
        one = found[name]
        colour = _OURS if name.startswith("stepwell") else _DCP if name.startswith("dcp") else _OTHERS
        axes.barh(row + offset, one.median, height=height, color=colour, alpha=alpha)
        axes.plot([one.least, one.greatest], [row + offset] * 2, color=_INK, linewidth=1)
        axes.annotate(
            f"{label} {one.median:.3g}".strip(),
            (max(one.greatest, 0), row + offset),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=_INK,
        )
    axes.set_yticks(range(len(names)), [titles[name] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
