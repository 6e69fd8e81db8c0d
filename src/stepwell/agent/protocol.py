"""What trainer and agent say to each other: one message per packet of a Unix SOCK_SEQPACKET socket, in msgpack.

The kernel keeps the messages apart; descriptors travel beside them with SCM_RIGHTS. `Hello`, `Welcome` and `Refused`
only ever grow at their end: so any two versions can read each other's greeting, and refuse each other in words.
"""

from __future__ import annotations

import os
import socket
from typing import TypeAlias

import msgspec

from stepwell.errors import AgentError

VERSION = 1
MESSAGE_BYTES_MAX = 128 << 10


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The root of all messages. An answer repeats the `request` number of its question; 0 is no question."""


# ---- trainer to agent


class Hello(Message, frozen=True):
    """First message of a connection. `attempt` is set when a trainer comes back after its agent died."""

    version: int
    pid: int
    identity: str
    observer: bool = False
    attempt: int | None = None
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: tuple[str, str, int] | None = None
    request: int = 0


class OpenAttempt(Message, frozen=True):
    """Take the next attempt number; refused when the run has steps and neither a parent nor `fresh` is given."""

    parent: str | None
    fresh: bool
    request: int = 0


class LayoutIs(Message, frozen=True):
    """A layout, in the memfd that comes along."""

    hash: str
    bytes: int


class MakeSlot(Message, frozen=True):
    """Make a slot; with `touch` its pages are written once before the answer."""

    bytes: int
    touch: bool
    request: int = 0


class AdoptSlot(Message, frozen=True):
    """A slot that an earlier agent made, handed over by the trainer; its memfd comes along."""

    slot: int
    bytes: int
    request: int = 0


class DropSlot(Message, frozen=True):
    """Forget a slot that is too small now."""

    slot: int


class Begin(Message, frozen=True):
    """The trainer starts to write into this slot: what it held is no longer whole."""

    slot: int


class Persist(Message, frozen=True):
    """The snapshot in this slot is complete: from here on the save is accepted and survives the trainer.

    `entered_seconds` is when `save()` was entered, by CLOCK_MONOTONIC: it is the same for all processes of a machine.
    """

    save: str
    step: int
    slot: int
    layout: str
    values_bytes: int
    metrics: dict[str, float | str]
    entered_seconds: float
    queue_depth: int
    telemetry: dict[str, float | int | str | bool | None]


class AskMemory(Message, frozen=True):
    """What is the newest committed step that a slot still holds whole?"""

    request: int = 0


class Note(Message, frozen=True):
    """One telemetry record that the trainer made (a restore, a skipped save)."""

    record: dict[str, float | int | str | bool | None]


class Prune(Message, frozen=True):
    """Apply a Keep now (from the command): remove at most `limit` steps, so that an answer fits into a message."""

    keep_last: int
    keep_every: int | None
    keep_best: tuple[str, str, int] | None
    limit: int
    request: int = 0


class AskStatus(Message, frozen=True):
    """What is the agent doing? (from the command)"""

    request: int = 0


class Stop(Message, frozen=True):
    """Finish what is accepted, then end (from the command); refused while a trainer is connected."""

    request: int = 0


class Bye(Message, frozen=True):
    """The trainer closes in good order: the agent finishes what it accepted and ends."""


# ---- agent to trainer


class Welcome(Message, frozen=True):
    version: int
    pid: int
    run: str
    filesystem: str
    direct_io: bool
    hard_links: bool
    shares_cgroup: bool
    request: int = 0


class Refused(Message, frozen=True):
    """An answer that is an error; `kind` is the name of a class in `errors.py`."""

    kind: str
    what: str
    where: str | None = None
    expected: str | None = None
    found: str | None = None
    todo: str | None = None
    request: int = 0


class AttemptOpened(Message, frozen=True):
    attempt: int
    request: int = 0


class SlotMade(Message, frozen=True):
    """A slot; its memfd comes along."""

    slot: int
    bytes: int
    request: int = 0


class Committed(Message, frozen=True):
    """The save is durable on tier 0, `durable_seconds` after `save()` was entered. `stages` has the seconds of each."""

    save: str
    key: str
    durable_seconds: float
    stages: dict[str, float]
    retries: int


class Failed(Message, frozen=True):
    """The save was given up; nothing of it is committed."""

    save: str
    error: Refused
    errno: int | None
    retries: int


class MemoryIs(Message, frozen=True):
    """The newest committed step that a slot holds, its memfd beside it; `key` is None when there is none."""

    key: str | None
    slot: int = -1
    bytes: int = 0
    layout: str = ""
    request: int = 0


class Pruned(Message, frozen=True):
    """The keys of the steps that are gone now. Steps that somebody reads stay and are not named."""

    removed: tuple[str, ...]
    request: int = 0


class SlotIs(Message, frozen=True):
    """One slot of the agent; `holds` is the committed step in it."""

    slot: int
    bytes: int
    holds: str | None


class StatusIs(Message, frozen=True):
    """What the agent is doing. `trainer_pid` is 0 for a trainer whose process cannot be seen from here; `pending`
    counts orders that are not finished yet."""

    pid: int
    service: bool
    trainer_pid: int | None
    attempt: int | None
    slots: tuple[SlotIs, ...]
    pending: int
    stopping: bool
    request: int = 0


AnyMessage: TypeAlias = (
    Hello | OpenAttempt | LayoutIs | MakeSlot | AdoptSlot | DropSlot | Begin | Persist | AskMemory | Note | Prune
    | AskStatus | Stop | Bye | Welcome | Refused | AttemptOpened | SlotMade | Committed | Failed | MemoryIs | Pruned
    | StatusIs
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def send(connection: socket.socket, message: AnyMessage, fds: tuple[int, ...] = ()) -> None:
    """Send one message and the descriptors that belong to it. Raises `OSError` when the peer is gone."""
    data = _encoder.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise AgentError("a message is too large", expected=f"at most {MESSAGE_BYTES_MAX} bytes", found=len(data))
    if fds:
        socket.send_fds(connection, [data], list(fds))
    else:
        connection.send(data)


def receive(connection: socket.socket) -> tuple[AnyMessage, list[int]] | None:
    """The next message and its descriptors, or None when the peer is gone.

    Raises `AgentError` for a message that this version cannot read; descriptors are closed then.
    """
    data, fds, flags, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 4, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    try:
        if flags & socket.MSG_TRUNC:
            raise AgentError("a message was cut off", found=f"{len(data)} bytes")
        return _decoder.decode(data), fds
    except (msgspec.DecodeError, AgentError) as error:
        for fd in fds:
            os.close(fd)
        raise AgentError("the other side speaks another protocol", found=str(error)) from None
