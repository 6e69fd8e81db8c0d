"""Every error that Stepwell raises.

    StepwellError
    ├── UsageError (ValueError)                 an argument that cannot be right
    ├── UnsupportedStateError (TypeError)       something in the state that cannot be stored
    ├── StateMismatchError (ValueError)         the saved state and the given one differ in names, shapes or dtypes
    ├── StateClobbered (RuntimeError)           damage found midway, and no whole step to put in its place
    ├── UnsafeSnapshotError (RuntimeError)      a tensor changed while a lazy snapshot was reading it
    ├── NotARunError (FileNotFoundError)        no Stepwell run at this path
    ├── NoSuchStepError (LookupError)           the run has no such committed step
    ├── DamagedError (ValueError)               bytes on disk are not the bytes that were written
    ├── LineageError (RuntimeError)             saving here would hide or mix up steps that exist
    ├── RunBusyError (RuntimeError)             another trainer is writing this run
    ├── PersistError (OSError)                  the storage refused: full disk, permission, I/O error
    ├── SlotMemoryError (MemoryError)           a slot does not fit into the memory that is left
    ├── WaitTimeout (TimeoutError)              something is not done yet
    └── AgentError (ConnectionError)            the agent could not be started or reached

Members inherit the builtin that a user would catch. `exit_code` is what the commands return: 1 findings, 2 usage,
3 cannot.
"""

from __future__ import annotations


class StepwellError(Exception):
    """The root of all errors of Stepwell.

    The text says what went wrong, then where, what was expected, what was found, and what to do; parts that do not
    apply are left out.
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        todo: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.expected, self.found, self.todo = what, where, expected, found, todo

    def __str__(self) -> str:
        parts = [self.what]
        for label, value in (("where", self.where), ("expected", self.expected), ("found", self.found)):
            if value is not None:
                parts.append(f"  {label}: {value}")
        if self.todo:
            parts.append(f"  what to do: {self.todo}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.expected, self.found, self.todo))


def _rebuild(
    kind: type[StepwellError], what: str, where: object, expected: object, found: object, todo: str | None
) -> StepwellError:
    return kind(what, where=where, expected=expected, found=found, todo=todo)


class UsageError(StepwellError, ValueError):
    """An argument that cannot be right."""

    exit_code = 2


class UnsupportedStateError(StepwellError, TypeError):
    """Something in the state that cannot be stored; the text names its path."""


class StateMismatchError(StepwellError, ValueError):
    """The saved state and the given one differ. Nothing was changed.

    The text shows the first differences, `differences` has them all.
    """

    differences: tuple[str, ...] = ()


class StateClobbered(StepwellError, RuntimeError):
    """Damage was found after the state had been written to, and no whole older step could replace it.

    The state must not be trained on: rebuild the model, or restore another step.
    """


class UnsafeSnapshotError(StepwellError, RuntimeError):
    """A tensor changed while a lazy snapshot was still reading it; that save was failed, not stored."""


class NotARunError(StepwellError, FileNotFoundError):
    """There is no Stepwell run at this path."""


class NoSuchStepError(StepwellError, LookupError):
    """The run has no such committed step."""


class DamagedError(StepwellError, ValueError):
    """Bytes on disk are not the bytes that were written, or a file is not what it claims to be."""

    exit_code = 1


class LineageError(StepwellError, RuntimeError):
    """Saving here would hide or mix up steps that exist."""


class RunBusyError(StepwellError, RuntimeError):
    """Another trainer is writing this run."""


class PersistError(StepwellError, OSError):
    """The storage refused a write: disk full, no permission, I/O error. Nothing was committed."""


class SlotMemoryError(StepwellError, MemoryError):
    """A slot does not fit into the memory that is left; the text shows the arithmetic."""


class WaitTimeout(StepwellError, TimeoutError):
    """The time given to a wait is over; the work goes on."""


class AgentError(StepwellError, ConnectionError):
    """The agent could not be started or reached."""
