from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tests.cli.conftest import Command, make_state
from tests.helpers import flip_byte

import stepwell
from stepwell.agent import prune as pruner
from stepwell.agent.observer import take_lock
from stepwell.agent.place import place_of
from stepwell.restore import catalogue as catalogues

ALL = {"100-1", "200-1", "300-1", "400-1", "500-1", "400-2", "450-2"}


def steps(run: Path) -> set[str]:
    """The steps that are there, by their short keys."""
    return {f"{one.step}-{one.attempt}" for one in catalogues.read(run).steps}


def files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def leave_things_behind(run: Path) -> None:
    """What a killed agent leaves, and what somebody else put there."""
    for path in (".run.json.tmp", "attempts/.0003.json.tmp", "steps/000000000450-0002/.manifest.json.tmp"):
        (run / path).write_bytes(bytes(10))
    for key in ("000000000500-0002", "000000000600-0002"):
        (run / "steps" / key).mkdir()
        (run / "steps" / key / "node00000-00.safetensors").write_bytes(bytes(1000))
    (run / "steps" / "000000000600-0002" / "my notes.txt").write_text("mine")
    (run / "steps" / "plots").mkdir()
    (run / "layouts" / ("0" * 32 + ".safetensors")).write_bytes(bytes(20))
    (run / "layouts" / "README").write_text("mine")


def test_without_a_rule_no_step_goes(command: Command, branchy: Path) -> None:
    outcome = command("prune", branchy)
    assert outcome.code == 0
    assert "No steps are removed unless you say what to keep" in outcome.out
    assert steps(branchy) == ALL


def test_the_plan_is_shown_and_nothing_done(command: Command, branchy: Path) -> None:
    leave_things_behind(branchy)
    before = files(branchy)
    outcome = command("prune", branchy, "--last", "1", "--dry-run")
    assert outcome.code == 0
    words = [" ".join(line.split()) for line in outcome.lines]
    assert any(line.startswith("remove 100-1") and "not kept by Keep(last=1)" in line for line in words)
    assert any(line.startswith("keep 450-2") and line.endswith("the newest step") for line in words)
    assert any("steps/000000000500-0002 1.00 kB parts of a save that was never committed" in line for line in words)
    assert files(branchy) == before
    document = command("prune", branchy, "--last", "1", "--dry-run", "--json").document
    assert (document["format"], document["version"], document["dry_run"]) == ("stepwell.prune", 1, True)
    assert document["done_by"] is None and document["removed"] == []
    assert len(document["plan"]) == 7
    assert files(branchy) == before


