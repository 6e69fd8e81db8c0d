"""How a job is laid out, and what each tool writes for it: files, writers, bytes of each, metadata operations.

File counts are those of each tool's own layout; see docs/planning.md for where each comes from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepwell.errors import UsageError
from stepwell.plan.models import Model
from stepwell.plan.spelling import misspelt
from stepwell.plan.state import StateBytes

SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
SAFETENSORS_SHARD_BYTES = 5_000_000_000  # what transformers cuts at by default
TENSORS_PER_PARAMETER = 3  # the weight and two moments, for tools that write an item for each tensor


@dataclass(frozen=True)
class Layout:
    """Where the ranks are and what each holds.

    Attributes:
        gpus: ranks of the job; `gpus_per_node` of them on each machine.
        sharding: of the data-parallel dimension: "ddp" (whole replicas), "zero1" and "zero2" (optimizer sharded),
            "zero3" and "fsdp" (everything sharded), "hsdp" (sharded within a group, replicated between `replicas`).
        tensor, pipeline, expert, context: degrees of the other dimensions.
        replicas: for "hsdp", how many groups hold the whole state.

    Raises `UsageError` for degrees that do not divide the ranks.
    """

    gpus: int
    gpus_per_node: int = 8
    sharding: str = "fsdp"
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node", "tensor", "pipeline", "expert", "context", "replicas"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name.replace('_', ' ')}: not a count", expected="1 or more", found=repr(value))
        if self.sharding not in SHARDINGS:
            raise misspelt("layout", self.sharding, SHARDINGS)
        parts = self.tensor * self.pipeline * self.context
        if self.gpus % parts:
            product = f"TP × PP × CP = {self.tensor} × {self.pipeline} × {self.context} = {parts}"
            raise UsageError(f"{product} does not divide {self.gpus} GPUs")
        if self.data_parallel * self.context % self.expert:
            raise UsageError(
                f"EP = {self.expert} does not divide data parallel × CP = {self.data_parallel * self.context}"
            )
        if self.replicas > 1 and self.sharding != "hsdp":
            raise UsageError("replicas are for hsdp", found=f"{self.sharding} with {self.replicas} replicas")
        if self.data_parallel * self.context % self.replicas:
            ranks = self.data_parallel * self.context
            raise UsageError(f"{self.replicas} replicas are no divisor of {ranks} ranks")

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def model_parallel(self) -> int:
        """Ranks that hold different parts of the model: TP × PP."""
        return self.tensor * self.pipeline

    @property
    def data_parallel(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def weight_readers(self) -> int:
        """How many times the weights alone are read at a restart: with ZeRO-1 and 2 every replica has them whole."""
        return self.data_parallel * self.context if self.sharding in ("zero1", "zero2") else 1

    @property
    def reading_groups(self) -> int:
        """How many times the state is read at a restart: by every group of ranks that holds all of it."""
        if self.sharding == "ddp":
            return self.data_parallel * self.context
        return self.replicas if self.sharding == "hsdp" else 1


@dataclass(frozen=True)
class Files:
    """What one save writes.

    Attributes:
        tool: whose layout this is.
        file_count, writer_count: of the whole job; `writers_per_node` on the busiest machine.
        written_bytes: by all writers together; above the unique bytes where replicas are written more than once.
        writer_bytes_max: of the busiest writer; `node_bytes_max` of the busiest node.
        gpu_bytes_max: what one GPU hands over at most: its share, where ranks share the work; all, where one writes.
        imbalance: busiest writer over the mean of all ranks that write.
        metadata_op_count: creates, stats, mkdirs, fsyncs, renames and closes.
        serial_op_count: of these, how many follow each other on the busiest writer.
        replicated: how often each byte is written; 1 is right.
    """

    tool: str
    file_count: int
    writer_count: int
    writers_per_node: int
    written_bytes: int
    writer_bytes_max: int
    node_bytes_max: int
    gpu_bytes_max: int
    imbalance: float
    metadata_op_count: int
    serial_op_count: int
    replicated: int = 1


TOOLS = (
    "stepwell", "torch.save", "torch.save-every-rank", "safetensors", "deepspeed", "dcp", "dcp-per-item", "megatron",
)  # fmt: skip


def files(tool: str, layout: Layout, model: Model, state: StateBytes, *, threads: int | None = None) -> Files:
    """The files of one save by `tool`; `threads` per rank where the tool has them (DCP 1, Megatron 2 by default).

    Raises `UsageError` for an unknown tool, and where DeepSpeed's pipeline layout needs a layer count.
    """
    if tool not in TOOLS:
        raise misspelt("tool", tool, TOOLS)
    ranks, total = layout.gpus, state.total
    per_node = min(layout.gpus_per_node, ranks)
    if tool == "torch.save" or tool == "safetensors":
        count = 1 if tool == "torch.save" else math.ceil(total / SAFETENSORS_SHARD_BYTES) + 1
        return _files(tool, layout, count, 1, 1, total, total, total, 1)
    if tool == "torch.save-every-rank":
        copies = layout.data_parallel * layout.context if layout.sharding == "ddp" else 1
        each = total // (ranks // copies)
        return _files(tool, layout, ranks, ranks, per_node, total * copies, each, each * per_node, 1, copies)
    if tool == "deepspeed":
        return _deepspeed(layout, model, state, per_node)
    threads = threads or {"megatron": 2}.get(tool, 1)
    if tool == "stepwell":
        each = math.ceil(total / layout.nodes)
        return _files(tool, layout, layout.nodes + 2, layout.nodes, 1, total, each, each, 2)
    each = math.ceil(total / ranks)
    if tool == "dcp-per-item":
        items = model.tensor_count * TENSORS_PER_PARAMETER * (ranks if layout.sharding != "ddp" else 1)
        count, serial = items + 1, math.ceil(items / ranks)
    else:
        count, serial = ranks * threads + (1 if tool == "dcp" else 3), threads
    return _files(tool, layout, count, ranks, per_node, total, each, each * per_node, serial)


def _deepspeed(layout: Layout, model: Model, state: StateBytes, per_node: int) -> Files:
    """Model states by the first data-parallel rank of each model-parallel part, optimizer shards by every rank."""
    ranks, mp, total = layout.gpus, layout.model_parallel, state.total
    each = math.ceil(total / ranks)
    if layout.sharding in ("zero3", "fsdp", "hsdp"):
        return _files("deepspeed", layout, 2 * ranks, ranks, per_node, total, each, each * per_node, 2)
    if layout.sharding == "ddp":
        return _files("deepspeed", layout, mp, mp, min(mp, per_node), total, total // mp, total, 1)
    if layout.pipeline > 1 and not model.layer_count:
        raise UsageError(
            "DeepSpeed writes a file for each layer, and how many there are is not known",
            found=model.name,
            todo="name a preset or a config.json instead of a count",
        )
    model_files = (model.layer_count + 3) * layout.tensor if layout.pipeline > 1 else mp
    shard, weights = math.ceil((total - state.weights) / ranks), math.ceil(state.weights / mp)
    holders = min(mp, per_node)
    node = shard * per_node + weights * holders
    serial = math.ceil(model_files / mp) + 1
    return _files("deepspeed", layout, model_files + ranks, ranks, per_node, total, shard + weights, node, serial)


def _files(
    tool: str, layout: Layout, count: int, writers: int, writers_per_node: int, written: int, writer_max: int,
    node_max: int, files_each: int, replicated: int = 1,
) -> Files:  # fmt: skip
    per_file = 4 if tool == "stepwell" else 3  # create, fsync, close; Stepwell also renames
    per_writer = 3  # mkdir, its stat, and whether the folder exists
    return Files(
        tool=tool,
        file_count=count,
        writer_count=writers,
        writers_per_node=writers_per_node,
        written_bytes=written,
        writer_bytes_max=writer_max,
        node_bytes_max=min(node_max, written),
        gpu_bytes_max=math.ceil(written / layout.gpus) if tool == "stepwell" else writer_max,
        imbalance=writer_max * writers / written if written else 1.0,
        metadata_op_count=per_writer * writers + per_file * count + 5,
        serial_op_count=per_writer + per_file * files_each,
        replicated=replicated,
    )


def metadata_seconds(op_count: int, ops_per_second: float, serial_op_count: int, latency_seconds: float) -> float:
    """max(operations / service rate, serial operations × latency)."""
    return max(op_count / ops_per_second, serial_op_count * latency_seconds)


def mlperf_bytes(model: Model, world: int) -> tuple[int, int]:
    """(model, optimizer) bytes of MLPerf Storage's checkpoint workload: fp16 weights, and on each of `world` ranks
    4·(3·⌊N/world⌋ + 15·hidden)."""
    return 2 * model.parameter_count, world * 4 * (3 * (model.parameter_count // world) + 15 * model.hidden)
