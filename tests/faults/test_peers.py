"""Others who want the same run: a second trainer, one that hangs, agents of another version, strangers."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.helpers import agents_of, assert_is_step, state_of, wait_until

import stepwell
from stepwell.agent import client
from stepwell.agent import protocol as p
from stepwell.agent.place import place_of, runtime_folder
from stepwell.errors import AgentError, RunBusyError

PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP = 28, 4

HANGING = """
import sys, time, stepwell
from pathlib import Path
from tests.helpers import state_of
ckpt = stepwell.Checkpointer(Path(sys.argv[1]))
ckpt.save(1, state_of(1)).wait(timeout=60)
print("saved", flush=True)
time.sleep(600)
"""

OLD_AGENT = """
import sys
from stepwell.agent import protocol
protocol.VERSION = 0
from stepwell.agent.place import place_of
from stepwell.agent.server import run_agent
run_agent(sys.argv[1], place_of(sys.argv[1]), service=len(sys.argv) > 3, ready_fd=int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person would wait for is not waited for here."""
    monkeypatch.setattr(client, "BUSY_SECONDS_MAX", 0.5)


def python(script: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, text=True, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def hanging(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has saved step 1 and then does nothing for ever."""
    process = python(HANGING, str(run), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_two_trainers_on_one_run(run: Path, hanging: subprocess.Popen[str]) -> None:
    """The second is refused with the first one's pid and command, and disturbs nothing."""
    with pytest.raises(RunBusyError) as caught:
        stepwell.Checkpointer(run)
    text = str(caught.value)
    assert str(hanging.pid) in text and "python" in text and "another folder" in text
    assert hanging.poll() is None
    assert_is_step(stepwell.load(run), 1)


def test_a_restarted_trainer_while_the_old_one_hangs(run: Path, hanging: subprocess.Popen[str]) -> None:
    """A stopped process still owns the run: it might wake up and save. Once it is ended, the new one goes on."""
    hanging.send_signal(signal.SIGSTOP)
    with pytest.raises(RunBusyError, match=str(hanging.pid)):
        stepwell.Checkpointer(run)
    hanging.kill()
    hanging.wait()
    with stepwell.Checkpointer(run) as ckpt:
        state = state_of(0)
        restored = ckpt.restore(state)
        assert restored is not None and restored.step == 1
        ckpt.save(2, state_of(2))
    assert [step.key for step in stepwell.steps(run)] == ["000000000001-0001", "000000000002-0002"]


def test_the_same_run_by_another_path(run: Path, hanging: subprocess.Popen[str], tmp_path: Path) -> None:
    """A link to the run is the same run."""
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(RunBusyError, match=str(hanging.pid)):
        stepwell.Checkpointer(tmp_path / "link")


def old_agent(run: Path, *more: str) -> subprocess.Popen[str]:
    ready, ready_write = os.pipe()
    process = python(OLD_AGENT, str(run), str(ready_write), *more, pass_fds=[ready_write], stderr=subprocess.DEVNULL)
    os.close(ready_write)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return process


def test_an_idle_agent_of_another_version_makes_room(run: Path) -> None:
    """After an upgrade the trainer starts an agent of its own version; the old one ends by itself."""
    old = old_agent(run)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
    assert old.wait(20) == 0
    assert_is_step(stepwell.load(run), 1)


def test_a_service_of_another_version_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that somebody runs as a service does not end for us: the error says what to do."""
    monkeypatch.setattr(client, "START_SECONDS_MAX", 1.0)
    old = old_agent(run, "--service")
    try:
        with pytest.raises(AgentError, match="another version"):
            stepwell.Checkpointer(run)
        assert old.poll() is None
    finally:
        old.kill()
        old.wait()


def test_a_trainer_of_a_later_version_is_refused_in_words(run: Path) -> None:
    """Its greeting has grown at the end; this agent reads the part that it knows."""
    with stepwell.Checkpointer(run):
        greeting = msgspec.to_builtins(p.Hello(p.VERSION + 1, os.getpid(), "later", request=5))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as later:
            later.connect(place_of(str(run)).socket)
            later.settimeout(20)
            later.send(msgspec.msgpack.encode([*greeting, "a field of later", {"another": 1}]))
            received = p.receive(later)
    assert received is not None and isinstance(received[0], p.Refused)
    assert "another version" in received[0].what and received[0].request == 5


def test_another_user_is_turned_away(run: Path) -> None:
    """Even one that can reach the socket: the kernel says who it is."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with stepwell.Checkpointer(run) as ckpt:
        place = place_of(str(run)).socket
        child = os.fork()
        if child == 0:  # somebody else, who keeps root's right to pass every folder
            ctypes.CDLL(None).prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)
            os.seteuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(place)
                stranger.settimeout(20)
                try:
                    p.send(stranger, p.Hello(p.VERSION, os.getpid(), "stranger", observer=True, request=1))
                    answered = bool(stranger.recv(1 << 16))
                except OSError:
                    answered = False
            os._exit(3 if answered else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ckpt.save(1, state_of(1)).wait(timeout=60).committed


def test_an_agent_that_dies_while_it_greets(run: Path) -> None:
    """The first connection ends without an answer, as when an agent is killed that was just found: the next agent
    counts, and the trainer does not take it for lost and run into itself."""
    place = place_of(str(run))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
        dying.bind(place.socket)
        dying.listen()

        def accept_and_die() -> None:
            connection, _ = dying.accept()
            connection.recv(1 << 16)
            os.unlink(place.socket)
            connection.close()

        thread = threading.Thread(target=accept_and_die)
        thread.start()
        with stepwell.Checkpointer(run, on_error="raise") as ckpt:
            thread.join()
            assert not ckpt._client.lost
            (agent,) = agents_of(run)
            agent.kill()
            assert ckpt.save(1, state_of(1)).wait(timeout=60).committed
            assert ckpt.counters.agent_restarts == 1


@pytest.mark.parametrize("garbage", [b"\x00", b"hello", b"\x93\x01\x02\x03", os.urandom(5000)])
def test_garbage_on_the_socket_disturbs_nobody(run: Path, garbage: bytes) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(place_of(str(run)).socket)
            stranger.send(garbage)
            stranger.settimeout(20)
            try:
                while stranger.recv(1 << 16):
                    pass
            except ConnectionResetError:
                pass
        ckpt.save(2, state_of(2)).wait(timeout=60)
        assert ckpt.counters.agent_restarts == 0


def test_orders_before_an_introduction_are_refused(run: Path) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(place_of(str(run)).socket)
            stranger.settimeout(20)
            for message in (p.AskMemory(request=7), p.MakeSlot(1 << 40, True, request=8)):
                p.send(stranger, message)
                received = p.receive(stranger)
                assert received is not None and isinstance(received[0], p.Refused)
        assert ckpt.save(2, state_of(2)).wait(timeout=60).committed


def test_only_the_user_may_enter(run: Path) -> None:
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=60)
        place = place_of(str(run))
        assert os.stat(runtime_folder()).st_mode & 0o077 == 0
        assert os.stat(place.socket).st_mode & 0o077 == 0


def test_a_runtime_folder_that_others_may_enter_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path("/tmp") / f"sw-open-{os.getpid()}"
    base.mkdir()
    try:
        (base / "stepwell").mkdir(mode=0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        with pytest.raises(AgentError, match="not safe"):
            stepwell.Checkpointer(run)
    finally:
        (base / "stepwell").rmdir()
        base.rmdir()


@pytest.mark.parametrize("base", ["/proc", "/nonexistent", "relative", "/dev/null"])
def test_a_runtime_folder_that_cannot_be_used_is_passed_over(
    run: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        assert place_of(str(run)).socket.startswith(f"/tmp/stepwell-{os.getuid()}/")
        assert ckpt.save(1, state_of(1)).wait(timeout=60).committed


def test_a_python_that_cannot_be_started_is_said_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(run.parent / "no-python"))
    monkeypatch.setattr(client, "START_SECONDS_MAX", 1e6)  # it would not end by itself
    with pytest.raises(AgentError, match="No such file"):
        stepwell.Checkpointer(run)


def test_files_have_the_users_umask(run: Path) -> None:
    before = os.umask(0o027)
    try:
        with stepwell.Checkpointer(run) as ckpt:
            ckpt.save(1, state_of(1)).wait(timeout=60)
    finally:
        os.umask(before)
    wait_until(lambda: not agents_of(run))
    for path in run.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_the_agent_is_the_package_of_the_trainer_and_not_another_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run.parent / "elsewhere" / "stepwell"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('another stepwell, installed as well')\n")
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        assert ckpt.save(1, state_of(1)).wait(timeout=60).committed
