"""The package works in a process that never imports torch."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import ctypes, random
import numpy as np
from stepwell.errors import UsageError
from stepwell.state import *

state = {"w": np.arange(6.0).reshape(2, 3), "tied": None, "n": [1, (2,)], "rng": np.random.default_rng(0)}
state["tied"] = state["w"]
flat = flatten(state)
assert flatten(state, previous=flat).skeleton is flat.skeleton
saved = Saved(flat.names, flat.specs, flat.alias_of, flat.skeleton, decode_values(encode_values(flat.values)))
expected = state["rng"].random(), random.random(), np.random.random()
live = {"w": np.zeros((2, 3)), "tied": None, "n": [], "rng": np.random.default_rng(5)}
plan = match(live, saved)
for copy in plan.copies:
    assert copy.address and copy.index == 0
    ctypes.memmove(copy.address, state["w"].ctypes.data, 48)
plan.finish()
assert (live["w"] == state["w"]).all() and live["tied"] is live["w"] and live["n"] == [1, (2,)]
assert (live["rng"].random(), random.random(), np.random.random()) == expected

data = bytes.fromhex(sys.argv[1])
values = decode_values(data)
assert [value.kind for value in values] == ["dtype", "size", "device"]
assert encode_values(values) == data
spec = TensorSpec("bfloat16", (2,), 4, "torch", "cpu")
assert from_bytes(spec, np.zeros(4, np.uint8), as_numpy=True).dtype == np.uint16
try:
    from_bytes(spec, np.zeros(4, np.uint8), as_numpy=False)
except UsageError as error:
    assert "import torch" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules
"""


def test_everything_works_without_torch() -> None:
    import torch

    from stepwell.state import encode_values

    values = encode_values([torch.float32, torch.Size([2, 3]), torch.device("cuda:1")])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, values.hex()],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
