"""What a model consists of: its parameters as groups of equal matrices, from hyperparameters, a configuration, a name.

A group keeps shapes, since some optimizers' states depend on them. Counts are of all parameters (of a mixture of
experts all experts, not the active ones); tied weights count once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stepwell.errors import UsageError
from stepwell.plan.spelling import misspelt

Role = Literal["embedding", "head", "hidden", "vector"]


@dataclass(frozen=True)
class Group:
    """`count` parameters of the same shape, `rows` × `columns`; a vector has one row."""

    name: str
    count: int
    rows: int
    columns: int
    role: Role

    @property
    def parameter_count(self) -> int:
        return self.count * self.rows * self.columns


@dataclass(frozen=True)
class Model:
    """A model by its shapes, or by its parameter count alone (`groups` is empty then).

    `layer_count` is 0 when unknown. `source` says where the numbers come from, `note` which of several models of
    that name is meant.
    """

    name: str
    parameter_count: int
    groups: tuple[Group, ...] = ()
    layer_count: int = 0
    hidden: int = 0
    source: str = ""
    note: str = ""

    @property
    def tensor_count(self) -> int:
        """Parameters as tensors; one for each 10 million parameters, as a guess, where the shapes are unknown."""
        return sum(group.count for group in self.groups) or max(1, self.parameter_count // 10_000_000)


def from_count(name: str, parameter_count: int, note: str = "") -> Model:
    return Model(name, parameter_count, source="the count you gave", note=note)


def from_groups(name: str, groups: list[Group], layer_count: int, hidden: int, source: str, note: str = "") -> Model:
    kept = tuple(group for group in groups if group.parameter_count)
    return Model(name, sum(group.parameter_count for group in kept), kept, layer_count, hidden, source, note)


@dataclass(frozen=True)
class Decoder:
    """The hyperparameters of a decoder-only transformer, enough to count its parameters.

    Attributes:
        gated: a feed-forward of three matrices (SwiGLU and its kind) instead of two.
        qkv_bias, out_bias, mlp_bias, norm_bias: which parts have biases.
        norms_per_layer: vectors of `hidden` in each layer; `qk_norm`: two more of the head's size.
        positions: rows of a learned position table; embedding_norm: a norm after the embeddings.
        experts: routed experts in each sparse layer; 0 is a dense model. `expert_ffn` is the width of one.
        shared_ffn: the width of what all tokens use beside the experts; `shared_gate`: one more vector for it.
        dense_layers: layers at the start that stay dense, of width `ffn`.
        q_rank, kv_rank, rope_dim, nope_dim, value_dim: multi-head latent attention, when `kv_rank` is not 0.
        predicted_layers: extra layers that predict further tokens (DeepSeek's MTP), each with two norms, a projection
            of 2·hidden × hidden, and an embedding and a head stored once more.
    """

    vocabulary: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    positions: int = 0
    embedding_norm: bool = False
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    predicted_layers: int = 0

    def groups(self) -> list[Group]:
        """All parameters. For an untied, bias-free, gated model with `dkv = head_dim · kv_heads` they come to
        2Vh + h + L·(2h + h(h + 2dkv) + h² + 3hf)."""
        h, layers = self.hidden, self.layers
        found = [Group("embedding", 1, self.vocabulary, h, "embedding")]
        if self.positions:
            found.append(Group("positions", 1, self.positions, h, "embedding"))
        if not self.tied:
            found.append(Group("head", 1, self.vocabulary, h, "head"))
        if self.head_bias:
            found.append(Group("head bias", 1, 1, self.vocabulary, "vector"))
        found += self._layers("", layers, sparse=max(0, layers - self.dense_layers) if self.experts else 0)
        found.append(self._norm("final norm", 1))
        if self.embedding_norm:
            found.append(self._norm("embedding norm", 1))
        if self.predicted_layers:
            extra = self.predicted_layers
            found += self._layers("predicted ", extra, sparse=extra if self.experts else 0)
            found += [
                Group("predicted projection", extra, h, 2 * h, "hidden"),
                Group("predicted embedding", extra, self.vocabulary, h, "embedding"),
                Group("predicted head", extra, self.vocabulary, h, "head"),
                self._norm("predicted norms", 3 * extra),
            ]
        return found

    def _layers(self, prefix: str, layers: int, *, sparse: int) -> list[Group]:
        found = self._attention(layers)
        dense = layers - sparse
        if dense:
            found += self._feed_forward("feed-forward", dense, self.ffn)
        if sparse:
            found.append(Group("router", sparse, self.experts, self.hidden, "hidden"))
            if self.router_bias:
                found.append(Group("router bias", sparse, 1, self.experts, "vector"))
            found += self._feed_forward("expert", sparse * self.experts, self.expert_ffn)
            if self.shared_ffn:
                found += self._feed_forward("shared expert", sparse, self.shared_ffn)
            if self.shared_gate:
                found.append(Group("shared gate", sparse, 1, self.hidden, "vector"))
        found.append(self._norm("norms", layers * self.norms_per_layer))
        return [Group(prefix + g.name, g.count, g.rows, g.columns, g.role) for g in found]

    def _attention(self, layers: int) -> list[Group]:
        h, wide = self.hidden, self.heads * self.head_dim
        if self.kv_rank:
            query = self.heads * (self.nope_dim + self.rope_dim)
            found = [
                Group("key-value down", layers, self.kv_rank + self.rope_dim, h, "hidden"),
                Group("key-value up", layers, self.heads * (self.nope_dim + self.value_dim), self.kv_rank, "hidden"),
                Group("output", layers, h, self.heads * self.value_dim, "hidden"),
                Group("key-value norm", layers, 1, self.kv_rank, "vector"),
            ]
            if self.q_rank:
                found += [
                    Group("query down", layers, self.q_rank, h, "hidden"),
                    Group("query up", layers, query, self.q_rank, "hidden"),
                    Group("query norm", layers, 1, self.q_rank, "vector"),
                ]
            else:
                found.append(Group("query", layers, query, h, "hidden"))
            return found
        narrow = self.kv_heads * self.head_dim
        found = [
            Group("query", layers, wide, h, "hidden"),
            Group("key and value", 2 * layers, narrow, h, "hidden"),
            Group("output", layers, h, wide, "hidden"),
        ]
        if self.qkv_bias:
            found += [
                Group("query bias", layers, 1, wide, "vector"),
                Group("key-value bias", 2 * layers, 1, narrow, "vector"),
            ]
        if self.out_bias:
            found.append(Group("output bias", layers, 1, h, "vector"))
        if self.qk_norm:
            found.append(Group("query and key norm", 2 * layers, 1, self.head_dim, "vector"))
        return found

    def _feed_forward(self, name: str, count: int, width: int) -> list[Group]:
        ups = 2 if self.gated else 1
        found = [
            Group(f"{name} up", ups * count, width, self.hidden, "hidden"),
            Group(f"{name} down", count, self.hidden, width, "hidden"),
        ]
        if self.mlp_bias:
            found += [
                Group(f"{name} up bias", ups * count, 1, width, "vector"),
                Group(f"{name} down bias", count, 1, self.hidden, "vector"),
            ]
        return found

    def _norm(self, name: str, count: int) -> Group:
        return Group(name, count * (2 if self.norm_bias else 1), 1, self.hidden, "vector")


# ---- configurations of Hugging Face's transformers


def from_config(config: Mapping[str, Any], name: str, source: str) -> Model:
    """A model from the contents of a `config.json`. Raises `UsageError` for a family that is not known, and for what
    is missing or makes no sense."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" in text:
        config = {**text, "model_type": text.get("model_type", config.get("model_type"))}
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        error = misspelt("kind of model", family, sorted(FAMILIES), "; or give the count instead, as in --model 13.5B")
        error.where = source
        raise error
    reader = _Reader(config, source)
    decoder = FAMILIES[family](reader)
    return from_groups(name, decoder.groups(), decoder.layers, decoder.hidden, source)


class _Reader:
    """Reads whole numbers and switches from a configuration, by any of the names that families give them."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(
                    f"{key} makes no sense", where=self.source, expected=f"a number from {least}", found=repr(value)
                )
            return value
        if default is None:
            raise UsageError("the configuration is incomplete", where=self.source, expected=" or ".join(keys))
        return default

    def switch(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def plain(self, *, tied: bool, **more: Any) -> Decoder:
        """What nearly all families have in common."""
        hidden, heads = (
            self.number("hidden_size", "n_embd", "d_model"),
            self.number("num_attention_heads", "n_head", "num_heads"),
        )
        if hidden % heads and "head_dim" not in self.config:
            raise UsageError("hidden size and heads do not go together", where=self.source, found=f"{hidden}, {heads}")
        return Decoder(
            **{
                "vocabulary": self.number("vocab_size"),
                "hidden": hidden,
                "ffn": self.number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden),
                "layers": self.number("num_hidden_layers", "n_layer", "num_layers"),
                "heads": heads,
                "kv_heads": self.number("num_key_value_heads", default=heads),
                "head_dim": self.number("head_dim", default=hidden // heads),
                "tied": self.switch("tie_word_embeddings", tied),
                **more,
            }
        )


_OLD = {"gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}


def _llama(c: _Reader) -> Decoder:
    bias = c.switch("attention_bias", False)
    return c.plain(tied=False, qkv_bias=bias, out_bias=bias, mlp_bias=c.switch("mlp_bias", False))


def _mixtral(c: _Reader) -> Decoder:
    return c.plain(tied=False, experts=c.number("num_local_experts"), expert_ffn=c.number("intermediate_size"))


def _qwen2_moe(c: _Reader) -> Decoder:
    return c.plain(
        tied=False, qkv_bias=c.switch("qkv_bias", True), experts=c.number("num_experts"),
        expert_ffn=c.number("moe_intermediate_size"), shared_ffn=c.number("shared_expert_intermediate_size"),
        shared_gate=True,
    )  # fmt: skip


def _qwen3(c: _Reader) -> Decoder:
    return c.plain(tied=False, qk_norm=True, head_dim=c.number("head_dim", default=128))


def _qwen3_moe(c: _Reader) -> Decoder:
    return c.plain(
        tied=False, qk_norm=True, experts=c.number("num_experts"), expert_ffn=c.number("moe_intermediate_size")
    )


def _deepseek(c: _Reader) -> Decoder:
    width = c.number("moe_intermediate_size", default=0, least=0)
    return c.plain(
        tied=False, experts=c.number("n_routed_experts", default=0, least=0), expert_ffn=width,
        shared_ffn=width * c.number("n_shared_experts", default=0, least=0),
        router_bias=c.config.get("topk_method") == "noaux_tc",
        dense_layers=c.number("first_k_dense_replace", default=0, least=0),
        q_rank=c.number("q_lora_rank", default=0, least=0), kv_rank=c.number("kv_lora_rank"),
        rope_dim=c.number("qk_rope_head_dim"), nope_dim=c.number("qk_nope_head_dim"),
        value_dim=c.number("v_head_dim"),
    )  # fmt: skip


FAMILIES = {
    "gpt2": lambda c: c.plain(tied=True, positions=c.number("n_positions"), **_OLD),
    "opt": lambda c: c.plain(tied=True, positions=c.number("max_position_embeddings") + 2, **_OLD),
    "bloom": lambda c: c.plain(tied=True, embedding_norm=True, **_OLD),
    "gpt_neox": lambda c: c.plain(tied=False, **_OLD),
    "llama": _llama,
    "mistral": lambda c: c.plain(tied=False),
    "ministral": lambda c: c.plain(tied=False),
    "mixtral": _mixtral,
    "qwen2": lambda c: c.plain(tied=False, qkv_bias=True),
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": lambda c: c.plain(tied=True),
    "gemma2": lambda c: c.plain(tied=True, norms_per_layer=4),
    "gemma3_text": lambda c: c.plain(tied=True, norms_per_layer=4, qk_norm=True),
    "phi3": lambda c: c.plain(tied=False),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


# ---- names


def _config(family: str, **numbers: Any) -> dict[str, Any]:
    return {"model_type": family, **numbers}


def _dense(
    family: str, v: int, h: int, f: int, layers: int, heads: int, kv: int | None = None, **more: Any
) -> dict[str, Any]:
    return _config(
        family, vocab_size=v, hidden_size=h, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads if kv is None else kv, **more,
    )  # fmt: skip


# The hyperparameters that their makers publish; the counts that they come to are compared with published ones in the
# tests. The MLPerf rows are the models of MLPerf Storage's checkpoint workload, which are not quite the real ones.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _dense("gpt2", 50257, 768, 3072, 12, 12, n_positions=1024),
    "gpt2-xl": _dense("gpt2", 50257, 1600, 6400, 48, 25, n_positions=1024),
    "bloom-176b": _dense("bloom", 250880, 14336, 57344, 70, 112),
    "llama2-7b": _dense("llama", 32000, 4096, 11008, 32, 32),
    "llama2-13b": _dense("llama", 32000, 5120, 13824, 40, 40),
    "llama2-70b": _dense("llama", 32000, 8192, 28672, 80, 64, 8),
    "llama3-8b": _dense("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama3-70b": _dense("llama", 128256, 8192, 28672, 80, 64, 8),
    "llama3-405b": _dense("llama", 128256, 16384, 53248, 126, 128, 8),
    "mistral-7b": _dense("mistral", 32000, 4096, 14336, 32, 32, 8),
    "mixtral-8x7b": _dense("mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8),
    "qwen2.5-0.5b": _dense("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "qwen2.5-7b": _dense("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-72b": _dense("qwen2", 152064, 8192, 29568, 80, 64, 8),
    "qwen3-8b": _dense("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "qwen3-30b-a3b": _dense(
        "qwen3_moe", 151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768
    ),
    "qwen3-235b-a22b": _dense(
        "qwen3_moe", 151936, 4096, 12288, 94, 64, 4, head_dim=128, num_experts=128, moe_intermediate_size=1536
    ),
    "gemma2-9b": _dense("gemma2", 256000, 3584, 14336, 42, 16, 8, head_dim=256),
    "deepseek-v3": _dense(
        "deepseek_v3", 129280, 7168, 18432, 61, 128, 128, n_routed_experts=256, n_shared_experts=1,
        moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, topk_method="noaux_tc",
    ),
    "mlperf-8b": _dense("llama", 128256, 4096, 14336, 32, 32, 8),
    "mlperf-70b": _dense("llama", 128256, 8192, 28672, 80, 128, 8),
    "mlperf-405b": _dense("llama", 128256, 16384, 53248, 126, 128, 8),
}  # fmt: skip

# What people call a size, and what they may mean by it.
_SAME_SIZE = {
    "7b": "llama2-7b (6.74 B), mistral-7b (7.24 B), qwen2.5-7b (7.62 B)",
    "8b": "llama3-8b (8.03 B), qwen3-8b (8.19 B)",
    "70b": "llama3-70b (70.55 B), llama2-70b (68.98 B), mlperf-70b (69.88 B)",
    "405b": "llama3-405b (405.85 B)",
}
_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def from_text(text: str) -> Model:
    """A model from what a user types: a preset, a count such as 70B or 6.7e9, a `config.json` or its folder, or the
    hyperparameters themselves, as such a file has them (`{"model_type": "llama", "hidden_size": 4096, …}`).

    Raises `UsageError` with the nearest right spelling.
    """
    key = text.strip().lower()
    if key in PRESETS:
        model = from_config(PRESETS[key], key, "published hyperparameters")
        return model
    counted = _count(key)
    if counted is not None:
        note = (
            f"nominal: exactly {text.strip()}. Real models of that name: {_SAME_SIZE[key]}" if key in _SAME_SIZE else ""
        )
        return from_count(text.strip(), counted, note)
    if key.startswith("{"):
        return from_config(_parsed(text, "--model"), "your model", "the hyperparameters you gave")
    path = os.path.join(text, "config.json") if os.path.isdir(text) else text
    if os.path.isfile(path):
        return from_config(_read(path), os.path.basename(os.path.dirname(os.path.abspath(path))), path)
    raise misspelt("model", text, PRESETS, "; or a count, as in 13.5B; or a path to a config.json")


def _count(text: str) -> int | None:
    scale = _SCALES.get(text[-1:])
    try:
        value = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        return None
    if not 1 <= value < 1e18:
        raise UsageError("a parameter count makes no sense", expected="as in 70B or 6.7e9", found=repr(text))
    return round(value)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(4 << 20)
    except (OSError, ValueError) as error:
        raise UsageError("not a readable configuration", where=path, found=str(error)) from None
    return _parsed(text, path)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("not a readable configuration", where=where, found=str(error)) from None
    if not isinstance(config, dict):
        raise UsageError("not a configuration", where=where, expected="a JSON object", found=type(config).__name__)
    return config
