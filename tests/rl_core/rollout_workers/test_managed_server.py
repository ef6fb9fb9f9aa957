"""A server that the trainer starts itself: a pretended vLLM, its crash and restart, failed starts, and its end."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from helpers import ROOT
from helpers.fake_vllm import write_program
from helpers.waiting import wait_for

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import BackendError, SettingsError, Stopped
from rl_core.models import causal_lm
from rl_core.rollout_workers.managed_server import (
    ManagedServer,
    build_start_command,
    check_start_settings,
    choose_free_port,
)
from rl_core.settings import ModelSettings, RolloutServerSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("managed") / "model"
    tokenizer = train_tokenizer(["abc xyz"], 300)
    created = causal_lm.create_model(ModelSettings(preset="nano", context=64), tokenizer, 0)
    causal_lm.save(created, tokenizer, folder)
    return folder


def make_server(model, tmp_path, *arguments, timeout_s=120.0, **options):
    python = str(write_program(tmp_path))
    settings = RolloutServerSettings(start=True, python=python, arguments=arguments)
    port = choose_free_port()
    command = build_start_command(
        str(model), settings, port, dtype="float32", lora_rank=0, trust_remote_code=False
    )
    return ManagedServer(command, port, tmp_path / "server.log", timeout_s=timeout_s, **options)


def list_tree(pid):
    """List a process and its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def assert_ended(processes):
    _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        process.kill()
    assert alive == []


def test_a_server_starts_restarts_and_ends(model, tmp_path):
    server = make_server(model, tmp_path)
    server.start()
    first = list_tree(server._process.pid)
    assert len(first) == 3 and "sleep" in {process.name() for process in first}  # with its engine
    assert not server.restart_if_ended()
    first[1].kill()
    wait_for(lambda: server._process.poll() is not None)
    assert_ended(first)  # the engine too, although it is in another session
    assert server.restart_if_ended() and server._is_healthy()
    second = list_tree(server._process.pid)
    server.close()
    assert_ended(second)
    assert not server._is_healthy()
    assert server.log.read_text().count("--- started") == 2


TRAINER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from rl_core_test import make_server
server = make_server(Path({model!r}), Path({folder!r}))
server.start()
print(server._process.pid, flush=True)
import time
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_trainer(model, tmp_path, number):
    code = TRAINER.format(tests=str(tmp_path), model=str(model), folder=str(tmp_path))
    (tmp_path / "rl_core_test.py").symlink_to(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as trainer:
        processes = list_tree(int(trainer.stdout.readline()))
        trainer.send_signal(number)
        assert trainer.wait(30) == -number
        assert_ended(processes)


def test_a_failed_start_is_one_line_with_the_first_error(model, tmp_path):
    server = make_server(model, tmp_path, "--fake-failure")
    with pytest.raises(BackendError) as caught:
        server.start()
    assert str(caught.value).startswith("the inference server ended with exit code 1 after ")
    assert str(caught.value).endswith(
        f"s: ValueError: No available memory for the cache blocks. (log: {tmp_path}/server.log)"
    )
    assert server._process is None


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "it wrote nothing"),
        ("INFO 11-29 01:20:37 [a.py:1] one\n\nusage: vllm\nvllm serve: error: no\n", "vllm serve: error: no"),
        ("/opt/python: No module named vllm\n", "/opt/python: No module named vllm"),
        ("Traceback (most recent call last):\n  File\nKeyError: 1\nlater\n", "KeyError: 1"),
        ("\x1b[0;36m(EngineCore pid=7)\x1b[0;0m Traceback (most recent call last):\ntorch.OutOfMemoryError: x\n",
         "torch.OutOfMemoryError: x"),
        ("x" * 600, "x" * 500),
    ],
)  # fmt: skip
def test_the_line_of_a_log_that_says_what_went_wrong(tmp_path, log, line):
    server = make_server("model", tmp_path)
    server.log.write_text(f"ValueError: of an earlier start\n--- started\n{log}")
    server._log_start = len("ValueError: of an earlier start\n")
    assert server.read_error() == line


def test_a_server_that_does_not_answer_in_time(model, tmp_path):
    server = make_server(model, tmp_path, "--fake-hang", timeout_s=1.0)
    with pytest.raises(BackendError, match=r"did not answer within 1 s \(rollouts.server.start_t"):
        server.start()
    assert server._process is None


def test_a_stop_request_ends_the_wait(model, tmp_path):
    stop_event = threading.Event()
    server = make_server(model, tmp_path, "--fake-hang", stop_event=stop_event)
    timer = threading.Timer(0.5, stop_event.set)
    timer.start()
    with pytest.raises(Stopped, match="stopped while the inference server started"):
        server.start()
    timer.join()
    assert server._process is None


def test_settings_that_cannot_be_started(tmp_path, monkeypatch):
    def check(rank=0, **options):
        check_start_settings(
            RolloutServerSettings(**{"start": True, "python": str(program), **options}), rank
        )

    program = write_program(tmp_path)
    check(512)
    with pytest.raises(SettingsError, match="python: /nowhere is not an executable program"):
        check(python="/nowhere")
    with pytest.raises(SettingsError, match=r"model.lora.rank is 513, but vLLM supports .* to 512"):
        check(513)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SettingsError, match="sleeps: vLLM releases the memory of a GPU alone"):
        check(sleeps=True)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SettingsError, match="can end its server on Linux alone"):
        check()
