"""Stepwell beside its peers, in one command: rounds that alternate on one disk, then tables, JSON and plots."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from . import report
from .targets import FIO

HERE = Path(__file__).parent
ROUNDS = {"a": 5, "b": 3, "c": 5}


def main() -> int:
    """Measure and report; 1 when a contestant failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--states", default="a,b,c", help="a: 2.4 GB in 384 tensors, b: 20 000 of 4 KiB, c: training")
    parser.add_argument("--rounds", type=int, help="for every state (default: 5, 3 and 5)")
    parser.add_argument("--quick", action="store_true", help="one round of states a tenth as large")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="measure these contestants alone")
    parser.add_argument("--folder", type=Path, default=HERE / "out", help="where the saves go: its disk is measured")
    parser.add_argument("--render", action="store_true", help="make tables and plots anew from the results there are")
    parser.add_argument("--scale", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    states = arguments.states.replace(",", "")
    if not states or set(states) - set(ROUNDS):
        parser.error("--states takes a, b and c")
    if unknown := set(arguments.only) - {FIO, *report.TITLES}:
        parser.error(f"--only does not know {', '.join(sorted(unknown))}; there are {FIO}, {', '.join(report.TITLES)}")
    scale = arguments.scale or (0.1 if arguments.quick else 1.0)
    # What is not the whole comparison must not take the place of one.
    whole = scale == 1 and not arguments.only and set(states) == set(ROUNDS)
    results = HERE / "results" if whole else HERE / "out" / "results"
    if arguments.render:
        return report.render(results)

    from .rounds import Bench, run

    rounds = {state: arguments.rounds or (1 if arguments.quick else ROUNDS[state]) for state in states}
    about = report.about(arguments.folder.resolve(), rounds, scale)

    def keep(bench: Bench) -> None:
        report.keep(results, about, bench.samples, bench.failures)

    # So that a run that is told to end takes its children and Stepwell's agents with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = arguments.folder.resolve() / f"bench-{os.getpid()}"
    run(Bench(folder, rounds, tuple(arguments.only), scale, keep))
    return report.render(results)


if __name__ == "__main__":
    sys.exit(main())
