"""What a run folder holds. Reads only; treats every file as coming from a stranger."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stepwell.errors import DamagedError, NoSuchStepError, NotARunError, UsageError
from stepwell.flow.retain import AttemptFacts, StepFacts, lineage, newest
from stepwell.store import layout as layouts
from stepwell.store import names
from stepwell.store.checksum import hex_digest
from stepwell.store.manifest import (
    DOCUMENT_BYTES_MAX,
    AttemptDocument,
    Document,
    Manifest,
    RunDocument,
    decode,
    metrics_from_json,
)

LAYOUT_BYTES_MAX = 8 << 30
LOOKS_MAX = 10  # at a run whose steps come and go


@dataclass(frozen=True)
class Step:
    """One step folder that has a manifest.

    `problem` is None for a whole step; otherwise it says in words why the step cannot be read, and `manifest` may be
    None. `state_bytes` is the unique state, `stored_bytes` the size of its files.
    """

    key: str
    step: int
    attempt: int
    manifest: Manifest | None = field(repr=False)
    problem: str | None
    in_lineage: bool = False
    newest: bool = False
    tier: int = 0

    @property
    def parent(self) -> str | None:
        return self.manifest.parent if self.manifest else None

    @property
    def state_bytes(self) -> int:
        return self.manifest.state_bytes if self.manifest else 0

    @property
    def stored_bytes(self) -> int:
        return sum(pack.bytes for pack in self.manifest.packs) if self.manifest else 0

    @property
    def metrics(self) -> dict[str, float]:
        return metrics_from_json(self.manifest.metrics) if self.manifest else {}

    @property
    def created(self) -> str:
        return self.manifest.created if self.manifest else ""


@dataclass(frozen=True)
class Catalogue:
    """A run as it was when it was read. `steps` are in the order attempt, step; `newest` is what a restore takes."""

    root: str
    run: RunDocument
    attempts: tuple[AttemptDocument, ...]
    steps: tuple[Step, ...]
    problems: tuple[str, ...]

    @property
    def newest(self) -> Step | None:
        return next((step for step in self.steps if step.newest), None)

    def facts(self) -> dict[str, StepFacts]:
        return {
            step.key: StepFacts(
                key=step.key,
                step=step.step,
                attempt=step.attempt,
                parent=step.parent,
                metrics=step.metrics,
                bytes=step.stored_bytes,
                readable=step.problem is None,
            )
            for step in self.steps
        }

    def attempt_facts(self) -> list[AttemptFacts]:
        return [AttemptFacts(number=one.attempt, parent=one.parent) for one in self.attempts]

    def by_key(self, key: str) -> Step | None:
        return next((step for step in self.steps if step.key == key), None)

    def find(self, step: int | str) -> Step:
        """The step of this number, in the current lineage if it is there, else of the highest attempt; or the step of
        this key. Raises `NoSuchStepError` with what there is."""
        if isinstance(step, str) and names.parse_step_key(step):
            found = self.by_key(step)
            candidates = [found] if found else []
        else:
            try:
                number = int(step) if isinstance(step, str) else names.step_number(step)
            except ValueError:
                raise UsageError(
                    "not a step", expected="a number or a key like 000000001000-0003", found=step
                ) from None
            candidates = [one for one in self.steps if one.step == number]
            candidates.sort(key=lambda one: (one.problem is None, one.in_lineage, one.attempt))
        if not candidates:
            there = ", ".join(one.key for one in self.steps[-8:]) or "no committed step"
            raise NoSuchStepError(
                "the run has no such committed step", where=self.root, expected=str(step), found=there
            )
        return candidates[-1]

    def lineage_of(self, key: str | None) -> list[Step]:
        """A step and the committed steps that it descends from, the nearest first."""
        order = lineage(self.facts(), key, self.attempt_facts())
        return [step for one in order if (step := self.by_key(one)) is not None]

    def fallbacks(self) -> list[Step]:
        """Steps in the order in which a restore tries them: the newest, its lineage, then the rest, newest first."""
        chain = self.lineage_of(self.newest.key if self.newest else None)
        there = {step.key for step in chain}
        rest = sorted((s for s in self.steps if s.key not in there), key=lambda s: (-s.attempt, -s.step))
        return chain + rest


def read_small(path: str, size_max: int = DOCUMENT_BYTES_MAX) -> bytes:
    """A whole regular file of bounded size. Raises `DamagedError` for a link, a device or something too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not (status.st_mode & 0o170000) == 0o100000 or status.st_size > size_max:
            raise DamagedError("not a small regular file", where=path, found=f"{status.st_size} bytes")
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(status.st_size + 1)
    finally:
        os.close(fd)


