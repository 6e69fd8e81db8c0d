"""Copies from an accelerator into a slot: pinned memory, a side stream and events, no device-wide synchronisation.

`CudaCopier` is the real one. It takes the torch that it calls as an argument, so that all of it is tested on machines
without an accelerator against a fake one (`stepwell.testing.device`).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, Protocol

CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every device, not only for the current one


class Ticket(Protocol):
    """Copies that have been queued. It keeps the tensors alive until `wait` has returned."""

    def wait(self) -> None:
        """Block the host until the copies are in host memory."""

    def hold_device(self) -> None:
        """Make the work that the trainer queues from now on wait on the device for the copies; blocks no host."""


class DeviceCopier(Protocol):
    """Queues copies from device tensors to host views."""

    def register(self, address: int, size: int) -> bool:
        """Pin host memory for direct transfer; True when the transfers are as fast as they can be now."""

    def unregister(self, address: int) -> None:
        """Undo `register`; before the memory is unmapped."""

    def copy(self, pairs: list[tuple[Any, Any]]) -> Ticket:
        """Queue (host view, device tensor) copies after everything the trainer has queued so far."""


class CudaCopier:
    """`DeviceCopier` for CUDA: one side stream per device. Only the trainer's thread queues copies."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.streams: dict[Any, Any] = {}

    def register(self, address: int, size: int) -> bool:
        code = self.torch.cuda.cudart().cudaHostRegister(address, size, CUDA_HOST_REGISTER_PORTABLE)
        if int(code) == 0:
            return True
        with suppress(RuntimeError):  # CUDA reports this failure once more, to whoever launches next: let it be us
            self.torch.zeros(1, device="cuda")
        return False

    def unregister(self, address: int) -> None:
        self.torch.cuda.cudart().cudaHostUnregister(address)

    def copy(self, pairs: list[tuple[Any, Any]]) -> Ticket:
        by_device: dict[Any, list[tuple[Any, Any]]] = {}
        for pair in pairs:
            by_device.setdefault(pair[1].device, []).append(pair)
        ticket = CudaTicket(self.torch, pairs)
        try:
            for device, members in by_device.items():
                ticket.events.append((device, self._queue(device, members)))
        except BaseException:
            for stream in self.streams.values():  # what was queued must not arrive in a slot that is somebody else's
                stream.synchronize()
            raise
        return ticket

    def _queue(self, device: Any, pairs: list[tuple[Any, Any]]) -> Any:
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = self.torch.cuda.Stream(device)
        stream.wait_stream(self.torch.cuda.current_stream(device))
        event = self.torch.cuda.Event(blocking=True)
        copy = self.torch.Tensor.copy_
        with self.torch.no_grad(), self.torch.cuda.stream(stream):
            for view, tensor in pairs:
                copy(view, tensor, non_blocking=True)
            event.record(stream)
        return event


class CudaTicket:
    """`Ticket` of `CudaCopier`: one event per device."""

    def __init__(self, torch: Any, pairs: list[tuple[Any, Any]]) -> None:
        self.torch, self.pairs = torch, pairs
        self.events: list[tuple[Any, Any]] = []

    def wait(self) -> None:
        for _, event in self.events:
            event.synchronize()
        self.pairs = []

    def hold_device(self) -> None:
        for device, event in self.events:
            self.torch.cuda.current_stream(device).wait_event(event)


class PlainCopier:
    """`DeviceCopier` for devices whose streams are not known here: each tensor is brought to the host at once."""

    def register(self, address: int, size: int) -> bool:
        return True

    def unregister(self, address: int) -> None:
        """Nothing was registered."""

    def copy(self, pairs: list[tuple[Any, Any]]) -> Ticket:
        for view, tensor in pairs:
            view.copy_(tensor.detach())
        return NothingToWaitFor()


class NothingToWaitFor:
    """The `Ticket` of copies that are complete."""

    def wait(self) -> None:
        """Everything is there already."""

    def hold_device(self) -> None:
        """Everything is there already."""


def copier_for(device_type: str) -> DeviceCopier:
    """The copier of a device type."""
    return CudaCopier(sys.modules["torch"]) if device_type == "cuda" else PlainCopier()
