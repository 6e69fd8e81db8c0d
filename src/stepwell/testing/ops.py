"""Wrappers around `FileOps` that count, fail, slow down, record or kill; and the same from the environment.

Wrappers compose: `KillingOps(ShortWritingOps(OsFileOps(), 512), at=7)`. All are safe to use from several threads.

A process that was started with `STEPWELL_FAULT` set puts the faults on itself, so that a real agent or a real trainer
can be killed at any effect or message. The variable holds faults, separated by `;`, the first one innermost:

    kill:N[:before|after|torn]   SIGKILL of the own process at its N-th effect (from 1); `torn` writes half of a write
    kill-at:NAME:N               SIGKILL when the failpoint NAME (`agent-received-Persist`) is reached for the N-th time
    both                         kills take the parent process along, or for a trainer its children
    once:PATH                    kills happen only when PATH can be created: never again in the process that follows
    enospc:BYTES                 the disk is full after so many bytes
    short-writes:BYTES           one write takes at most so many bytes
    fail:KIND:ERRNO[:FIRST[:COUNT]]  effects of this kind (`fsync`) fail with this errno (`EIO`), from the FIRST on
                                 (1), COUNT of them (all)
    eio-fsync:N                  the N-th fsync of a file fails with EIO
    read-only                    every effect fails with EROFS
    no-link, no-direct           no hard links, no O_DIRECT
    slow:SECONDS                 every write and fsync takes so much longer
    record:PATH                  all effects, with their data, are appended to PATH (`read_effects`)
    trace:PATH                   one line for each effect and failpoint is appended to PATH

Effects are counted per process in the order in which they begin; `close` is none.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from stepwell.errors import UsageError
from stepwell.tiers.base import FileOps

VARIABLE = "STEPWELL_FAULT"
BLOCK_BYTES = 4096

Result = TypeVar("Result")
_PARENT = os.getppid()


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """One call of `FileOps`, and `mark`, with which a test notes in a recording what it was promised at that point.

    `kind` is the method's name, `path` the path or the one that the descriptor was opened with, `new` the second path
    of `rename` and `link`, `file` a number for the descriptor, unique within a recording. `offset` is also the size
    that `ftruncate` was given.
    """

    kind: str
    path: str
    new: str = ""
    file: int = -1
    offset: int = 0
    data: bytes = b""
    direct: bool = False

    def __str__(self) -> str:
        name = f"{self.path} → {self.new}" if self.new else self.path
        extent = f" [{self.offset}, {self.offset + len(self.data)})" if self.kind == "pwrite" else ""
        return f"{self.kind} {name}{extent}"


class WrappedOps:
    """`FileOps` that passes each effect on through the method `effect`; the root of the wrappers in this module."""

    def __init__(self, inner: FileOps) -> None:
        self.inner = inner
        self.lock = threading.RLock()
        self._files: dict[int, tuple[int, str, bool]] = {}
        self._file_count = 0

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        """Carry out one effect, or not."""
        return do()

    def mkdir(self, path: str) -> None:
        self.effect(Effect("mkdir", path), lambda: self.inner.mkdir(path))

    def create(self, path: str, *, direct: bool = False) -> int:
        number = self._number()
        effect = Effect("create", path, file=number, direct=direct)
        fd = self.effect(effect, lambda: self.inner.create(path, direct=direct))
        self._files[fd] = (number, path, direct)
        return fd

    def open_append(self, path: str) -> int:
        number = self._number()
        fd = self.effect(Effect("open_append", path, file=number), lambda: self.inner.open_append(path))
        self._files[fd] = (number, path, False)
        return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        file, path, direct = self._files[fd]
        effect = Effect("pwrite", path, "", file, offset, self.copy_of(data), direct)
        return self.effect(effect, lambda: self.inner.pwrite(fd, data, offset))

    def append(self, fd: int, data: bytes) -> None:
        file, path, _ = self._files[fd]
        self.effect(Effect("append", path, file=file, data=data), lambda: self.inner.append(fd, data))

    def ftruncate(self, fd: int, size: int) -> None:
        file, path, _ = self._files[fd]
        self.effect(Effect("ftruncate", path, file=file, offset=size), lambda: self.inner.ftruncate(fd, size))

    def fsync(self, fd: int) -> None:
        file, path, _ = self._files[fd]
        self.effect(Effect("fsync", path, file=file), lambda: self.inner.fsync(fd))

    def close(self, fd: int) -> None:
        self._files.pop(fd, None)
        self.inner.close(fd)

    def rename(self, old: str, new: str) -> None:
        self.effect(Effect("rename", old, new), lambda: self.inner.rename(old, new))

    def link(self, old: str, new: str) -> None:
        self.effect(Effect("link", old, new), lambda: self.inner.link(old, new))

    def unlink(self, path: str) -> None:
        self.effect(Effect("unlink", path), lambda: self.inner.unlink(path))

    def rmdir(self, path: str) -> None:
        self.effect(Effect("rmdir", path), lambda: self.inner.rmdir(path))

    def fsync_directory(self, path: str) -> None:
        self.effect(Effect("fsync_directory", path), lambda: self.inner.fsync_directory(path))

    def copy_of(self, data: memoryview) -> bytes:
        """What `effect` sees of a write's data: nothing, unless a wrapper needs it."""
        return b""

    def _number(self) -> int:
        with self.lock:
            self._file_count += 1
            return self._file_count


