"""The trainer's side of the agent: start it, talk to it, notice its death and begin again with the same slots."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from stepwell import errors
from stepwell.agent import protocol as p
from stepwell.agent.place import Place, bound_sending, peer_user, place_of
from stepwell.errors import AgentError, RunBusyError, StepwellError
from stepwell.testing.ops import failpoint

log = logging.getLogger("stepwell")

START_SECONDS_MAX = 30.0
ANSWER_SECONDS_MAX = 120.0
BUSY_SECONDS_MAX = 15.0
SEND_SECONDS_MAX = 20
READY_BYTES_MAX = 2000
CANNOT_START = b"0"  # what a starting agent says, before the reason in words, when another try cannot help
# The agent must be this very package, wherever the trainer found it, and not another one that is installed as well.
_START = """
import importlib.util, runpy, sys
folder = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("stepwell", f"{folder}/__init__.py", submodule_search_locations=[folder])
sys.modules["stepwell"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_module("stepwell.agent", None, "__main__")
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def as_error(refused: p.Refused) -> StepwellError:
    """The error that the agent refused with, as its own class again."""
    kind = getattr(errors, refused.kind, errors.StepwellError)
    if not (isinstance(kind, type) and issubclass(kind, StepwellError)):
        kind = StepwellError
    return kind(refused.what, where=refused.where, expected=refused.expected, found=refused.found, todo=refused.todo)


class _CannotStartError(AgentError):
    """Starting the agent again would end in the same way."""


class Client:
    """One connection to the agent of a run. Thread-safe.

    `on_message` is called from the reading thread for every message that answers no question; `on_lost` once when the
    connection ends without `close`. Questions have bounded waits.
    """

    def __init__(
        self, root: str, on_message: Callable[[p.AnyMessage], None], on_lost: Callable[[Client], None]
    ) -> None:
        self.root, self.on_message, self.on_lost = root, on_message, on_lost
        self.place: Place = place_of(root)
        self.welcome: p.Welcome | None = None
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._send_lock = threading.Lock()
        self._questions: dict[int, Future[tuple[p.AnyMessage, list[int]]]] = {}
        self._next = 0
        self.lost = False  # True once the connection has ended

    def connect(self, hello: p.Hello) -> p.Welcome:
        """Meet the agent, starting one when there is none, and introduce this trainer.

        Raises `AgentError` when none can be started, `RunBusyError` when another trainer stays connected.
        """
        deadline = time.monotonic() + START_SECONDS_MAX
        busy_until = time.monotonic() + BUSY_SECONDS_MAX
        while True:
            try:
                self._open(deadline)
                answer, _ = self.ask(hello)
                assert isinstance(answer, p.Welcome)
                self.welcome = answer
                return answer
            except RunBusyError:
                self.hang_up()
                if time.monotonic() >= busy_until:
                    raise
            except _CannotStartError as error:
                self.hang_up()
                raise AgentError(error.what, where=error.where, found=error.found, todo=error.todo) from None
            except (AgentError, OSError) as error:
                self.hang_up()
                if time.monotonic() >= deadline:
                    raise AgentError(
                        "the agent could not be started",
                        where=self.place.socket,
                        found=str(error),
                        todo=f"read its log, {self.place.log}",
                    ) from error
            time.sleep(0.1)  # an ending agent needs a moment to leave; bounded by the deadlines above

    def _open(self, deadline: float) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                connection.connect(self.place.socket)
            except (FileNotFoundError, ConnectionRefusedError):
                self._spawn(deadline)
                connection.connect(self.place.socket)
            bound_sending(connection, SEND_SECONDS_MAX)
            _, uid = peer_user(connection)
            if uid != os.getuid():
                raise AgentError("the agent belongs to another user", where=self.place.socket, found=f"uid {uid}")
        except BaseException:
            connection.close()
            raise
        with self._send_lock:
            self._socket, self.lost = connection, False
        self._reader = threading.Thread(target=self._read, args=(connection,), name="stepwell-agent", daemon=True)
        self._reader.start()

    def _spawn(self, deadline: float) -> None:
        ready, ready_write = os.pipe()
        try:
            with open(self.place.log, "ab") as output, _starting(sys.executable):
                process = subprocess.Popen(
                    [sys.executable, "-c", _START, _PACKAGE, "--run", self.root, "--ready-fd", str(ready_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,  # never ours: an inherited pipe would keep the launcher waiting for ever
                    close_fds=True,
                    pass_fds=[ready_write],
                    start_new_session=True,
                    cwd="/",
                    env=_environment(),
                )
        finally:
            os.close(ready_write)
        try:
            readable, _, _ = select.select([ready], [], [], max(0.1, deadline - time.monotonic()))
            said = os.read(ready, READY_BYTES_MAX + 1) if readable else None
            if said is not None and said.startswith(CANNOT_START):
                raise _CannotStartError(
                    "the agent could not be started",
                    where=self.root,
                    found=said[1:].decode(errors="replace"),
                    todo=f"mend that; stepwell.load() reads a run without an agent (whose log is {self.place.log})",
                )
            if said is None or (said != b"1" and process.wait(timeout=5) != 0):
                words = "does not answer" if said is None else "ended at its start"
                raise AgentError(f"the agent {words}", where=self.place.log, found=_last_line(self.place.log))
        except subprocess.TimeoutExpired:
            raise AgentError("the agent does not answer", where=self.place.log) from None
        finally:
            os.close(ready)
            threading.Thread(target=process.wait, name="stepwell-reap", daemon=True).start()  # leaves no zombie

    def ask(
        self, message: p.AnyMessage, fds: tuple[int, ...] = (), timeout: float = ANSWER_SECONDS_MAX
    ) -> tuple[p.AnyMessage, list[int]]:
        """Send a question and wait for its answer. Raises the error that the agent refused with, or `AgentError`."""
        import msgspec

        future: Future[tuple[p.AnyMessage, list[int]]] = Future()
        with self._send_lock:
            self._next += 1
            number = self._next
            self._questions[number] = future
        try:
            self.tell(msgspec.structs.replace(message, request=number), fds)
            answer, received = future.result(timeout)
        except FutureTimeout:
            raise AgentError("the agent does not answer", where=self.place.socket, found=f"{timeout} s") from None
        finally:
            self._questions.pop(number, None)
        if isinstance(answer, p.Refused):
            raise as_error(answer)
        return answer, received

    def tell(self, message: p.AnyMessage, fds: tuple[int, ...] = ()) -> None:
        """Send a message. Raises `AgentError` when the agent is gone."""
        failpoint(f"trainer-sends-{type(message).__name__}")
        try:
            with self._send_lock:
                if self._socket is None:
                    raise AgentError("not connected to an agent", where=self.place.socket)
                p.send(self._socket, message, fds)
        except OSError as error:
            if isinstance(error, StepwellError):
                raise
            raise AgentError("the agent is gone", where=self.place.socket, found=str(error)) from None

    def _read(self, connection: socket.socket) -> None:
        while True:
            try:
                received = p.receive(connection)
            except (OSError, AgentError) as error:
                log.debug("connection to the agent ended: %s", error)
                received = None
            if received is None:
                break
            message, fds = received
            failpoint(f"trainer-received-{type(message).__name__}")
            question = self._questions.pop(getattr(message, "request", 0), None)
            if question is not None:
                question.set_result((message, fds))
            else:
                for fd in fds:
                    os.close(fd)
                self.on_message(message)
        with self._send_lock:
            given_up = connection is not self._socket  # by `close`, or by `connect` for another try
            if not given_up:
                self._socket, self.lost = None, True
        connection.close()
        for question in list(self._questions.values()):
            if not question.done():
                question.set_exception(AgentError("the agent is gone", where=self.place.socket))
        if not given_up and self.welcome is not None:
            self.on_lost(self)

    def close(self) -> None:
        """Say goodbye: the agent finishes what it accepted and ends."""
        with contextlib.suppress(AgentError):
            self.tell(p.Bye())
        self.hang_up()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection without a word."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def hang_up(self) -> None:
        """End the connection without a word; `on_lost` is not called."""
        with self._send_lock:
            connection, self._socket = self._socket, None
            self.welcome = None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the reading thread wakes up and closes it


@contextlib.contextmanager
def _starting(program: str) -> Iterator[None]:
    """A program that the system cannot start now cannot be started in a second, unless it is short of something."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            raise
        raise _CannotStartError(
            "the agent could not be started",
            where=program or "sys.executable is empty",
            found=os.strerror(error.errno or 0),
            todo="the agent runs with this process's own Python: let this user execute it",
        ) from None


def _environment() -> dict[str, str]:
    """The trainer's environment, with one thread for numerical libraries."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _last_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read()[-2000:].strip().splitlines()
    except OSError:
        return "no log"
    return lines[-1] if lines else "an empty log"