def test_steps_that_are_not_kept_go(command: Command, branchy: Path) -> None:
    expected = command("prune", branchy, "--last", "1", "--every", "200", "-n", "--json").document
    outcome = command("prune", branchy, "--last", "1", "--every", "200", "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["done_by"] == "command"
    assert set(document["removed"]) == {one["key"] for one in expected["plan"] if one["remove"]}
    assert steps(branchy) == {"200-1", "400-1", "500-1", "400-2", "450-2"}
    assert document["freed_bytes"] == sum(one["stored_bytes"] for one in document["plan"] if one["remove"])
    assert command("verify", branchy).code == 0


def test_the_best_stay(command: Command, branchy: Path) -> None:
    command("prune", branchy, "--last", "1", "--best", "accuracy:min:1")
    assert "100-1" in steps(branchy) and "200-1" not in steps(branchy)


@pytest.mark.parametrize("best", ["loss", "loss:least:2", "loss:min:x", ":min:1", "loss:min:0", "loss:min:-1"])
def test_a_rule_that_cannot_be_read_is_wrong_usage(command: Command, branchy: Path, best: str) -> None:
    assert command("prune", branchy, "--best", best).code == 2
    assert steps(branchy) == ALL


def test_a_metric_may_have_colons(command: Command, branchy: Path) -> None:
    document = command("prune", branchy, "--best", "eval:loss:min:2", "-n", "--json").document
    assert document["keep"] == {"last": 3, "every": None, "best": ["eval:loss", "min", 2]}


def test_leftovers_go_and_foreign_files_stay(command: Command, branchy: Path) -> None:
    whole = files(branchy)
    leave_things_behind(branchy)
    outcome = command("prune", branchy, "--json")
    assert outcome.code == 0, outcome.err
    kinds = {one["path"]: (one["kind"], one["removed"]) for one in outcome.document["leftovers"]}
    assert kinds == {
        ".run.json.tmp": ("temporary", True),
        "attempts/.0003.json.tmp": ("temporary", True),
        "steps/000000000450-0002/.manifest.json.tmp": ("temporary", True),
        "steps/000000000500-0002": ("uncommitted", True),
        "steps/000000000600-0002": ("uncommitted", True),
        f"layouts/{'0' * 32}.safetensors": ("layout", True),
    }
    foreign = {"steps/000000000600-0002", "steps/000000000600-0002/my notes.txt", "steps/plots", "layouts/README"}
    assert files(branchy) == whole | foreign
    assert command("prune", branchy, "--json").document["leftovers"] == []
    assert steps(branchy) == ALL


def test_a_layout_stays_while_a_manifest_cannot_be_read(command: Command, branchy: Path) -> None:
    leave_things_behind(branchy)
    flip_byte(branchy / "steps" / "000000000100-0001" / "manifest.json", 20)
    command("prune", branchy)
    assert (branchy / "layouts" / ("0" * 32 + ".safetensors")).exists()


def test_what_cannot_be_read_is_never_removed(command: Command, branchy: Path) -> None:
    flip_byte(branchy / "steps" / "000000000100-0001" / "manifest.json", 20)
    os.truncate(next((branchy / "steps" / "000000000200-0001").glob("*.safetensors")), 50)
    command("prune", branchy, "--last", "1")
    assert {"100-1", "200-1"} <= steps(branchy)


def test_a_prune_that_was_cut_off_is_finished(command: Command, branchy: Path) -> None:
    """A crash after the mark and the manifest's removal: the step is absent, its parts are there."""
    folder = branchy / "steps" / "000000000100-0001"
    (folder / "condemned").write_text("")
    (folder / "manifest.json").unlink()
    document = command("prune", branchy, "--json").document
    assert [(one["kind"], one["removed"]) for one in document["leftovers"]] == [("condemned", True)]
    assert not folder.exists()


def test_a_step_that_is_read_stays_and_is_named(command: Command, branchy: Path) -> None:
    pin = branchy / "steps" / "000000000100-0001" / "pin-0123456789abcdef"
    pin.write_text("0")
    outcome = command("prune", branchy, "--last", "1")
    assert outcome.code == 0
    assert "Left alone because somebody reads it: 100-1." in outcome.out
    assert "100-1" in steps(branchy) and "200-1" not in steps(branchy)
    pin.unlink()
    assert command("prune", branchy, "--last", "1", "--json").document["removed"] == ["000000000100-0001"]


def test_another_machine_may_still_write(command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    monkeypatch.setattr("socket.gethostname", lambda: "login-node")
    outcome = command("prune", branchy, "--last", "1")
    assert outcome.code == 3
    assert f"expected: {here}" in outcome.err and "found: login-node" in outcome.err
    assert "--assume-ended" in outcome.err
    assert steps(branchy) == ALL
    assert command("prune", branchy, "--last", "1", "--assume-ended").code == 0
    assert steps(branchy) != ALL


def test_another_user_may_still_write(command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    outcome = command("prune", branchy, "--last", "1")
    assert outcome.code == 3
    assert "another user" in outcome.err
    assert steps(branchy) == ALL


def test_an_agent_that_starts_or_ends_is_waited_for_by_the_user(command: Command, branchy: Path) -> None:
    lock = take_lock(place_of(str(branchy)))
    try:
        outcome = command("prune", branchy, "--last", "1")
    finally:
        os.close(lock)
    assert outcome.code == 3
    assert "try again in a moment" in outcome.err
    assert steps(branchy) == ALL


def test_a_running_agent_does_it_itself(command: Command, run: Path) -> None:
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=99)) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, make_state(step), metrics={"loss": step}).wait()
        (run / "steps" / "000000000099-0001").mkdir()  # may be a save on its way
        outcome = command("prune", run, "--last", "2", "--best", "loss:min:1", "--json")
        assert outcome.code == 0, outcome.err
        document = outcome.document
        assert document["done_by"] == "agent"
        assert len(document["removed"]) == 4
        assert [one["removed"] for one in document["leftovers"]] == [False]
        assert steps(run) == {"1-1", "6-1", "7-1"}
        checkpointer.save(8, make_state(8)).wait()
        assert "The running agent removed 2 steps" in command("prune", run, "--last", "2").out


def test_many_steps_are_removed_in_several_requests(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.cli.prune.STEPS_PER_REQUEST", 2)
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=99)) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, make_state(step)).wait()
        assert len(command("prune", run, "--last", "2", "--json").document["removed"]) == 5
        assert steps(run) == {"6-1", "7-1"}


def test_only_what_was_shown_is_removed(command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fell out of the rule after the plan was printed waits for the next prune."""
    from stepwell.cli import prune

    real, calls = prune.plan_for, []

    def plan_for(catalogue: catalogues.Catalogue, keep: stepwell.Keep) -> object:
        calls.append(keep)
        return real(catalogue, stepwell.Keep(last=3) if len(calls) == 1 else keep)

    monkeypatch.setattr(prune, "plan_for", plan_for)
    document = command("prune", branchy, "--last", "1", "--json").document
    assert document["removed"] == [one["key"] for one in document["plan"] if one["remove"]]
    assert len(calls) == 2 and "400-1" in steps(branchy)


def test_on_a_network_file_system_the_parts_go_after_a_grace(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("stepwell.cli.prune.Pruner", lambda tier: pruner.Pruner(tier, clock=lambda: clock[0]))
    monkeypatch.setattr("stepwell.cli.prune.time.sleep", sleep)
    for module in ("stepwell.cli.prune", "stepwell.agent.prune"):
        monkeypatch.setattr(f"{module}.LOCAL_FILESYSTEMS", frozenset())
    command("prune", branchy, "--last", "1")
    assert slept == [pruner.NETWORK_GRACE_SECONDS]
    assert not (branchy / "steps" / "000000000100-0001").exists()


def test_a_terminal_is_asked(command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(question: str, **about: object) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr("stepwell.cli.prune._is_terminal", lambda: True)
    monkeypatch.setattr("click.confirm", answer)
    outcome = command("prune", branchy, "--last", "1")
    assert outcome.code == 3
    assert asked == ["Remove 5 steps?"]
    assert steps(branchy) == ALL
    assert command("prune", branchy, "--last", "1", "--yes").code == 0
    assert len(asked) == 1
