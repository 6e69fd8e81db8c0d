"""Real English text that every Python ships, and a loader that can be stopped and continued anywhere in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepwell.errors import StepwellError


def english_text() -> bytes:
    """The language reference that `help()` reads from, as UTF-8: about half a million bytes of English.

    Its exact content depends on the version of Python. Raises `StepwellError` where Python was packaged without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise StepwellError(
            "this Python comes without the text that the demo learns from",
            expected="the module pydoc_data.topics, part of the standard library",
            todo="use a Python with its complete standard library",
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class ShuffledText:
    """An endless loader of byte windows: every epoch visits each window once, in an order of its own.

    The order comes from the loader's own generator, so nothing else that draws random numbers moves it.
    `state_dict` holds where it is, a few kilobytes; after `load_state_dict` exactly the batches follow that would have
    followed there.
    """

    def __init__(self, text: bytes, *, context: int, batch: int, seed: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context, self.batch = context, batch
        self.window_count = (len(self.tokens) - 1) // context
        if self.window_count < batch:
            raise ValueError(f"{len(text)} bytes of text do not fill one batch of {batch} × {context}")
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self.epoch_start = self.generator.get_state()
        self.order = torch.randperm(self.window_count, generator=self.generator)
        self.position = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Bytes and the bytes that follow them, both int64 of shape (batch, context)."""
        if self.position + self.batch > self.window_count:
            self.epoch += 1
            self._shuffle()
        starts = self.order[self.position : self.position + self.batch] * self.context
        self.position += self.batch
        places = starts[:, None] + torch.arange(self.context)
        return self.tokens[places], self.tokens[places + 1]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "epoch_start": self.epoch_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["epoch_start"])
        self._shuffle()
        self.epoch, self.position = state["epoch"], state["position"]
