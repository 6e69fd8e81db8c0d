"""Policies, trouble and preemption as they meet at the door: through `Checkpointer`, not piece by piece."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import agents_of, assert_is_step, flip_byte, pack_of, state_of, wait_until

import stepwell
from stepwell.agent import client
from stepwell.agent import protocol as p
from stepwell.errors import AgentError, PersistError, RunBusyError, StateClobbered, StateMismatchError, UsageError
from stepwell.snapshot.slot import Slot

FALLING_THEN_FLAT = [3.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0]

POLICIES: list[tuple[Any, list[int]]] = [
    (stepwell.Best("loss", "min"), [0, 1, 3]),
    (stepwell.Best("loss", "max"), [0]),
    (stepwell.Every(steps=3), [3, 6]),
    (stepwell.Every(minutes=60), []),
    (stepwell.Overhead(at_most=1e-9), [0]),
    (stepwell.LossPlateau("loss", window=2), [7]),
    (stepwell.AnyOf(stepwell.Every(steps=5), stepwell.Best("loss")), [0, 1, 3, 5]),
    (stepwell.AllOf(stepwell.Every(steps=3), stepwell.Best("loss")), [3]),
]


@pytest.mark.parametrize("asking", ["save_if_due", "due"])
@pytest.mark.parametrize(
    ("policy", "expected"), POLICIES, ids=[type(p).__name__ + str(i) for i, (p, _) in enumerate(POLICIES)]
)
def test_each_policy_is_due_when_it_says(run: Path, policy: Any, expected: list[int], asking: str) -> None:
    saved = []
    with stepwell.Checkpointer(run, save_when=policy, on_error="raise") as ckpt:
        for step, loss in enumerate(FALLING_THEN_FLAT):
            if asking == "save_if_due":
                save = ckpt.save_if_due(step, state_of(step), metrics={"loss": loss})
                due = save is not None
                assert save is None or (save.reason and not save.skipped)
            else:
                due = ckpt.due(step, {"loss": loss})
                assert ckpt.due(step, {"loss": loss}) is due, "asking twice gives the same answer"
                if due:
                    ckpt.save(step, state_of(step))
            if due:
                saved.append(step)
    assert saved == expected


def test_overhead_measures_again_after_a_resume(run: Path) -> None:
    for first in (0, 1):
        with stepwell.Checkpointer(run, save_when=stepwell.Overhead(at_most=1e-9)) as ckpt:
            ckpt.restore(state_of(0))
            assert ckpt.save_if_due(first, state_of(first)) is not None
            ckpt.wait()
            ckpt.restore(state_of(0))
            assert ckpt.due(first + 10), "also after a restore in the middle of a run"


def test_the_best_value_is_that_of_the_restored_branch(run: Path) -> None:
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=9)) as ckpt:
        for step, loss in enumerate([5.0, 4.0, 1.0]):
            ckpt.save(step, state_of(step), metrics={"loss": loss})
    with stepwell.Checkpointer(run, save_when=stepwell.Best("loss")) as ckpt:
        ckpt.restore(state_of(0), step=1)
        assert not ckpt.due(2, {"loss": 4.5})
        assert ckpt.due(3, {"loss": 3.0}), "the 1.0 of the abandoned step does not count"


@pytest.mark.parametrize("fault", ["fail:link:ENOSPC:3:2", "fail:link:EIO:3:1"])
def test_trouble_before_the_first_save_does_not_end_training(
    run: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Case 25: the disk that refuses the attempt's own document is as sick as one that refuses a pack."""
    monkeypatch.setenv("STEPWELL_FAULT", fault)
    with stepwell.Checkpointer(run) as ckpt:
        handles = [ckpt.save(step, state_of(step)).wait(timeout=60) for step in range(6)]
        assert any(one.skipped or one.error for one in handles), "the fault was met"
        assert handles[-1].committed
        assert ckpt.counters.skipped == sum(one.skipped for one in handles)
    assert_is_step(stepwell.load(run), 5)


def test_trouble_before_the_first_save_is_raised_when_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "fail:link:ENOSPC:3")
    with stepwell.Checkpointer(run, on_error="raise") as ckpt, pytest.raises(PersistError, match="No space left"):
        ckpt.save(1, state_of(1))


