"""What the persister's thread owes to others while it works."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.agent.persister import Persister


def test_who_waits_for_accepted_saves_does_not_wait_for_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing a large pack takes seconds on some disks, and a restarted trainer has nothing to do with it."""
    may_commit, pruning, may_end = threading.Event(), threading.Event(), threading.Event()
    told: list[str] = []
    persister = Persister(SimpleNamespace(tier=None))  # type: ignore[arg-type]

    def prune(*about: Any, **more: Any) -> list[str]:
        pruning.set()
        assert may_end.wait(30)
        return []

    monkeypatch.setattr(persister, "_commit", lambda job: may_commit.wait(30))
    monkeypatch.setattr(persister, "_prune", prune)
    job: Any = SimpleNamespace(keep=None, resumed_from=None, order=SimpleNamespace(attempt=1))
    persister.start()
    persister.put(job)
    persister.after_saves(lambda: told.append("before the commit" if not may_commit.is_set() else "after"))
    assert told == []
    may_commit.set()
    assert pruning.wait(30)
    assert told == ["after"]
    persister.after_saves(lambda: told.append("at once"))
    assert told == ["after", "at once"] and persister.unfinished == 1
    may_end.set()
    persister.stop()
    assert persister.unfinished == 0


def test_a_save_that_fails_unexpectedly_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    persister = Persister(SimpleNamespace(tier=None))  # type: ignore[arg-type]

    def fail(job: Any) -> bool:
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr(persister, "_commit", fail)
    persister.put(None)  # type: ignore[arg-type]
    persister.after_saves(told.set)
    assert not told.is_set()
    persister.start()
    assert told.wait(30)
    persister.stop()
