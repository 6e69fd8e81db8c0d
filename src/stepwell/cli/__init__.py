"""The command `stepwell`. Each command has a file of its own here, imported only when that command is called.

So `stepwell --help` imports neither numpy nor torch. Exit codes: 0 fine, 1 findings, 2 usage, 3 cannot.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from typing import Any

import click

from stepwell import __version__
from stepwell.errors import StepwellError

# In the order in which a new user needs them. A test keeps the texts equal to those of the commands themselves.
COMMANDS = {
    "demo": "Train a small GPT, kill it while it saves, resume, compare bits.",
    "ls": "List the steps of a run: branches, newest, damaged ones.",
    "show": "Show one step: origin, tensors, values, timings.",
    "verify": "Read every byte of a run and say what is damaged.",
    "diff": "Compare two steps, tensor by tensor.",
    "export": "Write one step as a plain safetensors or torch file.",
    "prune": "Remove steps you do not keep, and what killed processes left.",
    "agent": "Run, ask or stop the process that persists saves.",
    "plan": "Work out storage, interval and tiers for a model and a cluster.",
}
BROKEN_PIPE_EXIT_CODE = 141  # what a shell reports for a program that SIGPIPE ended
INTERRUPTED_EXIT_CODE = 130  # the same for SIGINT


class Commands(click.Group):
    """The group of all commands: imports one when it is called, and turns errors into texts and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"stepwell.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any of them."""
        with formatter.section("Commands, in the order you need them"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write("    stepwell ls runs/gpt           # what is there, and is it whole?\n")
            formatter.write("    stepwell verify runs/gpt       # read every byte\n")
        formatter.write("\n`stepwell COMMAND --help` says more. Exit codes: 0 fine, 1 findings, 2 usage, 3 cannot.\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _leave_broken_pipe()
        except (StepwellError, OSError) as error:
            ctx.exit(_report(_as_stepwell(error), as_json=ctx.ensure_object(dict).get("json", False)))
        except (KeyboardInterrupt, click.Abort):
            click.echo("\nstepwell: interrupted", err=True)
            ctx.exit(INTERRUPTED_EXIT_CODE)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception:
            # A traceback alone would end with code 1, which says that something is damaged.
            traceback.print_exc()
            click.echo("\nstepwell: this is a bug in Stepwell; please report it with the text above.", err=True)
            ctx.exit(3)


def _report(error: StepwellError, *, as_json: bool) -> int:
    """Tell a foreseen error as one block of text on stderr, with `--json` also as a document on stdout."""
    from stepwell.cli import _output

    _output.print_error(error)
    if as_json:
        _output.print_error_json(error)
    return error.exit_code


def _as_stepwell(error: StepwellError | OSError) -> StepwellError:
    if isinstance(error, StepwellError):
        return error
    reason = os.strerror(error.errno) if error.errno else str(error)
    todo = None
    if isinstance(error, PermissionError):
        todo = "run it as the user that the files belong to"
    return StepwellError(f"cannot go on: {reason.lower()}", where=error.filename, todo=todo)


def _leave_broken_pipe() -> None:
    """The reader of our output has gone (`stepwell ls RUN | head`): nothing is wrong, and nobody wants to hear it."""
    # The interpreter flushes stdout once more when it ends; that must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE_EXIT_CODE)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND [ARGUMENTS]",
    options_metavar="",
)
@click.version_option(__version__, prog_name="stepwell")
@click.pass_context
def stepwell(ctx: click.Context) -> None:
    """Stepwell keeps the state of deep-learning training runs.

    A save costs the trainer milliseconds, a step is committed or absent, and every byte that is read back is checked.
    A RUN is the folder given to stepwell.Checkpointer in the training script. A STEP is a number (600), a number and
    an attempt (600-2), or the word newest.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """The entry point: runs one command and exits with its code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal gets escapes instead of an exception
    try:
        stepwell(prog_name="stepwell")
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_broken_pipe()
