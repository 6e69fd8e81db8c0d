"""Faults that users of other checkpoint tools report, each reduced to its kind; `docs/cases.md` says what they are.

A kind that has its test elsewhere is in `ELSEWHERE`, one that needs several ranks or nodes in `NOT_ONE_PROCESS`; all
others are below, named after their number.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.helpers import agents_of, assert_is_step, state_of, wait_until

import stepwell
from stepwell.restore.read import Source
from stepwell.snapshot import slot as slots
from stepwell.state import encode_values, flatten
from stepwell.store import layout as layouts

ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    1: ["tests/faults/test_storage.py::test_an_error_that_stays_is_reported_and_commits_nothing",
        "tests/snapshot/test_lazy_saves.py::test_an_error_while_copying_reaches_the_handle"],
    2: ["tests/test_checkpointer.py::test_what_save_returns_does_not_alias_the_trainer"],
    4: ["tests/gpu/test_cuda.py::test_the_staged_copy_is_in_host_memory"],
    6: ["tests/test_checkpointer.py::test_ten_saves_each_restorable_and_memory_flat"],
    7: ["tests/test_memory.py::test_case_7_a_tiny_dev_shm_does_not_matter"],
    8: ["tests/faults/test_storage.py::test_short_of_descriptors"],
    12: ["tests/crash/test_kill_agent.py::test_killing_the_agent_at_every_effect",
         "tests/crash/test_kill_processes.py::test_killing_processes"],
    13: ["tests/faults/test_peers.py::test_two_trainers_on_one_run"],
    16: ["tests/test_torch.py::test_a_parameter_of_another_dtype_is_refused_unless_cast_is_asked_for"],
    17: ["tests/test_torch.py::test_a_view_costs_its_own_bytes_on_disk",
         "tests/test_torch.py::test_tied_weights_are_stored_once_and_stay_tied"],
    18: ["tests/faults/test_hostile.py::test_case_18_a_pickle_is_never_executed_unasked"],
    19: ["tests/faults/test_foreign_files.py::test_case_19_foreign_files_stay"],
    21: ["tests/faults/test_foreign_files.py::test_case_21_order_is_by_step_and_not_by_time"],
    23: ["tests/test_checkpointer.py::test_dead_agent_is_replaced_and_nothing_accepted_is_lost",
         "tests/test_relink.py::test_saves_fail_in_words_without_an_agent_and_work_again_later"],
    25: ["tests/test_checkpointer.py::test_transient_error_is_retried_and_counted",
         "tests/faults/test_storage.py::test_one_error_at_any_effect_is_survived"],
    27: ["tests/faults/test_storage.py::test_file_systems_that_can_do_less",
         "tests/faults/test_storage.py::test_memory_file_system"],
    30: ["tests/faults/test_foreign_files.py::test_case_30_a_prune_that_fails_does_not_disturb_training"],
    31: ["tests/test_checkpointer.py::test_rollback_never_collides_with_or_hides_the_abandoned_steps"],
    32: ["tests/test_torch.py::test_moments_keep_their_dtype_whatever_the_parameters_is"],
    33: ["tests/test_checkpointer.py::test_launcher_pipe_is_not_held_open"],
    34: ["tests/snapshot/test_lazy.py::test_large_parameters_and_their_moments_are_lazy_and_nothing_else",
         "tests/snapshot/test_lazy_saves.py::test_edits_without_a_trace_are_found_by_the_audit_and_become_eager"],
    35: ["tests/test_memory.py::test_case_35_too_large_a_state_in_a_container_is_refused_with_the_arithmetic"],
}  # fmt: skip
NOT_ONE_PROCESS = {11, 15, 28, 29}


def test_every_case_has_a_test_or_a_reason_and_the_page_says_the_same() -> None:
    here = {int(name.split("_")[2]) for name in globals() if re.match(r"test_case_\d+_", name)}
    assert not here & set(ELSEWHERE) and not (here | set(ELSEWHERE)) & NOT_ONE_PROCESS
    assert here | set(ELSEWHERE) | NOT_ONE_PROCESS == set(range(1, 36))
    rows = {
        int(number): text
        for number, text in re.findall(r"^\| (\d+) \|(.*)\|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    }
    assert set(rows) == set(range(1, 36))
    for number, text in rows.items():
        named = re.findall(r"`(tests/[^`]+)`", text)
        if number in ELSEWHERE:
            assert named == ELSEWHERE[number]
        else:
            assert named == ([] if number in NOT_ONE_PROCESS else ["tests/test_cases.py"])
    for place in (place for places in ELSEWHERE.values() for place in places):
        file, name = place.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), place


def test_case_3_every_file_holds_one_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer writes into the very arrays that were saved, while a slow disk is still taking them."""
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.02")
    arrays = {f"layer{i}": np.zeros(5000, dtype=np.float32) for i in range(60)}
    state = {"model": arrays, "epoch": 0, "history": []}
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=20)) as ckpt:
        for step in range(8):
            for array in arrays.values():
                array.fill(step)
            state["epoch"], state["history"] = step, list(range(step))
            ckpt.save(step, state)
    for step in range(8):
        assert_is_step(stepwell.load(run, step), step)