def test_a_state_that_is_half_overwritten_is_never_called_unchanged(run: Path) -> None:
    """The newest step is damaged in its second chunk, and the one before has another form."""
    large = {"a": np.arange(3 << 20, dtype=np.float64)}
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, {"a": np.zeros(5), "b": np.zeros(5)}).wait(timeout=60)
        ckpt.save(2, large).wait(timeout=60)
    pack = pack_of(run, "000000000002-0001")
    flip_byte(pack, pack.stat().st_size - (1 << 20))
    live = {"a": np.zeros(3 << 20)}
    with stepwell.Checkpointer(run) as ckpt, pytest.raises((StateClobbered, StateMismatchError)) as caught:
        ckpt.restore(live)
    if live["a"].any():
        assert isinstance(caught.value, StateClobbered), "nothing may say that nothing was changed"


def test_all_differences_are_in_the_error_also_those_it_does_not_show(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, {f"w{i}": np.zeros(3) for i in range(50)}).wait(timeout=60)
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore({f"w{i}": np.zeros(4) for i in range(50)})
    assert len(caught.value.differences) == 50 and "differences" in str(caught.value)


@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_the_last_save_before_preemption_waits_for_a_slot_within_the_deadline(
    run: Path, monkeypatch: pytest.MonkeyPatch, when_full: Any
) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.05")
    with stepwell.Checkpointer(run, slots=1, when_full=when_full, save_when=stepwell.Every(steps=1)) as ckpt:
        ckpt._preempt_seconds = 60.0
        ckpt.save(1, state_of(1))
        ckpt._on_signal(15, None)
        save = ckpt.save_if_due(2, state_of(2))
        assert save is not None and save.committed and not save.skipped


def test_a_deadline_of_preemption_ends_the_wait_for_a_slot(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.5")
    with stepwell.Checkpointer(run, slots=1, save_when=stepwell.Every(steps=1)) as ckpt:
        ckpt._preempt_seconds = 0.2
        first = ckpt.save(1, state_of(1))
        ckpt._on_signal(15, None)
        save = ckpt.save_if_due(2, state_of(2))
        assert save is not None and save.skipped and "no slot" in str(save.reason)
        assert first.wait(timeout=60).committed


def test_the_limits_of_this_machine_are_said_at_the_start(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), stepwell.Checkpointer(run) as ckpt:
        assert any("share a cgroup" in limit for limit in ckpt.limits)
        assert any("local to this machine" in limit or "is memory" in limit for limit in ckpt.limits)
    assert all(limit in caplog.text for limit in ckpt.limits)


def test_every_failure_is_raised_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "fail:rename:EACCES")
    ckpt = stepwell.Checkpointer(run, on_error="raise", slots=2)
    handles = []
    with pytest.raises(PersistError) as caught:
        handles = [ckpt.save(1, state_of(1))]
        handles[0]._done.wait(60)
        ckpt._on_error = "warn"  # the trainer is busy and calls nothing that would raise
        handles.append(ckpt.save(2, state_of(2)))
        handles[1]._done.wait(60)
        ckpt._on_error = "raise"
        ckpt.close()
    assert [one.error for one in handles] == [caught.value, caught.value.__cause__]


def test_a_prepared_slot_is_not_waited_for_after_the_end(run: Path) -> None:
    ckpt = stepwell.Checkpointer(run)
    hold, started = threading.Event(), threading.Semaphore(0)

    def busy() -> None:
        started.release()
        hold.wait(30)

    for _ in range(ckpt._background._max_workers):
        ckpt._background.submit(busy)
    for _ in range(ckpt._background._max_workers):
        assert started.acquire(timeout=30)
    preparation = ckpt.prepare(state_of(0))
    closing = threading.Thread(target=ckpt.close)
    closing.start()
    while not ckpt._background._shutdown:
        closing.join(0.01)
    hold.set()
    closing.join(60)
    with pytest.raises(UsageError, match="closed"):
        preparation.wait(timeout=30)


