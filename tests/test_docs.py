"""The documentation is true: its code runs, its tables are what happens, its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import agents_of, state_of, wait_until

import stepwell

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What every page may use: a small model, and a training step on it.
PRELUDE = """
import logging, sys
import torch

logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
total = 30
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)


def train_one_step():
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return float(loss)


"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "page.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment(), capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if blocks(page, "python")], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, run: Path) -> None:
    """All blocks of a page, one after the other."""
    done = run_script(PRELUDE + "\n".join(blocks(page, "python")), tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_example_resumes(tmp_path: Path, run: Path) -> None:
    """The example of the README, started twice: the second time it goes on where the first one stopped."""
    (example,) = blocks(ROOT / "README.md", "python")
    first = run_script(f"{PRELUDE}total = 250\n{example}\nprint(restored)", tmp_path)
    assert first.returncode == 0 and first.stdout == "None\n", first.stderr
    assert [step.step for step in stepwell.steps(tmp_path / "runs/gpt")] == [100, 200]
    second = run_script(f"{PRELUDE}total = 320\n{example}\nprint(restored.step, step)", tmp_path)
    assert second.returncode == 0 and second.stdout == "200 319\n", second.stderr
    assert len(example.strip().splitlines()) <= 10


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{name_of(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """`tests/...py`, `src/...` and `docs/...md` in a page's text."""
    for path in re.findall(r"`((?:tests|src|docs|benchmarks)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


# ---- docs/durability.md


def effects_in_tables() -> list[str]:
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \|", (ROOT / "docs/durability.md").read_text(), re.MULTILINE)
    assert len(rows) > 50
    return rows


def effects_of_a_run(run: Path, trace: Path) -> list[str]:
    """What the agent did, in the words of the page."""
    found = []
    for line in trace.read_text().splitlines():
        if not line.startswith("effect ") or "telemetry/" in line:
            continue
        text = line.removeprefix("effect ").split(" [")[0].replace(f"{run}/", "")
        text = text.replace(f" {run.parent}", " ..") if text.endswith(f" {run.parent}") else text
        text = re.sub(rf" {re.escape(str(run))}$", " .", text)
        text = re.sub(r"probe-\d+", "probe-PID", text)
        text = re.sub(r"\d{12}-\d{4}", "KEY", text)
        text = text.replace("node00000-00.safetensors", "PACK")
        found.append(re.sub(r"[0-9a-f]{32}\.safetensors", "LAYOUT", text))
    return found


def test_the_effects_of_the_durability_page_are_those_of_the_agent(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("STEPWELL_FAULT", f"trace:{trace}")
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=1)) as ckpt:
        ckpt.save(1, {"a": np.ones(4)}).wait(timeout=60)
        ckpt.save(2, {"a": np.ones(4)}).wait(timeout=60)
    wait_until(lambda: not agents_of(run))
    told = effects_in_tables()
    save = told[told.index("mkdir steps/KEY") : told.index("create steps/KEY/condemned")]
    new_layout = {effect for effect in told if "LAYOUT" in effect} | {"mkdir layouts", "fsync_directory ."}
    second = [effect for effect in save if effect not in new_layout]
    prune = told.index("create steps/KEY/condemned")
    assert effects_of_a_run(run, trace) == [*told[:prune], *second, *told[prune:]]


# ---- docs/telemetry.md


def fields_of(section: str) -> set[str]:
    text = (ROOT / "docs/telemetry.md").read_text()
    (part,) = re.findall(rf"^## {section}.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    fields: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE):
        fields.update(re.findall(r"`(\w+)`", row))
    return fields


def test_the_telemetry_has_the_fields_of_its_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "slow:0.2")
    with stepwell.Checkpointer(run, slots=1, when_full="skip") as ckpt:
        ckpt.save(1, state_of(1))
        assert ckpt.save(2, state_of(2)).skipped
        ckpt.wait(timeout=60)
        ckpt.restore(state_of(0))
    wait_until(lambda: not agents_of(run))  # its last line is written after the goodbye
    lines = (run / "telemetry/node00000.jsonl").read_text().splitlines()
    records: dict[str, dict[str, Any]] = {record["event"]: record for record in map(json.loads, lines)}
    assert set(records) == {"save", "skip", "restore"}
    every = fields_of("Every line")
    for event, record in records.items():
        assert set(record) == every | fields_of(f"`{event}`"), event
    for name, value in records["save"].items():
        if name.endswith("_seconds"):
            assert value >= 0, name
    save = records["save"]
    assert save["durable_seconds"] >= save["blocked_seconds"] >= save["copy_seconds"]
    assert save["state_bytes"] == sum(array.nbytes for array in state_of(1)["model"].values())
    assert save["error"] is None and records["restore"]["tier"] == "memory"


def test_a_save_that_failed_is_in_the_telemetry(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "fail:rename:EACCES:1:1")
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
    (line,) = (run / "telemetry/node00000.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert "ermission" in record["error"] and record["durable_seconds"] is None
    assert "write_seconds" in record and "commit_seconds" not in record
    assert set(record) <= fields_of("Every line") | fields_of("`save`")


# ---- docs/howto

TRAINER = """
import os, signal, sys, time
import numpy as np, stepwell
with stepwell.Checkpointer(sys.argv[1], save_when=stepwell.Every(minutes=60)) as ckpt:
    ckpt.save_on_signals(signal.SIGTERM, signal.SIGUSR1)
    state = {"a": np.zeros(1000)}
    ckpt.restore(state)
    for step in range(100_000):
        if step == 1:
            print("training", flush=True)
        time.sleep(0.005)
        state["a"][:] = step
        save = ckpt.save_if_due(step, state)
        if ckpt.preempted:
            assert save is not None and save.committed, save
            print(step)
            break
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_trainer_and_agent_alike(run: Path, number: int) -> None:
    """howto/preemption.md: Slurm signals every process of a step, the agent too."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "training\n"
        (agent,) = agents_of(run)
        agent.send_signal(number)
        trainer.send_signal(number)
        last = int(trainer.stdout.read())
        assert trainer.wait(60) == 0
    (step,) = stepwell.steps(run)
    assert step.step == last
    np.testing.assert_array_equal(stepwell.load(run)["a"], np.full(1000, last))


CONTAINED = """
import os, sys
import numpy as np, stepwell
ckpt = stepwell.Checkpointer(sys.argv[1])
save = ckpt.save(1, {"a": np.arange(2_000_000)})
assert save.snapshot_done and not save.done
print("accepted", flush=True)
sys.stdin.read()
"""


def test_an_agent_outside_outlives_the_trainers_container(run: Path, tmp_path: Path) -> None:
    """howto/containers-and-slurm.md: other namespaces, the whole container killed right after a save was accepted."""
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("no permission to make namespaces here")
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as runtime:  # a socket's path has to be short
        outlive_a_container(run, tmp_path / "log", runtime)


def outlive_a_container(run: Path, log_path: Path, runtime: str) -> None:
    own = {**environment(), "XDG_RUNTIME_DIR": runtime}
    command = [sys.executable, "-m", "stepwell", "agent", str(run)]
    with open(log_path, "wb") as log:
        service = subprocess.Popen(
            [*command, "--service"], env={**own, "STEPWELL_FAULT": "slow:0.3"}, stdout=log, stderr=log
        )
    with service:
        try:
            wait_until(lambda: subprocess.run([*command, "--status"], env=own, capture_output=True).returncode == 0)
            container = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, "-c", CONTAINED, str(run)],
                env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            with container:
                assert container.stdout is not None
                assert container.stdout.readline() == "accepted\n"
                container.kill()  # --kill-child: and everything in it
            wait_until(lambda: len(stepwell.steps(run)) == 1)
            assert subprocess.run([*command, "--stop"], env=own, capture_output=True).returncode == 0
            assert service.wait(30) == 0
        finally:
            service.kill()
    np.testing.assert_array_equal(stepwell.load(run)["a"], np.arange(2_000_000))


def test_the_shell_of_a_page_is_shell(tmp_path: Path) -> None:
    """Commands with placeholders cannot be run; at least they parse, and the commands and options of ours exist."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            done = subprocess.run(["sh", "-n"], input=block, capture_output=True, text=True)
            assert done.returncode == 0, f"{name_of(page)}: {done.stderr}"
            for line in re.findall(r"(?:^|[ /])stepwell ([a-z]+[^#&|\n]*)", block, re.MULTILINE):
                name, *arguments = line.split()
                options = {word for word in arguments if word.startswith("--")}
                told = subprocess.run(
                    [sys.executable, "-m", "stepwell", name, "--help"],
                    env=environment(),
                    capture_output=True,
                    text=True,
                )
                assert told.returncode == 0, f"{name_of(page)}: stepwell {line}"
                for option in options:
                    assert option in told.stdout, f"{name_of(page)}: stepwell {line}"


def test_the_unit_of_the_page_is_one(tmp_path: Path) -> None:
    verify = subprocess.run(["sh", "-c", "command -v systemd-analyze"], capture_output=True)
    if verify.returncode != 0:
        pytest.skip("no systemd here")
    (unit,) = blocks(ROOT / "docs/howto/containers-and-slurm.md", "ini")
    path = tmp_path / "stepwell-agent@.service"
    path.write_text(unit.replace("/opt/venv/bin/stepwell", "/bin/true").replace("User=trainer", "User=root"))
    instance = tmp_path / "stepwell-agent@data-runs-gpt.service"
    instance.write_text(path.read_text())
    done = subprocess.run(["systemd-analyze", "verify", str(instance)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


def test_the_readme_shows_what_ls_prints(run: Path, tmp_path: Path) -> None:
    """Its picture has the columns and marks of the real thing."""
    with stepwell.Checkpointer(run) as ckpt:
        for step in (10, 20):
            ckpt.save(step, state_of(step), metrics={"loss": 1 / step}).wait(timeout=60)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.restore(state_of(0), step=10)
        ckpt.save(20, state_of(20), metrics={"loss": 0.04}).wait(timeout=60)
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "ls", str(run)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0
    (picture,) = (part for part in blocks(ROOT / "README.md", "text") if "restore() takes" in part)

    def skeleton(text: str) -> list[str]:
        marks = re.findall(r"^[▶●○✗]|^attempt \d+|^restore\(\) takes step \d+ of attempt \d+", text, re.MULTILINE)
        return [*marks, *(" ".join(line.split()) for line in text.splitlines() if line.split()[:1] == ["step"])]

    assert skeleton(picture) == skeleton(done.stdout)


def test_the_parts_of_the_prelude_are_used() -> None:
    """Keeps `PRELUDE` honest: what the pages call their own is what it defines."""
    text = textwrap.dedent(PRELUDE)
    used = "\n".join(block for page in PAGES for block in blocks(page, "python"))
    for name in ("model", "optimizer", "scheduler", "train_one_step"):
        assert name in text and name in used
