"""The command as a whole: help, errors, exit codes, what it imports, what it does to a terminal."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.cli.conftest import ENVIRONMENT, Command
from tests.helpers import flip_byte

from stepwell.cli import COMMANDS
from stepwell.errors import DamagedError


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=ENVIRONMENT)


def shell(*arguments: object, **about: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    command = [sys.executable, "-m", "stepwell", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**ENVIRONMENT, **about}
    )


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_imports_neither_torch_nor_numpy_nor_rich(arguments: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'numpy', 'rich', 'msgspec'} & set(sys.modules))))\n"
        "from stepwell.cli import main\n"
        f"sys.argv[1:] = {arguments}\n"
        "main()\n"
    )
    done = python(code)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "ls runs/gpt" in done.stdout


def test_looking_at_a_run_does_not_import_torch(branchy: Path) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from stepwell.cli import main\n"
        f"sys.argv[1:] = ['verify', {str(branchy)!r}]\n"
        "main()\n"
    )
    done = python(code)
    assert done.stdout.splitlines()[-1] == "False"


def test_without_arguments_it_says_what_it_is_and_names_the_commands_in_order(command: Command) -> None:
    outcome = command()
    assert outcome.code == 0
    assert "keeps the state of deep-learning training runs" in outcome.out
    places = [outcome.out.index(f"  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert len(outcome.lines) <= 40
    assert max(map(len, outcome.lines)) <= 100


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    loaded: click.Command = importlib.import_module(f"stepwell.cli.{name}").command
    assert (loaded.help or "").splitlines()[0] == COMMANDS[name]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_and_json(command: Command, name: str) -> None:
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["ls"], ["ls", "a", "b"], ["ls", ".", "--what"], ["export", ".", "1", "x", "--format", "npz"]],
)
def test_wrong_usage_exits_with_2(command: Command, arguments: list[str]) -> None:
    outcome = command(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""


@pytest.mark.parametrize("name", ["ls", "show", "verify", "prune"])
def test_a_folder_that_is_no_run_is_one_block_of_text(command: Command, tmp_path: Path, name: str) -> None:
    outcome = command(name, tmp_path)
    assert outcome.code == 3
    assert outcome.out == ""
    assert outcome.err.startswith("stepwell: there is no Stepwell run here\n")
    assert f"where: {tmp_path}" in outcome.err
    assert "what to do:" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_folder_of_runs_names_them(command: Command, branchy: Path) -> None:
    outcome = command("ls", branchy.parent)
    assert outcome.code == 3
    assert "runs below it: gpt" in outcome.err
    assert f"name one of them, as in {branchy}" in outcome.err


@pytest.mark.parametrize("inside", ["run.json", "steps", "steps/000000000100-0001"])
def test_a_path_inside_a_run_names_the_run(command: Command, branchy: Path, inside: str) -> None:
    outcome = command("ls", branchy / inside)
    assert outcome.code == 3
    assert f"name the run itself: {branchy}" in outcome.err


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_what_is_there_instead_of_a_run_is_said(command: Command, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("hello")
    outcome = command("ls", path)
    assert outcome.code == 3
    assert ("found: a file" if kind == "file" else "found: no such folder") in outcome.err


def test_with_json_an_error_is_a_document_too(command: Command, tmp_path: Path) -> None:
    outcome = command("ls", tmp_path, "--json")
    assert outcome.code == 3
    assert outcome.document["format"] == "stepwell.error"
    assert outcome.document["error"] == "NotARunError"
    assert outcome.document["where"] == str(tmp_path)
    assert outcome.document["exit_code"] == 3
    assert outcome.err != ""


def test_a_damaged_run_file_is_a_finding(command: Command, branchy: Path) -> None:
    flip_byte(branchy / "run.json", 10)
    outcome = command("ls", branchy)
    assert outcome.code == DamagedError.exit_code == 1
    assert "run.json is damaged; the run is known from attempts/" in outcome.out
    shutil.rmtree(branchy / "attempts")
    shutil.rmtree(branchy / "steps")
    outcome = command("ls", branchy)
    assert outcome.code == 1 and str(branchy / "run.json") in outcome.err


@pytest.mark.parametrize("step", ["12x", "", "-", "1-2-3", "../x"])
def test_what_is_no_step_is_wrong_usage(command: Command, branchy: Path, step: str) -> None:
    outcome = command("show", branchy, "--", step)
    assert outcome.code == 2
    assert "600-2" in outcome.err


@pytest.mark.parametrize("step", ["400", "400-2", "000000000400-0002"])
def test_a_step_can_be_named_by_number_short_key_and_key(command: Command, branchy: Path, step: str) -> None:
    assert command("show", branchy, step, "--json").document["key"] == "000000000400-0002"


def test_a_step_that_is_not_there_is_answered_with_those_that_are(command: Command, branchy: Path) -> None:
    outcome = command("show", branchy, "999")
    assert outcome.code == 3
    assert "000000000450-0002" in outcome.err


@pytest.mark.parametrize("name", ["show", "export"])
def test_newest_of_a_run_without_steps_is_said(command: Command, empty: Path, tmp_path: Path, name: str) -> None:
    outcome = command(*(["show", empty] if name == "show" else ["export", empty, "newest", tmp_path / "x"]))
    assert outcome.code == 3
    assert "no committed step" in outcome.err


def test_a_fault_of_ours_is_a_traceback_and_not_a_finding(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.cli.ls.restore_takes", lambda catalogue: 1 / 0)
    outcome = command("ls", branchy)
    assert outcome.code == 3
    assert "ZeroDivisionError" in outcome.err
    assert "bug in Stepwell" in outcome.err


def test_ctrl_c_is_no_finding(command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stepwell.cli.verify.verify_step", interrupt)
    outcome = command("verify", branchy)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_a_folder_that_may_not_be_read_is_said(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def refuse(path: str) -> list[str]:
        if str(path).endswith("steps"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr("os.listdir", refuse)
    outcome = command("ls", branchy)
    assert outcome.code == 3
    assert outcome.err.startswith("stepwell: cannot go on: permission denied\n")
    assert str(branchy / "steps") in outcome.err


def test_a_reader_that_has_enough_ends_the_command_quietly(branchy: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "ls", str(branchy)]
    read, write = os.pipe()
    os.close(read)  # the reader of `stepwell ls | true` that is gone already
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False, env=ENVIRONMENT)
    finally:
        os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


def test_names_from_files_cannot_steer_the_terminal(command: Command, tmp_path: Path) -> None:
    import numpy as np

    import stepwell

    with stepwell.Checkpointer(tmp_path / "run") as checkpointer:
        state = {"\x1b[2Jevil": np.zeros(3), "value\x07": "\x1b]0;title\x07"}
        checkpointer.save(1, state, metrics={"lo\x1b[31mss": 1.0}).wait()
    for name in ("ls", "show"):
        outcome = command(name, tmp_path / "run")
        assert outcome.code == 0
        assert "\x1b" not in outcome.out and "\x07" not in outcome.out
        assert r"lo\x1b[31mss" in outcome.out
    assert r"\x1b[2Jevil" in outcome.out


def test_an_ascii_terminal_gets_escapes_instead_of_a_traceback(branchy: Path) -> None:
    done = shell("ls", branchy, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "\\u25b6" in done.stdout


def test_version() -> None:
    import stepwell

    assert shell("--version").stdout == f"stepwell, version {stepwell.__version__}\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only_and_never_among_the_results(branchy: Path, terminal: bool) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "stepwell", "verify", str(branchy)]
    stderr = theirs if terminal else subprocess.PIPE
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100"}
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert out.count(b"ok ") == 7 and b"\x1b" not in out
        if terminal:
            assert b"(1 of 7)" in os.read(ours, 100_000)
        else:
            assert err == b""
    finally:
        os.close(ours)
        os.close(theirs)
