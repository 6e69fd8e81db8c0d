"""`stepwell agent`: run, ask or stop the process that persists the saves of a run."""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import click

from stepwell.agent import protocol as p
from stepwell.agent.observer import Observer, observe
from stepwell.agent.place import place_of
from stepwell.cli._output import console, count_of, json_option, print_facts, print_json
from stepwell.cli._runs import in_words, run_argument
from stepwell.errors import RunBusyError, UsageError
from stepwell.units import format_bytes

STOP_SECONDS_MAX = 3600.0


@click.command()
@run_argument
@click.option("--service", "what", flag_value="service", help="Be the agent, here in the foreground, until stopped.")
@click.option("--status", "what", flag_value="status", help="Say what the agent is doing (this is the default).")
@click.option("--stop", "what", flag_value="stop", help="Let the agent finish what it accepted, and end.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, what: Literal["service", "status", "stop"] | None, as_json: bool) -> None:
    """Run, ask or stop the process that persists saves.

    A trainer starts its agent by itself; this command is not needed for that. But an agent in the trainer's container
    (cgroup, Slurm step) dies with that container, and with it saves that are accepted but not yet durable. Started
    with --service outside, as the same user and with the same runtime folder (XDG_RUNTIME_DIR, else /tmp), it
    outlives the container; trainers find it and use it.

    --status exits with 1 when no agent is running. --stop waits until it has ended.
    """
    if what == "service":
        if as_json:
            raise UsageError(
                "--service has no answer that could be JSON", todo="ask it from elsewhere: --status --json"
            )
        _serve(run)
        return
    observer = observe(run)
    if observer is None:
        _say_none(run, as_json)
        ctx.exit(0 if what == "stop" else 1)
    with observer:
        if what == "stop":
            _stop(observer, run, as_json)
        else:
            _print_status(run, _ask(observer, p.AskStatus()), as_json)


def _serve(run: str) -> None:
    from stepwell.agent.server import run_agent

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    try:
        run_agent(run, place_of(run), service=True, ready_fd=None)
    except RunBusyError as error:
        error.todo = "stop that one first: stepwell agent --stop RUN"
        raise


def _ask(observer: Observer, message: p.AskStatus | p.Stop) -> p.StatusIs:
    answer = observer.ask(message)
    assert isinstance(answer, p.StatusIs)
    return answer


def _stop(observer: Observer, run: str, as_json: bool) -> None:
    status = _ask(observer, p.Stop())
    if status.pending:
        click.echo(f"agent {status.pid} finishes {count_of(status.pending, 'order')} first ...", err=True)
    observer.wait_until_gone(STOP_SECONDS_MAX)
    if as_json:
        print_json("agent", {"run": os.path.abspath(run), "running": False, "stopped_pid": status.pid})
    else:
        console().print(f"agent {status.pid} has ended")


def _say_none(run: str, as_json: bool) -> None:
    if as_json:
        print_json("agent", {"run": os.path.abspath(run), "running": False, "stopped_pid": None})
    else:
        console().print("no agent is running for this run on this machine")


def _print_status(run: str, status: p.StatusIs, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = {
            "run": os.path.abspath(run),
            "running": True,
            "pid": status.pid,
            "service": status.service,
            "stopping": status.stopping,
            "trainer_pid": status.trainer_pid,
            "attempt": status.attempt,
            "pending": status.pending,
            "slots": [{"slot": one.slot, "bytes": one.bytes, "holds": one.holds} for one in status.slots],
        }
        print_json("agent", document)
        return
    out = console()
    out.print(f"agent {status.pid} is running" + (", and ending" if status.stopping else ""))
    held = [f"slot {one.slot} holds {in_words(one.holds)}" for one in status.slots if one.holds]
    slots = f"{len(status.slots)}, {format_bytes(sum(one.bytes for one in status.slots))}"
    print_facts(
        out,
        [
            ("started by", "stepwell agent --service" if status.service else "a trainer"),
            ("trainer", "none is connected" if status.trainer_pid is None else f"pid {status.trainer_pid}"),
            ("attempt", str(status.attempt) if status.attempt is not None else "none yet"),
            (
                "pending",
                f"{count_of(status.pending, 'order')} (saves, prunes, records)" if status.pending else "nothing",
            ),
            ("slots", slots + (": " + ", ".join(held) if held else "")),
        ],
    )
