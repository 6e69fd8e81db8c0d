"""Tables and files that are made from samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.stats import Sample

from benchmarks import report


def test_a_table_shows_the_median_with_its_range_and_leaves_out_who_was_not_there() -> None:
    samples = [
        Sample("a", number, "dcp-1", "later", {"blocked_seconds": seconds}) for number, seconds in enumerate([2, 1, 4])
    ]
    (table,) = report.state_tables(samples)
    (row,) = table.rows
    assert row[:3] == ("dcp.save, 1 thread", "–", "2 s (1 s – 4 s)")
    assert "| dcp.save, 1 thread | – | 2 s (1 s – 4 s) |" in table.markdown()


def test_rendering_from_the_kept_samples_says_who_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the bench extra")
    about = report.about(tmp_path, {"a": 1}, 0.5)
    samples = [Sample("a", 0, "dcp-1", "later", {"blocked_seconds": 2.0, "durable_seconds": 3.0})]
    report.keep(tmp_path, about, samples, {"a/dcp-4": "Traceback ...\nOSError: disk full"})
    assert report.render(tmp_path) == 1
    assert "a/dcp-4 failed: OSError: disk full" in (tmp_path / "table.md").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["figures"][0]["median"] == 2.0
    assert {target["verdict"] for target in summary["targets"]} == {"not measured"}
    assert (tmp_path / "blocked-durable-a.png").read_bytes().startswith(b"\x89PNG")
