"""What the demo does, in order: train in peace; train with Stepwell and be killed; resume; compare; look."""

from __future__ import annotations

import fcntl
import importlib.util
import json as jsons
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepwell.cli._output import VERSION
from stepwell.demo.compare import compare, read_state
from stepwell.demo.show import Show
from stepwell.demo.trainer import Kill, Trainer, agent_of, end_agent, module_command
from stepwell.errors import RunBusyError, StepwellError, UsageError
from stepwell.units import format_bytes, format_seconds

DEFAULT_FOLDER = "stepwell-demo"
MARKER = "demo.json"
STEPS = 100
SAVE_EVERY = 5
THREADS_MAX = 2
# A save may be faster than the kill that is meant for it; then the next ones are tried.
TRIES_MAX = 3
KILLS = ((0.42, False), (0.77, True))  # when, as a share of all steps, and whether the agent dies too

PARTS = {
    "model": "weights",
    "optim": "optimizer",
    "sched": "learning rate",
    "data": "place in the data",
    "random": "random numbers",
    "losses": "losses",
}


@dataclass(frozen=True)
class Plan:
    """Where, how long, and with what model. `sizes` are arguments of `train.build`."""

    folder: Path
    steps: int
    save_every: int
    threads: int
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "trainer.log"

    def final(self, name: str) -> Path:
        return self.folder / f"{name}.state"


@dataclass(frozen=True)
class Outcome:
    """What the demo found. All four must hold."""

    equal: bool
    killed_in_the_middle: bool
    accepted_kept: bool
    commands_fine: bool

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """What does not hold, in words."""
        found = (
            (self.equal, "NOT THE SAME: the states differ, see above."),
            (self.killed_in_the_middle, "No kill hit a save in the middle: this disk was faster. Run the demo again."),
            (self.accepted_kept, "An accepted save was lost although its agent lived, see above."),
            (self.commands_fine, "A command found something wrong with the run, see above."),
        )
        return [text for holds, text in found if not holds]


def run(
    folder: Path | None = None,
    *,
    json: bool = False,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
    sizes: Mapping[str, Any] | None = None,
) -> int:
    """Run the demo in `folder` (`./stepwell-demo`) and leave the run there to be looked at.

    Prints the story to stdout; with `json` to stderr, and one JSON document to stdout. Returns the exit code: 0 when
    everything was identical, a save was hit in the middle and `ls` and `verify` found nothing; else 1.
    Raises `UsageError` for a folder that is not the demo's own, `StepwellError` when a training ends by itself.
    """
    if importlib.util.find_spec("torch") is None:
        raise StepwellError("the demo trains with torch, which is not installed", todo="pip install 'stepwell[torch]'")
    if steps < 4 * save_every or save_every < 1:
        raise UsageError("too few steps for the demo", expected=f"at least {4 * save_every}", found=steps)
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
    plan = Plan((folder or Path(DEFAULT_FOLDER)).absolute(), steps, save_every, threads, sizes or {})
    show = Show(sys.stderr if json else sys.stdout)
    with claimed(plan):
        try:
            return _tell(plan, show, json)
        finally:
            end_agent(plan.run)  # after a close there is none; after Ctrl-C one would wait for its trainer