def test_case_5_memory_is_flat_over_many_saves(run: Path) -> None:
    state_bytes = 16 << 20
    state = {f"w{i}": np.zeros(state_bytes // 16, dtype=np.float32) for i in range(4)}
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=2)) as ckpt:
        processes = [psutil.Process(), agents_of(run)[0]]
        seen = []
        for step in range(26):
            ckpt.save(step, {**state, "history": list(range(step))}).wait(timeout=60)
            seen.append([process.memory_info().rss for process in processes])
    for before, after in zip(seen[5], seen[-1], strict=True):
        assert after - before < state_bytes / 2


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_case_9_other_threads_run_while_the_state_is_copied(
    run: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """The copy is the only part of a save that takes long in the trainer; the interpreter is free meanwhile."""
    big: Any = np.ones(128 << 20, dtype=np.float32)
    if library == "torch":
        big = pytest.importorskip("torch").from_numpy(big)
    beats, during, stop = 0, 0, threading.Event()

    def heart() -> None:
        nonlocal beats
        while not stop.is_set():
            beats += 1
            time.sleep(0)

    copy = slots.copy_eager

    def watched(*arguments: Any) -> None:
        nonlocal during
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)  # from here on a thread that does not let go keeps the interpreter
        try:
            before = beats
            copy(*arguments)
            during = beats - before
        finally:
            sys.setswitchinterval(interval)

    monkeypatch.setattr("stepwell.checkpointer.copy_eager", watched)
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        ckpt.prepare({"w": big}).wait(60)
        thread = threading.Thread(target=heart, daemon=True)
        thread.start()
        save = ckpt.save(0, {"w": big})
        stop.set()
        thread.join(30)
        save.wait(timeout=60)
    assert during > 2, "with the interpreter held it would be none, or one"


