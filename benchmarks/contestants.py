"""Who is compared, each in the way that is fairest to it. Every `save` ends durable: written, fsynced, named."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

import stepwell

from .measure import fsync_path
from .states import State, flat_tensors


@dataclass(frozen=True)
class Saving:
    """A save whose blocking part is over.

    `wait` returns once it is durable. `blocked_seconds` is given by those for whom the duration of `save` is not the
    whole blocked time (or not the right one); it is final after `wait`.
    """

    wait: Callable[[], object]
    blocked_seconds: Callable[[], float] | None = None


class Contestant(Protocol):
    def save(self, step: int) -> Saving:
        """Save the state; returns as soon as training could go on."""

    def restore(self) -> str:
        """Bring the state's tensors back in place; returns where the bytes came from, if it is known."""

    def close(self) -> None:
        """Give everything back."""


def durable_already() -> None:
    """The `wait` of those who block until the end."""


class Memcpy:
    """The floor of any snapshot: the bytes of the state copied into touched shared memory, by as many threads."""

    def __init__(self, state: State, folder: Path) -> None:
        self._sources = [
            tensor.detach().view(-1).view(torch.uint8).numpy()
            for tensor in flat_tensors(state.for_peers()).values()
            if tensor.dim()
        ]
        fd = os.memfd_create("benchmark-slot")
        os.ftruncate(fd, sum(source.nbytes for source in self._sources))
        self._slot = np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        os.close(fd)
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads)
        self._copy()

    def _copy(self) -> float:
        """One copy; pieces of at most 8 MiB are dealt out so that all threads end together."""
        pieces, offset, piece_bytes = list[tuple[Any, Any]](), 0, 8 << 20
        for source in self._sources:
            for start in range(0, source.nbytes, piece_bytes):
                piece = source[start : start + piece_bytes]
                pieces.append((self._slot[offset : offset + piece.nbytes], piece))
                offset += piece.nbytes

        def work(first: int) -> None:
            for target, piece in pieces[first :: self._threads]:
                np.copyto(target, piece)

        began = time.perf_counter()
        list(self._pool.map(work, range(self._threads)))
        return time.perf_counter() - began

    def save(self, step: int) -> Saving:
        seconds = median(self._copy() for _ in range(5))
        return Saving(durable_already, lambda: seconds)

    def restore(self) -> str:
        raise NotImplementedError("memory cannot be restored from a folder")

    def close(self) -> None:
        self._pool.shutdown()


class Stepwell:
    """Stepwell, with its defaults but for `keep`."""

    def __init__(self, state: State, folder: Path, *, lazy: bool = False, prepare: bool = False) -> None:
        self._state = state.for_stepwell(lazy=lazy)
        self._checkpointer = stepwell.Checkpointer(
            folder / "run", snapshot="lazy" if lazy else "eager", keep=stepwell.Keep(last=1), on_error="raise"
        )
        if prepare:
            self._checkpointer.prepare(self._state).wait()

    def save(self, step: int) -> Saving:
        start = time.perf_counter()
        save = self._checkpointer.save(step, self._state)
        returned_seconds = time.perf_counter() - start
        return Saving(save.wait, lambda: max(returned_seconds, save.blocked_seconds))

    def restore(self) -> str:
        restored = self._checkpointer.restore(self._state)
        if restored is None:
            raise RuntimeError("there was no step to restore")
        return ""

    def settle(self) -> None:
        """Wait until the slots are ready that a first save leaves to the background; later saves find them so."""
        self._checkpointer.prepare(self._state).wait()

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave:
    """`torch.save`, then fsync; `torch.load` without mmap, copied into the state."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._path = state, str(folder / "x.pt")

    def save(self, step: int) -> Saving:
        self._write(self._state.for_peers())
        return Saving(durable_already)

    def _write(self, state_dict: Any) -> None:
        torch.save(state_dict, self._path)
        fsync_path(self._path)
        fsync_path(os.path.dirname(self._path))

    def restore(self) -> str:
        _copy_into(self._state, flat_tensors(torch.load(self._path, mmap=False, weights_only=True)))
        return ""

    def close(self) -> None:
        return None


class TorchSaveThread(TorchSave):
    """`torch.save` in a thread pool: the state is copied into reused tensors first, or it would change meanwhile."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._pool = ThreadPoolExecutor(1)
        self._staged: dict[str, torch.Tensor] = {}

    def save(self, step: int) -> Saving:
        tensors = {name: tensor.detach() for name, tensor in flat_tensors(self._state.for_peers()).items()}
        if not self._staged:
            self._staged = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        torch._foreach_copy_(list(self._staged.values()), list(tensors.values()))
        return Saving(self._pool.submit(self._write, self._staged).result)

    def close(self) -> None:
        self._pool.shutdown()


