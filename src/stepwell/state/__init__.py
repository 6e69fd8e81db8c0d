"""What is saved: a training state taken apart into tensors, values and a skeleton, and put back in place.

Start reading at `flatten` (the walk over a state) and `match` (the way back).
"""

from .flatten import RESERVED_NAMES, RNG_NAME, Flat, flatten
from .match import Copy, RestorePlan, match
from .rebuild import Saved, matches, rebuild
from .spec import ITEM_BYTES, TensorSpec, address_of, from_bytes
from .values import TorchValue, decode_values, encode_values

__all__ = [
    "ITEM_BYTES",
    "RESERVED_NAMES",
    "RNG_NAME",
    "Copy",
    "Flat",
    "RestorePlan",
    "Saved",
    "TensorSpec",
    "TorchValue",
    "address_of",
    "decode_values",
    "encode_values",
    "flatten",
    "from_bytes",
    "match",
    "matches",
    "rebuild",
]
