"""The run's folder is removed, replaced, linked or damaged: before a start, between two, and while it trains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers import agents_of, assert_is_step, flip_byte, state_of, wait_until

import stepwell
from stepwell.agent import place
from stepwell.errors import AgentError, DamagedError, LineageError, NotARunError, UsageError

KILLED = """
import os, signal, sys, stepwell
from pathlib import Path
from tests.helpers import state_of
ckpt = stepwell.Checkpointer(Path(sys.argv[1]))
ckpt.save(1, state_of(1)).wait(timeout=60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_trainer(run: Path) -> None:
    """A trainer that has saved step 1 and is killed; its agent lingers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED, str(run)], env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and len(agents_of(run)) == 1


def save_some(run: Path, *steps: int) -> None:
    with stepwell.Checkpointer(run, on_error="raise", keep=stepwell.Keep(last=9)) as ckpt:
        ckpt.restore(state_of(0))
        for step in steps:
            ckpt.save(step, state_of(step)).wait(timeout=60)
    wait_until(lambda: not agents_of(run))


@pytest.mark.parametrize("how", ["removed", "emptied", "renamed", "replaced"])
def test_a_lingering_agent_does_not_serve_a_run_that_is_gone(run: Path, how: str) -> None:
    """Begin again in an empty folder right after a kill: the new training's saves are kept."""
    killed_trainer(run)
    if how == "renamed":
        run.rename(run.parent / "aside")
    else:
        shutil.rmtree(run)
    if how == "emptied":
        run.mkdir()
    if how == "replaced":
        save_some(run.parent / "other", 7)
        (run.parent / "other").rename(run)
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        state = state_of(0)
        restored = ckpt.restore(state)
        assert (restored.step if restored else None) == (7 if how == "replaced" else None)
        assert ckpt.save(8, state_of(8)).wait(timeout=60).committed
    assert_is_step(stepwell.load(run), 8)


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "of nothing"])
def test_a_run_is_known_without_its_first_document(run: Path, damage: str) -> None:
    """Every attempt and manifest repeats who the run is: nothing is lost, and the next start writes it again."""
    save_some(run, 1, 2)
    document = run / "run.json"
    whole = document.read_bytes()
    if damage == "missing":
        document.unlink()
    elif damage == "flipped":
        flip_byte(document, len(whole) // 2)
    else:
        document.write_bytes(b"" if damage == "empty" else b"{}")
    assert [step.problem for step in stepwell.steps(run)] == [None, None]
    assert_is_step(stepwell.load(run), 2)
    save_some(run, 3)
    assert [step.step for step in stepwell.steps(run) if step.problem is None] == [1, 2, 3]
    assert b'"run"' in document.read_bytes()


def test_without_attempts_the_manifests_know_it(run: Path) -> None:
    save_some(run, 1)
    (run / "run.json").unlink()
    shutil.rmtree(run / "attempts")
    assert_is_step(stepwell.load(run), 1)
    (run / "steps" / "000000000001-0001" / "manifest.json").write_text("{}")
    with pytest.raises(NotARunError):
        stepwell.load(run)
    (run / "run.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"run\.json"):
        stepwell.load(run)


@pytest.mark.parametrize("damage", ["removed", "emptied", "attempts removed"])
def test_documents_that_go_while_it_trains_come_back_with_the_next_save(run: Path, damage: str) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        if damage == "removed":
            (run / "run.json").unlink()
        elif damage == "emptied":
            (run / "run.json").write_bytes(b"")
        else:
            shutil.rmtree(run / "attempts")
        ckpt.save(2, state_of(2)).wait(timeout=60)
    assert [(step.step, step.problem) for step in stepwell.steps(run)] == [(1, None), (2, None)]
    assert_is_step(stepwell.load(run), 2)


def test_another_run_put_in_its_place_is_not_written_into(run: Path) -> None:
    other = run.parent / "other"
    save_some(other, 5)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        run.rename(run.parent / "aside")
        other.rename(run)
        failed = ckpt.save(2, state_of(2)).wait(timeout=60)
        assert isinstance(failed.error, LineageError) and "another run" in str(failed.error)
    assert [(step.step, step.problem) for step in stepwell.steps(run)] == [(5, None)]
    assert_is_step(stepwell.load(run.parent / "aside"), 1)


def test_a_linked_step_folder_is_not_followed(run: Path) -> None:
    victim = run.parent / "victim"
    victim.mkdir()
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        (run / "steps" / "000000000002-0001").symlink_to(victim)
        failed = ckpt.save(2, state_of(2)).wait(timeout=60)
        assert failed.error is not None and "link" in str(failed.error) and failed.retries == 0
        assert ckpt.save(3, state_of(3)).wait(timeout=60).committed
    assert list(victim.iterdir()) == []


def test_strange_things_in_the_folder_prevent_no_start(run: Path) -> None:
    save_some(run, 1)
    (run / "steps" / "000000000009-0001").write_text("a file that is named like a step")
    shutil.rmtree(run / "telemetry")
    (run / "telemetry").symlink_to(run.parent / "nowhere")
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        restored = ckpt.restore(state_of(0))
        assert restored is not None and restored.step == 1
        for step in (2, 3, 4, 5):
            ckpt.save(step, state_of(step)).wait(timeout=60)
    wait_until(lambda: not agents_of(run))
    assert [step.step for step in stepwell.steps(run)] == [3, 4, 5]
    assert (run / "steps" / "000000000009-0001").is_file()


def test_two_agents_cannot_serve_one_run_by_different_ways(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another runtime folder, as in a login shell beside a job, leads to another socket, but not to a second writer."""
    monkeypatch.setattr(place, "RUN_LOCK_SECONDS_MAX", 0.2)
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        script = "import sys, stepwell; stepwell.Checkpointer(sys.argv[1])"
        elsewhere = Path("/tmp") / f"sw-else-{os.getpid()}"
        elsewhere.mkdir(mode=0o700)
        try:
            environment = {
                **os.environ,
                "XDG_RUNTIME_DIR": str(elsewhere),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            done = subprocess.run(
                [sys.executable, "-c", script, str(run)], env=environment, capture_output=True, text=True, timeout=60
            )
        finally:
            shutil.rmtree(elsewhere)
        assert done.returncode == 1 and "another agent serves this run" in done.stderr
        ckpt.save(2, state_of(2)).wait(timeout=60)
    save_some(run, 3)


def test_file_systems_without_such_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(9, "no locks here")

    monkeypatch.setattr(place.fcntl, "flock", no_locks)
    assert place.lock_run(str(tmp_path)) == -1


def test_a_folder_that_is_locked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "RUN_LOCK_SECONDS_MAX", 0.0)
    first = place.lock_run(str(tmp_path))
    with pytest.raises(AgentError, match="met elsewhere"):
        place.lock_run(str(tmp_path))
    os.close(first)
    os.close(place.lock_run(str(tmp_path)))


@pytest.mark.parametrize("metrics", [{"lo\ud800ss": 1.0}, {"loss": 10**400}])
def test_metrics_that_cannot_be_written_take_no_slot_away(run: Path, metrics: dict[str, float]) -> None:
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        with pytest.raises(UsageError, match="metric"):
            ckpt.save(1, state_of(1), metrics=metrics)
        assert ckpt.save(2, state_of(2)).wait(timeout=60).committed


def test_whatever_goes_wrong_at_the_hand_over_takes_no_slot_away(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        with monkeypatch.context() as patch:
            patch.setattr(ckpt, "_send_layout", lambda layout: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ckpt.save(2, state_of(2))
        assert ckpt.save(3, state_of(3)).wait(timeout=60).committed
