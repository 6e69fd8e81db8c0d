"""A small training run that uses everything a real one has; also a script, for tests that resume in a new process."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import stepwell


class Loader:
    """Shuffled batches of indices, with the place it has come to."""

    def __init__(self, count: int, batch: int) -> None:
        self.count, self.batch, self.epoch, self.position = count, batch, 0, 0
        self.random = torch.Generator().manual_seed(11)
        self.order = torch.randperm(count, generator=self.random)

    def take(self) -> torch.Tensor:
        if self.position + self.batch > self.count:
            self.epoch, self.position = self.epoch + 1, 0
            self.order = torch.randperm(self.count, generator=self.random)
        self.position += self.batch
        return self.order[self.position - self.batch : self.position]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order,
            "random": self.random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.order = state["epoch"], state["position"], state["order"]
        self.random.set_state(state["random"])


class Training:
    """Tied embedding, BatchNorm, dropout, AdamW with two groups, scheduler, scaler, loader, generators."""

    def __init__(self, seed: int = 5, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(1)  # no waiting for a busy core, and the same sums everywhere
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.dtype = dtype
        self.data = torch.randint(0, 64, (200, 8), generator=torch.Generator().manual_seed(1))
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(64, 256),
                "body": nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1)),
                "head": nn.Linear(256, 64, bias=False),
            }
        ).to(dtype)
        self.model["head"].weight = self.model["embed"].weight
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=100)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=4)
        self.loader = Loader(len(self.data), 16)
        self.noise = np.random.default_rng(3)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "sched": self.scheduler,
            "scaler": self.scaler,
            "data": self.loader,
            "noise": self.noise,
            "losses": [],
            "tokens": 0,
        }

    def backward(self) -> float:
        """Everything of one step before the optimizer's."""
        batch = self.data[self.loader.take()]
        hidden = self.model["body"](self.model["embed"](batch[:, :-1]).mean(1))
        hidden = hidden + self.noise.normal() * 1e-3 + random.random() * 1e-3 + float(np.random.rand()) * 1e-3
        loss = nn.functional.cross_entropy(self.model["head"](hidden).float(), batch[:, -1])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.item()

    def step(self) -> float:
        loss = self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.state["losses"].append(loss)
        self.state["tokens"] += 16 * 8
        return loss

    def digest(self) -> str:
        """A hash over every byte of weights, optimizer state and values."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + _bytes(tensor))
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in sorted(self.optimizer.state[parameter].items()):
                    digest.update(f"{key} {value.dtype}".encode() + _bytes(value))
            digest.update(repr(sorted((k, v) for k, v in group.items() if k != "params")).encode())
        parts = (self.scheduler.state_dict(), self.scaler.state_dict(), self.state["losses"], self.state["tokens"])
        digest.update(repr(parts).encode())
        digest.update(repr((self.noise.bit_generator.state, random.getstate())).encode())
        digest.update(np.random.get_state()[1].tobytes())  # type: ignore[index,union-attr]
        digest.update(
            _bytes(torch.get_rng_state()) + _bytes(self.loader.order) + _bytes(self.loader.random.get_state())
        )
        return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    """`RUN TOTAL SNAPSHOT [KILL_AT]`: train, save every third step, resume; die by SIGKILL before step KILL_AT."""
    run, total, snapshot = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    kill_at = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    training = Training(seed=99)  # another start than the uninterrupted run has: nothing may come from here
    if kill_at >= 0:
        training = Training()
    with stepwell.Checkpointer(run, snapshot=snapshot, save_when=stepwell.Every(steps=3)) as ckpt:  # type: ignore[arg-type]
        restored = ckpt.restore(training.state)
        first = restored.step + 1 if restored else 0
        for step in range(first, total):
            if step == kill_at:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            training.step()
            ckpt.save_if_due(step, training.state, metrics={"loss": training.state["losses"][-1]})
    answer = {"first": first, "tier": restored.tier if restored else None}
    print(json.dumps({**answer, "losses": training.state["losses"], "digest": training.digest()}))


if __name__ == "__main__":
    main()
