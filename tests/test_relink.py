"""The agent goes at the worst moment, or no agent can be started for a while: the next save works all the same."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from tests.helpers import agents_of, assert_is_step, state_of, wait_until

import stepwell
from stepwell.agent import client as clients
from stepwell.agent import protocol as p
from stepwell.errors import AgentError


def test_the_agent_dies_just_before_the_first_save(run: Path) -> None:
    """No attempt and no slot is there yet, so the save has to ask an agent for both."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with stepwell.Checkpointer(run, fresh=True, on_error="raise") as ckpt:
            (agent,) = agents_of(run)
            agent.send_signal(number)
            assert ckpt.save(3, state_of(3)).wait(timeout=60).committed
            assert ckpt.counters.skipped == 0


def test_a_restore_does_not_need_the_agent(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(3, state_of(3)).wait(timeout=60)
        (agent,) = agents_of(run)
        agent.kill()
        state = state_of(0)
        restored = ckpt.restore(state)
        assert restored is not None and restored.step == 3
        assert_is_step(state, 3)


def test_saves_fail_in_words_without_an_agent_and_work_again_later(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = clients._START
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        monkeypatch.setattr(clients, "_START", "raise SystemExit(3)")
        monkeypatch.setattr(clients, "START_SECONDS_MAX", 0.2)
        for step in (2, 3):  # the second one finds no agent at all, and looks for one again
            for agent in agents_of(run):
                agent.kill()
                agent.wait(10)
            wait_until(lambda: not ckpt._linked)
            save = ckpt.save(step, state_of(step)).wait(timeout=60)
            assert save.skipped or isinstance(save.error, AgentError)
        monkeypatch.setattr(clients, "_START", start)
        monkeypatch.setattr(clients, "START_SECONDS_MAX", 30.0)
        wait_until(lambda: not ckpt._relinking)
        assert ckpt.save(4, state_of(4)).wait(timeout=60).committed
        assert ckpt.counters.failed + ckpt.counters.skipped == 2
    assert_is_step(stepwell.load(run), 4)


def test_a_save_without_an_agent_is_accepted_only_by_the_next_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    connect = clients.Client.connect

    def late(self: clients.Client, hello: p.Hello) -> p.Welcome:
        assert go.wait(30)
        return connect(self, hello)

    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        monkeypatch.setattr(clients.Client, "connect", late)
        (agent,) = agents_of(run)
        agent.kill()
        wait_until(lambda: ckpt._relinking)
        save = ckpt.save(2, state_of(2))
        assert not save.skipped and not save.snapshot_done and "on its way" in repr(save)
        go.set()
        assert save.wait(timeout=60).committed and save.snapshot_done
