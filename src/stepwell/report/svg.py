"""Small drawings as SVG: lines over a logarithmic or linear axis, stacked bars, spans of time.

Each is drawn twice, for a wide and a narrow screen, and the page's style sheet shows the one that fits: text in a
drawing that is scaled down would be too small to read. No script, no fonts, nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTHS = {"wide": 720, "narrow": 350}
COLORS = ("#1f6feb", "#d1242f", "#9a6700", "#1a7f37", "#8250df", "#57606a")


@dataclass(frozen=True)
class Line:
    """A named curve."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves with one x axis. `band` shades a range of x, `marks` draws named verticals.

    Values that are not positive are left out on a logarithmic axis.
    """

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    x_log: bool = False
    y_log: bool = False
    band: tuple[float, float] | None = None
    marks: Sequence[tuple[str, float]] = field(default_factory=tuple)
    y_min: float | None = None
    y_max: float | None = None


@dataclass(frozen=True)
class Part:
    """A named share of a bar, or a span of a timeline: [begin, end)."""

    name: str
    begin: float
    end: float
    text: str


def drawn_twice(draw: Callable[[int], str]) -> str:
    """The drawing for each kind of screen."""
    return "".join(f'<div class="{kind}">{draw(width)}</div>' for kind, width in WIDTHS.items())


def chart(it: Chart) -> str:
    """The drawing, with its legend below it where there is more than one curve."""
    names = [line.name for line in it.lines]
    items = "".join(
        f'<span><i style="background:{COLORS[i % len(COLORS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    legend = f'<div class="legend">{items}</div>' if len(names) > 1 else ""
    return drawn_twice(lambda width: _chart(it, width)) + legend


def _chart(it: Chart, width: int) -> str:
    height = 300 if width > 500 else 260
    left, right, top, bottom = 64, 14, 14, 42
    xs = [x for line in it.lines for x, _ in line.points if x > 0 or not it.x_log]
    ys = [y for line in it.lines for _, y in line.points if math.isfinite(y) and (y > 0 or not it.y_log)]
    x_low, x_high = min(xs), max(xs)
    y_low = min(ys) if it.y_min is None else it.y_min
    y_high = max(ys) if it.y_max is None else it.y_max
    if y_high <= y_low:
        y_high = y_low + 1
    x_of = _scale(x_low, x_high, left, width - right, it.x_log)
    y_of = _scale(y_low, y_high, height - bottom, top, it.y_log)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(it.title)}">']
    if it.band:
        begin, end = (min(max(one, x_low), x_high) for one in it.band)
        parts.append(
            f'<rect class="band" x="{x_of(begin):.1f}" y="{top}" width="{x_of(end) - x_of(begin):.1f}" '
            f'height="{height - bottom - top}"/>'
        )
    for y in ticks(y_low, y_high, it.y_log, 5):
        at = y_of(y)
        parts.append(f'<path class="grid" d="M{left} {at:.1f}H{width - right}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(it.y_text(y))}</text>')
    count = 7 if width > 500 else 4
    for x in time_ticks(x_low, x_high, count) if it.x_log else ticks(x_low, x_high, False, count):
        at = x_of(x)
        parts.append(f'<path class="grid" d="M{at:.1f} {top}V{height - bottom}"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{height - bottom + 16}" text-anchor="{"end" if at > width - 30 else "middle"}">'
            f"{escape(it.x_text(x))}</text>"
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">{escape(it.x_title)}</text>'
    )
    for index, line in enumerate(it.lines):
        color = COLORS[index % len(COLORS)]
        drawn = [
            f"{x_of(x):.1f} {y_of(y):.1f}"
            for x, y in line.points
            if math.isfinite(y) and (y > 0 or not it.y_log) and y_low <= y <= y_high * (1 + 1e-9)
        ]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        if not drawn:
            continue
        parts.append(f'<path d="M{"L".join(drawn)}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
    for index, (name, x) in enumerate(it.marks):
        if x_low <= x <= x_high:
            at, side = x_of(x), "end" if x_of(x) > width * 0.6 else "start"
            shift = -5 if side == "end" else 5
            parts.append(f'<path class="mark" d="M{at:.1f} {top}V{height - bottom}"/>')
            y = height - bottom - 8 - 15 * index
            parts.append(f'<text x="{at + shift:.1f}" y="{y}" text-anchor="{side}">{escape(name)}</text>')
    return "".join(parts) + "</svg>"


def stacked(title: str, parts: Sequence[Part], *, total: float) -> str:
    """One bar, split; the texts stand below it, one to a line."""

    def draw(width: int) -> str:
        line_height, bar = 20, 34
        height = bar + 12 + line_height * len(parts)
        out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
        for index, part in enumerate(parts):
            color = COLORS[index % len(COLORS)]
            begin, end = part.begin / total * width, part.end / total * width
            out.append(
                f'<rect x="{begin:.1f}" y="0" width="{max(0.5, end - begin):.1f}" height="{bar}" fill="{color}"/>'
            )
            y = bar + 12 + line_height * index
            out.append(f'<rect x="0" y="{y}" width="11" height="11" fill="{color}"/>')
            out.append(f'<text x="18" y="{y + 10}">{escape(part.name)}: {escape(part.text)}</text>')
        return "".join(out) + "</svg>"

    return drawn_twice(draw)


def timeline(title: str, spans: Sequence[Part], *, end: float, text: Callable[[float], str]) -> str:
    """Spans of time, one to a line, from 0 to `end`."""

    def draw(width: int) -> str:
        line_height, top = 44, 4
        height = top + line_height * len(spans) + 24
        out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
        for index, span in enumerate(spans):
            y = top + line_height * index
            begin, stop = span.begin / end * (width - 8), span.end / end * (width - 8)
            out.append(f'<text x="0" y="{y + 12}">{escape(span.name)}: {escape(span.text)}</text>')
            out.append(f'<path class="grid" d="M0 {y + 26}H{width}"/>')
            out.append(
                f'<rect x="{begin:.1f}" y="{y + 18}" width="{max(2.0, stop - begin):.1f}" height="16" '
                f'fill="{COLORS[index % len(COLORS)]}"/>'
            )
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
            x = share * (width - 8)
            out.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="{anchor}">{escape(text(end * share))}</text>')
        return "".join(out) + "</svg>"

    return drawn_twice(draw)


def _scale(low: float, high: float, begin: float, end: float, log: bool) -> Callable[[float], float]:
    if log:
        low, high = math.log(low), math.log(max(high, low * (1 + 1e-9)))
        return lambda value: begin + (math.log(value) - low) / (high - low) * (end - begin)
    span = (high - low) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def ticks(low: float, high: float, log: bool, count: int) -> list[float]:
    """Round values within [low, high], about `count` of them; on a logarithmic axis at equal ratios."""
    if log:
        steps = math.log10(high / low)
        ratio = next(r for r in (2, 5, 10, 100, 1000, 10**6, 10**12) if steps / math.log10(r) <= count)
        first = math.ceil(math.log(low) / math.log(ratio) - 1e-9)
        last = math.floor(math.log(high) / math.log(ratio) + 1e-9)
        return [float(ratio**power) for power in range(first, last + 1)] or [low, high]
    raw = (high - low) / max(1, count - 1)
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


_ROUND_SECONDS = sorted(
    [base * 10**power for base in (1, 2, 5) for power in range(-6, 1)]
    + [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200]
    + [86400 * base * 10**power for base in (1, 2, 5) for power in range(6)]
)


def time_ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` durations within [low, high] that people call round, about evenly on a logarithmic axis."""
    there = [one for one in _ROUND_SECONDS if low <= one <= high]
    if len(there) <= count:
        return there or [low, high]
    step = math.log(high / low) / count
    chosen = [there[0]]
    for one in there[1:]:
        if math.log(one / chosen[-1]) >= step:
            chosen.append(one)
    return chosen
