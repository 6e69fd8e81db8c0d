from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cli.conftest import Command, make_state
from tests.helpers import agents_of, pack_of, wait_until

import stepwell


def row(lines: list[str], step: int) -> list[str]:
    """The lines of the table for steps of this number, without runs of spaces."""
    found = [" ".join(line.split()) for line in lines]
    return [line for line in found if line.split()[1:2] == [str(step)]]


def test_steps_stand_under_their_attempt_with_their_branch(command: Command, branchy: Path) -> None:
    outcome = command("ls", branchy)
    assert outcome.code == 0, outcome.err
    text = outcome.out
    first, second = text.index("attempt 1, "), text.index("attempt 2, ")
    assert "resumed from step 300 of attempt 1" in text[second:]
    abandoned, kept = row(text[first:second].splitlines(), 400)[0], row(text[second:].splitlines(), 400)[0]
    assert abandoned.startswith("○") and abandoned.endswith("abandoned")
    assert kept.startswith("●") and kept.endswith("0.4")
    assert row(outcome.lines, 300)[0].startswith("●")
    newest = row(outcome.lines, 450)[0]
    assert newest.startswith("▶") and newest.endswith("newest")
    assert "restore() takes step 450 of attempt 2" in text


def test_the_document_says_the_same(command: Command, branchy: Path) -> None:
    document = command("ls", branchy, "--json").document
    assert (document["format"], document["version"]) == ("stepwell.ls", 1)
    assert document["ok"] is True
    assert document["newest"] == document["restore_takes"] == "000000000450-0002"
    branches = {step["key"]: step["branch"] for step in document["steps"]}
    assert branches == {
        "000000000100-0001": "lineage",
        "000000000200-0001": "lineage",
        "000000000300-0001": "lineage",
        "000000000400-0001": "abandoned",
        "000000000500-0001": "abandoned",
        "000000000400-0002": "lineage",
        "000000000450-0002": "newest",
    }
    assert [one["resumed_from"] for one in document["attempts"]] == [None, "000000000300-0001"]
    step = document["steps"][-1]
    assert step["metrics"]["accuracy"] == 0.45
    assert step["stored_bytes"] == os.path.getsize(pack_of(branchy, step["key"]))
    assert step["parent"] == "000000000400-0002"
    assert document["agent"] is None


def test_a_pipe_sees_every_column_and_a_narrow_terminal_the_metrics_that_fit(command: Command, branchy: Path) -> None:
    assert "accuracy" in command("ls", branchy).out
    narrow = command("ls", branchy, columns=60)
    assert "not shown for want of width: accuracy" in narrow.out
    table = [line for line in narrow.lines if line[:1] in "▶●○ "]
    assert max(map(len, table)) <= 60
    assert row(narrow.lines, 450)[0].endswith("newest")


def test_damage_is_marked_with_its_reason_and_what_restore_takes_instead(command: Command, branchy: Path) -> None:
    pack = pack_of(branchy, "000000000450-0002")
    os.truncate(pack, 100)
    (branchy / "steps" / "000000000200-0001" / "manifest.json").write_text("{}")
    outcome = command("ls", branchy)
    assert outcome.code == 1
    assert row(outcome.lines, 450)[0].endswith("newest, INCOMPLETE")
    assert row(outcome.lines, 200)[0] == "✗ 200 DAMAGED"
    assert "has 100 bytes, expected" in outcome.out
    last = outcome.lines[-1]
    assert "step 450 of attempt 2, cannot be read: restore() takes step 400 of attempt 2" in last
    document = command("ls", branchy, "--json").document
    assert document["ok"] is False
    assert document["newest"] == "000000000450-0002"
    assert document["restore_takes"] == "000000000400-0002"
    assert "incomplete copy" in document["steps"][-1]["problem"]


def test_a_damaged_attempt_is_a_finding(command: Command, branchy: Path) -> None:
    (branchy / "attempts" / "0002.json").write_text("{")
    outcome = command("ls", branchy)
    assert outcome.code == 1
    assert "attempt 2: its record is missing or damaged" in outcome.out
    assert "✗ attempt 2: the document cannot be read" in outcome.out


def test_a_run_without_steps(command: Command, empty: Path) -> None:
    outcome = command("ls", empty)
    assert outcome.code == 0
    assert "0 steps" in outcome.out
    assert "No committed step yet" in outcome.out
    assert command("ls", empty, "--json").document["newest"] is None


def test_leftovers_are_counted(command: Command, branchy: Path) -> None:
    (branchy / "steps" / "000000000600-0002").mkdir()
    (branchy / "steps" / "000000000600-0002" / "node00000-00.safetensors").write_bytes(bytes(2000))
    assert "1 leftover of unfinished saves or prunes, 2.00 kB" in command("ls", branchy).out


def test_metrics_that_are_no_numbers_are_words(command: Command, tmp_path: Path) -> None:
    with stepwell.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, make_state(1), metrics={"loss": float("nan"), "gap": float("inf")}).wait()
    assert "nan" in command("ls", tmp_path / "run").out
    document = command("ls", tmp_path / "run", "--json")
    json.loads(document.out, parse_constant=lambda word: (_ for _ in ()).throw(AssertionError(word)))
    assert document.document["steps"][0]["metrics"] == {"loss": "nan", "gap": "inf"}


def test_a_running_agent_is_told(command: Command, run: Path) -> None:
    with stepwell.Checkpointer(run) as checkpointer:
        checkpointer.save(1, make_state(1)).wait()
        assert f"trainer {os.getpid()} is connected" in command("ls", run).out
        assert command("ls", run, "--json").document["agent"]["trainer_pid"] == os.getpid()


def test_attempts_without_steps_take_one_line_together(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3, 4):
        with stepwell.Checkpointer(run, keep=stepwell.Keep(last=1)) as checkpointer:
            checkpointer.restore(make_state(0))
            checkpointer.save(step, make_state(step)).wait()
        wait_until(lambda: not agents_of(run))  # it prunes after the commit
    outcome = command("ls", run)
    shown = [line for line in outcome.lines if line.startswith("attempt ")]
    assert [line.split(",")[0] for line in shown] == ["attempt 4"]
    assert "3 attempts have no step (any more)" in outcome.out