class CountingOps(WrappedOps):
    """Counts effects by kind in `counts`."""

    def __init__(self, inner: FileOps) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        with self.lock:
            self.counts[effect.kind] += 1
        return do()


class RecordingOps(WrappedOps):
    """Keeps every effect that succeeded, with its data, in the order in which it took place.

    Effects take turns, so that this order is true. With `path` they are also appended to a file, readable with
    `read_effects` after the process was killed.
    """

    def __init__(self, inner: FileOps, path: str | None = None) -> None:
        super().__init__(inner)
        self.effects: list[Effect] = []
        self._sink = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def mark(self, text: str) -> None:
        """Note in the recording that something was promised by now, such as "step 5 is durable"."""
        self._keep(Effect("mark", text))

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        with self.lock:
            result = do()
            if effect.kind == "pwrite":  # a short write is recorded as short as it was
                effect = msgspec.structs.replace(effect, data=effect.data[: int(result)])  # type: ignore[call-overload]
            self._keep(effect)
            return result

    def copy_of(self, data: memoryview) -> bytes:
        return bytes(data)

    def _keep(self, effect: Effect) -> None:
        with self.lock:
            self.effects.append(effect)
            if self._sink >= 0:
                packed = msgspec.msgpack.encode(effect)
                os.write(self._sink, len(packed).to_bytes(8, "little") + packed)


def read_effects(path: str) -> list[Effect]:
    """The effects that a `RecordingOps` appended to a file; a last one that was cut off is left out."""
    with open(path, "rb") as file:
        data = file.read()
    effects, position = [], 0
    while position + 8 <= len(data):
        size = int.from_bytes(data[position : position + 8], "little")
        packed = data[position + 8 : position + 8 + size]
        if len(packed) < size:
            break
        effects.append(msgspec.msgpack.decode(packed, type=Effect))
        position += 8 + size
    return effects


class TracingOps(WrappedOps):
    """Appends one line for each effect to a file before it takes place."""

    def __init__(self, inner: FileOps, path: str) -> None:
        super().__init__(inner)
        self.path = path

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        _trace(self.path, f"effect {effect}")
        return do()


class KillingOps(WrappedOps):
    """Kills its own process at the n-th effect.

    `at` counts from 1. `when` is "before" or "after" the effect, or "torn": the first half of a write is written, in
    whole blocks where there is more than one; every other effect has no halves and is not begun.
    """

    def __init__(self, inner: FileOps, at: int, when: str = "before", kill: Callable[[], None] | None = None) -> None:
        super().__init__(inner)
        if when not in ("before", "after", "torn"):
            raise UsageError("not a moment to kill at", expected="before, after or torn", found=when)
        self.at, self.when, self.count = at, when, 0
        self._kill = kill or kill_myself

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        if not self._is_now():
            return do()
        if self.when != "after":
            self._kill()
        try:
            return do()
        finally:  # an effect that failed is over too
            self._kill()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if not self._is_now():
            return self.inner.pwrite(fd, data, offset)
        if self.when == "torn":
            half = len(data) // 2 // BLOCK_BYTES * BLOCK_BYTES or (0 if self._files[fd][2] else len(data) // 2)
            data = data[:half]
        if self.when != "before" and data:
            self.inner.pwrite(fd, data, offset)
        self._kill()
        return self.inner.pwrite(fd, data, offset)

    def _is_now(self) -> bool:
        with self.lock:
            self.count += 1
            return self.count == self.at