def read_document(path: str, kind: type[Document]) -> Document:
    return decode(read_small(path), kind, path)


def is_run(root: str) -> bool:
    return os.path.isfile(os.path.join(root, names.RUN_FILE))


def read(root: str | os.PathLike[str], known: Mapping[str, Step] | None = None) -> Catalogue:
    """Read a run's catalogue; `known` steps of an earlier reading are not parsed again, only looked for.

    Raises `NotARunError`; damage to single files becomes `problem`s, never an exception.
    """
    root = os.path.abspath(os.fspath(root))
    run, problem = identity_of(root)
    problems = [problem] if problem else []
    attempts = _read_attempts(root, problems)
    steps: list[Step] = []
    for _ in range(LOOKS_MAX):
        steps, settled = _read_steps(root, run, known)
        if settled:
            break
    steps.sort(key=lambda step: (step.attempt, step.step))
    bare = Catalogue(root, run, attempts, tuple(steps), tuple(problems))
    facts = bare.facts()
    tip = newest(facts, bare.attempt_facts())
    line = set(lineage(facts, tip, bare.attempt_facts()))
    marked = tuple(replace(step, in_lineage=step.key in line, newest=step.key == tip) for step in steps)
    return replace(bare, steps=marked)


def identity_of(root: str) -> tuple[RunDocument, str | None]:
    """The run's document; and, where that is missing or damaged, why it was pieced together from another.

    Every attempt and every manifest repeats the run's identity, so no single file can take a run away. Raises
    `NotARunError` when there is none of them, `DamagedError` when there is only a damaged one.
    """
    damaged: DamagedError | OSError | None = None
    try:
        return read_document(os.path.join(root, names.RUN_FILE), RunDocument), None
    except (FileNotFoundError, NotADirectoryError):
        why = f"{names.RUN_FILE} is missing"
    except (DamagedError, OSError) as error:
        damaged, why = error, f"{names.RUN_FILE} is damaged"
    for path in _that_repeat_it(root):
        try:
            data = read_small(path)
            document: Manifest | AttemptDocument
            if os.path.basename(path) == names.MANIFEST:
                document = decode(data, Manifest, path)
            else:
                document = decode(data, AttemptDocument, path)
        except (DamagedError, OSError):
            continue
        run = RunDocument(run=document.run, created=document.created, writer=document.writer)
        return run, f"{why}; the run is known from {os.path.relpath(path, root)}"
    if damaged is not None:
        raise damaged
    raise NotARunError("there is no Stepwell run here", where=root, expected=f"a folder with {names.RUN_FILE}")


def _that_repeat_it(root: str) -> Iterator[str]:
    """The documents that repeat a run's identity, the newest first."""
    attempts, steps = os.path.join(root, names.ATTEMPTS), os.path.join(root, names.STEPS)
    for name in reversed(listed(attempts)):
        if names.parse_attempt_file(name) is not None:
            yield os.path.join(attempts, name)
    for name in reversed(listed(steps)):
        if names.parse_step_key(name) is not None:
            yield os.path.join(steps, name, names.MANIFEST)


