"""Targets are judged by paired ratios against the right opponent."""

from __future__ import annotations

import pytest
from benchmarks.stats import Sample
from benchmarks.targets import Verdict, judge, verdicts


def find(samples: list[Sample], text: str) -> Verdict:
    return next(one for one in verdicts(samples) if one.text == text)


def test_words() -> None:
    values = [0.5, 0.6, 0.7, 0.8, 1.2]
    assert judge("", 1.3, values).word == "met"
    assert judge("", 1.0, values).word == "likely"
    assert judge("", 0.6, values).word == "missed"
    assert judge("", 0.4, values, at_most=False).word == "met"
    assert judge("", 0.7, values, at_most=False).word == "likely"
    assert judge("", 0.9, values, at_most=False).word == "missed"
    assert judge("", 1.3, values[:2]).word == "likely"
    assert judge("", 1.0, []).word == "not measured"


def test_without_samples_nothing_is_claimed() -> None:
    assert {one.word for one in verdicts([])} == {"not measured"}


def test_the_best_dcp_is_the_opponent_and_the_ratio_is_of_the_same_round() -> None:
    samples = []
    for number, drift in enumerate([1.0, 2.0, 4.0, 2.0, 1.0]):
        for contestant, seconds in (("stepwell-eager", 3.0), ("dcp-1", 9.0), ("dcp-async-thread", 6.0)):
            samples.append(Sample("a", number, contestant, "later", {"durable_seconds": seconds * drift}))
    verdict = find(samples, "(a) durable seconds / best DCP")
    assert verdict.against == "dcp-async-thread"
    assert (verdict.measured, verdict.bound, verdict.round_count) == (0.5, 0.5, 5)
    assert verdict.confidence == pytest.approx(1 - 1 / 32)
    assert verdict.word == "met"


def test_the_ceiling_of_the_disk_is_a_lower_limit() -> None:
    samples = [
        Sample("a", 0, "stepwell-eager", "later", {"bytes_per_second": 0.45e9}),
        Sample("a", 0, "fio", "fio", {"write_bytes_per_second": 0.5e9}),
    ]
    verdict = find(samples, "(a) durable bytes/s / fio write")
    assert verdict.measured == pytest.approx(0.9)
    assert verdict.word == "missed"


def test_slots_are_not_in_the_memory_beside_them() -> None:
    figures = {"memory_peak_bytes": 2.5e9, "shared_memory_peak_bytes": 2.4e9}
    verdict = find([Sample("a", 0, "stepwell-eager", "later", figures)], "(a) peak memory above state and slots, MB")
    assert verdict.measured == pytest.approx(100)