def kill_myself(*, both: bool = False, once: str | None = None) -> None:
    """End this process as the kernel's OOM killer would; with `both` its children first, or else its parent.

    `once` is a path: when it exists nothing happens, so that a process that takes over can get further.
    """
    if once is not None:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
    if both:
        import psutil

        children = [child.pid for child in psutil.Process().children()]
        # When the parent has ended, somebody else has adopted this process, who is none of our business.
        parent = [_PARENT] if os.getppid() == _PARENT else []
        for pid in children or parent:
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


Rule = Callable[[Effect], "OSError | None"]
"""Looks at an effect before it takes place; what it returns is raised instead."""


class FailingOps(WrappedOps):
    """Raises what a rule returns instead of carrying the effect out. The rule is asked for one effect at a time."""

    def __init__(self, inner: FileOps, rule: Rule) -> None:
        super().__init__(inner)
        self.rule = rule

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        with self.lock:
            error = self.rule(effect)
        if error is not None:
            raise error
        return do()


def os_error(code: int, path: str) -> OSError:
    """The error that the system raises for this errno."""
    return OSError(code, os.strerror(code), path)


def fails(kind: str, code: int, *, first: int = 1, count: int | None = None) -> Rule:
    """Effects of this kind fail from the `first` on (counted from 1), `count` of them, then they work again."""
    seen = 0

    def rule(effect: Effect) -> OSError | None:
        nonlocal seen
        if effect.kind != kind:
            return None
        seen += 1
        strikes = seen >= first and (count is None or seen < first + count)
        return os_error(code, effect.path) if strikes else None

    return rule


def read_only(effect: Effect) -> OSError | None:
    """A rule: nothing can be changed."""
    return os_error(errno.EROFS, effect.path)


def no_direct(effect: Effect) -> OSError | None:
    """A rule: a file system without O_DIRECT."""
    return os_error(errno.EINVAL, effect.path) if effect.direct and effect.kind == "create" else None


class FullDiskOps(WrappedOps):
    """The disk is full after `bytes_left` more bytes: the write that reaches the end is cut short, the next one fails.

    With nothing left, new files and folders fail too. A test gives space back by setting `bytes_left`.
    """

    def __init__(self, inner: FileOps, bytes_left: int) -> None:
        super().__init__(inner)
        self.bytes_left = bytes_left

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        if effect.kind in ("mkdir", "create", "append") and self.bytes_left <= 0:
            raise os_error(errno.ENOSPC, effect.path)
        return do()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        _, path, direct = self._files[fd]
        with self.lock:
            allowed = min(len(data), self.bytes_left)
            if direct:  # a direct write ends at a block
                allowed = allowed // BLOCK_BYTES * BLOCK_BYTES
            if data and allowed <= 0:
                self.bytes_left = 0
                raise os_error(errno.ENOSPC, path)
            count = self.inner.pwrite(fd, data[:allowed], offset)
            self.bytes_left -= count
            return count


