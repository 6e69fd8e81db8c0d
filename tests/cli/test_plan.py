"""The command `plan`: its words, its documents, its exit codes, its page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.cli.conftest import ENVIRONMENT, Command

from stepwell.vocabulary import FIELDS, Document, schema

ASKED = ("plan", "--model", "llama3-70b", "--gpus", "512", "--mtbf", "3h", "--rpo", "10m")
SCHEMA = Path(__file__).parents[2] / "docs" / "plan.schema.json"


def test_the_answer_comes_first(command: Command) -> None:
    outcome = command(*ASKED)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert "llama3-70b" in lines[0] and "512 GPUs in 64 nodes" in lines[0]
    assert "save every" in lines[1] and "988 GB (920 GiB)" in outcome.out
    assert len(lines) < 32, "one screen"


def test_explain_shows_each_formula_with_its_numbers(command: Command) -> None:
    out = command(*ASKED, "--explain").out
    assert "weight_bytes + master_bytes + moment_bytes" in out
    assert re.search(
        r"demand_rpo_bytes_per_second\s+3\.29 GB/s\s+2 \* written_bytes / rpo_seconds = 2 \* 9\.87\S*e\+11 / 600", out
    )


def test_the_document_keeps_to_its_schema_and_to_the_words(command: Command) -> None:
    document = command(*ASKED, "--simulate", "--json").document
    assert (document["format"], document["version"]) == ("stepwell.plan", 1)
    assert document["inputs"]["gpus"] == 512 and document["answer"]["feasible"] is True
    assert document["answer"]["simulated"]["low"] < document["answer"]["simulated"]["high"]
    figures = {figure["id"]: figure for figure in document["figures"]}
    for name, figure in figures.items():
        field = FIELDS.get(name.partition("{")[0])
        assert field is None or figure["unit"] == field[0], name
    assert figures["state_bytes"]["value"] == 987_792_850_944 or figures["state_bytes"]["value"] > 987e9
    read = msgspec.convert(document, Document)
    assert [figure.id for figure in read.figures] == list(figures)


def test_the_schema_that_is_checked_in_is_the_one_that_is_made() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), "run: python -m stepwell.vocabulary > docs/plan.schema.json"


def test_what_is_not_feasible_ends_with_one(command: Command) -> None:
    outcome = command(*ASKED, "--storage", "nfs")
    assert outcome.code == 1
    assert "NOT FEASIBLE" in outcome.out and "3.29 GB/s" in outcome.out


@pytest.mark.parametrize("unknown", ["bandwidth", "interval", "gpus", "rpo"])
def test_solving(command: Command, unknown: str) -> None:
    outcome = command(*ASKED, "--storage", "nfs", "--solve", unknown)
    assert outcome.out.splitlines()[1].strip().startswith(unknown)
    document = command(*ASKED, "--storage", "nfs", "--solve", unknown, "--json").document
    assert document["answer"]["solved"]["unknown"] == unknown


def test_a_sweep_and_advice(command: Command) -> None:
    rows = command(*ASKED, "--sweep", "interval=5m..60m", "--json").document["answer"]["plans"]
    intervals = [row["interval_seconds"] for row in rows]
    assert len(rows) == 12 and intervals == sorted(intervals) and intervals[0] == 300
    out = command(*ASKED, "--advise").out
    assert "nvme+parallel" in out and "after the loss of a node" in out and "assumes" in out
    first = command(*ASKED, "--advise", "--json").document["answer"]["plans"][0]
    assert first["feasible"] and first["for"] and first["ceiling"]


def test_folk_figures(command: Command) -> None:
    out = command("plan", "--folk").out
    for right in ("98.0 GB", "980 GB", "1.63 GB/s", "7.78 GB/s", "1,953,125/s of 4 KiB", "257 B"):
        assert right in out, right
    assert len(command("plan", "--folk", "--json").document["answer"]["claims"]) >= 20


WRONG = [
    (("--model", "lama3-70b"), "llama3-70b"),
    (("--model", "70b", "--gpus", "64", "--tp", "3"), "TP × PP × CP"),
    (("--model", "70b", "--mtbf", "3"), "bare number"),
    (("--model", "70b", "--mtbf", "3 parsec"), "as in 90s"),
    (("--model", "70b", "--rpo", "-5m"), "as in 90s"),
    (("--model", "70b", "--overhead-max", "5"), "5%"),
    (("--model", "70b", "--copy-rate", "5GB"), "40 GB/s"),
    (("--model", "70b", "--storage", "lustr"), "parallel"),
    (("--model", "70b", "--optimizer", "adam"), "adamw"),
    (("--model", "70b", "--gpus", "0"), "gpus"),
    (("--model", "70b", "--sweep", "5m..60m"), "interval=5m..60m"),
    (("--model", "70b", "--mtbf", "3h", "--mtbf-gpu", "3h"), "twice"),
    ((), "model"),
    (("--model", "70b", "--checkpoint", "x"), "not both"),
    (("--checkpoint", "/nowhere"), "no such checkpoint"),
]


@pytest.mark.parametrize(("options", "hint"), WRONG, ids=[" ".join(options) or "nothing" for options, _ in WRONG])
def test_mistakes_end_with_two_and_say_what_is_right(command: Command, options: tuple[str, ...], hint: str) -> None:
    outcome = command("plan", *options)
    assert outcome.code == 2 and hint in outcome.err and outcome.out == ""


def test_the_page_is_one_file_without_anything_from_elsewhere(command: Command, tmp_path: Path) -> None:
    assert command(*ASKED, "--html", tmp_path / "plan.html").code == 0
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 8 and "Save every" in text
    assert not re.search(r"<script|https?://|@import|url\((?!['\"]?data:)", text)


def test_the_page_of_what_is_not_feasible(command: Command, tmp_path: Path) -> None:
    assert command(*ASKED, "--storage", "nfs", "--html", tmp_path / "plan.html").code == 1
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "Not feasible" in text and "3.29 GB/s" in text and "nvme+parallel (assumes" in text


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_in_a_browser_without_a_complaint(command: Command, tmp_path: Path, width: int) -> None:
    """Nothing on the console, and nothing wider than the screen."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium here")
    page = tmp_path / "plan.html"
    command(*ASKED, "--simulate", "--html", page)
    measure = "<script>document.title = `width ${document.documentElement.scrollWidth}`</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", measure), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               f"--window-size={width},900", "--enable-logging=stderr", "--dump-dom"]  # fmt: skip
    done = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, timeout=100)
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>width (\d+)</title>", done.stdout)
    assert found is not None and int(found[1]) <= max(width, 500), "a headless window is at least 500 pixels wide"


def test_an_answer_imports_neither_torch_nor_numpy() -> None:
    script = f"""
import sys
from stepwell.cli import stepwell
try:
    stepwell({[*ASKED]!r}, prog_name="stepwell")
except SystemExit as ended:
    assert ended.code == 0
assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
