"""The demo from its first to its last line, and its manners towards folders that are not its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import agents_of

from stepwell.demo import run as run_demo
from stepwell.demo.story import MARKER, Outcome, Plan, claimed
from stepwell.demo.trainer import Kill, Trainer, agent_of
from stepwell.errors import RunBusyError, StepwellError, UsageError

# Small steps, but a state of 15 MB: written in a few milliseconds at the least, so that a kill can hit the writing.
SIZES = {"layers": 2, "width": 224, "heads": 2, "context": 16, "batch": 2}


@pytest.mark.timeout(300)
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice in the middle of a save, resumed, and equal to the undisturbed training bit for bit.

    A file in the current folder that is named like a module of the standard library is not taken for it.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')")
    code = run_demo(Path("demo"), json=True, steps=40, save_every=3, sizes=SIZES)
    out, err = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)

    assert result["equal"], err
    for parts in result["comparison"].values():
        assert {part["name"] for part in parts} >= {"weights", "optimizer", "losses", "random numbers"}
        assert all(part["tensor_count"] or part["value_count"] for part in parts)
    assert result["killed_in_the_middle"] and result["accepted_kept"], err
    assert [kill["agent_too"] for kill in result["kills"] if kill["in_the_middle"]] == [False, True]
    assert result["ls"]["exit_code"] == result["verify"]["exit_code"] == 0, err
    assert result["ok"] and code == 0

    assert json.loads((tmp_path / "demo" / MARKER).read_text()) == result
    assert (tmp_path / "demo" / "run" / "run.json").is_file()
    assert not agents_of(tmp_path)


def plan_in(folder: Path) -> Plan:
    return Plan(folder, steps=20, save_every=5, threads=1)


def test_a_folder_of_somebody_else_is_refused_and_untouched(tmp_path: Path) -> None:
    mine = tmp_path / "run"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not the demo's own"):
        run_demo(tmp_path)
    assert (mine / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "demo")
    with claimed(plan):
        (plan.run / "steps").mkdir(parents=True)
        plan.final("resumed").touch()
        plan.log.touch()
        (plan.folder / "notes.txt").touch()
    with claimed(plan):
        assert sorted(path.name for path in plan.folder.iterdir()) == [MARKER, "notes.txt"]


def test_two_demos_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    with claimed(plan_in(tmp_path)), pytest.raises(RunBusyError), claimed(plan_in(tmp_path)):
        pass


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few steps"):
        run_demo(tmp_path, steps=10, save_every=5)
    assert not any(tmp_path.iterdir())


def test_a_training_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path) -> None:
    arguments = ["--final", "f", "--threads", "1", "--sizes", '{"wdith": 3}', "--steps", "1", "--save-every", "1"]
    with Trainer(arguments, tmp_path / "log") as trainer, pytest.raises(StepwellError, match="wdith"):
        list(trainer.events())


def test_a_run_without_an_agent_has_none(tmp_path: Path) -> None:
    assert agent_of(tmp_path / "run") is None


@pytest.mark.parametrize("broken", ["equal", "killed_in_the_middle", "accepted_kept", "commands_fine"])
def test_one_fault_is_enough_to_fail(broken: str) -> None:
    names = ("equal", "killed_in_the_middle", "accepted_kept", "commands_fine")
    assert Outcome(True, True, True, True).ok
    outcome = Outcome(**{name: name != broken for name in names})
    assert not outcome.ok and len(outcome.faults) == 1


def test_an_accepted_save_that_vanishes_while_its_agent_lives_is_a_broken_promise() -> None:
    def kill(agent_too: bool, commit_seconds: float | None) -> Kill:
        return Kill(10, agent_too, 0.001, False, commit_seconds, 5)

    assert kill(agent_too=False, commit_seconds=0.1).promise_kept
    assert kill(agent_too=True, commit_seconds=None).promise_kept
    assert not kill(agent_too=False, commit_seconds=None).promise_kept
