"""How many bytes the state of a training run has: precision and optimizer, parameter by parameter.

Unique bytes: each value once, however many ranks hold it. Gradients are not part of a state. How the job is laid out
(DDP, FSDP, tensor, pipeline, expert or context parallel) changes who writes the bytes, not how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepwell.errors import UsageError
from stepwell.plan.models import Group, Model
from stepwell.plan.spelling import misspelt

BLOCK_VALUES_8BIT = 256  # bitsandbytes keeps one 4-byte scale for each block of a moment
RNG_BYTES_PER_RANK = 16_000  # Python's, numpy's and torch's generators as a pack stores them: 6 to 14 kB were seen
LOADER_BYTES_PER_RANK = 64_000


@dataclass(frozen=True)
class Recipe:
    """A precision and an optimizer.

    Attributes:
        weight_bytes: of each parameter in the weights that the forward pass uses.
        master_bytes: of a second, more precise copy; 0 where there is none.
        moments: bytes that the optimizer keeps for a group of equal parameters.
        needs_shapes: the moments depend on the shapes, so a bare count is not enough.
        words: what it is, in a line.
    """

    name: str
    weight_bytes: int
    master_bytes: int
    moments: Callable[[Group], float]
    words: str
    needs_shapes: bool = False


def _each(count: float) -> Callable[[Group], float]:
    return lambda group: count * group.parameter_count


def _adafactor(group: Group) -> float:
    """Row and column sums in fp32 for a matrix, every value for a vector; no momentum."""
    if group.role == "vector":
        return 4.0 * group.parameter_count
    return 4.0 * group.count * (group.rows + group.columns)


def _muon(group: Group) -> float:
    """One fp32 momentum for hidden matrices, Adam's two for embeddings, head and vectors."""
    return (4.0 if group.role == "hidden" else 8.0) * group.parameter_count


_BLOCKWISE = 2 * (1 + 4 / BLOCK_VALUES_8BIT)  # two moments of a byte each, with their scales

RECIPES = {
    one.name: one
    for one in (
        Recipe("adamw-fp32", 4, 0, _each(8), "fp32 weights, Adam's two moments in fp32"),
        Recipe("sgd-fp32", 4, 0, _each(4), "fp32 weights, momentum in fp32"),
        Recipe("adamw-bf16", 2, 4, _each(8), "bf16 weights, fp32 master, Adam in fp32"),
        Recipe("adamw-bf16-derived", 0, 4, _each(8), "the same, bf16 weights made from the master at load"),
        Recipe("adamw-bf16-nomaster", 2, 0, _each(8), "bf16 weights, Adam in fp32, no master"),
        Recipe("adamw-bf16-pure", 2, 0, _each(4), "everything in bf16"),
        Recipe("adamw-fsdp", 4, 0, _each(8), "FSDP2 mixed precision: shards stay fp32, Adam in fp32"),
        Recipe("adamw-8bit", 2, 0, _each(_BLOCKWISE), "bf16 weights, both moments in 8 bits with block scales"),
        Recipe("adamw-8bit-master", 2, 4, _each(_BLOCKWISE), "the same with an fp32 master"),
        Recipe("adafactor-fp32", 4, 0, _adafactor, "fp32 weights, factored second moment", needs_shapes=True),
        Recipe("adafactor-bf16", 2, 0, _adafactor, "bf16 weights, factored second moment", needs_shapes=True),
        Recipe("muon-fp32", 4, 0, _muon, "fp32 weights, Muon for hidden matrices, Adam else", needs_shapes=True),
        Recipe("muon-bf16", 2, 4, _muon, "bf16 weights with master, Muon and Adam", needs_shapes=True),
        Recipe("weights-bf16", 2, 0, _each(0), "bf16 weights alone: nothing to resume an optimizer from"),
        Recipe("weights-fp32", 4, 0, _each(0), "fp32 weights alone: nothing to resume an optimizer from"),
    )
}


@dataclass(frozen=True)
class StateBytes:
    """A state's unique bytes by part. `trained_count` is the number of parameters that the optimizer moves."""

    weights: int
    master: int
    moments: int
    ema: int
    host: int
    trained_count: int

    @property
    def total(self) -> int:
        return self.weights + self.master + self.moments + self.ema + self.host


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: `rank` on the matrices whose group names are in `targets`."""

    rank: int
    targets: tuple[str, ...] = ("query", "key and value")
    keys_too: bool = False  # adapters usually sit on q and v: half of the group "key and value"

    def groups(self, model: Model) -> list[Group]:
        """The adapter's matrices: r·(d_in + d_out) for each one that is adapted."""
        found = []
        for group in model.groups:
            if group.name not in self.targets:
                continue
            count = group.count if self.keys_too or group.name != "key and value" else group.count // 2
            found.append(Group(f"{group.name} A", count, self.rank, group.columns, "hidden"))
            found.append(Group(f"{group.name} B", count, group.rows, self.rank, "hidden"))
        if not found:
            raise UsageError(
                "no matrix to adapt", where=model.name, expected="a model whose shapes are known", found=self.targets
            )
        return found


def recipe_named(name: str) -> Recipe:
    """Raises `UsageError` with the nearest right spelling."""
    if name in RECIPES:
        return RECIPES[name]
    raise misspelt("optimizer and precision", name, RECIPES)


def state_bytes(
    model: Model,
    recipe: Recipe,
    *,
    ema_bytes: int = 0,
    lora: Lora | None = None,
    rank_count: int = 1,
    loader_bytes_per_rank: int = LOADER_BYTES_PER_RANK,
) -> StateBytes:
    """The unique bytes of the whole job's state.

    `ema_bytes` per parameter (4 or 2) for a moving average; with `lora` only the adapters are part of the state, since
    the base does not change. Each of `rank_count` ranks adds its generators and its data loader's position.

    Raises `UsageError` where the optimizer's state depends on shapes and only a count is known.
    """
    if (recipe.needs_shapes or lora) and not model.groups:
        raise UsageError(
            f"{'adapters' if lora else recipe.name} cannot be sized from a count",
            expected="a preset or a config.json, which have shapes",
            found=model.name,
        )
    groups = lora.groups(model) if lora else list(model.groups)
    groups = groups or [Group("all", 1, 1, model.parameter_count, "hidden")]
    count = sum(group.parameter_count for group in groups)
    return StateBytes(
        weights=recipe.weight_bytes * count,
        master=recipe.master_bytes * count,
        moments=round(sum(recipe.moments(group) for group in groups)),
        ema=ema_bytes * count,
        host=rank_count * (RNG_BYTES_PER_RANK + loader_bytes_per_rank),
        trained_count=count,
    )


def bytes_per_parameter(recipe: Recipe, model: Model) -> float:
    """Of the parts that grow with the model: without generators and loaders."""
    one = state_bytes(model, recipe, rank_count=0)
    return one.total / one.trained_count
