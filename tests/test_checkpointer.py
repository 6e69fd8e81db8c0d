"""The door: save, handles, slots, restore, lineage, errors. Small numpy states; torch has its own file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.helpers import agents_of, assert_is_step, flip_byte, open_files, pack_of, state_of, wait_until

import stepwell
from stepwell.errors import (
    DamagedError,
    LineageError,
    NoSuchStepError,
    StateClobbered,
    StateMismatchError,
    UsageError,
    WaitTimeout,
)


def test_round_trip_in_place(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        assert ckpt.restore(state_of(0)) is None
        save = ckpt.save(7, state_of(7), metrics={"loss": 0.5})
        save.wait(timeout=30)
        assert save.committed and save.key == "000000000007-0001"
        assert save.durable_seconds is not None and save.durable_seconds >= save.blocked_seconds > 0
    live = state_of(0)
    arrays, history = dict(live["model"]), live["history"]
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(live)
    assert restored is not None and restored.step == 7 and restored.metrics == {"loss": 0.5}
    assert_is_step(live, 7)
    assert live["history"] is history, "containers are filled in place"
    assert all(live["model"][name] is array for name, array in arrays.items())


def test_what_save_returns_does_not_alias_the_trainer(run: Path) -> None:
    """CASES 2: a CPU tensor changed right after save() must not end up in the file."""
    with stepwell.Checkpointer(run) as ckpt:
        for step in range(5):
            state = state_of(step)
            ckpt.save(step, state)
            for array in state["model"].values():
                array.fill(-1)
    loaded = stepwell.load(run)
    assert_is_step(loaded, 4)


def test_same_step_twice_returns_the_first_handle(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        first = ckpt.save(1, state_of(1))
        assert ckpt.save(1, state_of(1)) is first


def test_ten_saves_each_restorable_and_memory_flat(run: Path) -> None:
    """CASES 5 and 6: neither the second nor the tenth save is different; descriptors do not grow."""
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=20)) as ckpt:
        ckpt.save(0, state_of(0)).wait(timeout=30)
        ckpt.save(1, state_of(1)).wait(timeout=30)
        wait_until(lambda: len(ckpt._slots) == 2)
        before = open_files()
        for step in range(2, 12):
            ckpt.save(step, state_of(step)).wait(timeout=30)
        assert open_files() <= before + 1
    for step in range(12):
        assert_is_step(stepwell.load(run, step), step)


def test_full_slots_skip_with_a_handle_and_a_counter(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.5")
    with stepwell.Checkpointer(run, slots=1, when_full="skip") as ckpt:
        first = ckpt.save(0, state_of(0))
        second = ckpt.save(1, state_of(1))
        assert not first.skipped and second.skipped and second.done and "slot" in str(second.reason)
        assert ckpt.counters.skipped == 1
        assert second.wait(timeout=0.01) is second
    assert [step.step for step in stepwell.steps(run)] == [0]


def test_waiting_for_a_slot_is_bounded_and_counted_as_blocked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "slow:1.0")
    with stepwell.Checkpointer(run, slots=1, slot_wait_seconds_max=0.2) as ckpt:
        ckpt.save(0, state_of(0))
        late = ckpt.save(1, state_of(1))
        assert late.skipped and late.blocked_seconds >= 0.2


def test_wait_times_out_and_the_save_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.3")
    with stepwell.Checkpointer(run) as ckpt:
        save = ckpt.save(0, state_of(0))
        with pytest.raises(WaitTimeout):
            save.wait(timeout=0.01)
        save.wait(timeout=30)
        with pytest.raises(UsageError):
            save.wait(tier=1)


def test_first_save_into_a_run_with_steps_is_refused_unless_fresh(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(5, state_of(5)).wait(timeout=30)
    with stepwell.Checkpointer(run) as ckpt, pytest.raises(LineageError, match="fresh=True"):
        ckpt.save(0, state_of(0))
    with stepwell.Checkpointer(run, fresh=True) as ckpt:
        ckpt.save(0, state_of(0)).wait(timeout=30)
    assert [step.key for step in stepwell.steps(run)] == ["000000000005-0001", "000000000000-0002"]
    assert_is_step(stepwell.load(run), 0)


def test_rollback_never_collides_with_or_hides_the_abandoned_steps(run: Path) -> None:
    """CASES 31: resuming from 600 after 1000 makes a branch; the abandoned future stays readable and is not newest."""
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=10)) as ckpt:
        for step in (400, 600, 800, 1000):
            ckpt.save(step, state_of(step)).wait(timeout=30)
        live = state_of(0)
        restored = ckpt.restore(live, step=600)
        assert restored is not None and restored.step == 600
        assert_is_step(live, 600)
        newest = next(step for step in ckpt.steps() if step.newest)
        assert newest.step == 1000, "before the rollback's first commit nothing has changed on disk"
        branch = ckpt.save(800, state_of(800))
        branch.wait(timeout=30)
        assert branch.key == "000000000800-0002"
    steps = {step.key: step for step in stepwell.steps(run)}
    assert set(steps) == {f"{n:012d}-0001" for n in (400, 600, 800, 1000)} | {"000000000800-0002"}
    assert steps["000000000800-0002"].newest and steps["000000000800-0002"].parent == "000000000600-0001"
    assert not steps["000000001000-0001"].in_lineage and steps["000000000400-0001"].in_lineage
    assert_is_step(stepwell.load(run), 800)
    assert_is_step(stepwell.load(run, "000000001000-0001"), 1000)


def test_pruning_keeps_the_step_resumed_from_until_newer_ones_exist(run: Path) -> None:
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=2)) as ckpt:
        for step in range(4):
            ckpt.save(step, state_of(step)).wait(timeout=30)
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=2)) as ckpt:
        live = state_of(0)
        assert ckpt.restore(live, step=2) is not None
        ckpt.save(3, state_of(3)).wait(timeout=30)
        wait_until(lambda: True)
    keys = [step.key for step in stepwell.steps(run)]
    assert "000000000002-0001" in keys


def test_damaged_newest_falls_back_whole_and_says_so(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait(timeout=30)
    pack = pack_of(run, "000000000002-0001")
    flip_byte(pack, pack.stat().st_size - 9000)
    live = state_of(0)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(live)
        assert restored is not None and restored.step == 1 and restored.warnings
        assert_is_step(live, 1)
        assert "DAMAGED" in caplog.text and "layer" in caplog.text
        with pytest.raises((DamagedError, StateClobbered)):
            ckpt.restore(live, step=2)


def test_only_step_damaged_is_never_none_and_never_silent(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=30)
    pack = pack_of(run, "000000000001-0001")
    flip_byte(pack, pack.stat().st_size - 9000)
    with stepwell.Checkpointer(run) as ckpt, pytest.raises((StateClobbered, DamagedError)):
        ckpt.restore(state_of(0))


def test_mismatch_lists_everything_and_changes_nothing(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(3, state_of(3)).wait(timeout=30)
    live = state_of(0)
    live["model"]["extra"] = np.zeros(3)
    live["model"]["layer0"] = np.zeros(999, dtype=np.float32)
    live["model"]["layer1"] = np.zeros(1000, dtype=np.float64)
    del live["model"]["layer2"]
    with stepwell.Checkpointer(run) as ckpt:
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(live)
        text = str(caught.value)
        for part in ("model.extra", "model.layer0", "999", "1000", "model.layer1", "float64", "model.layer2"):
            assert part in text
        assert live["epoch"] == 0 and (live["model"]["layer3"] == 0).all()


def test_unknown_step_names_what_there_is(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(3, state_of(3)).wait(timeout=30)
        with pytest.raises(NoSuchStepError, match="000000000003-0001"):
            ckpt.restore(state_of(0), step=4)


def test_unstorable_state_names_its_path(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        with pytest.raises(TypeError, match="lock"):
            ckpt.save(0, {"a": {"lock": open_files.__code__}})
        ckpt.save(1, state_of(1)).wait(timeout=30)


def test_storage_error_reaches_the_handle_once_and_the_next_save_works(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 1 and 25."""
    monkeypatch.setenv("STEPWELL_FAULT", "fail:link:EACCES:5:1")
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        failed = 0
        for step in range(6):
            try:
                ckpt.save(step, state_of(step)).wait(timeout=30)
            except OSError as error:
                failed += 1
                assert isinstance(error, stepwell.StepwellError)
        assert failed == 1 and ckpt.counters.failed == 1
    assert len(stepwell.steps(run)) >= 3


