"""An agent without a process around it: the real `Server` and `Persister`, driven message by message in one thread.

The trainer's side is played by `CoreTrainer`: it writes its slot as a trainer does and says what a trainer says. So
every effect on the disk happens in a known order, and thousands of crashes need no thousands of processes.
"""

from __future__ import annotations

import os
import queue
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stepwell.agent import protocol as p
from stepwell.agent.place import Place
from stepwell.agent.server import Connection, Server
from stepwell.restore import catalogue as catalogues
from stepwell.restore.read import open_step
from stepwell.restore.load import read_tensors
from stepwell.state import decode_values, encode_values, flatten
from stepwell.store import layout as layouts
from stepwell.store import names
from stepwell.tiers.base import FileOps, OsFileOps

KEEP_LAST = 2


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


def make_state(step: int, *, wide: bool = False) -> dict[str, object]:
    """A state whose every number is the step; `wide` has one tensor more, so its layout is another one."""
    state: dict[str, object] = {
        "weights": np.full((40, 64), step, dtype=np.float32),
        "moments": [np.full(700, step, dtype=np.float64), np.full(3, step, dtype=np.int16)],
        "nothing": np.empty((0, 4), dtype=np.float32),
        "step": step,
    }
    if wide:
        state["more"] = np.full(2000, step, dtype=np.int32)
    return state


@dataclass
class CoreTrainer:
    """What a trainer remembers when its agent dies: its slot, its attempt, and the saves not answered yet."""

    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    attempt: int | None = None
    slot: tuple[int, int, int] | None = None  # index, descriptor, bytes
    pending: list[p.Persist] = field(default_factory=list)
    layout: layouts.Layout | None = None
    keep: tuple[int, int | None, tuple[str, str, int] | None] = (KEEP_LAST, None, None)


class CoreAgent:
    """One life of an agent, and the connection of one trainer to it. `on_commit` hears each key as it is answered."""

    def __init__(self, root: str, ops: FileOps, trainer: CoreTrainer, on_commit: Callable[[str], None]) -> None:
        self.trainer, self.on_commit = trainer, on_commit
        place = Place(*(f"{root}.{kind}" for kind in ("lock", "sock", "log")))
        self.server = Server(root, place, ops)
        self.server.open()
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mine.setblocking(False)
        self.peer = Connection(theirs, os.getpid())
        self.server.connections[theirs.fileno()] = self.peer
        self.say(
            p.Hello(
                p.VERSION,
                os.getpid(),
                trainer.identity,
                attempt=trainer.attempt,
                keep_last=trainer.keep[0],
                keep_every=trainer.keep[1],
                keep_best=trainer.keep[2],
                request=1,
            )
        )
        if trainer.slot is not None:
            index, fd, size = trainer.slot
            self.say(p.AdoptSlot(index, size, 2), (fd,))

    def say(self, message: p.AnyMessage, fds: tuple[int, ...] = ()) -> None:
        """One message from the trainer, handled to its end."""
        self.server._handle(self.peer, message, list(fds))
        self.work()

    def work(self) -> None:
        """Whatever the agent's two threads would do until both have nothing left."""
        busy = True
        while busy:
            busy = False
            for source in (self.server.outbox, self.server.persister.work):
                try:
                    act = source.get_nowait()
                except queue.Empty:
                    continue
                busy = True
                if act is not None:
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
            if isinstance(message, p.AttemptOpened):
                self.trainer.attempt = message.attempt
            elif isinstance(message, p.SlotMade) and self.trainer.slot is None:
                self.trainer.slot = (message.slot, os.dup(fds[0]), message.bytes)
            elif isinstance(message, p.Committed):
                self.trainer.pending = [order for order in self.trainer.pending if order.save != message.save]
                self.on_commit(message.key)
            elif isinstance(message, p.Failed | p.Refused):
                raise AssertionError(f"the agent refused: {message}")
            for fd in fds:
                os.close(fd)

    def open_attempt(self, parent: str | None, *, fresh: bool = False) -> None:
        self.say(p.OpenAttempt(parent, fresh, 3))

    def order(self, step: int, *, wide: bool = False, metrics: dict[str, float] | None = None) -> p.Persist:
        """Snapshot a state into the slot; the order is pending until it is answered."""
        trainer = self.trainer
        flat = flatten(make_state(step, wide=wide), rng=False)
        values = encode_values(flat.values)
        layout = layouts.build(
            flat.names, flat.specs, flat.alias_of, flat.skeleton, values_bytes_max=layouts.values_room_for(64)
        )
        if trainer.slot is None:
            # The thread that touches pages is not started here: only its result matters.
            peer, message = self.peer, p.MakeSlot(layout.slot_bytes(4096) + 16384, False, 4)
            self.server._make_slot(peer, message)
            self.work()
        assert trainer.slot is not None
        index, fd, _ = trainer.slot
        self.say(p.Begin(index))
        for i, tensor in enumerate(flat.tensors):
            if tensor.nbytes:
                os.pwrite(fd, tensor.tobytes(), layout.slot_offset(i))
        plan = layout.packs[-1]
        os.pwrite(fd, values, plan.image_offset + plan.header_bytes + plan.data_bytes)
        trainer.layout = layout
        order = p.Persist(
            save=uuid.uuid4().hex,
            step=step,
            slot=index,
            layout=layout.hash,
            values_bytes=len(values),
            metrics=dict(metrics or {}),
            entered_wall_seconds=0.0,
            queue_depth=0,
            telemetry={},
        )
        trainer.pending.append(order)
        return order

    def persist_pending(self) -> None:
        """Hand the pending orders over, as a trainer does at first and again to the next agent."""
        layout = self.trainer.layout
        if layout is not None and self.trainer.pending:
            fd = os.memfd_create("layout")
            os.write(fd, layout.data)
            self.say(p.LayoutIs(layout.hash, len(layout.data)), (fd,))
            os.close(fd)
        for order in list(self.trainer.pending):
            self.say(order)

    def save(self, step: int, *, wide: bool = False, metrics: dict[str, float] | None = None) -> None:
        self.order(step, wide=wide, metrics=metrics)
        self.persist_pending()

    def close(self) -> None:
        """End in good order."""
        self.mine.close()
        self.server.persister.start()
        self.server.close()


def newest_key(root: str) -> str | None:
    newest = catalogues.read(root).newest
    return newest.key if newest else None


def problems_of(root: str) -> tuple[list[str], list[str]]:
    """(keys of the steps that are there, everything that is wrong with them), each byte of each step read.

    Wrong is: a step with a manifest that cannot be read whole, and a step that holds any number but its own.
    """
    catalogue = catalogues.read(root)
    wrong = list(catalogue.problems)
    for step in catalogue.steps:
        if step.problem is not None:
            wrong.append(f"{step.key}: {step.problem}")
            continue
        try:
            opened = open_step(root, step)
            try:
                wrong += [f"{step.key}: {text}" for text in opened.damage()]
                tensors = read_tensors(opened, None, as_numpy=True)
                values = decode_values(opened.values, allow_pickle=False)
            finally:
                opened.close()
        except Exception as error:
            wrong.append(f"{step.key}: {error}")
            continue
        number = names.parse_step_key(step.key)
        assert number is not None
        mixed = [i for i, tensor in tensors.items() if not np.all(tensor == number[0])]
        if mixed or number[0] not in values:
            wrong.append(f"{step.key}: holds something else than step {number[0]}: {mixed} {values}")
    return [step.key for step in catalogue.steps], wrong


def default_ops(ops: FileOps | None = None) -> FileOps:
    return ops or OsFileOps()