@contextmanager
def claimed(plan: Plan) -> Iterator[None]:
    """Make the folder the demo's, empty it of an earlier demo's files, and keep other demos out meanwhile."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    marker = plan.folder / MARKER
    if not marker.is_file() and any(plan.folder.iterdir()):
        raise UsageError(
            "this folder is not the demo's own",
            where=plan.folder,
            expected=f"no folder, an empty one, or one of an earlier demo (it holds {MARKER})",
            todo="name another folder",
        )
    with open(marker, "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError("another demo is running in this folder", where=plan.folder) from None
        end_agent(plan.run)
        if plan.run.exists():
            shutil.rmtree(plan.run)
        for file in (plan.log, *map(plan.final, ("in-peace", "resumed", "read-back"))):
            file.unlink(missing_ok=True)
        yield


def _tell(plan: Plan, show: Show, json: bool) -> int:
    started = time.monotonic()
    show.console.print("Stepwell demo", style="bold")
    show.say(
        f"A small GPT learns English from Python's own documentation: {plan.steps} steps on "
        f"{plan.threads} CPU thread{'s' if plan.threads > 1 else ''}. The same training runs twice: in peace, and with "
        "Stepwell, where SIGKILL hits it twice in the middle of a save. Both must end in the same bits."
    )
    show.heading("1/4  In peace, without Stepwell: what the result must be")
    parameters = _train_in_peace(plan, show)

    show.heading(f"2/4  With Stepwell: saved every {plan.save_every} steps, killed, resumed, killed again, resumed")
    kills, blocked_seconds = _train_and_die(plan, show)
    _read_back(plan)

    show.heading("3/4  Compared with the training in peace, bit for bit")
    expected = read_state(plan.final("in-peace"))
    columns = {
        "resumed": compare(expected, read_state(plan.final("resumed")), PARTS),
        "read back from disk": compare(expected, read_state(plan.final("read-back")), PARTS),
    }
    show.comparison(columns)

    show.heading("4/4  What Stepwell's commands say about the run")
    looks = {command: _look(plan, show, command, json) for command in ("ls", "verify")}

    outcome = Outcome(
        equal=all(part.difference is None for parts in columns.values() for part in parts),
        killed_in_the_middle=all(any(k.in_the_middle and k.agent_too == both for k in kills) for _, both in KILLS),
        accepted_kept=all(kill.promise_kept for kill in kills),
        commands_fine=all(code == 0 for code, _ in looks.values()),
    )
    seconds = time.monotonic() - started
    _conclude(plan, show, outcome, blocked_seconds, seconds)
    result = {
        "format": "stepwell.demo",
        "version": VERSION,
        "ok": outcome.ok,
        **asdict(outcome),
        "seconds": round(seconds, 3),
        "folder": str(plan.folder),
        "run": str(plan.run),
        "steps": plan.steps,
        "parameters": parameters,
        "threads": plan.threads,
        "blocked_seconds_median": statistics.median(blocked_seconds),
        "kills": [{**asdict(kill), "in_the_middle": kill.in_the_middle} for kill in kills],
        "comparison": {title: [asdict(part) for part in parts] for title, parts in columns.items()},
        **{command: {"exit_code": code, "result": document} for command, (code, document) in looks.items()},
    }
    (plan.folder / MARKER).write_text(jsons.dumps(result, indent=2) + "\n", encoding="utf-8")
    if json:
        print(jsons.dumps(result, indent=2))
    return 0 if outcome.ok else 1


def _arguments(plan: Plan, name: str) -> list[str]:
    return [
        *("--final", str(plan.final(name))),
        *("--steps", str(plan.steps)),
        *("--save-every", str(plan.save_every)),
        *("--threads", str(plan.threads)),
        *("--sizes", jsons.dumps(dict(plan.sizes))),
    ]


def _train_in_peace(plan: Plan, show: Show) -> int:
    with Trainer(_arguments(plan, "in-peace"), plan.log) as trainer:
        events = trainer.events()
        parameters: int = next(events)["parameters"]
        show.say(f"{parameters:,} parameters, AdamW, dropout, shuffled data")
        with show.steps(1, plan.steps) as progress:
            for event in events:
                progress(event["step"], event["loss"])
    return parameters


def _train_and_die(plan: Plan, show: Show) -> tuple[list[Kill], list[float]]:
    """Train to the end, killed on the way as often as `KILLS` says; each kill has a few tries to hit a save.

    Returns the kills, and the blocked seconds of all saves.
    """
    kills: list[Kill] = []
    blocked_seconds: list[float] = []
    for share, agent_too in KILLS:
        after = int(share * plan.steps)
        for _ in range(TRIES_MAX):
            kill = _train(plan, show, blocked_seconds, kill_after=after, agent_too=agent_too)
            if kill is None:
                return kills, blocked_seconds  # no save was left to hit: the training is done
            kills.append(kill)
            _say_kill(show, kill)
            if kill.in_the_middle:
                break
            after = kill.step
    _train(plan, show, blocked_seconds)
    return kills, blocked_seconds


def _train(
    plan: Plan, show: Show, blocked_seconds: list[float], *, kill_after: int | None = None, agent_too: bool = False
) -> Kill | None:
    """Start or resume the training; kill it in the first save after step `kill_after`. None when it came to its end."""
    with Trainer([*_arguments(plan, "resumed"), "--run", str(plan.run)], plan.log) as trainer:
        events = trainer.events()
        restored = next(events)["restored"]
        if restored is None:
            show.say("A new process begins at step 1.")
        else:
            place = "the agent's memory" if restored["tier"] == "memory" else "disk"
            show.say(f"A new process has restored step {restored['step']} from {place} and goes on.")
        agent = agent_of(plan.run) if agent_too else None
        try:
            with show.steps((restored["step"] if restored else 0) + 1, plan.steps) as progress:
                for event in events:
                    save = event["save"]
                    if save:
                        blocked_seconds.append(save["blocked_seconds"])
                        if kill_after is not None and event["step"] > kill_after and not save["done"]:
                            return trainer.kill(plan.run, event["step"], save["blocked_seconds"], agent)
                    progress(event["step"], event["loss"])
        finally:
            if agent is not None:
                os.close(agent)
    return None


def _say_kill(show: Show, kill: Kill) -> None:
    victims = "the trainer and Stepwell's agent" if kill.agent_too else "the trainer"
    show.say(
        f"save({kill.step}) came back after {format_seconds(kill.blocked_seconds)}, not yet on disk: "
        f"SIGKILL to {victims}.",
        "bold yellow",
    )
    if kill.committed_at_kill:
        show.say(f"The disk was faster: step {kill.step} was committed already. Trying again with a later save.")
        return
    show.say(f"Right after the kill step {kill.step} was not committed on disk: the kill hit the save.")
    if kill.commit_seconds is not None:
        who = (
            "The agent got it done while it was dying"
            if kill.agent_too
            else "Stepwell's agent lives on and finished it"
        )
        show.say(f"{who}: committed {format_seconds(kill.commit_seconds)} after the kill.")
    elif kill.promise_kept:
        newest = "none" if kill.newest_step is None else f"step {kill.newest_step}"
        show.say(f"Nobody is left to finish it: step {kill.step} is absent, not half there. Newest: {newest}.")
    else:
        show.say(f"FAULT: step {kill.step} was accepted, its agent lives, and it was never committed.", "bold red")


def _read_back(plan: Plan) -> None:
    """Have a new process restore the last step and write down what it got; all steps are done, so it trains none."""
    with Trainer([*_arguments(plan, "read-back"), "--run", str(plan.run)], plan.log) as trainer:
        for _ in trainer.events():
            pass


def _look(plan: Plan, show: Show, command: str, json: bool) -> tuple[int, Any]:
    """Run a command of Stepwell on the run, for the reader to see; with `json`, return what it says."""
    show.raw(f"$ {_stepwell()} {command} {_short(plan.run)}", "bold")
    arguments = module_command("stepwell", command, str(plan.run))
    if not json:
        show.console.file.flush()
        return subprocess.run(arguments, check=False).returncode, None
    done = subprocess.run([*arguments, "--json"], stdout=subprocess.PIPE, check=False)
    try:
        return done.returncode, jsons.loads(done.stdout)
    except ValueError:
        return done.returncode, None


def _conclude(plan: Plan, show: Show, outcome: Outcome, blocked_seconds: list[float], seconds: float) -> None:
    for fault in outcome.faults:
        show.heading(fault, "bold red")
    if outcome.ok:
        show.heading(
            f"Killed twice in the middle of a save, and the same bits in the end. ({format_seconds(seconds)})",
            "bold green",
        )
        for text in (
            f"A save stopped the training for {format_seconds(statistics.median(blocked_seconds))} (median of "
            f"{len(blocked_seconds)}): save() copies the state and comes back; the agent, another process, writes it.",
            "A step that was accepted outlives its trainer. Where the agent dies too, the step is whole or absent.",
            "A resumed process has the same weights, optimizer, random numbers and place in the data: the same bits.",
        ):
            show.say(text, bullet="– ")
    command, run = _stepwell(), shlex.quote(_short(plan.run))
    python = shlex.quote(_short(Path(sys.executable)))
    pack = _short(max(plan.run.glob("steps/*/*.safetensors"), default=plan.run))
    show.heading("Try next")
    for line, why in (
        (f"{command} show {run}", "what is in the newest step"),
        (f"{command} diff {run} {plan.steps - plan.save_every} {plan.steps}", "what the last steps changed"),
        (f"printf X | dd conv=notrunc bs=1 seek=999999 of={shlex.quote(pack)}", "damage one byte of the newest step"),
        (f"{command} verify {run}", "have the damage found"),
        (
            f"{python} -m stepwell.demo.train --run {run} --steps {2 * plan.steps}",
            "train on from the step before it; kill it when you like, call it again",
        ),
    ):
        show.raw(f"# {why}", "dim")
        show.raw(line)
    show.heading("To read: the training script, with Stepwell on five lines of it")
    show.raw(_short(Path(__file__).with_name("train.py")))
    size = sum(file.stat().st_size for file in plan.folder.rglob("*") if file.is_file())
    show.heading(f"To delete when you are done ({format_bytes(size)}; the trainers' own words are in {plan.log.name})")
    show.raw(_short(plan.folder))


def _stepwell() -> str:
    """How the reader can call this very installation."""
    script = Path(sys.executable).with_name("stepwell")
    on_path = shutil.which("stepwell")
    if on_path and script.exists() and os.path.samefile(on_path, script):
        return "stepwell"
    if script.exists():
        return shlex.quote(_short(script))
    return f"{shlex.quote(_short(Path(sys.executable)))} -m stepwell"


def _short(path: Path) -> str:
    """A path as one types it: relative when it is below the current folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
