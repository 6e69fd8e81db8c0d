"""An accelerator that is none: streams and events on the CPU, whose work runs when a test says so.

`FakeDevice.torch` stands for torch where `CudaCopier` calls it, so that the copier itself is under test: what it queues
where, what it waits for, and that it never stops the whole device. Tensors "on" this device are CPU tensors; their
copies are queued like kernels and read the memory when they run.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

WAIT_SECONDS_MAX = 30.0


class FakeEvent:
    """A point in a stream. `fired` is set once the stream has come to it."""

    def __init__(self, device: FakeDevice, *, blocking: bool = False) -> None:
        self.device, self.blocking = device, blocking
        self.stream: FakeStream | None = None
        self.fired = threading.Event()

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.work.append(self.fired.set)

    def synchronize(self) -> None:
        """Block the host until the stream has come here; raises `TimeoutError` when nobody runs the device."""
        self.device.host_waits.append(self)
        if self.device.runs_by_itself:
            self.device.run_until(self)
        if not self.fired.wait(WAIT_SECONDS_MAX):
            raise TimeoutError("the host waits for an event that nobody lets happen")


class FakeStream:
    """Work that runs in order; a waiting stream goes on when the event has fired."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.work: deque[Callable[[], None] | FakeEvent] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append(event)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Block the host until everything queued here has run."""
        event = FakeEvent(self.device)
        event.record(self)
        event.synchronize()

    def advance(self) -> bool:
        """Run the next piece of work; False when there is none or its event has not fired."""
        if not self.work:
            return False
        head = self.work[0]
        if isinstance(head, FakeEvent):
            if not head.fired.is_set():
                return False
            self.work.popleft()
            return True
        self.work.popleft()
        head()
        return True


class FakeDevice:
    """One accelerator.

    With `runs_by_itself` the device runs whatever the host waits for; otherwise nothing runs before `run`. `host_waits`
    are the events that the host has waited for, `pinned` the registered memory by address, `pin_code` what the next
    registration answers (0 is success), `stops` how often the whole device was stopped.
    """

    def __init__(self, *, runs_by_itself: bool = False) -> None:
        self.runs_by_itself = runs_by_itself
        self.trainer = FakeStream(self)
        self.streams = [self.trainer]
        self.host_waits: list[FakeEvent] = []
        self.pinned: dict[int, int] = {}
        self.pin_calls = 0
        self.pin_code = 0
        self.stops = 0
        self._current = self.trainer
        self._lock = threading.RLock()
        self.torch = self._fake_torch()

    def launch(self, kernel: Callable[[], None], *writes: Any) -> None:
        """Queue work of the trainer; as in torch, the versions of the tensors that it writes go up at once."""
        if writes:
            sys.modules["torch"].autograd.graph.increment_version(writes)
        self.trainer.work.append(kernel)

    def run(self, *first: FakeStream) -> None:
        """Run everything that can run; of the streams that can, always the one that comes first in `first`."""
        order = [*first, *(stream for stream in self.streams if stream not in first)]
        with self._lock:
            while any(stream.advance() for stream in order):
                pass

    def run_until(self, event: FakeEvent) -> None:
        """Run nothing but what an event needs to fire."""
        stream = event.stream
        assert stream is not None, "an event that was never recorded"
        with self._lock:
            while not event.fired.is_set():
                if not stream.advance():
                    head = stream.work[0]
                    assert isinstance(head, FakeEvent)
                    self.run_until(head)

    def _fake_torch(self) -> Any:
        cuda = SimpleNamespace(
            Stream=self._new_stream,
            Event=lambda *, blocking=False: FakeEvent(self, blocking=blocking),
            current_stream=lambda device: self._current,
            stream=self._on_stream,
            cudart=lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister),
            synchronize=self._stop,
        )
        return SimpleNamespace(
            cuda=cuda,
            Tensor=SimpleNamespace(copy_=self._copy),
            no_grad=sys.modules["torch"].no_grad,
            zeros=self._zeros,
        )

    def _new_stream(self, device: object) -> FakeStream:
        stream = FakeStream(self)
        self.streams.append(stream)
        return stream

    @contextmanager
    def _on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def _copy(self, view: Any, tensor: Any, *, non_blocking: bool) -> None:
        assert non_blocking, "a copy that blocks the host"
        self._current.work.append(lambda: view.copy_(tensor))

    def _register(self, address: int, size: int, flags: int) -> int:
        self.pin_calls += 1
        if self.pin_code == 0:
            self.pinned[address] = size
        return self.pin_code

    def _unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def _zeros(self, size: int, device: str) -> None:
        raise RuntimeError("an earlier error, reported once more")

    def _stop(self, device: object = None) -> None:
        self.stops += 1
        self.run()
