"""Lazy snapshots through the door, with a real agent: what is stored is the state at `save()`, or nothing is."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import agents_of, wait_until  # noqa: E402
from tests.snapshot.states import Gate, Trainer, assert_same, stored  # noqa: E402

import stepwell  # noqa: E402
from stepwell.errors import UnsafeSnapshotError  # noqa: E402
from stepwell.snapshot import lazy as module  # noqa: E402


def warmed_up(run: Path, trainer: Trainer, **options: Any) -> stepwell.Checkpointer:
    """A checkpointer whose audits are over and whose slots are touched: from here on saves are lazy. Saves 1 and 2."""
    options = {"keep": stepwell.Keep(last=50), **options}
    ckpt = stepwell.Checkpointer(run, snapshot="lazy", **options)
    trainer.step()
    ckpt.prepare(trainer.state).wait(60)
    for step in (1, 2):
        save = ckpt.save(step, trainer.state)
        trainer.step()
        save.wait(timeout=60)
        assert save._lazy is None, "an audited save is eager"
        assert save.blocked_seconds > save.timings["audit_seconds"] > 0, "the comparison is time that was lost"
    return ckpt


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(module, "memmove", gate)
    yield gate
    gate.open.set()


def opened_at_the_barrier(gate: Gate, save: stepwell.checkpointer.Save) -> threading.Thread:
    """A thread that opens the gate as soon as the trainer waits at the barrier."""

    def wait_and_open() -> None:
        wait_until(lambda: save._lazy is not None and save._lazy._held_since_seconds is not None)
        gate.open.set()

    thread = threading.Thread(target=wait_and_open, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_what_is_stored_is_the_state_at_save_although_the_optimizer_steps(
    run: Path, gate: Gate, options: dict[str, Any]
) -> None:
    """CASES 2, 3 and 34: with every copy held back until the trainer stands at the barrier."""
    trainer = Trainer(**options)
    expected = {}
    with warmed_up(run, trainer) as ckpt:
        for step in range(3, 7):
            gate.open.clear()
            expected[step] = trainer.tensors()
            save = ckpt.save(step, trainer.state)
            assert save._lazy is not None and not save.snapshot_done
            trainer.backward()
            opener = opened_at_the_barrier(gate, save)
            trainer.optimizer.step()
            assert gate.open.is_set(), "the step has waited"
            opener.join()
            save.wait(timeout=60)
            assert save.blocked_seconds > save._lazy.barrier_seconds > 0
    for step, tensors in expected.items():
        assert_same(stored(stepwell.load(run, step)), tensors)


def test_every_save_of_a_loop_with_a_scaler_clipping_and_two_optimizers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save(); loss.backward(); clip; scaler.step(optimizer)`, with groups so small that copies overlap with it."""
    monkeypatch.setattr(module, "GROUP_BYTES", 1024)
    trainer = Trainer()
    head = torch.nn.Linear(64, 512)
    second = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3)
    state = {**trainer.state, "head": head, "second": second, "scaler": scaler, "sched": scheduler}
    state["random"] = trainer.random
    expected: dict[int, Any] = {}
    lazy_count = 0
    with stepwell.Checkpointer(run, snapshot="lazy", slots=3, keep=stepwell.Keep(last=50)) as ckpt:
        for step in range(12):
            data = torch.randn(16, 128, generator=trainer.random)
            trainer.optimizer.zero_grad()
            second.zero_grad()
            scaler.scale(head(trainer.model(data)).square().mean()).backward()
            scaler.unscale_(trainer.optimizer)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            scaler.step(trainer.optimizer)
            scaler.step(second)
            scaler.update()
            scheduler.step()
            expected[step] = (
                trainer.tensors(),
                {name: value.clone() for name, value in head.state_dict().items()},
                second.state[head.weight]["momentum_buffer"].clone(),
                (scaler.state_dict(), scheduler.state_dict(), trainer.random.get_state()),
            )
            save = ckpt.save(step, state)
            lazy_count += save._lazy is not None
    assert ckpt.counters.committed == 12 and ckpt.counters.failed == 0 and lazy_count >= 5
    for step, (tensors, head_tensors, momentum, values) in expected.items():
        loaded = stepwell.load(run, step)
        assert_same(stored(loaded), tensors)
        assert_same(loaded["head"], head_tensors)
        assert torch.equal(loaded["second"]["state"]["weight"]["momentum_buffer"], momentum)
        assert (loaded["scaler"], loaded["sched"]) == values[:2]
        assert loaded["random"]["state"] == values[2].numpy().tobytes()


