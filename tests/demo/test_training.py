"""The demo's training: the same every time, and not the same when anything of its state is missing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.demo.compare import compare, flatten
from stepwell.demo.train import Training, build, state_of, train

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 4}


@pytest.fixture(autouse=True)
def _threads_and_generators() -> Any:
    """The demo's training draws from torch's global generator; other tests must not notice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def trained(steps: int, training: Training | None = None) -> tuple[Training, list[float]]:
    training = training or build(**TINY)
    return training, [training.train_step() for _ in range(steps)]


def test_two_short_runs_are_equal_bit_for_bit() -> None:
    one, one_losses = trained(4)
    random.random(), torch.rand(5)
    two, two_losses = trained(4)
    assert one_losses == two_losses
    parts = compare(flatten(state_of(one)), flatten(state_of(two)), {})
    assert [part.difference for part in parts if part.name != "losses"] == [None] * 4


def test_it_learns() -> None:
    _, losses = trained(40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_random_numbers_matter() -> None:
    """Without dropout drawing from torch's generator the demo would prove less than it says."""
    one, _ = trained(2)
    torch.manual_seed(99)
    after_other_seed = one.train_step()
    assert after_other_seed != trained(3)[1][2]


def test_the_output_layer_is_the_embedding() -> None:
    model = build(**TINY).model
    assert model.output.weight is model.embedding.weight
    assert "output.weight" in model.state_dict()


@pytest.mark.parametrize("missing", ["model", "optim", "sched", "data"])
def test_every_part_of_the_state_is_needed(missing: str) -> None:
    """Carrying all parts but one to a new training gives other losses: none is there for show."""
    one, _ = trained(3)
    generator = torch.get_rng_state()
    carried = {name: part.state_dict() for name, part in state_of(one).items() if name != "losses"}
    carried = {name: cloned(state) for name, state in carried.items()}
    expected = trained(4, one)[1]

    def resumed(without: str | None) -> list[float]:
        two = build(**TINY)
        for name, part in state_of(two).items():
            if name not in ("losses", without):
                part.load_state_dict(cloned(carried[name]))
        torch.set_rng_state(generator)
        return trained(4, two)[1]

    assert resumed(None) == expected
    assert resumed(missing) != expected


def cloned(value: Any) -> Any:
    """A deep copy that shares no tensor."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: cloned(one) for key, one in value.items()}
    return [cloned(one) for one in value] if isinstance(value, list) else value


def test_train_resumes_where_it_was_and_saves_the_last_step(run: Path) -> None:
    expected = train(run.with_name("whole"), steps=9, save_every=4, training=build(**TINY))["losses"]
    saved = []
    train(run, steps=5, save_every=4, training=build(**TINY), on_step=lambda step, _, save: saved.append((step, save)))
    assert [step for step, save in saved if save is not None] == [4, 5]
    starts = []
    state = train(run, steps=9, save_every=4, training=build(**TINY), on_start=starts.append)
    assert [one.step for one in starts] == [5]
    assert state["losses"] == expected
