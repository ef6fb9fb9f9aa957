"""Tensors in shared memory: bits, bounds, acknowledgements, and an empty /dev/shm after every kind of death."""

import json
import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from rl_core.errors import CheckpointError, CorruptError, DataError
from rl_core.online.tensor_channel import TensorReceiver, TensorSender
from rl_core.storage import faults
from rl_core.storage.session_resources import (
    SharedSegment,
    attach_segment,
    list_sender_segments,
    remove_stale_segments,
)

TENSORS = {
    "logprobs": torch.linspace(-3, 0, 7).reshape(7, 1).expand(7, 3).t(),  # not contiguous
    "ids": torch.arange(5, dtype=torch.int32),
    "half": torch.tensor([1.5, float("nan"), float("inf")], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture
def channel_ends():
    """Yield a sender of at most 4 KiB, and its receiver."""
    left, right = Pipe()
    with TensorReceiver(right) as receiver, TensorSender(left, max_bytes=4096) as sender:
        yield sender, receiver
        token = sender.token
    assert list_sender_segments(token) == []


def test_tensors_arrive_bit_by_bit_and_leave_nothing(channel_ends):
    sender, receiver = channel_ends
    assert sender.send_tensors(TENSORS, "r1 ünï") and len(list_sender_segments(sender.token)) == 1
    tag, tensors = receiver.receive_tensors()
    assert tag == "r1 ünï" and tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        raw = [
            t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else []
            for t in (tensors[name], tensor)
        ]
        assert raw[0] == raw[1]
    assert (
        sender.collect_acknowledgements() == 1
        and list_sender_segments(sender.token) == []
        and sender.unacknowledged_bytes == 0
    )
    assert receiver.receive_tensors() is None
    tensors["ids"][0] = 9  # the receiver has a copy


def test_the_bound_holds_until_something_is_acknowledged(channel_ends):
    sender, receiver = channel_ends
    half = {"x": torch.zeros(2048, dtype=torch.uint8)}
    assert sender.send_tensors(half) and sender.send_tensors(half)
    assert (
        not sender.send_tensors(half)
        and sender.num_refused == 1
        and sender.unacknowledged_bytes == 4096
    )
    before = time.monotonic()
    assert not sender.send_tensors(half, timeout_s=0.05) and time.monotonic() - before >= 0.05
    receiver.receive_tensors()
    assert sender.send_tensors(half)
    with pytest.raises(DataError, match="do not fit"):
        sender.send_tensors({"x": torch.zeros(5000, dtype=torch.uint8)})
    with pytest.raises(DataError, match="complex64"):
        sender.send_tensors({"x": torch.zeros(1, dtype=torch.complex64)})


def test_a_closed_receiver_leaks_nothing(channel_ends):
    sender, receiver = channel_ends
    assert sender.send_tensors({"x": torch.ones(3)})
    receiver.connection.close()
    sender.collect_acknowledgements()
    assert list_sender_segments(sender.token) == [] and not sender.send_tensors(
        {"x": torch.ones(3)}
    )
    assert list_sender_segments(sender.token) == []


def test_foreign_messages_are_refused_and_the_next_message_arrives(channel_ends):
    sender, receiver = channel_ends
    bad = [
        b"{",
        b"[]",
        b"{}",
        b'{"segment": "../../etc/passwd", "size": 9, "tensors": {}}',
        b'{"segment": "posttrain-0-1-00000000-0", "size": 9, "tensors": {}}',
    ]
    for message in bad:
        sender.connection.send_bytes(message)
        with pytest.raises(CorruptError):
            receiver.receive_tensors()
    with SharedSegment(64, token="0" * 8) as segment:
        layouts = [
            {"dtype": "float32", "shape": [99], "start": 0},
            {"dtype": "object", "shape": [1], "start": 0},
            {"dtype": "uint8", "shape": [-4], "start": 0},
            {"dtype": "uint8", "shape": [4], "start": -4},
        ]
        for layout in layouts:
            text = json.dumps(
                {"number": 77, "segment": segment.name, "size": 64, "tensors": {"x": layout}}
            )
            sender.connection.send_bytes(text.encode())
            with pytest.raises(CorruptError):
                receiver.receive_tensors()
        with pytest.raises(CorruptError, match="65 bytes"):
            attach_segment(segment.name, 65)
    assert sender.send_tensors({"x": torch.ones(3)}) and receiver.receive_tensors()[1][
        "x"
    ].tolist() == [1, 1, 1]
    # acknowledgements of unknown messages are ignored
    assert sender.collect_acknowledgements() == 1


@pytest.mark.parametrize("fault", ["", "online.segment:2:kill"])
def test_segments_of_a_killed_sender_are_removed_and_those_of_a_live_one_remain(fault):
    left, right = Pipe()
    token_reader, token_writer = os.pipe()
    pid = os.fork()
    if not pid:
        faults.configure_faults(fault)
        sender = TensorSender(left, max_bytes=1 << 20)
        sender.send_tensors({"x": torch.ones(3)})
        os.write(token_writer, sender.token.encode())
        sender.send_tensors({"x": torch.ones(3)})
        signal.pause()
    token = os.read(token_reader, 8).decode()
    try:
        if not fault:
            deadline = time.monotonic() + 20
            while len(list_sender_segments(token)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            # the sender is alive
            assert not [name for name in remove_stale_segments() if token in name]
            assert len(list_sender_segments(token)) == 2
    finally:
        if not fault:  # with a fault, the sender kills itself
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left.close()
    assert len(list_sender_segments(token)) == 2
    receiver = TensorReceiver(right)
    # the segment outlives its sender
    assert receiver.receive_tensors()[1]["x"].tolist() == [1, 1, 1]
    with receiver:
        assert list_sender_segments(token) == []
    os.close(token_reader)
    os.close(token_writer)


def test_an_error_while_a_segment_is_created_removes_it():
    before = set(os.listdir("/dev/shm"))
    faults.configure_faults("online.segment:1:raise")
    with pytest.raises(CheckpointError, match="the shared memory is full"):
        SharedSegment(64, token="1" * 8)
    assert set(os.listdir("/dev/shm")) - before == set() and list_sender_segments("1" * 8) == []


def test_another_folder_can_replace_shared_memory(tmp_path: Path):
    left, right = Pipe()
    with TensorSender(left, max_bytes=4096, folder=tmp_path) as sender:
        receiver = TensorReceiver(right, folder=tmp_path)
        assert sender.send_tensors(TENSORS) and len(list(tmp_path.iterdir())) == 1
        assert receiver.receive_tensors()[1]["ids"].tolist() == [0, 1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == []
