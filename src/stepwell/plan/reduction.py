"""What can be taken off the bytes of a dense training state, part by part.

Measured on one briefly trained model with byte planes and zstd; longer training compresses moments less, and lz4 on raw
bytes takes off nothing. Half and more comes only from zeros, duplicates, frozen parts, derivable copies, small
differences.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.plan.state import StateBytes

# The share that byte planes and zstd take off, by what the bytes are.
COMPRESSED = {"weights in bf16": 0.32, "fp32": 0.16, "Adam's m": 0.29, "Adam's v": 0.30}
MEASURED_ON = "measured on a briefly trained model, byte planes and zstd"


@dataclass(frozen=True)
class Reduction:
    """A way to write fewer bytes: the fraction that it takes off, and what it costs or asks for."""

    name: str
    fraction: float
    words: str


def reductions(state: StateBytes, *, weight_bytes_each: int, frozen_fraction: float = 0.0) -> list[Reduction]:
    """What each way takes off this state, alone, and derivation with compression together.

    `frozen_fraction` is the share of the bytes that no step changes: a later save may refer to the first one for them.
    """
    total = state.total
    if total <= 0:
        return []
    weights_rate = COMPRESSED["weights in bf16"] if weight_bytes_each == 2 else COMPRESSED["fp32"]
    moments_rate = (COMPRESSED["Adam's m"] + COMPRESSED["Adam's v"]) / 2
    rest = COMPRESSED["fp32"] * (state.master + state.ema) + moments_rate * state.moments
    compressed = (weights_rate * state.weights + rest) / total
    derivable = state.weights if state.master and weight_bytes_each == 2 else 0
    found = [Reduction("compression", compressed, f"{MEASURED_ON}; costs processor time on every save and restore")]
    if derivable:
        found += [
            Reduction("derivation", derivable / total, "the bf16 weights are made from the fp32 master at load"),
            Reduction(
                "both", (derivable + rest) / total, f"derived weights left out, the rest compressed; {MEASURED_ON}"
            ),
        ]
    if frozen_fraction:
        found.append(Reduction("references", frozen_fraction, "parts that no step changes are stored once"))
    return found