def test_memory_of_the_agent_is_checked_like_a_disk(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A slot whose bytes have changed since the commit gives nothing; the disk does."""
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        layout = ckpt._layout
        assert layout is not None
        slot = next(slot for slot in ckpt._slots if slot.used_at == 1)
        at = layout.slot_offsets[layout.stored[0]]
        slot.map[at] ^= 0x40
        live = state_of(0)
        restored = ckpt.restore(live)
        assert restored is not None and restored.tier == "0" and restored.warnings
        assert_is_step(live, 1)
        assert "memory tier" in caplog.text


def test_the_reason_of_a_save_and_the_stages_of_a_restore_are_in_the_telemetry(run: Path) -> None:
    import json

    with stepwell.Checkpointer(run, save_when=stepwell.Every(steps=2)) as ckpt:
        save = ckpt.save_if_due(2, state_of(2))
        assert save is not None
        save.wait(timeout=60)
        ckpt.restore(state_of(0))
    wait_until(lambda: not agents_of(run))  # the last lines are written while the agent ends
    lines = [json.loads(line) for line in (run / "telemetry/node00000.jsonl").read_text().splitlines()]
    saved = next(line for line in lines if line["event"] == "save")
    restored = next(line for line in lines if line["event"] == "restore")
    assert saved["reason"] == "every 2 steps"
    parts = [restored[f"{stage}_seconds"] for stage in ("settle", "open", "match", "read", "finish")]
    assert all(part >= 0 for part in parts) and sum(parts) <= restored["restore_seconds"] and restored["reason"] is None


def test_the_second_trainer_is_named_without_its_arguments(run: Path) -> None:
    script = """
        import sys, stepwell
        with stepwell.Checkpointer(sys.argv[1]) as ckpt:
            print("ready", flush=True)
            sys.stdin.read()
    """
    path = run.parent / "train.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, str(path), str(run), "--api-key", "s3cret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "ready\n"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(stepwell.StepwellError) as caught:
            patch.setattr(client, "BUSY_SECONDS_MAX", 0.1)
            stepwell.Checkpointer(run)
        other.stdin.close()
    assert "train.py" in str(caught.value) and "s3cret" not in str(caught.value)


def test_a_run_that_is_removed_under_way_begins_again_and_can_be_found(run: Path) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        shutil.rmtree(run)
        assert ckpt.restore(state_of(0)) is None
        for step in (2, 3):
            assert ckpt.save(step, state_of(step)).wait(timeout=60).committed
        live = state_of(0)
        restored = ckpt.restore(live)
        assert restored is not None and restored.step == 3
        assert_is_step(live, 3)
    assert_is_step(stepwell.load(run), 3)


# What is handed in


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), np.array(7)], ids=lambda value: type(value).__name__)
def test_steps_that_count_as_whole_numbers(run: Path, step: Any) -> None:
    with stepwell.Checkpointer(run, on_error="raise", save_when=stepwell.Every(steps=2)) as ckpt:
        save = ckpt.save(step, state_of(7))
        assert type(save.step) is int and save.wait(timeout=60).key == "000000000007-0001"
        assert ckpt.due(step) is False
        restored = ckpt.restore(state_of(0), step=step)
        assert restored is not None and restored.step == 7


@pytest.mark.parametrize("step", [-1, True, 1.0, "3", None, float("nan"), 10**12])
def test_steps_that_do_not(run: Path, step: Any) -> None:
    with stepwell.Checkpointer(run, save_when=stepwell.Every(steps=1)) as ckpt:
        for ask in (ckpt.save, ckpt.save_if_due):
            with pytest.raises(UsageError, match="whole number"):
                ask(step, state_of(1))
        with pytest.raises(UsageError, match="whole number"):
            ckpt.due(step)
        assert ckpt.counters.saves == 0


@pytest.mark.parametrize("state", [[], None, np.ones(1), (1, 2)], ids=lambda value: type(value).__name__)
def test_a_state_that_is_no_dict_is_refused_everywhere(run: Path, state: Any) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        for ask in (lambda: ckpt.save(1, state), lambda: ckpt.restore(state), lambda: ckpt.prepare(state)):
            with pytest.raises(TypeError, match="not a dict"):
                ask()


@pytest.mark.parametrize("metrics", [[("loss", 1)], {"loss": "low"}, {"loss": None}, {"loss": np.ones(3)}])
def test_metrics_that_are_no_numbers_are_refused_and_named(run: Path, metrics: Any) -> None:
    with stepwell.Checkpointer(run) as ckpt, pytest.raises(UsageError, match="metric"):
        ckpt.save(1, state_of(1), metrics=metrics)


@pytest.mark.parametrize("kind", ["spaces and é\U0001f600'\"", "a\nline", "bytes"])
def test_runs_with_odd_names(tmp_path: Path, kind: str) -> None:
    folder: Any = os.fsencode(tmp_path) + b"/\xff\xfe" if kind == "bytes" else tmp_path / kind
    with stepwell.Checkpointer(folder, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        assert [step.step for step in ckpt.steps()] == [1]
    assert os.path.isdir(folder)


@pytest.mark.parametrize("folder", ["", "a\0b"])
def test_what_cannot_be_a_folder(folder: str) -> None:
    with pytest.raises(UsageError, match="a run is a folder"):
        stepwell.Checkpointer(folder)


def test_a_file_in_the_place_of_the_run_is_said_at_once(run: Path) -> None:
    run.write_text("a file\n")
    with pytest.raises(AgentError, match="File exists") as caught:
        stepwell.Checkpointer(run)
    assert type(caught.value) is AgentError
    assert run.read_text() == "a file\n"


def test_the_same_run_twice_in_one_process(run: Path) -> None:
    """As when a notebook cell is run again: said at once, and the first one goes on."""
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        with pytest.raises(RunBusyError, match=r"close\(\)"):
            stepwell.Checkpointer(run)
        (run.parent / "link").symlink_to(run)
        with pytest.raises(RunBusyError, match=r"close\(\)"):
            stepwell.Checkpointer(run.parent / "link")
        ckpt.save(1, state_of(1)).wait(timeout=60)
    with stepwell.Checkpointer(run) as ckpt:
        assert ckpt.restore(state_of(0)) is not None


def test_a_clock_that_is_set_back_changes_no_duration(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 1e6)
        save = ckpt.save(1, state_of(1)).wait(timeout=60)
    assert save.durable_seconds is not None and save.blocked_seconds < save.durable_seconds < 1e5


def test_a_save_counts_as_accepted_only_once_the_agent_has_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer killed between the two would have lost what its own log calls accepted."""
    told: list[list[bool]] = []
    tell = client.Client.tell

    def telling(self: client.Client, message: Any, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, p.Persist):
            told.append([save.snapshot_done for save in ckpt._pending.values()])
        tell(self, message, fds)

    monkeypatch.setattr(client.Client, "tell", telling)
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        assert ckpt.save(1, state_of(1)).snapshot_done
    assert told == [[False]]


def test_a_second_preparation_is_ready_when_the_slots_are(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`restore` prepares too: `prepare().wait()` after it waits for the slots that are on their way."""
    made: list[int] = []
    go = threading.Event()
    populate = Slot.populate

    def populating(slot: Slot) -> None:
        assert go.wait(30)
        populate(slot)
        made.append(slot.index)

    monkeypatch.setattr(Slot, "populate", populating)
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        ckpt.prepare(state_of(1))
        second = ckpt.prepare(state_of(1))
        assert not second.done
        go.set()
        second.wait(timeout=30)
        assert len(made) == 1 == len(ckpt._slots) and all(slot.free for slot in ckpt._slots)


def test_an_agent_that_dies_while_slots_are_prepared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that it had just made is handed over to its successor like any other."""
    populate = Slot.populate
    killed: list[int] = []

    def killing(slot: Slot) -> None:
        if not killed:
            (agent,) = agents_of(run)
            agent.kill()
            killed.append(agent.pid)
            wait_until(lambda: ckpt.counters.agent_restarts == 1 and not ckpt._relinking)
        populate(slot)

    monkeypatch.setattr(Slot, "populate", killing)
    with stepwell.Checkpointer(run, slots=2, on_error="raise") as ckpt:
        ckpt.prepare(state_of(1)).wait(timeout=60)
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
    assert [step.step for step in stepwell.steps(run)] == [1, 2, 3]
    for step in (1, 2, 3):
        assert_is_step(stepwell.load(run, step), step)


def test_patterns_that_match_nothing_are_refused(run: Path) -> None:
    """A misspelt name would else restore nothing, and training would begin anew in silence."""
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        state = state_of(0)
        with pytest.raises(UsageError, match="no name"):
            ckpt.restore(state, names=["modle.*"], strict=False)
        assert_is_step(state, 0)


def test_arrays_that_cannot_be_written_to_are_replaced(run: Path) -> None:
    """What `save` takes, `restore` gives back: into the container, where the array itself takes nothing."""

    def fixed() -> np.ndarray[Any, Any]:
        array = np.arange(6.0).reshape(2, 3)
        array.flags.writeable = False
        return array

    wide = np.broadcast_to(np.arange(3.0), (4, 3))
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, {"fixed": fixed(), "list": [wide, 5], "tuple": (fixed(),)}).wait(timeout=60)
        zeros = np.zeros((2, 3))
        zeros.flags.writeable = False
        state = {"fixed": zeros, "list": [np.broadcast_to(np.zeros(3), (4, 3)), 0], "tuple": (zeros,)}
        ckpt.restore(state)
    assert np.array_equal(state["fixed"], fixed()) and np.array_equal(state["tuple"][0], fixed())
    assert np.array_equal(state["list"][0], wide) and state["list"][1] == 5
    assert not zeros.any(), "it could not be written to, and was not"
