"""Every row of the ground truth, and the table in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.ground_truth import ROWS, Row, table

DOCS = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.topic}: {row.what}")
def test_a_row(row: Row) -> None:
    assert row.ours() == pytest.approx(row.right, rel=row.within or 1e-12)


def test_the_table_in_the_docs_is_this_one() -> None:
    assert table() in DOCS.read_text(encoding="utf-8"), "run: python -m tests.plan.ground_truth"
