"""docs/commands.md names every field of every document, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import Command, make_state

import stepwell

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
# Filled by the user or by another page's format.
FREE = {"metrics", "telemetry"}


def described(kind: str) -> set[str]:
    """The fields that the page gives to a document, with those of a step where the document has steps."""
    text = PAGE.read_text()
    table = text.split(f"| `stepwell.{kind}` |", 1)[1].split("\n\n", 1)[0]
    common = text.split("**What a document says of a step**", 1)[1].split("##", 1)[0]
    if kind in ("ls", "show", "verify"):
        table += common
    return set(re.findall(r"`([a-z_]+)`", table))


def fields(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(fields, value)) if value else set()
    if isinstance(value, dict):
        inner = [fields(item) for key, item in value.items() if key not in FREE]
        return set(value) | set().union(*inner)
    return set()


def documents(command: Command, branchy: Path, run: Path) -> dict[str, list[dict[str, Any]]]:
    out = run.parent / "x"
    with stepwell.Checkpointer(run) as checkpointer:
        checkpointer.save(1, make_state(1)).wait()
        running = [command(name, run, "--json").document for name in ("agent", "ls")]
    (branchy / "steps" / "000000000999-0001").mkdir()
    return {
        "agent": [running[0], command("agent", branchy, "--json").document],
        "ls": [running[1], command("ls", branchy, "--json").document],
        "show": [command("show", branchy, "--json").document],
        "verify": [command("verify", branchy, "--json").document],
        "diff": [command("diff", branchy, 100, 500, "--json").document],
        "export": [command("export", branchy, 100, out, "--json").document],
        "error": [command("export", branchy, 100, out, "--json").document],
        "prune": [command("prune", branchy, "--last", 1, "--dry-run", "--json").document],
    }


WORDS: dict[str, set[str]] = {
    # Words in code style that are values or other things, not fields.
    "ls": {"newest", "lineage", "abandoned"},
    "show": {"newest", "lineage", "abandoned", "torch", "numpy"},
    "verify": {"newest", "lineage", "abandoned"},
    "diff": {"form"},
    "export": {"safetensors", "torch"},
    "prune": {"temporary", "uncommitted", "condemned", "layout", "agent", "command"},
    "agent": set(),
    "error": set(),
}


def test_the_page_describes_every_field_and_no_other(command: Command, branchy: Path, run: Path) -> None:
    for kind, found in documents(command, branchy, run).items():
        assert {(document["format"], document["version"]) for document in found} == {(f"stepwell.{kind}", 1)}
        present = set().union(*map(fields, found)) - {"format", "version"}
        assert present - described(kind) == set(), f"fields of stepwell.{kind} that are not on the page"
        on_the_page = described(kind) - WORDS[kind] - {"bytes"}
        assert on_the_page - present == set(), f"words of the page that are no fields of stepwell.{kind}"


def test_the_page_has_a_section_for_every_command() -> None:
    from stepwell.cli import COMMANDS

    headings = re.findall(r"^## ([a-z]+)$", PAGE.read_text(), re.MULTILINE)
    assert headings == list(COMMANDS)


def test_every_error_has_one_of_the_exit_codes_of_the_page() -> None:
    from stepwell import errors

    kinds: list[Callable[..., Any]] = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if hasattr(kind, "exit_code")}
    assert codes == {1, 2, 3}
