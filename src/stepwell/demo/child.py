"""The process in which the demo trains, and which the demo kills. It reports each step over a pipe."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepwell import Restored, Save
from stepwell.demo.compare import write_state
from stepwell.demo.train import Training, build, state_of, train
from stepwell.errors import StepwellError


def in_peace(training: Training, steps: int, report: Reporter) -> dict[str, Any]:
    """The same training without Stepwell: not saved, not killed, not resumed. What the result must be."""
    state = state_of(training)
    report(event="start", restored=None, parameters=_parameter_count(training))
    for step in range(1, steps + 1):
        loss = training.train_step()
        state["losses"].append(loss)
        report(event="step", step=step, loss=loss, save=None)
    return state


def with_stepwell(training: Training, run: Path, steps: int, save_every: int, report: Reporter) -> dict[str, Any]:
    """The training of train.py, telling about each save what it is right after `save()` has come back."""

    def on_start(restored: Restored | None) -> None:
        report(
            event="start",
            restored={"step": restored.step, "tier": restored.tier} if restored else None,
            parameters=_parameter_count(training),
        )

    def on_step(step: int, loss: float, save: Save | None) -> None:
        about = None
        if save is not None and not save.skipped:
            about = {"done": save.done, "blocked_seconds": save.blocked_seconds}
        report(event="step", step=step, loss=loss, save=about)

    return train(run, steps=steps, save_every=save_every, training=training, on_start=on_start, on_step=on_step)


def random_state() -> dict[str, Any]:
    """Where the three random number generators stand."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


class Reporter:
    """Writes one JSON line per event to a pipe. When its reader is gone, so is the reason to go on: the write fails."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __call__(self, **event: Any) -> None:
        os.write(self.fd, json.dumps(event).encode() + b"\n")


def _parameter_count(training: Training) -> int:
    return sum(parameter.numel() for parameter in training.model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--final", type=Path, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)  # sums are split by thread: another count, another last bit
    torch.use_deterministic_algorithms(True)
    random.seed(1)
    np.random.seed(1)
    report = Reporter(options.events)
    training = build(**options.sizes)
    try:
        if options.run is None:
            state = in_peace(training, options.steps, report)
        else:
            state = with_stepwell(training, options.run, options.steps, options.save_every, report)
    except StepwellError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    write_state({**state, "random": random_state()}, options.final)
    report(event="end")
    return 0


def _ends_with_pipe(error: BrokenPipeError) -> int:
    print(f"the demo is gone: {error}", file=sys.stderr)
    return 3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError as gone:
        sys.exit(_ends_with_pipe(gone))