def _read_steps(root: str, run: RunDocument, known: Mapping[str, Step] | None) -> tuple[list[Step], bool]:
    """The steps that have a manifest, and whether no step came or went while they were read.

    A run that keeps one step commits the next and then removes it. Who lists the first, and looks for its manifest
    after that, would see none at all.
    """
    folder = os.path.join(root, names.STEPS)
    there = [name for name in listed(folder) if names.parse_step_key(name) is not None]
    found: list[Step] = []
    absent = []
    for name in there:
        place = os.path.join(folder, name)
        if is_committed(place):
            step, attempt = names.parse_step_key(name) or (0, 0)
            before = known.get(name) if known else None
            if before is not None and before.problem is None and before.manifest is not None:
                one = replace(before, problem=missing_parts(place, before.manifest))
            else:
                one = _read_step(root, name, step, attempt, run)
            if one.problem is None or is_committed(place):  # else it was being removed, which is no damage
                found.append(one)
                continue
        absent.append(place)
    again = [name for name in listed(folder) if names.parse_step_key(name) is not None]
    return found, again == there and not any(map(is_committed, absent))


def is_committed(folder: str) -> bool:
    """Whether a step's folder has a manifest."""
    return os.path.lexists(os.path.join(folder, names.MANIFEST))


def listed(folder: str) -> list[str]:
    """The names in a folder, sorted; none when there is no such folder. Other errors are the system's `OSError`."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_attempts(root: str, problems: list[str]) -> tuple[AttemptDocument, ...]:
    attempts = []
    for name in listed(os.path.join(root, names.ATTEMPTS)):
        number = names.parse_attempt_file(name)
        if number is None:
            continue
        try:
            document = read_document(os.path.join(root, names.ATTEMPTS, name), AttemptDocument)
            if document.attempt != number:
                raise DamagedError("an attempt has another number than its name", where=name, found=document.attempt)
            attempts.append(document)
        except (DamagedError, OSError) as error:
            problems.append(f"attempt {number}: {error}")
    return tuple(sorted(attempts, key=lambda document: document.attempt))


def _read_step(root: str, key: str, step: int, attempt: int, run: RunDocument) -> Step:
    folder = os.path.join(root, names.STEPS, key)
    path = os.path.join(folder, names.MANIFEST)
    try:
        manifest = read_document(path, Manifest)
        if manifest.key != key:
            raise DamagedError("the manifest belongs to another step", where=path, expected=key, found=manifest.key)
        if manifest.run != run.run:
            raise DamagedError("the manifest belongs to another run", where=path, expected=run.run, found=manifest.run)
    except (DamagedError, OSError) as error:
        return Step(key, step, attempt, None, str(error))
    return Step(key, step, attempt, manifest, missing_parts(folder, manifest))


def missing_parts(folder: str, manifest: Manifest) -> str | None:
    """Why the files that a manifest names are not all there at their sizes, or None when they are."""
    for pack in manifest.packs:
        try:
            size = os.lstat(os.path.join(folder, pack.name)).st_size
        except OSError:
            return f"incomplete copy: {pack.name} is missing"
        if size != pack.bytes:
            return f"incomplete copy: {pack.name} has {size} bytes, expected {pack.bytes}"
    return None


def read_layout(root: str, layout_hash: str) -> layouts.Layout:
    """A layout, checked against the hash that names it. Raises `DamagedError` also when it is missing."""
    path = os.path.join(root, names.LAYOUTS, names.layout_file(layout_hash))
    try:
        data = read_small(path, LAYOUT_BYTES_MAX)
    except FileNotFoundError:
        raise DamagedError("the layout is missing", where=path) from None
    except OSError as error:
        raise DamagedError("the layout cannot be read", where=path, found=error.strerror) from error
    found = hex_digest(data)
    if found != layout_hash:
        raise DamagedError("the layout's checksum is wrong", where=path, expected=layout_hash, found=found)
    return layouts.parse(data, path)
