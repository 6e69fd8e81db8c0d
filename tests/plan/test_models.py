"""Parameter counts against those that are published, and bytes per parameter against the ground truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.errors import UsageError
from stepwell.plan import models
from stepwell.plan.layout import Layout, files, metadata_seconds, mlperf_bytes
from stepwell.plan.state import RECIPES, Lora, bytes_per_parameter, recipe_named, state_bytes

SEVENTY = models.from_text("70b")
# As the makers' checkpoints have them (elements of all tensors, tied ones once).
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "bloom-176b": 176_247_271_424, "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704, "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648, "qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "gemma2-9b": 9_241_705_984, "deepseek-v3": 671_026_419_200,
    "mlperf-8b": 8_030_261_248, "mlperf-70b": 69_882_617_856, "mlperf-405b": 405_853_388_800,
}  # fmt: skip


@pytest.mark.parametrize("name", models.PRESETS)
def test_published_counts(name: str) -> None:
    assert models.from_text(name).parameter_count == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3-70b", "mlperf-70b", "mistral-7b"])
def test_the_formula_for_untied_bias_free_gated_models(name: str) -> None:
    c = models.PRESETS[name]
    v, h, f, layers = c["vocab_size"], c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    dkv = h // c["num_attention_heads"] * c["num_key_value_heads"]
    assert models.from_text(name).parameter_count == 2 * v * h + h + layers * (
        2 * h + h * (h + 2 * dkv) + h * h + 3 * h * f
    )


BYTES = {
    "adamw-fp32": 12, "sgd-fp32": 8, "adamw-bf16": 14, "adamw-bf16-derived": 12, "adamw-bf16-nomaster": 10,
    "adamw-bf16-pure": 6, "adamw-fsdp": 12, "adamw-8bit": 4.03125, "adamw-8bit-master": 8.03125,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes_for_each_parameter(name: str) -> None:
    model = models.from_text("llama3-8b")
    assert bytes_per_parameter(RECIPES[name], model) == pytest.approx(BYTES[name], abs=1e-9)


def test_adafactor_keeps_rows_and_columns() -> None:
    model = models.from_groups(
        "two", [models.Group("m", 1, 100, 300, "hidden"), models.Group("v", 1, 1, 50, "vector")], 1, 100, ""
    )
    found = state_bytes(model, recipe_named("adafactor-bf16"), rank_count=0)
    assert found.weights == 2 * 30_050 and found.moments == 4 * (100 + 300) + 4 * 50


def test_muon_has_one_momentum_for_hidden_matrices_and_two_for_the_rest() -> None:
    groups = [
        models.Group("m", 2, 10, 10, "hidden"),
        models.Group("e", 1, 50, 10, "embedding"),
        models.Group("v", 1, 1, 10, "vector"),
    ]
    found = state_bytes(models.from_groups("mix", groups, 1, 10, ""), recipe_named("muon-fp32"), rank_count=0)
    assert found.moments == 4 * 200 + 8 * 510


def test_adapters() -> None:
    full = models.from_config(
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32}, "7b", "test",
    )  # fmt: skip
    adapter = state_bytes(full, recipe_named("adamw-fp32"), lora=Lora(16), rank_count=0)
    assert adapter.trained_count == 8_388_608 and round(adapter.total / 1e6, 1) == 100.7
    grouped = state_bytes(models.from_text("llama3-8b"), recipe_named("adamw-fp32"), lora=Lora(16), rank_count=0)
    assert grouped.trained_count == 6_815_744


def test_moving_averages_generators_and_loaders_count() -> None:
    model = models.from_count("1k", 1000)
    assert state_bytes(model, recipe_named("adamw-bf16"), ema_bytes=4, rank_count=0).total == 18_000
    assert state_bytes(model, recipe_named("adamw-bf16"), ema_bytes=2, rank_count=0).total == 16_000
    assert state_bytes(model, recipe_named("adamw-bf16"), rank_count=4, loader_bytes_per_rank=1000).host == 4 * 17_000


# ---- MLPerf Storage and DeepSpeed

MLPERF = [
    ("mlperf-8b", Layout(8, sharding="zero3"), 14.96, 89.75, 105, 16),
    ("mlperf-70b", Layout(64, sharding="zero3", tensor=8), 130.17, 781.03, 912, 128),
    ("mlperf-405b", Layout(512, sharding="zero1", tensor=8, pipeline=32), 755.96, 4536.23, 5290, 1544),
]


@pytest.mark.parametrize(("name", "layout", "model_gib", "optimizer_gib", "published_gib", "count"), MLPERF)
def test_mlperf_storage(
    name: str, layout: Layout, model_gib: float, optimizer_gib: float, published_gib: int, count: int
) -> None:
    model = models.from_text(name)
    weights, optimizer = mlperf_bytes(model, layout.gpus)
    assert round(weights / 2**30, 2) == model_gib and round(optimizer / 2**30, 2) == optimizer_gib
    assert (weights + optimizer) / 2**30 == pytest.approx(published_gib, rel=0.005)
    state = state_bytes(model, recipe_named("adamw-bf16"))
    assert files("deepspeed", layout, model, state).file_count == count


def test_which_seventy_billion() -> None:
    nominal, real, mlperf = (models.from_text(one) for one in ("70b", "llama3-70b", "mlperf-70b"))
    recipe = recipe_named("adamw-bf16")
    sizes = [round(state_bytes(one, recipe, rank_count=0).total / 1e9) for one in (nominal, mlperf, real)]
    assert sizes == [980, 978, 988]
    assert "llama3-70b" in nominal.note and "nominal" in nominal.note


def test_bloom() -> None:
    bloom = models.from_text("bloom-176b")
    weights = state_bytes(bloom, recipe_named("weights-bf16"), rank_count=0).total
    full = state_bytes(bloom, recipe_named("adamw-bf16"), rank_count=0).total
    assert (round(weights / 1e9, 1), round(weights / 2**30, 1)) == (352.5, 328.3)
    assert (round(full / 1e12, 2), round(full / 2**40, 2)) == (2.47, 2.24)


# ---- files

FILE_COUNTS = [
    ("torch.save", Layout(64, sharding="ddp"), 1, 1),
    ("deepspeed", Layout(64, sharding="zero2", tensor=4), 4 + 64, 64),
    ("deepspeed", Layout(16, sharding="zero3"), 32, 16),
    ("dcp", Layout(1024), 1025, 1024),
    ("megatron", Layout(64, tensor=8), 64 * 2 + 3, 64),
    ("stepwell", Layout(512), 64 + 2, 64),
]


@pytest.mark.parametrize(("tool", "layout", "count", "writers"), FILE_COUNTS)
def test_files_and_writers(tool: str, layout: Layout, count: int, writers: int) -> None:
    model = models.from_text("llama3-8b")
    state = state_bytes(model, recipe_named("adamw-bf16"), rank_count=layout.gpus)
    found = files(tool, layout, model, state)
    assert (found.file_count, found.writer_count) == (count, writers)
    assert found.written_bytes == state.total and found.replicated == 1


def test_a_published_deepspeed_listing() -> None:
    """EleutherAI/gpt-neox, issue 750: Pythia-410M on 8 GPUs with ZeRO-1, sizes in bytes as listed there."""
    model = models.from_config(
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096,
         "num_hidden_layers": 24, "num_attention_heads": 16}, "pythia-410m", "published hyperparameters",
    )  # fmt: skip
    assert model.parameter_count == 405_334_016
    state = state_bytes(model, recipe_named("adamw-bf16"), rank_count=0)
    found = files("deepspeed", Layout(8, sharding="zero1"), model, state)
    assert found.file_count == 1 + 8
    assert state.weights == pytest.approx(810_771_646, rel=0.01)
    assert (state.master + state.moments) / 8 == pytest.approx(608_007_000, rel=0.01)
    assert found.writer_bytes_max == pytest.approx(810_771_646 + 608_006_863, rel=0.01)


LISTED = [
    # deepspeedai/DeepSpeed, issue 7388: ZeRO-1 on 8 GPUs; InternLM/xtuner, issue 746: ZeRO-3 on 32.
    ("deepspeed", Layout(8, sharding="zero1"), 8 + 1),
    ("deepspeed", Layout(32, sharding="zero3"), 32 + 32),
    # NVIDIA-NeMo/Megatron-Bridge, issue 335: two `.distcp` for each rank, common.pt, metadata.json and .metadata.
    ("megatron", Layout(1), 2 + 3),
    ("megatron", Layout(18), 36 + 3),
]


@pytest.mark.parametrize(("tool", "layout", "count"), LISTED)
def test_published_listings(tool: str, layout: Layout, count: int) -> None:
    model = models.from_text("llama3-8b")
    assert files(tool, layout, model, state_bytes(model, recipe_named("adamw-bf16"))).file_count == count


def test_dcp_operations() -> None:
    model = models.from_text("llama3-8b")
    state = state_bytes(model, recipe_named("adamw-bf16"))
    found = files("dcp", Layout(1024), model, state, threads=2)
    assert found.file_count == 2049 and found.metadata_op_count == 3 * 1024 + 3 * 2049 + 5
    assert metadata_seconds(65_536 * 5, 5_000, 1, 0.0) == pytest.approx(65.536)
    assert metadata_seconds(10, 5_000, 100, 0.01) == pytest.approx(1.0)


def test_replicas_that_every_rank_writes_are_counted() -> None:
    model = models.from_text("llama3-8b")
    state = state_bytes(model, recipe_named("adamw-bf16"))
    found = files("torch.save-every-rank", Layout(8, sharding="ddp"), model, state)
    assert found.replicated == 8 and found.written_bytes == 8 * state.total


# ---- what users get wrong


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda: models.from_text("lama3-70b"), "llama3-70b"),
        (lambda: models.from_text("-3b"), "no such model|makes no sense"),
        (lambda: models.from_text("0"), "makes no sense"),
        (lambda: models.from_text("nan"), "makes no sense"),
        (lambda: recipe_named("adamw-bf61"), "adamw-bf16"),
        (lambda: Layout(64, tensor=3), "TP × PP × CP"),
        (lambda: Layout(64, expert=5), "EP"),
        (lambda: Layout(64, sharding="fdsp"), "fsdp"),
        (lambda: Layout(64, sharding="hsdp", replicas=3), "divisor"),
        (lambda: Layout(64, sharding="ddp", replicas=2), "hsdp"),
        (lambda: Layout(0), "1 or more"),
        (lambda: state_bytes(models.from_text("70b"), recipe_named("muon-bf16")), "shapes"),
        (lambda: files("dpc", Layout(8), SEVENTY, state_bytes(SEVENTY, recipe_named("adamw-bf16"))), "dcp"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_what_is_right(wrong: object, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "not a readable"), ("[]", "a JSON object"), ("{}", "no such kind"), ('{"model_type": "lama"}', "llama"),
        ('{"model_type": "llama", "hidden_size": 10}', "incomplete"),
        ('{"model_type": "llama", "hidden_size": "x", "vocab_size": 1}', "makes no sense"),
        ('{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}', "do not go together"),
    ],
)  # fmt: skip
def test_configurations_that_are_none(tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=hint) as caught:
        models.from_text(str(tmp_path))
    assert "config.json" in str(caught.value)


def test_a_configuration_by_file_and_by_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**models.PRESETS["qwen2.5-0.5b"], "torch_dtype": "bfloat16"}))
    for given in (tmp_path, tmp_path / "config.json"):
        assert models.from_text(str(given)).parameter_count == PUBLISHED["qwen2.5-0.5b"]


def test_hyperparameters_as_they_are(tmp_path: Path) -> None:
    model = models.from_text(json.dumps(models.PRESETS["llama3-8b"]))
    assert model.parameter_count == PUBLISHED["llama3-8b"]
    with pytest.raises(UsageError, match="not a readable"):
        models.from_text('{"model_type": ')
