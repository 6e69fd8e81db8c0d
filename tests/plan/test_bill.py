"""The bill as a whole: bounds, feasibility, figures that can be worked out again, properties, solving, playing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import UsageError
from stepwell.plan import interval as intervals
from stepwell.plan.advise import choices, recoveries, remedies
from stepwell.plan.bill import Plan, Question, answer, with_storage_rate
from stepwell.plan.layout import Layout
from stepwell.plan.ledger import Ledger, evaluate
from stepwell.plan.models import from_count, from_text
from stepwell.plan.reduction import reductions
from stepwell.plan.simulate import Story, simulate, story_of
from stepwell.plan.solve import solve
from stepwell.plan.state import recipe_named, state_bytes
from stepwell.plan.tiers import default_tier, measured, parse_rate, tiers_named


def question(**more: Any) -> Question:
    layout = more.pop("layout", Layout(512))
    storage = more.pop("storage", "nvme+parallel")
    base = Question(
        from_text("llama3-70b"), recipe_named("adamw-bf16"), layout, tuple(tiers_named(storage, layout.nodes)),
        mtbf_seconds=3 * 3600.0,
    )  # fmt: skip
    return replace(base, **more)


# ---- figures


def test_every_computed_figure_can_be_worked_out_from_its_own_formula() -> None:
    plan = answer(question(rpo_seconds=600.0, preemption_notice_seconds=120.0, gpu_price_per_hour=2.0))
    computed = [figure for figure in plan.ledger if figure.formula]
    assert len(computed) > 30
    for figure in computed:
        assert evaluate(figure.formula, figure.inputs) == figure.value, figure.id
    for figure in plan.ledger:
        assert figure.unit and (figure.formula or figure.kind) and figure.value is not None, figure.id


def test_a_formula_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        Ledger().compute("x", "1", "nowhere + 1", "")


# ---- bounds


def test_the_optimum_is_taken_where_no_bound_is_in_the_way() -> None:
    plan = answer(question())
    cost = plan.ledger["save_cost_seconds"]
    assert plan.feasible and math.isclose(
        plan.interval_seconds, intervals.optimum_seconds(cost, 3 * 3600.0) + cost, rel_tol=1e-9
    )
    assert "optimum" in plan.chosen_because


def test_the_tolerated_loss_shortens_the_interval() -> None:
    plan = answer(question(rpo_seconds=90.0))
    assert plan.feasible and "tolerated" in plan.chosen_because
    assert plan.ledger["loss_seconds_max"] == pytest.approx(90.0)


def test_slow_storage_lengthens_it_and_more_slots_do_not_help() -> None:
    slow = question(storage="nfs")
    plan = answer(slow)
    low = max(plan.lower, key=lambda bound: bound.seconds)
    assert plan.interval_seconds == low.seconds and "nfs" in low.name
    assert answer(replace(slow, slots=8)).interval_seconds == plan.interval_seconds


def test_the_overhead_budget_is_kept() -> None:
    plan = answer(question(asynchronous=False, storage="parallel", overhead_max=0.01))
    assert plan.ledger["overhead_fraction"] <= 0.01 * (1 + 1e-9)


def test_what_is_infeasible_says_what_would_do_and_that_does() -> None:
    asked = question(storage="nfs", rpo_seconds=600.0)
    plan = answer(asked)
    assert not plan.feasible and plan.remedies
    needed = 2 * plan.ledger["written_bytes"] / 600.0
    assert "3.29 GB/s" in plan.remedies[0]
    assert answer(with_storage_rate(asked, needed * 1.02)).feasible
    assert not answer(with_storage_rate(asked, needed * 0.98)).feasible


def test_a_chosen_interval_is_judged_and_not_changed() -> None:
    plan = answer(question(storage="nfs", interval_seconds=60.0))
    assert plan.interval_seconds == 60.0 and not plan.feasible
    assert any("at least" in remedy for remedy in plan.remedies)


def test_fixed_sums_of_the_ground_truth() -> None:
    """P = 60 s with 2 slots and an interval of 30 s is not feasible; capacity and readers multiply as they should."""
    tier = replace(default_tier("parallel", 1), write_bytes_per_second=1e9, node_bytes_per_second=1e9,
                   ops_per_second=1e12, latency_seconds=0.0)  # fmt: skip
    plan = answer(
        Question(from_count("x", 60_000_000_000 // 14), recipe_named("adamw-bf16"), Layout(1), (tier,),
                 interval_seconds=30.0, mtbf_seconds=1e5)
    )  # fmt: skip
    assert plan.ledger["persist_seconds"] == pytest.approx(60.0, rel=1e-3) and not plan.feasible
    ddp = answer(question(layout=Layout(64, sharding="ddp"), tool="torch.save"))
    assert ddp.ledger["restart_read_bytes"] == 64 * ddp.ledger["state_bytes"]
    zero = answer(question(layout=Layout(64, sharding="zero1", tensor=8))).ledger
    assert zero["restart_read_bytes"] == zero["state_bytes"] + 7 * zero["weight_bytes"]
    hsdp = answer(question(layout=Layout(64, sharding="hsdp", replicas=4))).ledger
    assert hsdp["restart_read_bytes"] == 4 * hsdp["state_bytes"]


WARNED = [
    ({"layout": Layout(64, sharding="ddp"), "tool": "torch.save-every-rank"}, "replicas"),
    ({"layout": Layout(64, sharding="ddp"), "tool": "torch.save"}, "one-writer"),
    ({"storage": "nvme"}, "not-node-safe"),
    ({"mtbf_seconds": None}, "mtbf-assumed"),
    ({"storage": "nfs", "preemption_notice_seconds": 30.0}, "preemption"),
    ({"storage": "nfs", "asynchronous": False}, "collective-timeout"),
    ({"layout": Layout(8), "node_memory_bytes": 10**12}, "host-memory"),
    ({"interval_seconds": 30.0}, "endurance"),
    ({"mtbf_seconds": 60.0}, "goodput"),
    ({"layout": Layout(64, sharding="zero1", tensor=8), "tool": "deepspeed"}, "imbalance"),
]


@pytest.mark.parametrize(("more", "code"), WARNED, ids=[code for _, code in WARNED])
def test_warnings(more: dict[str, Any], code: str) -> None:
    assert code in {notice.code for notice in answer(question(**more)).ledger.notices}
    assert code not in {notice.code for notice in answer(question(interval_seconds=600.0)).ledger.notices}


def test_the_failure_rate_that_nobody_gave_has_a_band() -> None:
    figure = answer(question(mtbf_seconds=None)).ledger.figures["mtbf_seconds"]
    assert figure.value is not None and figure.low is not None and figure.high is not None
    assert figure.high / figure.value == pytest.approx(3) and figure.value / figure.low == pytest.approx(3)
    for more in ({"gpu_mtbf_seconds": 512 * 3 * 3600.0}, {"node_mtbf_seconds": 64 * 3 * 3600.0}):
        assert answer(question(mtbf_seconds=None, **more)).ledger["mtbf_seconds"] == pytest.approx(3 * 3600.0)


# ---- properties

sizes = st.integers(10**6, 10**12)
rates = st.floats(1e8, 1e12)


@settings(deadline=None, max_examples=60)
@given(sizes, rates, st.floats(600, 1e6), st.sampled_from([True, False]))
def test_more_bytes_or_less_bandwidth_never_make_it_better(
    count: int, rate: float, mtbf: float, asynchronous: bool
) -> None:
    def plan(count: int, rate: float, mtbf: float) -> Plan:
        base = question(layout=Layout(64), storage="parallel", model=from_count("x", count), mtbf_seconds=mtbf,
                        asynchronous=asynchronous)  # fmt: skip
        return answer(with_storage_rate(base, rate))

    now = plan(count, rate, mtbf)
    assert plan(count * 2, rate, mtbf).goodput_fraction <= now.goodput_fraction + 1e-9
    assert plan(count, rate / 2, mtbf).goodput_fraction <= now.goodput_fraction + 1e-9
    assert plan(count, rate, mtbf / 2).goodput_fraction <= now.goodput_fraction + 1e-9
    assert plan(count * 2, rate, mtbf).ledger["state_bytes"] > now.ledger["state_bytes"]


# ---- solving


def test_the_least_bandwidth_just_works() -> None:
    asked = question(storage="nfs", rpo_seconds=300.0)
    found = solve(asked, "bandwidth")
    assert found.value is not None and found.plan is not None and found.plan.feasible
    assert not answer(with_storage_rate(asked, found.value * 0.999)).feasible


def test_the_most_gpus_just_work() -> None:
    asked = question(storage="nfs", interval_seconds=1200.0, mtbf_seconds=None)
    found = solve(asked, "gpus")
    assert found.value is None or answer(replace(asked, layout=Layout(int(found.value)))).feasible


def test_the_least_loss_and_the_shortest_interval() -> None:
    asked = question(storage="nfs")
    shortest = solve(asked, "interval")
    assert shortest.value is not None and shortest.plan is not None and shortest.plan.feasible
    assert not answer(replace(asked, interval_seconds=shortest.value * 0.999)).feasible
    least = solve(asked, "rpo")
    assert least.value is not None and least.plan is not None and least.plan.feasible
    assert not answer(replace(asked, rpo_seconds=least.value * 0.999)).feasible


def test_what_cannot_be_solved() -> None:
    with pytest.raises(UsageError, match="any bandwidth"):
        solve(question(), "bandwidth")
    with pytest.raises(UsageError, match="solved"):
        solve(question(), "model")


# ---- playing


@pytest.mark.parametrize(
    ("save", "mtbf", "restart"), [(5, 11_135, 600), (60, 11_135, 600), (60, 86_400, 600), (300, 3000, 600)]
)
def test_the_closed_form_lies_within_what_is_played(save: float, mtbf: float, restart: float) -> None:
    best = intervals.optimum_seconds(save, mtbf)
    played = simulate(Story(best + save, save, mtbf, 0.0, save, save, restart, restart), seed=1, runs=256)
    exact = intervals.goodput_fraction(best, save, mtbf, restart)
    assert played.low - (played.high - played.low) / 2 <= exact <= played.high + (played.high - played.low) / 2


def test_a_lag_counts_as_lost_work() -> None:
    played = simulate(Story(660, 60, 11_135, 1.0, 60, 360, 600, 600), seed=2, runs=256)
    assert played.lost_seconds_max <= 600 + 360 + 1e-6
    expected = intervals.goodput_fraction(600, 60, 11_135, 900)
    assert abs(played.goodput_fraction - expected) < 2 * (played.high - played.low)


def test_a_hundred_thousand_gpus_are_played_as_planned() -> None:
    asked = question(layout=Layout(100_000), mtbf_seconds=None)
    plan = answer(asked)
    played = simulate(story_of(plan), seed=3)
    assert plan.ledger["mtbf_seconds"] < 3600 and played.failure_count >= 6400
    assert abs(played.goodput_fraction - plan.goodput_fraction) < 2 * (played.high - played.low)
    assert simulate(story_of(plan), seed=3) == played != simulate(story_of(plan), seed=4)


# ---- tiers


def test_advice_puts_what_survives_a_node_first_and_says_what_it_assumes() -> None:
    found = choices(question(rpo_seconds=600.0))
    assert found[0].storage not in ("nvme", "nfs")
    assert all("assumes" in choice.ceiling and (choice.reasons_for or choice.reasons_against) for choice in found)
    nvme = next(choice for choice in found if choice.storage == "nvme")
    assert any("node" in reason for reason in nvme.reasons_against)
    nfs = next(choice for choice in found if choice.storage == "nfs")
    assert not nfs.plan.feasible


def test_an_infeasible_plan_names_a_combination_that_would_do() -> None:
    found = remedies(answer(question(storage="nfs", rpo_seconds=600.0)))
    assert any(remedy.startswith("nvme+parallel (assumes") for remedy in found)
    assert remedies(answer(question())) == []


def test_who_copies_what_depends_on_the_tool() -> None:
    """With one writer the whole state comes from one GPU."""
    ddp = Layout(8, sharding="ddp")
    alone = answer(question(layout=ddp, tool="torch.save")).ledger
    shared = answer(question(layout=ddp)).ledger
    assert alone["blocked_seconds"] == pytest.approx(8 * shared["blocked_seconds"], rel=1e-6)


def test_the_two_kinds_of_demand_are_kept_apart() -> None:
    ledger = answer(question(overhead_max=0.05)).ledger
    mean, peak = ledger["demand_mean_bytes_per_second"], ledger["demand_synchronous_bytes_per_second"]
    assert peak == pytest.approx(20 * mean) and ledger["demand_bytes_per_second"] == mean


def test_raw_capacity() -> None:
    ledger = answer(question(redundancy=1.25)).ledger
    assert ledger["raw_capacity_bytes"] == pytest.approx(1.25 * ledger["capacity_bytes"])
    with pytest.raises(UsageError, match="redundancy"):
        answer(question(redundancy=0.5))


def test_recovery_for_each_kind_of_failure() -> None:
    found = recoveries(answer(question(storage="nvme+parallel+object")))
    assert [one.tier for one in found] == ["memory or nvme", "parallel", "object"]
    lost = [one.lost_seconds_max for one in found]
    assert lost == sorted(lost)  # type: ignore[type-var]
    assert recoveries(answer(question(storage="nvme")))[1].lost_seconds_max is None


def test_two_levels_are_in_the_bill() -> None:
    ledger = answer(question()).ledger
    assert ledger["two_level_far_every"] >= 1 and ledger["two_level_interval_seconds"] > 0
    assert "two_level_far_every" not in answer(question(storage="parallel")).ledger
    three = answer(question(storage="nvme+parallel+object")).ledger
    assert three["three_level_second_every"] >= 1 and three["three_level_third_every"] >= 1


def test_reductions_of_the_whole_state() -> None:
    state = state_bytes(from_count("x", 10**9), recipe_named("adamw-bf16"), rank_count=0)
    found = {one.name: one.fraction for one in reductions(state, weight_bytes_each=2, frozen_fraction=0.3)}
    assert found == pytest.approx(
        {"compression": 0.26, "derivation": 1 / 7, "both": 0.357, "references": 0.3}, abs=0.001
    )
    reduced = answer(question(reduction="both"))
    assert reduced.ledger["written_bytes"] == pytest.approx(
        reduced.ledger["state_bytes"] * (1 - found["both"]), rel=1e-3
    )
    with pytest.raises(UsageError, match="reduced"):
        answer(question(recipe=recipe_named("adamw-fp32"), reduction="derivation"))


def test_a_storage_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[tier]]\nkind = "parallel"\nname = "scratch"\nwrite = "12 GB/s"\nper_node = "2 GB/s"\nlatency = "2ms"\n'
        'capacity = "500 TB"\nprice_per_tb = 20\nprice_date = "2026-01"\ncurrency = "EUR"\n'
        '[[tier]]\nkind = "nvme"\nwrite = "3 GB/s"\n'
    )
    near, far = tiers_named(str(path), 4)
    assert (near.name, far.name) == ("nvme", "scratch") and near.write_bytes_per_second == 3e9
    assert far.write_rate(4) == 8e9 and far.latency_seconds == 0.002
    plan = answer(question(layout=Layout(32), tiers=(near, far)))
    figure = plan.ledger.figures["price_per_month{scratch}"]
    assert figure.unit == "EUR" and "2026-01" in figure.source


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "names no tier"), ("[[tier]]\nname = 'x'\n", "without a kind"), ("[[tier]]\nkind = 'nvm'\n", "nvme"),
        ("[[tier]]\nkind = 'nfs'\nwrit = '1 GB/s'\n", "write"), ("[[tier]]\nkind = 'nfs'\nwrite = 5\n", "rate"),
        ("[[tier]]\nkind = 'nfs'\nops_per_second = -1\n", "cannot be read"), ("no toml", "cannot be read"),
        ("[[tier]]\nkind = 'nfs'\nops_per_second = 0\n", "above zero"),
        ("[[tier]]\nkind = 'nfs'\n[[tier]]\nkind = 'nfs'\n", "twice"),
    ],
)  # fmt: skip
def test_storage_files_that_are_wrong(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=hint):
        tiers_named(str(path), 1)


def test_storage_by_the_names_that_people_use() -> None:
    assert [tier.kind for tier in tiers_named("s3+lustre+SSD", 1)] == ["nvme", "parallel", "object"]


@pytest.mark.parametrize(("text", "hint"), [("nvem", "nvme"), ("nvme+nvme", "twice"), ("", "no such storage")])
def test_storage_names_that_are_wrong(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        tiers_named(text, 1)
    with pytest.raises(UsageError, match="rate"):
        parse_rate("5 GB")


def bench_result(path: Path, **more: Any) -> Path:
    document = {
        "format": "stepwell.bench", "version": 1, "inputs": {"tier": "nfs"},
        "figures": [
            {"id": "bytes_per_second{write,sustained}", "value": 7e8},
            {"id": "bytes_per_second{write,burst}", "value": 3e9},
            {"id": "bytes_per_second{read,burst}", "value": 4e9},
            {"id": "metadata_ops_per_second", "value": 900.0},
        ],
        **more,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def test_what_was_measured_replaces_what_was_assumed(tmp_path: Path) -> None:
    path = bench_result(tmp_path / "bench.json")
    (tier,) = measured(tiers_named("nfs", 2), str(path))
    assert (tier.write_bytes_per_second, tier.read_bytes_per_second, tier.ops_per_second) == (7e8, 4e9, 900.0)
    assert tier.origin == "measured" and tier.source == str(path)
    plan = answer(question(layout=Layout(16), tiers=(tier,)))
    assert plan.ledger.figures["bytes_per_second{write,nfs}"].kind == "measured"


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({"format": "stepwell.plan"}, "not a benchmark"), ({"version": 9}, "not a benchmark"),
        ({"figures": []}, "nothing"), ({"inputs": None}, "cannot be read"), ({"figures": 3}, "cannot be read"),
    ],
)  # fmt: skip
def test_results_that_are_none(tmp_path: Path, more: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        measured(tiers_named("nfs", 2), str(bench_result(tmp_path / "bench.json", **more)))
    with pytest.raises(UsageError, match="which tier"):
        measured(tiers_named("nvme+parallel", 2), str(bench_result(tmp_path / "bench.json")))


@pytest.mark.parametrize(
    "more",
    [
        {"mtbf_seconds": -1.0}, {"overhead_max": 0.0}, {"overhead_max": 1.5}, {"rpo_seconds": 0.0},
        {"headroom_fraction": 1.0}, {"gpu_mtbf_seconds": 5.0}, {"tiers": ()}, {"interval_seconds": math.inf},
        {"reduction": "zip"},
    ],
    ids=lambda more: ",".join(more),
)  # fmt: skip
def test_questions_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        answer(question(**more))
