"""The agent as a service, asked and stopped; and what an observer meets when things are not as they should be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import ENVIRONMENT, Command, make_state
from tests.helpers import wait_until

import stepwell
from stepwell.agent import protocol as p
from stepwell.agent.observer import observe, status_of, take_lock
from stepwell.agent.place import place_of
from stepwell.errors import AgentError, RunBusyError


@contextmanager
def service(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "stepwell", "agent", "--service", str(run)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: process.poll() is not None or status_of(str(run)) is not None)
            yield process
        finally:
            process.kill()


def test_no_agent(command: Command, tmp_path: Path) -> None:
    outcome = command("agent", tmp_path / "run")
    assert (outcome.code, outcome.out) == (1, "no agent is running for this run on this machine\n")
    document = command("agent", tmp_path / "run", "--json").document
    assert (document["format"], document["version"], document["running"]) == ("stepwell.agent", 1, False)
    assert command("agent", tmp_path / "run", "--stop").code == 0
    assert not (tmp_path / "run").exists()


def test_a_service_has_no_json(command: Command, tmp_path: Path) -> None:
    outcome = command("agent", "--service", tmp_path / "run", "--json")
    assert outcome.code == 2 and "--status --json" in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_service_outlives_its_trainer_and_ends_when_told(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with service(run) as process:
        document = command("agent", run, "--json").document
        assert document["pid"] == process.pid
        assert document["service"] is True and document["trainer_pid"] is None and document["slots"] == []
        with stepwell.Checkpointer(run, slots=1) as checkpointer:
            checkpointer.save(7, make_state(7)).wait()
            wait_until(lambda: command("agent", run, "--json").document["pending"] == 0)
            document = command("agent", run, "--status", "--json").document
            assert document["trainer_pid"] == os.getpid()
            assert document["attempt"] == 1
            assert [one["holds"] for one in document["slots"]] == ["000000000007-0001"]
            assert "slot 0 holds step 7 of attempt 1" in command("agent", run).out
            refused = command("agent", run, "--stop")
            assert refused.code == 3
            assert f"pid {os.getpid()}" in refused.err
        assert process.poll() is None
        outcome = command("agent", run, "--stop", "--json")
        assert outcome.code == 0
        assert outcome.document["stopped_pid"] == process.pid
        assert process.wait(10) == 0
        os.close(take_lock(place_of(str(run))))


def test_a_second_service_is_refused(command: Command, tmp_path: Path) -> None:
    with service(tmp_path / "run"), service(tmp_path / "run") as second:
        _, err = second.communicate(timeout=20)
        assert second.returncode == 3
        assert b"running already" in err and b"--stop" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_service_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    with service(tmp_path / "run") as process:
        process.send_signal(number)
        assert process.wait(20) == 0
    assert not os.path.lexists(place_of(str(tmp_path / "run")).socket)


def test_only_one_of_the_three(command: Command) -> None:
    assert command("agent").code == 2


def test_a_socket_without_an_agent_is_no_agent(command: Command, tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "run"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(place.socket)
    try:
        assert observe(str(tmp_path / "run")) is None
        assert command("agent", tmp_path / "run").code == 1
    finally:
        os.unlink(place.socket)


@contextmanager
def stranger(run: Path) -> Iterator[socket.socket]:
    """Something that listens where the agent should, and answers nothing by itself."""
    place = place_of(str(run))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place.socket)
    listener.listen()
    try:
        yield listener
    finally:
        listener.close()
        os.unlink(place.socket)


def test_an_agent_that_does_not_answer_is_said_and_ls_goes_on(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stranger(branchy), pytest.raises(AgentError, match="does not answer"):
        observe(str(branchy), seconds_max=0.2)
    monkeypatch.setattr("stepwell.agent.observer.STATUS_SECONDS_MAX", 0.2)
    with stranger(branchy):
        assert command("ls", branchy).code == 0


def test_without_a_usable_runtime_folder_ls_goes_on(
    command: Command, branchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.agent.observer.place_of", _raise_os_error)
    assert command("ls", branchy).code == 0


def _raise_os_error(root: str) -> None:
    raise OSError(30, "Read-only file system", "/tmp/stepwell-0")


def test_an_agent_of_another_version_is_said(branchy: Path) -> None:
    from threading import Thread

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(1000)
            connection.send(b"\x93\xa7Welcome\x01\x02")

    with stranger(branchy) as listener:
        thread = Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(AgentError, match="another protocol"):
            observe(str(branchy))
        thread.join()


def test_the_lock_keeps_agents_out(tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "run"))
    lock = take_lock(place)
    try:
        with pytest.raises(RunBusyError, match="starting or ending"):
            take_lock(place)
    finally:
        os.close(lock)
    os.close(take_lock(place))


def test_an_observer_does_not_keep_a_trainer_out(run: Path) -> None:
    with stepwell.Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"x": np.zeros(1)}).wait()
        observer = observe(str(run))
        assert observer is not None
        with observer:
            checkpointer.save(2, {"x": np.zeros(1)}).wait()
            answer = observer.ask(p.AskStatus())
            assert isinstance(answer, p.StatusIs) and answer.trainer_pid == os.getpid()