def test_the_first_save_into_an_untouched_slot_is_eager(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUDITED_SAVES", 0)
    trainer = Trainer()
    with stepwell.Checkpointer(run, snapshot="lazy") as ckpt:
        assert ckpt.save(0, trainer.state)._lazy is None
        wait_until(lambda: len(ckpt._slots) == 2)
        assert ckpt.save(1, trainer.state)._lazy is not None


def test_audits_count_only_when_a_barrier_compared(run: Path) -> None:
    trainer = Trainer()
    trainer.step()
    with stepwell.Checkpointer(run, snapshot="lazy") as ckpt:
        for step in range(4):
            ckpt.save(step, trainer.state).wait(timeout=60)
        assert ckpt._lazy is not None and ckpt._lazy.audits_left == module.AUDITED_SAVES
        trainer.step()
        assert ckpt._lazy.audits_left == module.AUDITED_SAVES - 1
        ckpt.save(9, {"array": torch.zeros(1 << 16)}).wait(timeout=60)
        trainer.step()
        assert ckpt._lazy.audits_left == module.AUDITED_SAVES - 1, "nothing lazy in it"


def test_edits_without_a_trace_are_found_by_the_audit_and_become_eager(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CASES 34: `.data` edits, and a fused kernel called by hand, bump no version."""
    trainer = Trainer()
    first, last = trainer.model[0].weight, trainer.model[2].weight
    expected = {}
    versions = (first._version, last._version)
    with stepwell.Checkpointer(run, snapshot="lazy", keep=stepwell.Keep(last=50)) as ckpt:
        ckpt.prepare(trainer.state).wait(60)
        for step in range(6):
            expected[step] = trainer.tensors()
            save = ckpt.save(step, trainer.state)
            trainer.backward()
            first.data.clamp_(-0.05, 0.05)
            parts = [torch.zeros_like(last) for _ in range(2)]
            torch._fused_adamw_(
                [last], [torch.ones_like(last)], parts[:1], parts[1:], [], [torch.tensor(1.0)],
                lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            if step == 0:
                assert (first._version, last._version) == versions, "these edits leave no trace"
            trainer.optimizer.step()
            save.wait(timeout=60)
        assert {"model.0.weight", "model.2.weight"} <= ckpt._lazy.never  # type: ignore[union-attr]
        assert ckpt.counters.failed == 0 and save._lazy is not None, "the moments are lazy still"
    warnings = [record.getMessage() for record in caplog.records if "lazy snapshot" in record.getMessage()]
    assert len(warnings) == 1 and "model.0.weight" in warnings[0] and "model.2.weight" in warnings[0]
    for step, tensors in expected.items():
        assert_same(stored(stepwell.load(run, step)), tensors)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_change_before_the_barrier_fails_that_save_and_the_next_ones_work(
    run: Path, gate: Gate, on_error: Any
) -> None:
    trainer = Trainer()
    with warmed_up(run, trainer, on_error=on_error) as ckpt:
        save = ckpt.save(3, trainer.state)
        with torch.no_grad():
            trainer.model[2].weight.mul_(2)
        gate.open.set()
        trainer.step()
        if on_error == "raise":
            with pytest.raises(UnsafeSnapshotError, match=r"model\.2\.weight"):
                save.wait(timeout=60)
        else:
            save.wait(timeout=60)
        assert isinstance(save.error, UnsafeSnapshotError) and not save.committed
        expected = trainer.tensors()
        again = ckpt.save(4, trainer.state)
        assert again._lazy is not None
        with torch.no_grad():
            trainer.model[2].weight.mul_(2)  # eager by now
        trainer.step()
        assert again.wait(timeout=60).committed
        assert ckpt.counters.failed == 1
    assert [step.step for step in stepwell.steps(run)] == [1, 2, 4]
    assert_same(stored(stepwell.load(run, 4)), expected)
    records = [json.loads(line) for line in (run / "telemetry" / "node00000.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "skip"] == [3]


def test_no_further_step_is_needed(run: Path) -> None:
    """The last save of a loop: `wait`, the next `save` and `close` complete it."""
    trainer = Trainer()
    ckpt = warmed_up(run, trainer, slots=3)
    expected = trainer.tensors()
    for step in (3, 4):
        assert ckpt.save(step, trainer.state)._lazy is not None
    ckpt.wait(60)
    assert ckpt.counters.committed == 4
    last = ckpt.save(5, trainer.state)
    assert last._lazy is not None
    ckpt.close()
    assert last.committed
    trainer.step()
    for step in (3, 4, 5):
        assert_same(stored(stepwell.load(run, step)), expected)


def test_the_same_optimizer_loads_another_state_before_the_barrier(run: Path, gate: Gate) -> None:
    """`load_state_dict` puts new tensors in place; the snapshot keeps reading the old ones."""
    trainer = Trainer()
    with warmed_up(run, trainer) as ckpt:
        expected = trainer.tensors()
        save = ckpt.save(3, trainer.state)
        state = trainer.optimizer.state_dict()
        for part in state["state"].values():
            part["exp_avg"] = torch.ones_like(part["exp_avg"])
        trainer.optimizer.load_state_dict(state)
        trainer.backward()
        opened_at_the_barrier(gate, save)
        trainer.optimizer.step()
        assert save.wait(timeout=60).committed
    assert_same(stored(stepwell.load(run, 3)), expected)


def test_restore_between_save_and_barrier_completes_the_save_first(
    run: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    with warmed_up(run, trainer) as ckpt:
        expected = trainer.tensors()
        save = ckpt.save(3, trainer.state)
        assert save._lazy is not None and gate.entered.wait(60)
        complete = save._lazy.complete

        def open_and_complete() -> None:
            gate.open.set()
            complete()

        monkeypatch.setattr(save._lazy, "complete", open_and_complete)
        restored = ckpt.restore(trainer.state, step=1)
        gate.open.set()
        assert restored is not None and restored.step == 1
        assert save.wait(timeout=60).committed
        trainer.step()
    assert_same(stored(stepwell.load(run, "000000000003-0001")), expected)


def test_an_error_while_copying_reaches_the_handle(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 1."""
    trainer = Trainer()

    def broken(*_: int) -> None:
        raise ValueError("no such page")

    with warmed_up(run, trainer) as ckpt:
        monkeypatch.setattr(module, "memmove", broken)
        save = ckpt.save(3, trainer.state)
        trainer.step()
        assert isinstance(save.wait(timeout=60).error, ValueError) and ckpt.counters.failed == 1
        monkeypatch.setattr(module, "memmove", ctypes.memmove)
        assert ckpt.save(4, trainer.state).wait(timeout=60).committed
    assert [step.step for step in stepwell.steps(run)] == [1, 2, 4]


def test_agent_killed_while_a_lazy_copy_is_under_way(run: Path, gate: Gate) -> None:
    """CASES 23: the new agent gets slot, layout and order, although none of them was pending when the old one died."""
    trainer = Trainer()
    with warmed_up(run, trainer) as ckpt:
        expected = trainer.tensors()
        save = ckpt.save(3, trainer.state)
        assert gate.entered.wait(60)
        agents_of(run)[0].kill()
        wait_until(lambda: ckpt.counters.agent_restarts == 1 and ckpt._linked, 60)
        gate.open.set()
        trainer.step()
        assert save.wait(timeout=60).committed
    assert_same(stored(stepwell.load(run, 3)), expected)


def test_trainer_killed_while_a_lazy_copy_is_under_way_leaves_nothing(run: Path) -> None:
    """Not accepted yet, so it may be gone, but it must never be committed half copied."""
    script = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        import stepwell
        from stepwell.snapshot import lazy
        from tests.snapshot.states import Gate, Trainer
        from tests.snapshot.test_lazy_saves import warmed_up
        lazy.memmove = gate = Gate()
        trainer = Trainer()
        ckpt = warmed_up(Path(sys.argv[1]), trainer)
        save = ckpt.save(3, trainer.state)
        assert gate.entered.wait(60) and not save.snapshot_done
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run), str(Path(__file__).parents[2])]
    ended = subprocess.run(command, timeout=100, check=False)
    assert ended.returncode == -signal.SIGKILL
    trainer = Trainer(seed=1)
    with stepwell.Checkpointer(run) as ckpt:
        restored = ckpt.restore(trainer.state)
        assert restored is not None and restored.step == 2
    assert [step.step for step in stepwell.steps(run)] == [1, 2]


def test_a_forked_child_that_steps_writes_nothing_into_the_slot(run: Path, gate: Gate) -> None:
    trainer = Trainer()
    with warmed_up(run, trainer) as ckpt:
        expected = trainer.tensors()
        save = ckpt.save(3, trainer.state)
        assert gate.entered.wait(60)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a child that hangs is a failure
            trainer.model[0].weight.data.fill_(7)
            gate.open.set()
            ckpt.barrier()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gate.open.set()
        trainer.step()
        assert save.wait(timeout=60).committed
    assert_same(stored(stepwell.load(run, 3)), expected)
