"""Talking to a running agent without being its trainer. Never starts one."""

from __future__ import annotations

import os
import socket
import time

from stepwell.agent import protocol as p
from stepwell.agent.client import as_error
from stepwell.agent.place import Place, lock_within, peer_user, place_of
from stepwell.errors import AgentError, RunBusyError, StepwellError, WaitTimeout

ANSWER_SECONDS_MAX = 10.0
STATUS_SECONDS_MAX = 2.0


class Observer:
    """One connection to the agent of a run; a question at a time. Use as a context manager."""

    def __init__(self, connection: socket.socket, place: Place) -> None:
        self._connection, self._place = connection, place
        self.welcome: p.Welcome | None = None

    def ask(self, message: p.AnyMessage, *, seconds_max: float = ANSWER_SECONDS_MAX) -> p.AnyMessage:
        """The answer to a question. Raises the error that the agent refused with, or `AgentError`."""
        try:
            self._connection.settimeout(seconds_max)
            p.send(self._connection, message)
            received = p.receive(self._connection)
        except TimeoutError:
            raise AgentError(
                "the agent does not answer", where=self._place.socket, found=f"nothing for {seconds_max:g} s",
                todo=f"read its log, {self._place.log}",
            ) from None  # fmt: skip
        except OSError as error:
            if isinstance(error, StepwellError):
                raise
            raise AgentError("the agent is gone", where=self._place.socket, found=str(error)) from None
        if received is None:
            raise AgentError("the agent has hung up", where=self._place.socket, todo=f"read its log, {self._place.log}")
        answer, fds = received
        for fd in fds:
            os.close(fd)
        if isinstance(answer, p.Refused):
            raise as_error(answer)
        return answer

    def wait_until_gone(self, seconds_max: float) -> None:
        """Wait until the agent has ended and its lock is free. Raises `WaitTimeout`."""
        deadline = time.monotonic() + seconds_max
        self._connection.settimeout(seconds_max)
        try:
            while p.receive(self._connection) is not None:
                pass
        except TimeoutError:
            raise WaitTimeout("the agent has not ended yet", expected=f"within {seconds_max:g} s") from None
        except OSError:
            pass  # it is gone, only less politely
        os.close(take_lock(self._place, deadline - time.monotonic()))

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *about: object) -> None:
        self._connection.close()


def observe(root: str, *, seconds_max: float = ANSWER_SECONDS_MAX) -> Observer | None:
    """Connect to the agent of a run on this machine; None when none is running for this user.

    Raises `AgentError` when it is another user's, of another version, or does not answer.
    """
    place = place_of(root)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds_max)
        try:
            connection.connect(place.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except TimeoutError:
            raise AgentError("the agent does not answer", where=place.socket, found=f"{seconds_max:g} s") from None
        _, uid = peer_user(connection)
        if uid != os.getuid():
            raise AgentError("the agent belongs to another user", where=place.socket, found=f"uid {uid}")
        observer = Observer(connection, place)
        hello = p.Hello(p.VERSION, os.getpid(), "", observer=True)
        answer = observer.ask(hello, seconds_max=seconds_max)
        assert isinstance(answer, p.Welcome)
        observer.welcome = answer
        return observer
    except BaseException:
        connection.close()
        raise


def status_of(root: str) -> p.StatusIs | None:
    """What the agent of a run is doing; None when none is running here, or it cannot be asked in a moment."""
    try:
        observer = observe(root, seconds_max=STATUS_SECONDS_MAX)
        if observer is None:
            return None
        with observer:
            answer = observer.ask(p.AskStatus(), seconds_max=STATUS_SECONDS_MAX)
    except (StepwellError, OSError):
        return None
    assert isinstance(answer, p.StatusIs)
    return answer


def take_lock(place: Place, seconds_max: float = 0.0) -> int:
    """Take the lock that the agent of a run holds, so that none can start. Returns the descriptor; close it to let go.

    Raises `RunBusyError` when somebody holds it for longer than `seconds_max`.
    """
    fd = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if lock_within(fd, seconds_max):
        return fd
    os.close(fd)
    raise RunBusyError(
        "the agent of this run is starting or ending, or another command works on it",
        where=place.lock,
        todo="try again in a moment",
    )
