"""The loader of the demo: every window once per epoch, and exactly resumable at any place."""

from __future__ import annotations

import pytest
import torch

from stepwell.demo.text import ShuffledText, english_text

TEXT = bytes(range(256)) * 2
CONTEXT, BATCH = 8, 5  # 63 windows: 12 batches, 3 windows left over


def loader(seed: int = 7) -> ShuffledText:
    return ShuffledText(TEXT, context=CONTEXT, batch=BATCH, seed=seed)


def test_targets_are_the_bytes_that_follow() -> None:
    tokens, targets = loader().next_batch()
    assert tokens.shape == targets.shape == (BATCH, CONTEXT)
    assert torch.equal((tokens + 1) % 256, targets)


def test_an_epoch_visits_no_window_twice_and_the_next_has_another_order() -> None:
    data = ShuffledText(bytes(range(256)), context=4, batch=7, seed=7)  # every window begins with another byte
    first = torch.cat([data.next_batch()[0] for _ in range(9)])[:, 0].tolist()
    assert data.epoch == 0
    assert len(set(first)) == len(first) == 63
    second = torch.cat([data.next_batch()[0] for _ in range(9)])[:, 0].tolist()
    assert data.epoch == 1
    assert sorted(second) == sorted(first) and second != first


@pytest.mark.parametrize("taken", [0, 1, 11, 12, 13, 24, 30])
def test_state_round_trip_continues_with_the_same_batches(taken: int) -> None:
    """Also right before, at and after the end of an epoch, and into a loader that was somewhere else."""
    original = loader()
    for _ in range(taken):
        original.next_batch()
    state = original.state_dict()
    following = [original.next_batch() for _ in range(30)]

    other = loader(seed=99)
    for _ in range(17):
        other.next_batch()
    other.load_state_dict(state)
    for tokens, targets in following:
        again_tokens, again_targets = other.next_batch()
        assert torch.equal(tokens, again_tokens) and torch.equal(targets, again_targets)
    assert other.epoch == original.epoch


def test_other_random_draws_do_not_move_the_loader() -> None:
    quiet, disturbed = loader(), loader()
    for _ in range(15):
        torch.rand(3)
        assert torch.equal(quiet.next_batch()[0], disturbed.next_batch()[0])


def test_a_text_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fill one batch"):
        ShuffledText(TEXT[:40], context=8, batch=5, seed=1)


def test_the_shipped_text_is_english_and_large_enough() -> None:
    text = english_text()
    assert len(text) > 100_000
    assert text.count(b" the ") > 1000
