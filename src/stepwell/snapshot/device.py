"""Copies from an accelerator into a slot: pinned memory, a side stream and events, no device-wide synchronisation.

`CudaCopier` is the real one. The checkpointer only uses the `DeviceCopier` protocol, so everything but the transfer
itself is tested on a machine without an accelerator (`stepwell.testing.device`).
"""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Ticket(Protocol):
    """Copies that have been queued."""

    def wait(self) -> None:
        """Block the host until the copies are in host memory."""

    def hold_device(self) -> None:
        """Make the work that the trainer queues from now on wait on the device for the copies; blocks no host."""


class DeviceCopier(Protocol):
    """Queues copies from device tensors to host views."""

    def register(self, address: int, size: int) -> bool:
        """Pin host memory for direct transfer; True when it is pinned now."""

    def copy(self, pairs: list[tuple[Any, Any]]) -> Ticket:
        """Queue (host view, device tensor) copies after everything the trainer has queued so far."""


class CudaCopier:
    """`DeviceCopier` for CUDA: one side stream per device."""

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        self.streams: dict[Any, Any] = {}

    def register(self, address: int, size: int) -> bool:
        code = self.torch.cuda.cudart().cudaHostRegister(address, size, 0)
        return int(code) == 0

    def copy(self, pairs: list[tuple[Any, Any]]) -> CudaTicket:
        events = []
        by_device: dict[Any, list[tuple[Any, Any]]] = {}
        for pair in pairs:
            by_device.setdefault(pair[1].device, []).append(pair)
        for device, members in by_device.items():
            if device not in self.streams:
                self.streams[device] = self.torch.cuda.Stream(device)
            stream = self.streams[device]
            stream.wait_stream(self.torch.cuda.current_stream(device))
            with self.torch.no_grad(), self.torch.cuda.stream(stream):
                for view, tensor in members:
                    view.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)  # its memory must not be given to others before the copy ran
                event = self.torch.cuda.Event()
                event.record(stream)
            events.append((device, event))
        return CudaTicket(self.torch, events)


class CudaTicket:
    """`Ticket` of `CudaCopier`: one event per device."""

    def __init__(self, torch: Any, events: list[tuple[Any, Any]]) -> None:
        self.torch, self.events = torch, events

    def wait(self) -> None:
        for _, event in self.events:
            event.synchronize()

    def hold_device(self) -> None:
        for device, event in self.events:
            self.torch.cuda.current_stream(device).wait_event(event)


def copier_for(device_type: str) -> DeviceCopier | None:
    """The copier of a device type, or None: then tensors are brought to the host one by one."""
    return CudaCopier() if device_type == "cuda" else None
