from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.helpers import flip_byte, pack_of

from stepwell.restore.verify import Finding

NEWEST, BEFORE = "000000000450-0002", "000000000400-0002"


def test_a_whole_run(command: Command, branchy: Path) -> None:
    outcome = command("verify", branchy)
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.lines[:7]] == ["ok"] * 7
    assert outcome.lines[-2].endswith("all whole")
    assert outcome.lines[-1] == "restore() takes step 450 of attempt 2 now."
    document = command("verify", branchy, "--all", "--json").document
    assert (document["format"], document["version"], document["ok"]) == ("stepwell.verify", 1, True)
    assert document["restore_takes"] == NEWEST and document["restore_takes_verified"] is True
    assert document["read_bytes"] == sum(os.path.getsize(pack_of(branchy, one["key"])) for one in document["steps"])


def test_a_flipped_byte_names_its_tensors_and_what_restore_takes_instead(command: Command, branchy: Path) -> None:
    flip_byte(pack_of(branchy, NEWEST), -4000 + os.path.getsize(pack_of(branchy, NEWEST)))
    outcome = command("verify", branchy)
    assert outcome.code == 1
    damaged = [line for line in outcome.lines if line.startswith("DAMAGED")]
    assert len(damaged) == 1 and "450-2" in damaged[0]
    assert "model.layers.0.weight" in outcome.out or "frozen" in outcome.out or "plain values" in outcome.out
    assert outcome.lines[-1] == (
        "restore() takes step 400 of attempt 2 now, since step 450 of attempt 2 cannot be read."
    )
    document = command("verify", branchy, "--json").document
    assert document["ok"] is False
    assert document["restore_takes"] == BEFORE
    by_key = {one["key"]: one for one in document["steps"]}
    assert by_key[NEWEST]["ok"] is False and len(by_key[NEWEST]["findings"]) == 1
    assert by_key[BEFORE]["ok"] is True and by_key[BEFORE]["findings"] == []


def test_one_step_alone(command: Command, branchy: Path) -> None:
    flip_byte(pack_of(branchy, "000000000100-0001"), 5000)
    outcome = command("verify", branchy, "newest")
    assert outcome.code == 0
    assert outcome.lines[-2].startswith("1 step, ")
    assert command("verify", branchy, "100").code == 1
    assert command("verify", branchy, "200").lines[-1].endswith("(not read just now).")


def test_step_and_all_contradict_each_other(command: Command, branchy: Path) -> None:
    assert command("verify", branchy, "100", "--all").code == 2


def test_nothing_whole_is_said(command: Command, branchy: Path) -> None:
    for pack in branchy.glob("steps/*/*.safetensors"):
        os.truncate(pack, 10)
    outcome = command("verify", branchy)
    assert outcome.code == 1
    assert outcome.lines[0].startswith("INCOMPLETE")
    assert outcome.lines[-1] == "restore() would find no step that it could read."
    assert command("verify", branchy, "--json").document["restore_takes"] is None


def test_damage_of_the_run_itself_is_a_finding(command: Command, branchy: Path) -> None:
    (branchy / "attempts" / "0001.json").write_text("{")
    outcome = command("verify", branchy)
    assert outcome.code == 1
    assert "run: attempt 1: the document cannot be read" in outcome.out
    assert len(command("verify", branchy, "--json").document["run_findings"]) == 1


def test_a_missing_layout_is_a_finding_of_every_step_that_needs_it(command: Command, branchy: Path) -> None:
    for layout in (branchy / "layouts").iterdir():
        layout.unlink()
    outcome = command("verify", branchy)
    assert outcome.code == 1
    assert outcome.out.count("the layout is missing") == 7


def test_a_step_that_is_pruned_meanwhile_is_no_damage(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(root: str, step: object, progress: object) -> list[Finding]:
        key = step.key  # type: ignore[attr-defined]
        if key == "000000000100-0001":
            shutil.rmtree(Path(root) / "steps" / key)
            return [Finding(key, "a pack is missing")]
        return []

    monkeypatch.setattr("stepwell.cli.verify.verify_step", vanish)
    outcome = command("verify", branchy)
    assert outcome.code == 0
    assert outcome.lines[0].split()[0] == "pruned"


def test_a_pack_that_this_user_may_not_read_is_not_called_damaged(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith(".safetensors") and access(path, mode))
    outcome = command("verify", branchy)
    assert outcome.code == 3
    assert "cannot be read by this user" in outcome.err
    assert outcome.out == ""


def test_a_run_without_steps(command: Command, empty: Path) -> None:
    outcome = command("verify", empty)
    assert (outcome.code, outcome.out) == (0, "The run has no committed step.\n")


def test_verify_changes_nothing(command: Command, branchy: Path) -> None:
    def listing() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in branchy.rglob("*") if path.is_file())

    before = listing()
    command("verify", branchy)
    assert listing() == before