def test_transient_error_is_retried_and_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "fail:pwrite:EIO:8:1")
    with stepwell.Checkpointer(run) as ckpt:
        for step in range(4):
            ckpt.save(step, state_of(step)).wait(timeout=30)
        assert ckpt.counters.retries == 1 and ckpt.counters.failed == 0
        assert ckpt.counters.committed == 4


def test_accepted_save_survives_the_trainer(run: Path) -> None:
    script = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        import stepwell
        from tests.helpers import state_of
        ckpt = stepwell.Checkpointer(sys.argv[1])
        ckpt.save(3, state_of(3, 1_000_000))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run), str(Path(__file__).parents[1])]
    environment = {**os.environ, "STEPWELL_FAULT": "slow:0.2"}
    ended = subprocess.run(command, env=environment, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    wait_until(lambda: run.exists() and any(step.problem is None for step in stepwell.steps(run)))
    assert_is_step(stepwell.load(run), 3)


def test_dead_agent_is_replaced_and_nothing_accepted_is_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 23."""
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.3")
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=9)) as ckpt:
        ckpt.save(0, state_of(0)).wait(timeout=30)
        pending = ckpt.save(1, state_of(1))
        agents = agents_of(run)
        assert len(agents) == 1
        agents[0].kill()
        pending.wait(timeout=30)
        assert pending.committed
        ckpt.save(2, state_of(2)).wait(timeout=30)
        assert ckpt.counters.agent_restarts == 1
    for step in range(3):
        assert_is_step(stepwell.load(run, step), step)


def test_restarted_trainer_restores_from_memory(run: Path) -> None:
    script = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        import stepwell
        from tests.helpers import state_of
        ckpt = stepwell.Checkpointer(sys.argv[1])
        ckpt.save(3, state_of(3)).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run), str(Path(__file__).parents[1])]
    subprocess.run(command, timeout=60, check=False)
    live = state_of(0)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(live)
        assert restored is not None and restored.tier == "memory" and restored.step == 3
        assert_is_step(live, 3)
        ckpt.save(4, state_of(4)).wait(timeout=30)


def test_signal_saves_once_more_and_waits(run: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with stepwell.Checkpointer(run, save_when=stepwell.Every(steps=1000)) as ckpt:
        ckpt.save_on_signals(signal.SIGUSR1, deadline_seconds=30)
        saves = []
        for step in range(1, 100):
            if step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
            saves.append(ckpt.save_if_due(step, state_of(step)))
            if ckpt.preempted:
                break
        assert step == 5 and saves[:4] == [None] * 4
        assert saves[4] is not None and saves[4].committed
    assert signal.getsignal(signal.SIGUSR1) == before


def test_agent_ends_after_close(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, state_of(0))
        assert len(agents_of(run)) == 1
    wait_until(lambda: not agents_of(run))


def test_state_that_grows_gets_larger_slots(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        for step, size in enumerate((10, 100_000, 10, 1_000_000)):
            ckpt.save(step, state_of(step, size)).wait(timeout=30)
    for step in range(1, 4):
        assert_is_step(stepwell.load(run, step), step)


def test_packs_open_with_safetensors(run: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(2, state_of(2)).wait(timeout=30)
    arrays = safetensors.load_file(pack_of(run, "000000000002-0001"))
    assert (arrays["model.layer0"] == 2).all()


def test_launcher_pipe_is_not_held_open(run: Path) -> None:
    """CASES 33: `python train.py | cat` ends when training ends, although the agent lingers."""
    script = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        import stepwell
        from tests.helpers import state_of
        ckpt = stepwell.Checkpointer(sys.argv[1])
        ckpt.save(0, state_of(0)).wait()
        print("done", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run), str(Path(__file__).parents[1])]
    ended = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert b"done" in ended.stdout
    assert agents_of(run), "the agent lingers for the restarted trainer"


def test_a_damaged_layout_is_replaced_by_the_next_save(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=30)
        (layout,) = (run / "layouts").iterdir()
        flip_byte(layout, 200)
        ckpt.save(2, state_of(2)).wait(timeout=30)
    assert_is_step(stepwell.load(run, 2), 2)
    assert_is_step(stepwell.load(run, 1), 1)