def calls_of(work: Callable[[], Any]) -> int:
    """How many Python and C functions are called."""
    count = 0

    def seen(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_case_10_the_work_of_a_save_grows_no_faster_than_the_count_of_tensors() -> None:
    """Counted in function calls, because a clock would measure the machine."""

    def lay_out(count: int) -> None:
        state = {"model": {f"block{i % 50}.layer{i}": np.zeros(2, dtype=np.float32) for i in range(count)}}
        flat = flatten(state)
        values = encode_values(flat.values)
        layout = layouts.build(
            flat.names, flat.specs, flat.alias_of, flat.skeleton, values_bytes_max=layouts.values_room_for(len(values))
        )
        assert sum(map(len, layout.tables)) == count
        assert layouts.parse(layout.data, "a test").names == flat.names
        assert flatten(state, previous=flat).specs is flat.specs

    lay_out(10)
    small, large = (calls_of(lambda count=count: lay_out(count)) for count in (1000, 8000))  # type: ignore[misc]
    assert large < 8.5 * small


def test_case_14_a_part_of_a_state_is_restored_by_reading_that_part(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{i}": np.full(1 << 20, i, dtype=np.float32) for i in range(16)}
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        ckpt.save(0, state).wait(timeout=60)
    wait_until(lambda: not agents_of(run))
    read: list[int] = []
    read_cached, read_direct = Source.read_cached, Source._read_direct

    def cached(self: Source, begin: int, room: memoryview) -> None:
        read.append(len(room))
        read_cached(self, begin, room)

    def direct(self: Source, begin: int, end: int, room: memoryview) -> None:
        read.append(end - begin)
        read_direct(self, begin, end, room)

    monkeypatch.setattr(Source, "read_cached", cached)
    monkeypatch.setattr(Source, "_read_direct", direct)
    part = stepwell.load(run, names="w7")
    assert set(part) == {"w7"} and (part["w7"] == 7).all()
    assert 4 << 20 <= sum(read) <= 3 * (4 << 20), "at most the chunks that the tensor touches, and that of the values"


def test_case_20_there_is_always_a_whole_step_even_if_one_is_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning comes after the commit; and a save that fails prunes nothing."""
    monkeypatch.setenv("STEPWELL_FAULT", "fail:link:EACCES:8:3")
    looks, stop = 0, threading.Event()
    empty: list[int] = []

    def watch() -> None:
        nonlocal looks
        while not stop.is_set():
            looks += 1
            if not any(step.problem is None for step in stepwell.steps(run)):
                empty.append(looks)

    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=1)) as ckpt:
        ckpt.save(0, state_of(0)).wait(timeout=60)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for step in range(1, 12):
            save = ckpt.save(step, state_of(step)).wait(timeout=60)
            newest = max(one.step for one in ckpt.steps() if one.problem is None)
            assert newest == step if save.committed else newest < step
            assert_is_step(stepwell.load(run), newest)
        assert ckpt.counters.failed > 0
        stop.set()
        watcher.join(30)
    assert looks > 10 and not empty
    wait_until(lambda: not agents_of(run))
    assert [step.step for step in stepwell.steps(run)] == [11]


def test_case_22_nothing_points_to_the_latest_step_so_nothing_can_point_wrongly(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait(timeout=60)
    assert sorted(path.name for path in run.iterdir()) == ["attempts", "layouts", "run.json", "steps", "telemetry"]
    manifest = run / "steps" / "000000000002-0001" / "manifest.json"
    whole = manifest.read_bytes()
    with stepwell.Checkpointer(run) as ckpt:
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            manifest.write_bytes(whole[:size])
            live = state_of(0)
            restored = ckpt.restore(live)
            assert restored is not None and restored.step == 1
            assert_is_step(live, 1)
    manifest.write_bytes(whole)
    assert_is_step(stepwell.load(run), 2)


def test_case_24_the_first_save_finds_its_pages_taken(run: Path) -> None:
    state = state_of(1, 100_000)
    with stepwell.Checkpointer(run, slots=2) as ckpt:
        ckpt.prepare(state).wait(60)
        ready = list(ckpt._slots)
        assert len(ready) == 2 and not any(slot.fresh for slot in ready)
        for slot in ready:
            assert os.fstat(slot.fd).st_blocks * 512 >= slot.bytes, "every page is there"
        for step in (1, 2):
            assert ckpt.save(step, state)._slot in ready
        assert ckpt._slots == ready


def test_case_26_a_copied_run_works(run: Path, tmp_path: Path) -> None:
    """Copied file by file, with other times, owners and inodes: the keys and the rules are all there is."""
    with stepwell.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait(timeout=60)
    wait_until(lambda: not agents_of(run))
    other = tmp_path / "elsewhere" / "copy"
    shutil.copytree(run, other, copy_function=shutil.copyfile)
    shutil.rmtree(run)
    live = state_of(0)
    with stepwell.Checkpointer(other) as ckpt:
        restored = ckpt.restore(live)
        assert restored is not None and restored.step == 2
        assert_is_step(live, 2)
        ckpt.save(3, state_of(3)).wait(timeout=60)
    assert [step.step for step in stepwell.steps(other) if step.problem is None] == [1, 2, 3]
