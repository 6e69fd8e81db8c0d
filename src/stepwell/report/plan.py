"""A plan as a page: the answer, four drawings, the bill, the arithmetic."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from stepwell import __version__
from stepwell.plan import interval as intervals
from stepwell.plan.advise import recoveries, remedies
from stepwell.plan.bill import Plan
from stepwell.plan.tiers import KINDS, default_tier
from stepwell.plan.words import bill_facts, how, in_words, outcome_words, percent, title_of
from stepwell.report import page, svg
from stepwell.units import format_rate, format_seconds

if TYPE_CHECKING:
    from stepwell.plan.simulate import Outcome

POINTS = 160


def render(plan: Plan, outcome: Outcome | None = None) -> str:
    """The page as one string."""
    ledger, q = plan.ledger, plan.question
    sections = []
    if q.model.note:
        sections.append(f'<p class="soft">{escape(q.model.note)}</p>')
    if not plan.feasible:
        items = "".join(f"<li>{escape(remedy)}</li>" for remedy in remedies(plan))
        sections.append(
            f'<div class="bad"><p><b>Not feasible.</b> {escape(plan.chosen_because)}</p>'
            f"<p>What would make it feasible:</p><ul>{items}</ul></div>"
        )
    share, mean = percent(ledger["overhead_fraction"]), format_seconds(ledger["loss_seconds_mean"])
    often = format_seconds(ledger["mtbf_seconds"])
    rate, when = format_rate(ledger["demand_bytes_per_second"]), "in the mean" if q.asynchronous else "at the peak"
    sections.append(
        page.answers(
            [
                ("Save every", format_seconds(plan.interval_seconds), plan.chosen_because),
                ("A save blocks", format_seconds(ledger["blocked_seconds"]), f"{share} of the interval"),
                ("It is safe after", format_seconds(ledger["node_safe_seconds"]), "from the entry of save()"),
                ("Lost work, at most", format_seconds(ledger["loss_seconds_max"]), f"{mean} in the mean"),
                ("Useful time", percent(plan.waste.useful), f"a failure every {often}"),
                ("Storage must take", rate, when),
            ]
        )
    )
    if outcome is not None:
        sections.append(f'<p class="soft">Played: {outcome_words(outcome)}.</p>')
    sections += [
        page.section("Useful time against the interval", _goodput(plan),
                     "Shaded: as good as the best, to half a point. Left of it saves cost more, right of it failures."),
        page.section("Bandwidth against the interval", _bandwidth(plan),
                     "What the interval asks of the storage that makes a save node-safe, and what classes of storage "
                     "take by default."),
        page.section("Where the time goes", _split(plan)),
        page.section("One save on its way", _timeline(plan)),
        page.section("After a failure", _recoveries(plan)),
        page.section("The bill", page.table(["", ""], bill_facts(plan))),
    ]  # fmt: skip
    if ledger.notices:
        items = "".join(f"<li>{escape(notice.text)}</li>" for notice in ledger.notices)
        sections.append(page.section("Notes", f"<ul>{items}</ul>"))
    rows = [(figure.id, in_words(figure), how(figure)) for figure in ledger]
    sections.append(page.section("The arithmetic", page.table(["figure", "value", "how"], rows, how=2),
                                 "Each figure with its formula and the numbers in it (on a narrow screen: the values "
                                 "alone; turn it, or print)."))  # fmt: skip
    return page.page(
        title_of(plan),
        sections,
        f"stepwell {__version__} plan. Assumptions are there to be replaced by what you measure.",
    )


def _recoveries(plan: Plan) -> str:
    rows = []
    for one in recoveries(plan):
        if one.down_seconds is None or one.lost_seconds_max is None:
            rows.append((one.failure, "nowhere: the state is gone", "", ""))
        else:
            rows.append((one.failure, one.tier, format_seconds(one.down_seconds), format_seconds(one.lost_seconds_max)))
    return page.table(["loss of", "restored from", "down", "work lost at most"], rows)


def _range(plan: Plan) -> list[float]:
    """Intervals to draw, on a logarithmic scale around everything that matters."""
    cost = plan.ledger["save_cost_seconds"]
    matter = [plan.interval_seconds, plan.optimum_seconds, *plan.flat_seconds]
    low = max(cost * 1.5, min(one for one in matter if one > 0) / 5, 1e-3)
    high = max(max(matter) * 4, low * 10)
    return [low * (high / low) ** (index / (POINTS - 1)) for index in range(POINTS)]


def _goodput(plan: Plan) -> str:
    ledger = plan.ledger
    cost, mtbf = ledger["save_cost_seconds"], ledger["mtbf_seconds"]
    down = plan.down_seconds

    def useful(at: float, failures: float) -> float:
        return 100 * intervals.goodput_fraction(max(at - cost, 1e-9), cost, mtbf * failures, down)

    xs = _range(plan)
    figure = ledger.figures["mtbf_seconds"]
    bands = [("this failure rate", 1.0)]
    if figure.low is not None:
        bands += [("a third of the failures", 3.0), ("three times as many", 1 / 3)]
    lines = [svg.Line(name, [(x, useful(x, factor)) for x in xs], dashed=factor != 1.0) for name, factor in bands]
    best = max(y for line in lines for _, y in line.points)
    worst = min(useful(plan.optimum_seconds or xs[0], factor) for _, factor in bands)
    return svg.chart(
        svg.Chart(
            "Useful time against the interval", "interval", "useful", lines, format_seconds, lambda y: f"{y:.3g} %",
            x_log=True, band=plan.flat_seconds, marks=[("chosen", plan.interval_seconds)],
            y_min=max(0.0, worst - 4 * max(1.0, best - worst)), y_max=min(100.0, best + 0.2 * max(1.0, best - worst)),
        )
    )  # fmt: skip


def _bandwidth(plan: Plan) -> str:
    q, written = plan.question, plan.ledger["written_bytes"]
    xs = _range(plan)
    asked = [(x, written / x if q.asynchronous else written / (q.overhead_max * x)) for x in xs]
    lines = [svg.Line("asked", asked)]
    named = {tier.kind for tier in q.tiers}
    for tier in q.tiers:
        rate = plan.ledger[f"bytes_per_second{{write,{tier.name}}}"]
        lines.append(svg.Line(tier.name, [(xs[0], rate), (xs[-1], rate)]))
    for kind in KINDS:
        if kind not in named:
            rate = default_tier(kind, q.layout.nodes).write_rate(q.layout.nodes)
            lines.append(svg.Line(kind, [(xs[0], rate), (xs[-1], rate)], dashed=True))
    return svg.chart(
        svg.Chart(
            "Bandwidth against the interval", "interval", "bandwidth", lines, format_seconds, format_rate, x_log=True,
            y_log=True, marks=[("chosen", plan.interval_seconds)],
        )
    )  # fmt: skip


def _split(plan: Plan) -> str:
    waste, begin, parts = plan.waste, 0.0, []
    for name, share in (
        ("useful", waste.useful), ("work done again", waste.rework), ("down, and starting", waste.restart),
        ("saves", waste.save),
    ):  # fmt: skip
        parts.append(svg.Part(name, begin, begin + share, percent(share)))
        begin += share
    return svg.stacked("Where the time goes", parts, total=max(begin, 1e-9))


def _timeline(plan: Plan) -> str:
    ledger, q = plan.ledger, plan.question
    begin = ledger["blocked_seconds"] if q.asynchronous else 0.0
    spans = [
        svg.Part("the trainer is blocked", 0.0, ledger["blocked_seconds"], format_seconds(ledger["blocked_seconds"]))
    ]
    for tier in q.tiers:
        end = ledger[f"durable_seconds{{{tier.name}}}"]
        spans.append(svg.Part(f"written to {tier.name}", begin, end, f"durable after {format_seconds(end)}"))
        begin = end
    # Where the next save is far away, the way of this one is what is to be seen.
    end = max(begin, plan.interval_seconds) if plan.interval_seconds < 4 * begin else 1.2 * begin
    at = min(plan.interval_seconds, end)
    spans.append(svg.Part("the next save begins", at, at, f"after {format_seconds(plan.interval_seconds)}"))
    if not math.isfinite(end) or end <= 0:
        return ""
    return svg.timeline("One save on its way", spans, end=end, text=format_seconds)