class ShortWritingOps(WrappedOps):
    """One write takes at most `bytes_max` bytes, at least one block with O_DIRECT."""

    def __init__(self, inner: FileOps, bytes_max: int) -> None:
        super().__init__(inner)
        self.bytes_max = bytes_max

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        direct = self._files[fd][2]
        most = max(BLOCK_BYTES, self.bytes_max // BLOCK_BYTES * BLOCK_BYTES) if direct else self.bytes_max
        return self.inner.pwrite(fd, data[:most], offset)


class SlowOps(WrappedOps):
    """Every write and every fsync takes `seconds` longer."""

    def __init__(self, inner: FileOps, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    def effect(self, effect: Effect, do: Callable[[], Result]) -> Result:
        if effect.kind in ("pwrite", "fsync", "fsync_directory"):
            time.sleep(self.seconds)
        return do()


# ---- faults from the environment


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the variable: its word and its arguments."""

    word: str
    arguments: tuple[str, ...]


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read the variable's grammar. Raises `UsageError` for a fault that is not in it."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        word, _, rest = part.partition(":")
        arguments = (rest,) if word in ("once", "record", "trace") else tuple(filter(None, rest.split(":")))
        least, most = _ARGUMENT_COUNTS.get(word, (0, -1))
        if not least <= len(arguments) <= most or (arguments and not arguments[0]):
            known = ", ".join(sorted(_ARGUMENT_COUNTS))
            raise UsageError("not a fault", where=VARIABLE, expected=f"one of {known} with its arguments", found=part)
        faults.append(Fault(word, arguments))
    return tuple(faults)


_ARGUMENT_COUNTS = {
    "kill": (1, 2), "kill-at": (2, 2), "both": (0, 0), "once": (1, 1), "enospc": (1, 1), "short-writes": (1, 1),
    "fail": (2, 4), "eio-fsync": (1, 1), "read-only": (0, 0), "no-link": (0, 0), "no-direct": (0, 0), "slow": (1, 1),
    "record": (1, 1), "trace": (1, 1),
}  # fmt: skip


def ops_from_environment(inner: FileOps) -> FileOps:
    """`inner` with the faults that `STEPWELL_FAULT` asks for; `inner` itself when it asks for none.

    Raises `UsageError` when the variable cannot be understood: a test that injects nothing must not pass.
    """
    text = os.environ.get(VARIABLE)
    ops = inner
    if text:
        faults = parse_faults(text)
        for fault in faults:
            ops = _wrap(ops, fault, faults)
    return ops


def _wrap(ops: FileOps, fault: Fault, faults: tuple[Fault, ...]) -> FileOps:
    match fault.word, *fault.arguments:
        case "kill", at, *when:
            return KillingOps(ops, int(at), when[0] if when else "before", _killer(faults))
        case "enospc", count:
            return FullDiskOps(ops, int(count))
        case "short-writes", count:
            return ShortWritingOps(ops, int(count))
        case "fail", kind, name, *numbers:
            first = int(numbers[0]) if numbers else 1
            count_max = int(numbers[1]) if len(numbers) > 1 else None
            return FailingOps(ops, fails(kind, int(getattr(errno, name)), first=first, count=count_max))
        case "eio-fsync", at:
            return FailingOps(ops, fails("fsync", errno.EIO, first=int(at), count=1))
        case ("read-only",):
            return FailingOps(ops, read_only)
        case ("no-link",):
            return FailingOps(ops, fails("link", errno.EPERM))
        case ("no-direct",):
            return FailingOps(ops, no_direct)
        case "slow", seconds:
            return SlowOps(ops, float(seconds))
        case "record", path:
            return RecordingOps(ops, path)
        case "trace", path:
            return TracingOps(ops, path)
        case _:
            return ops  # kill-at, both and once say nothing about files


def _killer(faults: tuple[Fault, ...]) -> Callable[[], None]:
    both = any(fault.word == "both" for fault in faults)
    once = next((fault.arguments[0] for fault in faults if fault.word == "once"), None)
    return lambda: kill_myself(both=both, once=once)


_reached: Counter[str] = Counter()
_reached_lock = threading.Lock()


def failpoint(name: str) -> None:
    """A point between two messages at which a test may kill this process; costs nothing when no fault is asked for."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    faults = parse_faults(text)
    with _reached_lock:
        _reached[name] += 1
        count = _reached[name]
    for fault in faults:
        if fault.word == "trace":
            _trace(fault.arguments[0], f"message {name}")
    for fault in faults:
        if fault.word == "kill-at" and fault.arguments == (name, str(count)):
            _killer(faults)()


def _trace(path: str, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{line}\n".encode("utf-8", "surrogateescape"))
    finally:
        os.close(fd)
