"""A small GPT: the usual decoder-only transformer over bytes, with dropout and a tied output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        batch, length, width = x.shape
        mixed = self.query_key_value(self.norm_attention(x))
        query, key, value = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        heard = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        heard = self.attention_out(heard.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(heard, dropout)
        thought = self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return x + F.dropout(thought, dropout)


class GPT(nn.Module):
    """Logits of the next byte. The output layer is the embedding itself: one tensor under two names."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.dropout = dropout
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, length) to float (batch, length, 256); length is at most `context`."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
