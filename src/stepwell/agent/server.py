"""The agent: one process per node and run. It owns the slots, persists them, commits, and prunes.

One thread runs the event loop and answers messages; one thread, the persister, carries out orders one after another
with a few I/O workers. The loop itself touches only small documents and the catalogue, so no answer waits for a pack.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import queue
import selectors
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from stepwell import errors
from stepwell.agent import protocol as p
from stepwell.agent.memory import make_slot
from stepwell.agent.persist import WRITER, Order, utc_now
from stepwell.agent.persister import Job, Persister, Slot, as_stepwell, publish_run, refusal
from stepwell.agent.place import Place, bound_sending, cgroup_of, lock_run, peer_user
from stepwell.agent.prune import Pruner
from stepwell.errors import AgentError, DamagedError, LineageError, NotARunError, RunBusyError, StepwellError
from stepwell.policies import Keep
from stepwell.restore import catalogue as catalogues
from stepwell.store import layout as layouts
from stepwell.store import names
from stepwell.store.checksum import hex_digest
from stepwell.store.layout import Layout
from stepwell.store.manifest import AttemptDocument, RunDocument, encode
from stepwell.testing.ops import failpoint, ops_from_environment
from stepwell.tiers.base import FileOps, OsFileOps
from stepwell.tiers.posix import PosixTier, make_folders
from stepwell.tiers.probe import probe

log = logging.getLogger("stepwell.agent")

LINGER_SECONDS = 300.0
SEND_SECONDS_MAX = 2


@dataclass
class Connection:
    """One trainer or observer. `hello` is set once it has introduced itself."""

    socket: socket.socket
    pid: int
    hello: p.Hello | None = None
    said_bye: bool = False


class Server:
    """The state of one agent. Everything is owned by the loop thread, except what `Persister` is handed."""

    def __init__(self, root: str, place: Place, ops: FileOps | None = None, *, service: bool = False) -> None:
        self.root, self.place, self.service = os.path.abspath(root), place, service
        self.ops = ops or ops_from_environment(OsFileOps())
        self.slots: dict[int, Slot] = {}
        self.layouts: dict[str, Layout] = {}
        self.connections: dict[int, Connection] = {}
        self.attempt: AttemptDocument | None = None
        self.stopping = False
        self.idle_since = time.monotonic()
        self.linger_seconds = 10.0  # until the first trainer has come
        self.selector = selectors.DefaultSelector()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.lock_fd = self.run_lock_fd = -1
        self.next_slot = 0

    # ---- life

    def open(self) -> None:
        """Take the lock, make the run folder if it is new, probe the file system, listen.

        Raises `RunBusyError` when another agent holds the lock.
        """
        self.lock_fd = os.open(self.place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError("an agent for this run is running already", where=self.place.lock) from None
        make_folders(self.ops, self.root)
        self.run_lock_fd = lock_run(self.root)
        self.abilities = probe(self.root, self.ops)
        self.tier = PosixTier(self.root, self.ops, self.abilities)
        for folder in (names.ATTEMPTS, names.LAYOUTS, names.STEPS):
            self.tier.make_folders(self.tier.path(folder))
        try:
            self.tier.make_folders(self.tier.path(names.TELEMETRY))
        except OSError as error:  # nothing that is promised depends on it
            log.warning("there will be no telemetry: %s", error)
        self.run = self._open_run()
        self.pruner = Pruner(self.tier)
        self.pruner.remove_leftovers()
        self.persister = Persister(self)
        if os.path.lexists(self.place.socket):
            os.unlink(self.place.socket)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.place.socket)
        os.chmod(self.place.socket, 0o600)
        self.listener.listen(16)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wake_fd, selectors.EVENT_READ)

    def _open_run(self) -> str:
        path = self.tier.path(names.RUN_FILE)
        try:
            document, problem = catalogues.identity_of(self.root)
        except NotARunError:
            try:
                self.tier.publish(path, encode(RunDocument(run=uuid.uuid4().hex, created=utc_now(), writer=WRITER)))
            except FileExistsError:
                pass  # another node was first; its document is the run
            return catalogues.read_document(path, RunDocument).run
        if problem is None:  # whoever made it may have been killed before the folder was synced
            self.ops.fsync_directory(self.root)
        else:
            log.warning("%s; it is written again", problem)
            publish_run(self.tier, document)
        return document.run

    def serve(self) -> None:
        """Answer until there is nothing left to do; accepted work is always finished first."""
        self.persister.start()
        while not self._finished():
            for event, _ in self.selector.select(timeout=0.5):
                if event.fileobj is self.listener:
                    self._accept()
                elif event.fileobj == self.wake_fd:
                    os.eventfd_read(self.wake_fd)
                else:
                    self._read(self.connections[event.fd])
            while True:
                try:
                    act = self.outbox.get_nowait()
                except queue.Empty:
                    break
                act()
        self.close()

    def _finished(self) -> bool:
        if self.persister.unfinished:
            self.idle_since = time.monotonic()
            return False
        if self.stopping:
            return True
        if self.connections or self.service:
            self.idle_since = time.monotonic()
            return False
        return time.monotonic() - self.idle_since >= self.linger_seconds

    def close(self) -> None:
        """Stop the persister, remove the socket, let go of slots and lock."""
        self.persister.stop()
        if os.path.lexists(self.place.socket):
            os.unlink(self.place.socket)
        self.listener.close()
        for connection in list(self.connections.values()):
            connection.socket.close()
        for slot in self.slots.values():
            os.close(slot.fd)
        self.selector.close()
        os.close(self.wake_fd)
        if self.run_lock_fd >= 0:
            os.close(self.run_lock_fd)
        os.close(self.lock_fd)

    def stop(self) -> None:
        """Finish accepted work, then end (SIGTERM)."""
        self.stopping = True
        os.eventfd_write(self.wake_fd, 1)

    def post(self, act: Callable[[], None]) -> None:
        """Have the loop thread do something; called by the persister."""
        self.outbox.put(act)
        os.eventfd_write(self.wake_fd, 1)

    # ---- connections

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        pid, uid = peer_user(connection)
        if uid != os.getuid():
            log.warning("refused a connection of user %d (pid %d)", uid, pid)
            connection.close()
            return
        bound_sending(connection, SEND_SECONDS_MAX)
        self.connections[connection.fileno()] = Connection(connection, pid)
        self.selector.register(connection, selectors.EVENT_READ)

    def _read(self, peer: Connection) -> None:
        try:
            received = p.receive(peer.socket)
        except (OSError, AgentError) as error:
            log.warning("lost the connection of pid %d: %s", peer.pid, error)
            received = None
        if received is None:
            self._disconnect(peer)
            return
        message, fds = received
        failpoint(f"agent-received-{type(message).__name__}")
        try:
            self._handle(peer, message, fds)
        except (StepwellError, OSError) as error:
            self._refuse(peer, message, error)
        finally:
            for fd in fds:
                _close_quietly(fd)

    def _refuse(self, peer: Connection, message: p.AnyMessage, error: StepwellError | OSError) -> None:
        if not isinstance(error, StepwellError):
            error = errors.PersistError(os.strerror(error.errno or 0), where=error.filename)
        log.warning("refused %s of pid %d: %s", type(message).__name__, peer.pid, error)
        if isinstance(message, p.Persist):
            self._say(peer, p.Failed(message.save, refusal(error), None, 0))
        else:
            self._say(peer, refusal(error, getattr(message, "request", 0)))

    def _disconnect(self, peer: Connection) -> None:
        self.selector.unregister(peer.socket)
        del self.connections[peer.socket.fileno()]
        peer.socket.close()
        if peer.hello is not None and not peer.hello.observer:
            self.idle_since = time.monotonic()
            self.linger_seconds = 0.0 if peer.said_bye else LINGER_SECONDS
            log.info("trainer %d %s", peer.pid, "closed" if peer.said_bye else "is gone without a word")
            if peer.said_bye and not self.service:
                self.stopping = True

    def _say(self, peer: Connection, message: p.AnyMessage, fds: tuple[int, ...] = ()) -> None:
        failpoint(f"agent-sends-{type(message).__name__}")
        try:
            p.send(peer.socket, message, fds)
        except OSError as error:
            log.info("could not answer pid %d: %s", peer.pid, error)

    def _trainer(self) -> Connection | None:
        return next((c for c in self.connections.values() if c.hello and not c.hello.observer), None)

    # ---- messages

    def _handle(self, peer: Connection, message: p.AnyMessage, fds: list[int]) -> None:
        if peer.hello is None and not isinstance(message, p.Hello):
            raise AgentError("the first message must be Hello", found=type(message).__name__)
        match message:
            case p.Hello():
                self._hello(peer, message)
            case p.OpenAttempt():
                self._open_attempt(peer, message)
            case p.LayoutIs():
                self._layout(message, fds)
            case p.MakeSlot():
                threading.Thread(target=self._make_slot, args=(peer, message), daemon=True).start()
            case p.AdoptSlot():
                self._add_slot(peer, message.request, os.dup(fds[0]), message.bytes, message.slot)
            case p.DropSlot():
                slot = self.slots.pop(message.slot, None)
                if slot:
                    os.close(slot.fd)
            case p.Begin():
                self._slot(message.slot).holds = None
            case p.Persist():
                self._persist(peer, message)
            case p.AskMemory():
                # Behind everything accepted: a restarted trainer must not resume from before what is being persisted.
                self.persister.after_saves(lambda: self.post(lambda: self._memory(peer, message)))
            case p.Note():
                self.persister.note(dict(message.record))
            case p.Prune():
                self.persister.prune_now(peer, message)
            case p.AskStatus():
                self._say(peer, self._status(message.request))
            case p.Stop():
                self._stop_unless_used(peer, message)
            case p.Bye():
                peer.said_bye = True
            case _:
                raise AgentError("an agent does not take this message", found=type(message).__name__)

    def _hello(self, peer: Connection, message: p.Hello) -> None:
        if message.version != p.VERSION:
            idle = self._trainer() is None and not self.persister.unfinished
            self.stopping = self.stopping or (idle and not self.service)
            raise AgentError(
                "an agent of another version serves this run",
                where=f"pid {os.getpid()}",
                expected=f"protocol {message.version}",
                found=f"protocol {p.VERSION}",
                todo="it ends now; try again" if idle else "end the trainer that uses it, then try again",
            )
        if self.stopping and not message.observer:
            raise AgentError("the agent is ending", where=f"pid {os.getpid()}", todo="try again")
        other = self._trainer()
        if other is not None and not message.observer:
            raise RunBusyError(
                "another trainer is writing this run",
                where=self.root,
                found=f"pid {other.pid} ({_command_of(other.pid)})",
                todo="end that process, or give this run another folder",
            )
        if message.attempt is None and not message.observer:
            self._check_place()
        if message.attempt is not None:
            self.attempt = catalogues.read_document(
                self.tier.path(names.ATTEMPTS, names.attempt_file(message.attempt)), AttemptDocument
            )
            if self.attempt.identity != message.identity:
                raise LineageError("this attempt belongs to another trainer", where=self.root, found=message.attempt)
            before = [one.key for one in catalogues.read(self.root).steps if one.attempt == message.attempt]
            if before:
                self.persister.last_key[message.attempt] = before[-1]
        elif not message.observer:
            self.attempt = None
        peer.hello = message
        self._say(
            peer,
            p.Welcome(
                p.VERSION,
                os.getpid(),
                self.run,
                self.abilities.filesystem,
                self.abilities.direct_io,
                self.abilities.hard_links,
                cgroup_of(peer.pid) == cgroup_of("self"),
                message.request,
            ),
        )

    def _check_place(self) -> None:
        """A new trainer must not be served for a run that somebody has removed, or put another in the place of."""
        try:
            found = catalogues.identity_of(self.root)[0].run
        except NotARunError:
            found = None
        if found == self.run:
            return
        if not self.persister.unfinished and not self.service:
            self.stopping = True
        raise AgentError(
            "the run has been removed or replaced under the agent that serves it",
            where=self.root,
            expected=self.run,
            found=found or "no run",
            todo="end `stepwell agent --service` and start it anew" if self.service else "it ends now; try again",
        )

    def _open_attempt(self, peer: Connection, message: p.OpenAttempt) -> None:
        assert peer.hello is not None
        catalogue = catalogues.read(self.root)
        newest = catalogue.newest
        if newest is not None and message.parent is None and not message.fresh:
            raise LineageError(
                "the run has steps, and this training did not start from one of them",
                where=self.root,
                expected=f"ckpt.restore(state) before the first save (newest step: {newest.key})",
                found="a first save without a restore",
                todo="restore first, use another folder, or say Checkpointer(..., fresh=True) to begin a new branch",
            )
        folder = self.tier.path(names.ATTEMPTS)
        number = max((n for f in os.listdir(folder) if (n := names.parse_attempt_file(f)) is not None), default=0)
        while True:
            number += 1
            document = AttemptDocument(
                run=self.run,
                attempt=number,
                identity=peer.hello.identity,
                parent=message.parent,
                host=socket.gethostname(),
                pid=peer.pid,
                created=utc_now(),
                writer=WRITER,
            )
            try:
                self.tier.publish(os.path.join(folder, names.attempt_file(number)), encode(document))
                break
            except FileExistsError:
                continue  # another node took this number: take the next
        self.attempt = document
        self._drop_old_slots(peer)
        self._say(peer, p.AttemptOpened(number, message.request))

    def _drop_old_slots(self, peer: Connection) -> None:
        """Let go of the slots that a dead trainer left: the new one has restored from them, and saves from now on."""
        assert peer.hello is not None
        for index in [index for index, slot in self.slots.items() if slot.owner != peer.hello.identity]:
            os.close(self.slots.pop(index).fd)

    def _layout(self, message: p.LayoutIs, fds: list[int]) -> None:
        if message.hash in self.layouts:
            return
        with mmap.mmap(fds[0], message.bytes, prot=mmap.PROT_READ) as mapped:
            data = bytes(mapped)
        if hex_digest(data) != message.hash:
            raise DamagedError("a layout arrived with a wrong checksum", expected=message.hash)
        self.layouts[message.hash] = layouts.parse(data, "layout from the trainer")

    def _make_slot(self, peer: Connection, message: p.MakeSlot) -> None:
        """Runs in a thread of its own: touching the pages of a large slot takes seconds."""
        try:
            fd = make_slot(message.bytes, touch=message.touch)
        except (StepwellError, OSError) as error:
            refused = error
            self.post(lambda: self._refuse(peer, message, refused))
            return
        self.post(lambda: self._add_slot(peer, message.request, fd, message.bytes))

    def _add_slot(self, peer: Connection, request: int, fd: int, size: int, index: int | None = None) -> None:
        index = self.next_slot if index is None else index
        self.next_slot = max(self.next_slot, index + 1)
        mapped = mmap.mmap(fd, size)
        self.slots[index] = Slot(index, fd, size, memoryview(mapped), owner=peer.hello.identity if peer.hello else "")
        self._say(peer, p.SlotMade(index, size, request), (fd,))

    def _slot(self, index: int) -> Slot:
        slot = self.slots.get(index)
        if slot is None:
            raise AgentError("there is no such slot", expected=sorted(self.slots), found=index)
        return slot

    def _persist(self, peer: Connection, message: p.Persist) -> None:
        assert peer.hello is not None
        if self.attempt is None:
            raise AgentError("a save before the attempt was opened", found=message.step)
        layout = self.layouts.get(message.layout)
        if layout is None:
            raise AgentError("a save with an unknown layout", found=message.layout)
        slot = self._slot(message.slot)
        if not 0 <= message.values_bytes <= layout.values_room(slot.bytes):
            raise AgentError("a save whose values do not fit its slot", found=message.values_bytes)
        order = Order(
            identity=message.save,
            run=self.run,
            step=message.step,
            attempt=self.attempt.attempt,
            key=names.step_key(message.step, self.attempt.attempt),
            parent=None,  # set when its turn comes: by then the step before it is committed or given up
            values_bytes=message.values_bytes,
            metrics=message.metrics,
            entered_seconds=message.entered_seconds,
        )
        hello = peer.hello
        keep = Keep(last=hello.keep_last, every=hello.keep_every, best=hello.keep_best)  # type: ignore[arg-type]
        self.persister.put(
            Job(
                order,
                slot,
                layout,
                keep,
                self.attempt.parent,
                dict(message.telemetry),
                time.perf_counter(),
                message.queue_depth,
                self.attempt,
            )
        )

    def _memory(self, peer: Connection, message: p.AskMemory) -> None:
        try:
            newest = catalogues.read(self.root).newest
        except NotARunError:  # somebody has removed the run
            newest = None
        except (StepwellError, OSError) as error:
            self._refuse(peer, message, error)
            return
        held = {slot.holds: slot for slot in self.slots.values() if slot.holds}
        slot = held.get(newest.key) if newest else None
        if slot is None or slot.holds is None:
            self._say(peer, p.MemoryIs(None, request=message.request))
        else:
            answer = p.MemoryIs(slot.holds, slot.index, slot.bytes, slot.layout, message.request)
            self._say(peer, answer, (slot.fd,))

    def _status(self, request: int) -> p.StatusIs:
        trainer = self._trainer()
        return p.StatusIs(
            pid=os.getpid(),
            service=self.service,
            trainer_pid=trainer.pid if trainer else None,
            attempt=self.attempt.attempt if self.attempt else None,
            slots=tuple(p.SlotIs(slot.index, slot.bytes, slot.holds) for slot in self.slots.values()),
            pending=self.persister.unfinished,
            stopping=self.stopping,
            request=request,
        )

    def _stop_unless_used(self, peer: Connection, message: p.Stop) -> None:
        trainer = self._trainer()
        if trainer is not None:
            raise RunBusyError(
                "a trainer uses this agent, and would start another one",
                where=self.root,
                found=f"pid {trainer.pid} ({_command_of(trainer.pid)})",
                todo="end that trainer first; its agent ends with it",
            )
        self.stopping = True
        self._say(peer, self._status(message.request))

    # ---- answers of the persister

    def committed(self, job: Job, stages: dict[str, float], retries: int) -> None:
        job.slot.holds, job.slot.layout = job.order.key, job.layout.hash
        peer = self._trainer()
        if peer:
            self._say(
                peer,
                p.Committed(
                    job.order.identity, job.order.key, time.monotonic() - job.order.entered_seconds, stages, retries
                ),
            )

    def failed(self, job: Job, error: BaseException, retries: int) -> None:
        peer = self._trainer()
        if peer:
            code = error.errno if isinstance(error, OSError) else None
            self._say(peer, p.Failed(job.order.identity, refusal(as_stepwell(error, job, self.root)), code, retries))


def _command_of(pid: int) -> str:
    """The program and its script or module, without the arguments: there may be a secret among them."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            parts = file.read(4096).decode(errors="replace").split("\0")
    except OSError:
        return "its command cannot be read"
    script = next((index for index, part in enumerate(parts[1:], 1) if part and not part.startswith("-")), 1)
    shown = parts[:1] if "-c" in parts[1:script] else [parts[0], *parts[script : script + 1]]
    return " ".join(part[:200] for part in shown).strip()


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # closed already by who took it over


def lower_priority() -> None:
    """Training goes first: less CPU weight, lowest best-effort I/O priority."""
    import psutil

    try:
        os.nice(5)
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    except (OSError, psutil.Error) as error:
        log.info("could not lower the agent's priority: %s", error)


def run_agent(root: str, place: Place, *, service: bool, ready_fd: int | None) -> None:
    """Be the agent of a run until it is done. Writes one byte to `ready_fd` once it listens."""
    server = Server(root, place, service=service)
    server.open()
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    # Ctrl-C in the trainer's terminal is meant for the trainer; a service has a terminal of its own.
    signal.signal(signal.SIGINT, (lambda *_: server.stop()) if service else signal.SIG_IGN)
    # Slurm sends the signal of `--signal` to every process of a step; that, too, is meant for the trainer.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    lower_priority()
    if ready_fd is not None:
        os.write(ready_fd, b"1")
        os.close(ready_fd)
    log.info("agent %d serves %s (%s)", os.getpid(), root, server.abilities)
    server.serve()
