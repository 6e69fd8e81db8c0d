"""An agent without a process around it: the real `Server` and `Persister`, driven message by message in one thread.

The trainer's side is played too: it fills its slot as a trainer does and says what a trainer says. So every effect on
the disk happens in a known order, and thousands of crashes need no thousands of processes.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stepwell.agent import protocol as p
from stepwell.agent.memory import make_slot
from stepwell.agent.place import Place
from stepwell.agent.server import Connection, Server
from stepwell.errors import StepwellError
from stepwell.policies import Keep
from stepwell.state import Flat, encode_values, flatten
from stepwell.store import layout as layouts
from stepwell.store.layout import Layout
from stepwell.tiers.base import FileOps

KEEP = Keep(last=2)
SLOT_BYTES = 256 << 10


class NoSync:
    """`FileOps` without the wait for the disk: a killed process leaves the page cache behind, fsync or not."""

    def __init__(self, inner: FileOps) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self.inner, name)
        return method

    def fsync(self, fd: int) -> None:
        """Nothing to do."""

    def fsync_directory(self, path: str) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Trainer:
    """What a trainer knows at one moment; enough for it to go on with a new agent after its agent was killed.

    `snapshot_step` is the step in the slot, `committed_step` the last one it was told is durable; a save is pending
    while they differ. Steps from `wide_from` on have one tensor more, so their layout is another one.
    """

    identity: str
    slot_fd: int
    steps: tuple[int, ...] = (1, 2, 3, 4)
    wide_from: int = 3
    keep: Keep = KEEP
    parent: str | None = None
    fresh: bool = False
    attempt: int | None = None
    snapshot_step: int = -1
    committed_step: int = -1


def new_trainer(identity: str = "first", **about: object) -> Trainer:
    """A trainer with a slot of its own, to be closed with `os.close(trainer.slot_fd)`."""
    return Trainer(identity, make_slot(SLOT_BYTES, touch=False), **about)  # type: ignore[arg-type]


def make_state(step: int, *, wide: bool) -> dict[str, object]:
    """A state whose every number is the step."""
    state: dict[str, object] = {
        "weights": np.full((40, 64), step, dtype=np.float32),
        "moments": [np.full(700, step, dtype=np.float64), np.full(3, step, dtype=np.int16)],
        "nothing": np.empty((0, 4), dtype=np.float32),
        "step": step,
    }
    if wide:
        state["more"] = np.full(2000, step, dtype=np.int32)
    return state


@functools.lru_cache
def lay_out(step: int, *, wide: bool) -> tuple[Flat, bytes, Layout]:
    """The state of a step, flat; its values; its layout."""
    flat = flatten(make_state(step, wide=wide), rng=False)
    room = layouts.values_room_for(64)
    layout = layouts.build(flat.names, flat.specs, flat.alias_of, flat.skeleton, values_bytes_max=room)
    return flat, encode_values(flat.values), layout


class CoreAgent:
    """One life of an agent, and the connection of one trainer to it.

    `tell` hears of everything that the trainer gets to know, as the field of `Trainer` and its new value, and of each
    key that is answered as ("committed", key).
    """

    def __init__(self, root: str, ops: FileOps, trainer: Trainer, tell: Callable[[str, object], None]) -> None:
        self.trainer, self.tell = trainer, tell
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mine.setblocking(False)
        self.peer = Connection(theirs, os.getpid())
        place = Place(*(f"{root}.{kind}" for kind in ("lock", "sock", "log")))
        self.server = Server(root, place, ops)
        self.server.connections[theirs.fileno()] = self.peer
        self.server.post = self._answer_at_once  # type: ignore[method-assign]

    def play(self) -> None:
        """Take the trainer from where it is to its last step, in good order."""
        self.start()
        if self.trainer.snapshot_step != self.trainer.committed_step:
            self.hand_over()
        for step in self.trainer.steps:
            if step > self.trainer.snapshot_step:
                self.save(step)
        self.finish()

    def start(self) -> None:
        """Open the agent and introduce the trainer, with its slot and its attempt."""
        self.server.open()
        me = self.trainer
        keep = {"keep_last": me.keep.last, "keep_every": me.keep.every, "keep_best": me.keep.best}
        self._say(p.Hello(p.VERSION, os.getpid(), me.identity, attempt=me.attempt, request=1, **keep))  # type: ignore[arg-type]
        self._say(p.AdoptSlot(0, SLOT_BYTES, 2), (me.slot_fd,))
        self.open_attempt()

    def open_attempt(self) -> None:
        """Take an attempt's number, unless there is one."""
        if self.trainer.attempt is None:
            self._say(p.OpenAttempt(self.trainer.parent, self.trainer.fresh, 3))

    def save(self, step: int) -> None:
        """Snapshot the state of a step, and have it persisted."""
        self._snapshot(step)
        self.hand_over()

    def finish(self) -> None:
        """End in good order."""
        self.server.persister._sweep()  # as it does every two seconds when there is nothing else to do
        self.server.persister.start()
        self.server.close()
        self.mine.close()

    def abandon(self) -> None:
        """What the kernel does when the process is killed: descriptors go, and nothing else happens."""
        server = self.server
        self.mine.close()
        self.peer.socket.close()
        if hasattr(server, "persister"):
            server.persister.workers.shutdown()
        if hasattr(server, "listener"):
            server.listener.close()
        for slot in server.slots.values():
            os.close(slot.fd)
        server.selector.close()
        for fd in (server.wake_fd, server.run_lock_fd, server.lock_fd):
            if fd >= 0:
                os.close(fd)

    def refused(self, message: p.Failed | p.Refused) -> None:
        """The agent said no; a test that expects it replaces this."""
        raise AssertionError(f"the agent refused: {message}")

    def _learn(self, name: str, value: object) -> None:
        self.trainer = replace(self.trainer, **{name: value})  # type: ignore[arg-type]
        self.tell(name, value)

    def _snapshot(self, step: int) -> None:
        """Write a state into the slot as a trainer does."""
        flat, values, layout = lay_out(step, wide=step >= self.trainer.wide_from)
        self._say(p.Begin(0))
        for i, tensor in enumerate(flat.tensors):
            if tensor.nbytes:
                os.pwrite(self.trainer.slot_fd, tensor.tobytes(), layout.slot_offsets[i])
        plan = layout.packs[-1]
        os.pwrite(self.trainer.slot_fd, values, plan.image_offset + plan.header_bytes + plan.data_bytes)
        self._learn("snapshot_step", step)

    def hand_over(self) -> None:
        """Send the pending order, as a trainer does at first and again to its next agent."""
        step = self.trainer.snapshot_step
        _, values, layout = lay_out(step, wide=step >= self.trainer.wide_from)
        fd = os.memfd_create("layout")
        os.write(fd, layout.data)
        self._say(p.LayoutIs(layout.hash, len(layout.data)), (fd,))
        os.close(fd)
        save = f"{self.trainer.identity}-{step}"
        self._say(p.Persist(save, step, 0, layout.hash, len(values), {"loss": 1.0 / (1 + step)}, 0.0, 0, {}))

    def _say(self, message: p.AnyMessage, fds: tuple[int, ...] = ()) -> None:
        """One message from the trainer, and all that the persister does because of it."""
        try:
            self.server._handle(self.peer, message, list(fds))
        except (StepwellError, OSError) as error:
            self.server._refuse(self.peer, message, error)
        while True:
            self._listen()
            try:
                act = self.server.persister.work.get_nowait()
            except queue.Empty:
                return
            assert act is not None
            self.server.persister._guarded(act)

    def _answer_at_once(self, act: Callable[[], None]) -> None:
        """What the loop thread may do at any moment: a trainer is told as early as can be."""
        act()
        self._listen()

    def _listen(self) -> None:
        while True:
            try:
                received = p.receive(self.mine)
            except BlockingIOError:
                return
            assert received is not None
            message, fds = received
            for fd in fds:
                os.close(fd)
            if isinstance(message, p.AttemptOpened):
                self._learn("attempt", message.attempt)
            elif isinstance(message, p.Committed):
                self._learn("committed_step", self.trainer.snapshot_step)
                self.tell("committed", message.key)
            elif isinstance(message, p.Failed | p.Refused):
                self.refused(message)
