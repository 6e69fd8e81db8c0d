"""`stepwell plan`: from a model and a cluster to storage, interval and tiers, with the arithmetic."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepwell.cli._output import Column, Line, Row, console, json_option, print_facts, print_table
from stepwell.errors import UsageError
from stepwell.plan import bill, models
from stepwell.plan import layout as layouts
from stepwell.plan import solve as solving
from stepwell.plan import state as states
from stepwell.plan import tiers as storage
from stepwell.plan.advise import Recovery, recoveries, remedies
from stepwell.plan.words import answer_facts, bill_facts, how, in_words, outcome_words, percent, title_of
from stepwell.units import format_rate, format_seconds, parse_bytes, parse_seconds
from stepwell.vocabulary import document

if TYPE_CHECKING:
    from rich.console import Console

    from stepwell.plan.simulate import Outcome


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match:
        raise UsageError("not a share", expected="a percentage, as in 5%", found=repr(text))
    return float(match[1]) / 100


# What an option's text means, with the unit that users see in the help.
SECONDS: tuple[str, Callable[[str], Any]] = ("TIME", parse_seconds)
SIZE: tuple[str, Callable[[str], Any]] = ("SIZE", parse_bytes)
RATE: tuple[str, Callable[[str], Any]] = ("RATE", storage.parse_rate)
SHARE: tuple[str, Callable[[str], Any]] = ("PERCENT", _share)


def _measure(name: str, meaning: tuple[str, Callable[[str], Any]], **more: Any) -> Callable[[Any], Any]:
    """An option whose value has a unit."""
    metavar, parse = meaning

    def read(ctx: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        return None if text is None else parse(text)

    return click.option(name, metavar=metavar, callback=read, show_default="default" in more, **more)


@click.command("plan")
@click.option(
    "--model",
    "model_text",
    metavar="MODEL",
    help="A preset (llama3-70b), a count (13.5B), a config.json or its folder.",
)
@click.option("--checkpoint", type=click.Path(), help="Size an existing checkpoint instead: a file, a folder, a run.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="Ranks of the job.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option("--layout", "sharding", default="fsdp", show_default=True, help="ddp, zero1, zero2, zero3, fsdp or hsdp.")
@click.option("--tp", type=click.IntRange(1), default=1, help="Tensor parallel degree.")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline parallel degree.")
@click.option("--ep", type=click.IntRange(1), default=1, help="Expert parallel degree.")
@click.option("--cp", type=click.IntRange(1), default=1, help="Context parallel degree.")
@click.option("--replicas", type=click.IntRange(1), default=1, help="With hsdp: groups that each hold the whole state.")
@click.option("--optimizer", default="adamw-bf16", show_default=True, help="Precision and optimizer, as in adamw-fp32.")
@click.option("--ema", type=click.Choice(["fp32", "bf16"]), help="A moving average of the weights is kept too.")
@click.option(
    "--lora", type=click.IntRange(1), metavar="RANK", help="Only adapters of this rank on q and v are trained."
)
@click.option("--tool", default="stepwell", show_default=True, help="Whose files: " + ", ".join(layouts.TOOLS) + ".")
@click.option(
    "--storage",
    "storage_text",
    default="nvme+parallel",
    show_default=True,
    help="Tiers, as in nvme+parallel+object, or a TOML file.",
)
@click.option("--measured", type=click.Path(), help="What `stepwell bench --json` found replaces assumptions.")
@_measure("--mtbf", SECONDS, help="Mean time between failures of the whole job, as in 3h.")
@_measure("--mtbf-gpu", SECONDS, help="... of one GPU.")
@_measure("--mtbf-node", SECONDS, help="... of one node.")
@_measure("--node-failures", SHARE, default="50%", help="Share of failures that lose a node.")
@_measure("--restart", SECONDS, default="10m", help="Detect, reschedule and start, without reading.")
@_measure("--rpo", SECONDS, help="The most work that a failure may take, as in 10m.")
@_measure("--overhead-max", SHARE, default="5%", help="The most that blocked / interval may be.")
@_measure("--interval", SECONDS, help="Judge this interval instead of finding one.")
@click.option("--sync", is_flag=True, help="The trainer waits until tier 0 has the save.")
@click.option("--slots", type=click.IntRange(1), default=2, show_default=True)
@_measure("--copy-rate", RATE, default="10 GB/s", help="Each GPU's copy into host memory.")
@_measure("--slowdown", SHARE, default="1%", help="Steps are slower while a save is written.")
@_measure("--node-memory", SIZE, default="1 TB")
@_measure("--notice", SECONDS, help="The scheduler's notice before it kills, as in 2m.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Jobs like this one that share the storage.")
@click.option("--keep", type=click.IntRange(1), default=3, show_default=True, help="Steps kept along the way.")
@click.option("--milestones", type=click.IntRange(0), default=0, help="Steps kept for good.")
@click.option("--redundancy", type=float, default=1.0, help="Raw over usable bytes, as in 1.25 for 8+2 coding.")
@_measure("--headroom", SHARE, default="20%", help="Of the capacity that stays free.")
@click.option("--gpu-price", type=click.FloatRange(0), default=0.0, help="Per GPU and hour: what waiting costs.")
@click.option(
    "--reduction",
    type=click.Choice(["none", "compression", "derivation", "both"]),
    default="none",
    show_default=True,
    help="Write fewer bytes; honest rates, see --explain.",
)
@click.option("--advise", "advised", is_flag=True, help="Compare combinations of tiers, with reasons for and against.")
@click.option("--sweep", metavar="interval=A..B", help="A table of intervals, as in interval=5m..60m.")
@click.option("--folk", is_flag=True, help="Figures that are passed around, beside the right ones.")
@click.option("--solve", "unknown", type=click.Choice(solving.UNKNOWNS), help="Find the one unknown from the rest.")
@click.option(
    "--simulate", "simulated", is_flag=True, help="Play failures and give goodput with its confidence interval."
)
@click.option("--seed", type=int, default=0, help="For --simulate.")
@click.option("--explain", is_flag=True, help="Every figure with its formula and the numbers in it.")
@click.option("--html", type=click.Path(), help="Also write a page with drawings, one file.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    as_json: bool,
    explain: bool,
    unknown: str | None,
    simulated: bool,
    seed: int,
    **given: Any,
) -> None:
    """Work out storage, interval and tiers for a model and a cluster.

    The answer first: how often to save, what it blocks, when it is safe, what a failure takes, what dominates. Then the
    bill. Exit code 1 when no interval satisfies all bounds, with what would.

    \b
    stepwell plan --model llama3-70b --gpus 512 --optimizer adamw-bf16 --mtbf 3h --rpo 10m
    stepwell plan --model llama3-70b --gpus 512 --rpo 5m --solve bandwidth
    """
    if given["folk"]:
        _print_folk(console(), as_json=as_json)
        return
    question = question_of(given)
    if given["advised"] or given["sweep"]:
        _print_many(console(), question, given, as_json=as_json)
        return
    solution = solving.solve(question, unknown) if unknown else None
    plan = solution.plan if solution is not None and solution.plan is not None else bill.answer(question)
    outcome = None
    if simulated:
        from stepwell.plan.simulate import simulate, story_of

        outcome = simulate(story_of(plan), seed=seed)
    if given["html"]:
        from stepwell.report.plan import render

        with open(given["html"], "w", encoding="utf-8") as file:
            file.write(render(plan, outcome))
    if as_json:
        _print_json(plan, solution, outcome, given)
    else:
        _print(console(), plan, solution, outcome, explain=explain)
    ctx.exit(0 if plan.feasible and (solution is None or solution.value is not None) else 1)


def question_of(given: dict[str, Any]) -> bill.Question:
    """The question that the options ask. Raises `UsageError` for what makes no sense."""
    if bool(given["model_text"]) == bool(given["checkpoint"]):
        raise UsageError(
            "a plan needs a model or a checkpoint" + (", not both" if given["checkpoint"] else ""),
            expected="--model llama3-70b, --model 13.5B, --model path/config.json or --checkpoint path",
        )
    checkpoint = None
    if given["checkpoint"]:
        from stepwell.plan.inspect import inspect

        checkpoint = inspect(given["checkpoint"])
        model = models.from_count(checkpoint.path, checkpoint.parameter_count)
    else:
        model = models.from_text(given["model_text"])
    layout = layouts.Layout(
        given["gpus"], given["gpus_per_node"], given["sharding"], given["tp"], given["pp"], given["ep"], given["cp"],
        given["replicas"],
    )  # fmt: skip
    chain = storage.tiers_named(given["storage_text"], layout.nodes)
    if given["measured"]:
        chain = storage.measured(chain, given["measured"])
    return bill.Question(
        model=model,
        recipe=states.recipe_named(given["optimizer"]),
        layout=layout,
        tiers=tuple(chain),
        tool=given["tool"],
        mtbf_seconds=given["mtbf"],
        gpu_mtbf_seconds=given["mtbf_gpu"],
        node_mtbf_seconds=given["mtbf_node"],
        node_failure_fraction=given["node_failures"],
        restart_seconds=given["restart"],
        rpo_seconds=given["rpo"],
        overhead_max=given["overhead_max"],
        interval_seconds=given["interval"],
        asynchronous=not given["sync"],
        slots=given["slots"],
        copy_bytes_per_second=given["copy_rate"],
        slowdown_fraction=given["slowdown"],
        node_memory_bytes=given["node_memory"],
        preemption_notice_seconds=given["notice"],
        job_count=given["jobs"],
        keep=given["keep"],
        milestones=given["milestones"],
        headroom_fraction=given["headroom"],
        redundancy=given["redundancy"],
        reduction=given["reduction"],
        ema_bytes={"fp32": 4, "bf16": 2, None: 0}[given["ema"]],
        lora=states.Lora(given["lora"]) if given["lora"] else None,
        gpu_price_per_hour=given["gpu_price"],
        checkpoint=checkpoint,
    )


def _print(out: Console, plan: bill.Plan, solution: Any, outcome: Outcome | None, *, explain: bool) -> None:
    q, ledger = plan.question, plan.ledger
    out.print(title_of(plan), style="bold")
    if q.model.note:
        out.print(f"  {q.model.note}")
    if solution is not None:
        out.print(f"  {solution.unknown}: {_solved(solution)} ({solution.words})", style="bold green")
    if not plan.feasible:
        out.print("  NOT FEASIBLE: " + plan.chosen_because, style="bold red")
        for remedy in remedies(plan):
            out.print(f"    would do: {remedy}")
    played = [("played", outcome_words(outcome))] if outcome else []
    print_facts(out, [*answer_facts(plan), *played])
    out.print("The bill", style="bold")
    print_facts(out, bill_facts(plan))
    for notice in ledger.notices:
        out.print(f"note: {notice.text}", style="yellow")
    if explain:
        out.print("The arithmetic", style="bold")
        print_table(out, (Column("figure"), Column("value", right=True), Column("how")),
                    [Row((figure.id, in_words(figure), how(figure))) for figure in ledger])  # fmt: skip
    else:
        out.print("--explain shows every formula with its numbers.", style="dim")


def _solved(solution: Any) -> str:
    if solution.value is None:
        return "none"
    if solution.unit == "B/s":
        return format_rate(solution.value)
    return format_seconds(solution.value) if solution.unit == "s" else f"{solution.value:,.0f}"


def _print_json(plan: bill.Plan, solution: Any, outcome: Outcome | None, given: dict[str, Any]) -> None:
    answer: dict[str, Any] = {
        "feasible": plan.feasible,
        "interval_seconds": plan.interval_seconds,
        "optimum_seconds": plan.optimum_seconds,
        "chosen_because": plan.chosen_because,
        "flat_seconds": list(plan.flat_seconds),
        "lower_bounds": [{"name": b.name, "seconds": b.seconds} for b in plan.lower],
        "upper_bounds": [{"name": b.name, "seconds": b.seconds} for b in plan.upper],
        "remedies": remedies(plan),
        "waste": msgspec.to_builtins(plan.waste),
        "sensitivity": plan.sensitivity,
        "files": msgspec.to_builtins(plan.files),
    }  # fmt: skip
    if solution is not None:
        answer["solved"] = {"unknown": solution.unknown, "value": solution.value, "unit": solution.unit}
    if outcome is not None:
        answer["simulated"] = msgspec.to_builtins(outcome)
    _write(
        document("plan", inputs=_said(given), answer=answer, figures=list(plan.ledger), warnings=plan.ledger.notices)
    )


def _print_many(out: Console, question: bill.Question, given: dict[str, Any], *, as_json: bool) -> None:
    """Several plans side by side: intervals (--sweep) or combinations of tiers (--advise)."""
    if given["sweep"]:
        plans = [
            (format_seconds(at), bill.answer(replace(question, interval_seconds=at))) for at in _swept(given["sweep"])
        ]
        choices: list[Any] = []
    else:
        from stepwell.plan.advise import choices as choices_of

        choices = choices_of(question)
        plans = [(choice.storage, choice.plan) for choice in choices]
    if as_json:
        rows = [
            {
                "name": name,
                "feasible": plan.feasible,
                "interval_seconds": plan.interval_seconds,
                "goodput_fraction": plan.goodput_fraction,
                "overhead_fraction": plan.ledger["overhead_fraction"],
                "loss_seconds_max": plan.ledger["loss_seconds_max"],
                "demand_bytes_per_second": plan.ledger["demand_bytes_per_second"],
            }
            for name, plan in plans
        ]
        for row, choice in zip(rows, choices, strict=False):
            row |= {"ceiling": choice.ceiling, "for": list(choice.reasons_for), "against": list(choice.reasons_against)}
        _write(document("plan", inputs=_said(given), answer={"plans": rows}, figures=[], warnings=[]))
        return
    out.print(title_of(plans[0][1]).rsplit(" · ", 2)[0] if choices else title_of(plans[0][1]), style="bold")
    rows_shown: list[Row | Line] = []
    for index, (name, plan) in enumerate(plans):
        ledger = plan.ledger
        cells = (
            name,
            format_seconds(plan.interval_seconds),
            percent(plan.goodput_fraction),
            format_seconds(ledger["blocked_seconds"]),
            format_seconds(ledger["node_safe_seconds"]),
            format_seconds(ledger["loss_seconds_max"]),
            format_rate(ledger["demand_bytes_per_second"]),
            "yes" if plan.feasible else "NO",
        )
        rows_shown.append(Row(cells, "" if plan.feasible else "red"))
        if choices:
            choice = choices[index]
            rows_shown += [Line(f"    + {reason}", "green") for reason in choice.reasons_for]
            rows_shown += [Line(f"    - {reason}", "yellow") for reason in choice.reasons_against]
            rows_shown.append(Line(f"    {choice.ceiling}", "dim"))
            if index == 0:
                rows_shown += [Line(f"    {_recovered(one)}") for one in recoveries(plan)]
    titles = (
        "storage" if choices else "at",
        "save every",
        "useful",
        "blocks",
        "safe after",
        "lost at most",
        "asks for",
        "feasible",
    )
    print_table(out, [Column(title, right=0 < place < 7) for place, title in enumerate(titles)], rows_shown)


def _recovered(one: Recovery) -> str:
    if one.down_seconds is None or one.lost_seconds_max is None:
        return f"after the loss of {one.failure}: the state is gone"
    down, lost = format_seconds(one.down_seconds), format_seconds(one.lost_seconds_max)
    return f"after the loss of {one.failure}: from {one.tier}, down {down}, at most {lost} of work lost"


def _swept(text: str) -> list[float]:
    match = re.fullmatch(r"interval=(.+?)\.\.(.+)", text)
    if not match:
        raise UsageError("not a sweep", expected="as in interval=5m..60m", found=repr(text))
    low, high = parse_seconds(match[1]), parse_seconds(match[2])
    if not 0 < low < high:
        raise UsageError("a sweep goes from a shorter to a longer interval", found=repr(text))
    return [low * (high / low) ** (index / 11) for index in range(12)]


def _print_folk(out: Console, *, as_json: bool) -> None:
    from stepwell.plan.folk import CLAIMS

    if as_json:
        claims = [{"said": claim.said, "right": claim.right(), "why": claim.why} for claim in CLAIMS]
        _write(document("plan", inputs={"folk": True}, answer={"claims": claims}, figures=[], warnings=[]))
        return
    for claim in CLAIMS:
        out.print(f"“{claim.said}”", style="bold")
        print_facts(out, [("right", claim.right()), ("why", claim.why)])


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None and value is not False}


def _write(made: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n")
