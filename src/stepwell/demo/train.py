"""Train a small GPT on English text. It can be killed at any moment; started again, it goes on where it was.

    python -m stepwell.demo.train --run runs/gpt --steps 200

Everything that Stepwell needs is in `train`, on the lines marked with ①–⑤. The rest is an ordinary training script.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import stepwell
from stepwell.demo.gpt import GPT, VOCABULARY
from stepwell.demo.text import ShuffledText, english_text

WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Training:
    """A model with all that trains it."""

    model: GPT
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.LambdaLR
    loader: ShuffledText

    def train_step(self) -> float:
        """One optimizer step on the next batch; returns its loss in nats per byte."""
        tokens, targets = self.loader.next_batch()
        loss = F.cross_entropy(self.model(tokens).view(-1, VOCABULARY), targets.view(-1))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        value: float = loss.item()
        return value


def build(
    *,
    layers: int = 4,
    width: int = 192,
    heads: int = 6,
    context: int = 64,
    batch: int = 12,
    dropout: float = 0.1,
    learning_rate: float = 2e-3,
    seed: int = 1234,
) -> Training:
    """A fresh training, the same one for the same arguments. It has about 12 · layers · width² parameters."""
    torch.manual_seed(seed)
    model = GPT(layers=layers, width=width, heads=heads, context=context, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    return Training(model, optimizer, scheduler, ShuffledText(english_text(), context=context, batch=batch, seed=seed))


def _rate(step: int) -> float:
    """Linear warm-up, then falling with the square root: it does not depend on how long the training will be."""
    return min((step + 1) / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / (step + 1)))


def state_of(training: Training) -> dict[str, Any]:
    """All that a resumed run needs. Random number generators are not listed: Stepwell keeps them by itself."""
    return {
        "model": training.model,
        "optim": training.optimizer,
        "sched": training.scheduler,
        "data": training.loader,
        "losses": [],
    }


def train(
    run: str | Path,
    *,
    steps: int,
    save_every: int = 5,
    training: Training | None = None,
    on_start: Callable[[stepwell.Restored | None], None] = lambda restored: None,
    on_step: Callable[[int, float, stepwell.Save | None], None] = lambda step, loss, save: None,
) -> dict[str, Any]:
    """Train until `steps` steps are done, from wherever the run is, and return the final state.

    `on_start` is told what was restored, `on_step` each step with its loss and the handle of its save; both may be
    None.
    """
    training = training or build()
    state = state_of(training)
    with stepwell.Checkpointer(  # ①
        run, save_when=stepwell.Every(steps=save_every), keep=stepwell.Keep(last=3, every=25)
    ) as ckpt:
        restored = ckpt.restore(state)  # ②
        on_start(restored)
        for step in range(restored.step + 1 if restored else 1, steps + 1):  # ③
            loss = training.train_step()
            state["losses"].append(loss)
            if step < steps:
                save = ckpt.save_if_due(step, state, metrics={"loss": loss})  # ④
            else:
                save = ckpt.save(step, state, metrics={"loss": loss})  # ⑤ the last step, due or not
            on_step(step, loss, save)
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stepwell.demo.train", description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, type=Path, help="folder of the run; continued when it exists")
    parser.add_argument("--steps", type=int, default=200, help="train until this many steps are done (200)")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS", help="steps between two saves (5)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; results are exact per count (2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    def on_start(restored: stepwell.Restored | None) -> None:
        print(f"going on after step {restored.step}" if restored else "a new run", flush=True)

    def on_step(step: int, loss: float, save: stepwell.Save | None) -> None:
        if step % 10 == 0:
            print(f"step {step:5d}  loss {loss:.4f}", flush=True)

    try:
        train(options.run, steps=options.steps, save_every=options.save_every, on_start=on_start, on_step=on_step)
    except stepwell.StepwellError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
