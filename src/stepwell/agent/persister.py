"""The agent's second thread: it carries out accepted saves one after another, prunes after each commit, and keeps the
telemetry. It never talks to a trainer itself; it asks the loop to."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stepwell import errors
from stepwell.agent import protocol as p
from stepwell.agent.persist import WRITER, Order, Stages, persist, utc_now
from stepwell.errors import DamagedError, LineageError, StepwellError
from stepwell.flow.retain import plan_retention
from stepwell.policies import Keep
from stepwell.restore import catalogue as catalogues
from stepwell.store import names
from stepwell.store.layout import Layout
from stepwell.store.manifest import AttemptDocument, RunDocument, encode
from stepwell.tiers.posix import PosixTier, is_permanent
from stepwell.units import format_bytes

if TYPE_CHECKING:
    from stepwell.agent.server import Connection, Server

log = logging.getLogger("stepwell.agent")

IO_WORKERS = 3
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)
SWEEP_SECONDS = 2.0


@dataclass
class Slot:
    """A staging buffer. `holds` is the committed key in it, None while its content is being replaced."""

    index: int
    fd: int
    bytes: int
    view: memoryview = field(repr=False)
    holds: str | None = None
    layout: str = ""
    owner: str = ""


@dataclass(frozen=True)
class Job:
    """One accepted save on its way to the disk."""

    order: Order
    slot: Slot
    layout: Layout
    keep: Keep
    resumed_from: str | None
    telemetry: dict[str, float | int | str | bool | None]
    accepted_seconds: float
    queue_depth: int
    document: AttemptDocument


class Persister(threading.Thread):
    """Carries out orders in their order, prunes after each commit, and keeps the telemetry."""

    def __init__(self, server: Server) -> None:
        super().__init__(name="persister", daemon=True)
        self.server, self.tier = server, server.tier
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.workers = ThreadPoolExecutor(IO_WORKERS, thread_name_prefix="write")
        self.known: dict[str, catalogues.Step] = {}
        self.last_key: dict[int, str] = {}
        self._count_lock = threading.Lock()
        self._unfinished = self._unsaved = 0
        self._after_saves: list[Callable[[], None]] = []
        self._telemetry_fd = -1

    @property
    def unfinished(self) -> int:
        return self._unfinished

    def put(self, job: Job) -> None:
        with self._count_lock:
            self._unsaved += 1
        self._submit(lambda: self._save(job))

    def after_saves(self, act: Callable[[], None]) -> None:
        """Do something small once no accepted save is left to be committed; pruning is not waited for."""
        with self._count_lock:
            if self._unsaved:
                self._after_saves.append(act)
                return
        act()

    def note(self, record: dict[str, float | int | str | bool | None]) -> None:
        self._submit(lambda: self._write_telemetry(record))

    def prune_now(self, peer: Connection, message: p.Prune) -> None:
        keep = Keep(last=message.keep_last, every=message.keep_every, best=message.keep_best)  # type: ignore[arg-type]

        def work() -> None:
            try:
                removed = self._prune(keep, None, limit=message.limit)
            except (StepwellError, OSError) as error:
                refused = error
                self.server.post(lambda: self.server._refuse(peer, message, refused))
                return
            self.server.post(lambda: self.server._say(peer, p.Pruned(tuple(removed), message.request)))

        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        with self._count_lock:
            self._unfinished += 1
        self.work.put(work)

    def run(self) -> None:
        while True:
            try:
                work = self.work.get(timeout=SWEEP_SECONDS)
            except queue.Empty:
                self._guarded(self._sweep)
                continue
            if work is None:
                return
            try:
                self._guarded(work)
            finally:
                with self._count_lock:
                    self._unfinished -= 1

    def stop(self) -> None:
        self.work.put(None)
        self.join()
        self.workers.shutdown()
        if self._telemetry_fd >= 0:
            self.tier.ops.close(self._telemetry_fd)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # cleaning up and keeping books must never end the agent
            log.exception("background work failed")

    def _save(self, job: Job) -> None:
        try:
            saved = self._commit(job)
        finally:
            with self._count_lock:
                self._unsaved -= 1
                acts = [] if self._unsaved else self._after_saves
                self._after_saves = self._after_saves if self._unsaved else []
            for act in acts:
                act()
        if saved:
            removed = self._prune(job.keep, job.resumed_from, attempt=job.order.attempt)
            if removed:
                log.info("pruned %s", ", ".join(removed))

    def _restore_documents(self, job: Job) -> None:
        """Publish the run's and the attempt's document again where somebody has removed or damaged them under way:
        without them no step that is committed from now on could be found.

        Raises `LineageError` when another run has been put in this one's place.
        """
        tier, known, run = self.tier, job.document, self.server.run
        path = tier.path(names.RUN_FILE)
        try:
            found = catalogues.read_document(path, RunDocument).run
        except (DamagedError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                raise
            log.warning("%s is gone or damaged: it is written again", path)
            tier.make_folders(tier.root)
            publish_run(tier, RunDocument(run=run, created=utc_now(), writer=WRITER))
        else:
            if found != run:
                raise LineageError(
                    "another run has been put in the place of this one; nothing is written into it",
                    where=tier.root,
                    expected=run,
                    found=found,
                    todo="end this training, or put its own folder back",
                )
        path = tier.path(names.ATTEMPTS, names.attempt_file(known.attempt))
        if not os.path.lexists(path):
            log.warning("%s is gone: it is written again", path)
            tier.make_folders(os.path.dirname(path))
            tier.publish(path, encode(known))

    def _commit(self, job: Job) -> bool:
        """Persist and commit, with retries; the server is told how it ended. True when it is committed."""
        attempt = job.order.attempt
        order = replace(job.order, parent=self.last_key.get(attempt, job.resumed_from))
        stages = Stages()
        stages.seconds["queue_seconds"] = time.perf_counter() - job.accepted_seconds
        retries = 0
        while True:
            try:
                self._restore_documents(job)
                manifest = persist(self.tier, order, job.layout, job.slot.view, self.workers, stages)
                break
            except Exception as error:
                if retries >= len(RETRY_SECONDS) or is_permanent(error) or not isinstance(error, OSError):
                    log.exception("gave up saving %s", job.order.key)
                    self._write_record(job, stages, retries, error)
                    failed = partial(self.server.failed, job, error, retries)
                    self.server.post(failed)
                    return False
                log.warning("saving %s failed (%s), trying again in %s s", job.order.key, error, RETRY_SECONDS[retries])
                time.sleep(RETRY_SECONDS[retries])
                retries += 1
        self.last_key[attempt] = order.key
        seconds = dict(stages.seconds)
        seconds["durable_seconds"] = manifest.durable_seconds
        self.server.post(lambda: self.server.committed(job, seconds, retries))
        self._write_record(job, stages, retries, None)
        return True

    def _prune(
        self, keep: Keep, resumed_from: str | None, *, attempt: int | None = None, limit: int | None = None
    ) -> list[str]:
        catalogue = catalogues.read(self.server.root, self.known)
        self.known = {step.key: step for step in catalogue.steps}
        newest_attempt = max((a.attempt for a in catalogue.attempts), default=0)
        if attempt is not None and attempt < newest_attempt:
            log.warning("attempt %d is superseded by %d: it prunes nothing", attempt, newest_attempt)
            return []
        if resumed_from is None and catalogue.attempts:
            resumed_from = catalogue.attempts[-1].parent
        tip = catalogue.newest.key if catalogue.newest else None
        plan = plan_retention(catalogue.facts(), catalogue.attempt_facts(), keep, tip=tip, resumed_from=resumed_from)
        plan = replace(plan, remove=plan.remove[:limit])
        if attempt is not None:
            self.server.pruner.condemn_dead_parts(attempt)
        removed = self.server.pruner.condemn(plan, catalogue) if plan.remove else []
        self._sweep()
        return removed

    def _sweep(self) -> None:
        self.server.pruner.sweep()

    def _write_record(self, job: Job, stages: Stages, retries: int, error: BaseException | None) -> None:
        self._guarded(
            lambda: self._write_telemetry(
                {
                    "event": "save",
                    "time": utc_now(),
                    "step": job.order.step,
                    "key": job.order.key,
                    "attempt": job.order.attempt,
                    "node": 0,
                    "rank": 0,
                    **job.telemetry,
                    **{name: round(value, 6) for name, value in stages.seconds.items()},
                    "durable_seconds": None if error else round(time.monotonic() - job.order.entered_seconds, 6),
                    "state_bytes": job.layout.data_bytes,
                    "written_bytes": stages.written_bytes,
                    "file_count": stages.file_count,
                    "queue_depth": job.queue_depth,
                    "retries": retries,
                    "error": None if error is None else str(error),
                }
            )
        )

    def _write_telemetry(self, record: dict[str, float | int | str | bool | None]) -> None:
        if self._telemetry_fd < 0:
            path = self.tier.path(names.TELEMETRY, "node00000.jsonl")
            self._telemetry_fd = self.tier.ops.open_append(path)
        line = msgspec.json.encode(record) + b"\n"
        self.tier.ops.append(self._telemetry_fd, line)


def publish_run(tier: PosixTier, document: RunDocument) -> None:
    """Make this the run's document, in the place of a damaged one if there is one."""
    path = tier.path(names.RUN_FILE)
    if os.path.lexists(path):
        tier.remove([path])
    tier.publish(path, encode(document))


def refusal(error: StepwellError, request: int = 0) -> p.Refused:
    """An error as a message."""
    where, expected, found, todo = (
        None if part is None else str(part) for part in (error.where, error.expected, error.found, error.todo)
    )
    return p.Refused(type(error).__name__, error.what, where, expected, found, todo, request)


def as_stepwell(error: BaseException, job: Job, root: str) -> StepwellError:
    """The error that a trainer can be told, with what to do about it."""
    if isinstance(error, StepwellError):
        return error
    folder = os.path.join(root, names.STEPS, job.order.key)
    if not isinstance(error, OSError):
        return errors.PersistError(f"the agent failed: {error!r}", where=folder, todo="report this as a bug")
    found, todo = f"{os.strerror(error.errno or 0)} (errno {error.errno})", None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        todo = f"free at least {format_bytes(job.layout.data_bytes)} there, or keep fewer steps (stepwell prune)"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "make the folder writable for this user"
    return errors.PersistError(
        f"step {job.order.step} could not be saved", where=error.filename or folder, found=found, todo=todo
    )