class TorchSaveShm(TorchSave):
    """`torch.save` to /dev/shm, then copied to the disk and fsynced by a thread."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._pool = ThreadPoolExecutor(1)
        self._memory_path = f"/dev/shm/stepwell-benchmark-{os.getpid()}.pt"

    def save(self, step: int) -> Saving:
        # The file is overwritten, not made anew: its memory has been touched by the save before.
        mode = "r+b" if os.path.exists(self._memory_path) else "w+b"
        with open(self._memory_path, mode) as file:
            torch.save(self._state.for_peers(), file)
            file.truncate()
        return Saving(self._pool.submit(self._copy_to_disk).result)

    def _copy_to_disk(self) -> None:
        shutil.copyfile(self._memory_path, self._path)
        fsync_path(self._path)
        fsync_path(os.path.dirname(self._path))

    def close(self) -> None:
        self._pool.shutdown()
        Path(self._memory_path).unlink(missing_ok=True)


class Safetensors:
    """`safetensors.torch.save_file`, then fsync; `load_file`, copied into the state."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._path = state, str(folder / "x.safetensors")

    def save(self, step: int) -> Saving:
        save_file(flat_tensors(self._state.for_peers()), self._path)
        fsync_path(self._path)
        fsync_path(os.path.dirname(self._path))
        return Saving(durable_already)

    def restore(self) -> str:
        _copy_into(self._state, load_file(self._path))
        return ""

    def close(self) -> None:
        return None


class Dcp:
    """`torch.distributed.checkpoint.save` (fsyncs by itself) and `load`, which is in place."""

    def __init__(self, state: State, folder: Path, *, threads: int = 1) -> None:
        self._state, self._path, self._threads = state, str(folder / "dcp"), threads
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def save(self, step: int) -> Saving:
        writer = FileSystemWriter(self._path, thread_count=self._threads)
        save(self._state.for_peers(), storage_writer=writer)
        return Saving(durable_already)

    def restore(self) -> str:
        load(self._state.for_peers(), checkpoint_id=self._path)
        return ""

    def close(self) -> None:
        return None


class DcpAsync(Dcp):
    """`dcp.async_save` with one stager for all saves: a new one would pay for first touch at each of them."""

    def __init__(self, state: State, folder: Path, *, process: bool) -> None:
        super().__init__(state, folder)
        # Without an accelerator every option but shared memory has to be off, or the stager raises.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=process, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD

    def save(self, step: int) -> Saving:
        reply = async_save(
            self._state.for_peers(),
            checkpoint_id=self._path,
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
        )
        upload: Future[Any] = reply if isinstance(reply, Future) else reply.upload_completion
        return Saving(upload.result)

    def close(self) -> None:
        self._stager.close()


def _copy_into(state: State, loaded: dict[str, torch.Tensor]) -> None:
    targets = flat_tensors(state.for_peers())
    with torch.no_grad():
        torch._foreach_copy_(list(targets.values()), [loaded[name] for name in targets])


FIRST, SECOND, LATER = "first", "second", "later"


@dataclass(frozen=True)
class Entry:
    """A line of the list of contestants.

    `saves` are measured in each turn, which begins with a fresh process: the first save sets up and touches memory,
    a later one does not. Stepwell has two slots to touch, and lazy saves are audited twice, so its later one is the
    third. Those who measure no first save are warmed up with a tiny one. `lazy` saves end within a
    training step, so one follows. `dcp` are the peers that "the best DCP" is chosen from. `restores` come after the
    saves. `rounds_max` limits those who are never the best or are there for information only.
    """

    name: str
    make: Callable[[State, Path], Contestant]
    states: str = "abc"
    saves: tuple[str, ...] = (LATER,)
    lazy: bool = False
    floor: bool = False
    dcp: bool = False
    stepwell: bool = False
    restores: tuple[str, ...] = ()
    rounds_max: int = 1000


def _stepwell(state: State, folder: Path) -> Contestant:
    return Stepwell(state, folder)


def _stepwell_prepared(state: State, folder: Path) -> Contestant:
    return Stepwell(state, folder, prepare=True)


def _stepwell_lazy(state: State, folder: Path) -> Contestant:
    return Stepwell(state, folder, lazy=True)


def _dcp_4(state: State, folder: Path) -> Contestant:
    return Dcp(state, folder, threads=4)


def _dcp_thread(state: State, folder: Path) -> Contestant:
    return DcpAsync(state, folder, process=False)


def _dcp_process(state: State, folder: Path) -> Contestant:
    return DcpAsync(state, folder, process=True)


_BOTH = (FIRST, LATER)
_THREE = (FIRST, SECOND, LATER)
_FILES = ("cold", "cached")

ENTRIES = (
    Entry("memcpy", Memcpy, states="ab", floor=True),
    Entry("stepwell-eager", _stepwell, saves=_THREE, stepwell=True, restores=("memory", *_FILES)),
    Entry("stepwell-prepared", _stepwell_prepared, states="a", saves=(FIRST,), stepwell=True),
    Entry("stepwell-lazy", _stepwell_lazy, states="ac", saves=_THREE, lazy=True, stepwell=True),
    Entry("torch-save", TorchSave, restores=_FILES),
    Entry("safetensors", Safetensors, restores=_FILES),
    Entry("dcp-1", Dcp, dcp=True, rounds_max=3),
    Entry("dcp-4", _dcp_4, dcp=True, restores=_FILES),
    Entry("dcp-async-thread", _dcp_thread, saves=_BOTH, dcp=True),
    Entry("dcp-async-process", _dcp_process, saves=_BOTH, dcp=True),
    Entry("torch-save-thread", TorchSaveThread, saves=_BOTH, rounds_max=2),
    Entry("torch-save-shm", TorchSaveShm, saves=_BOTH, rounds_max=2),
)
