"""Parts of the speed benchmarks that could break silently: the protocol, medians and ratios, the floor, the fit;
whether what is for a GPU runs at all."""

import json
import math
import os
import sys
import time
from pathlib import Path

import gpu
import pytest
import torch
from speed import inputs, table
from speed.floor import (
    Rates,
    Shape,
    compute_adamw_seconds,
    compute_decode_seconds,
    compute_floor_rates,
)
from speed.growth import EXPECTED, Fit
from speed.protocol import Others, Worker, WorkerFailed, read_machine_cpu_s, take_turns

BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"
TALKER = """
from speed.protocol import Gate
gate = Gate()
print("a library's banner")
gate.ready(versions={"made": "up"})
for step in range(%d):
    gate.wait()
    gate.done(tokens=10 * (step + 1), loss=0.5, wall_s=100.0)
raise RuntimeError("no such layer")
"""


def start(tmp_path, steps, name="ours"):
    command = [sys.executable, "-c", TALKER % steps]
    return Worker(
        command, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)}, log=tmp_path / f"{name}.txt"
    )


# -------------------------------------------------------------------------------------------------------- protocol


def test_a_worker_answers_every_step_and_says_why_it_ended(tmp_path):
    worker = start(tmp_path, 2)
    assert worker.about["versions"] == {"made": "up"}
    answers = [worker.step() for _ in range(2)]
    assert [answer["tokens"] for answer in answers] == [10, 20]
    assert all(100 < answer["wall_s"] < 160 and answer["loss"] == 0.5 for answer in answers)
    assert answers[0]["peak_mb"] > 1
    with pytest.raises(WorkerFailed, match=r"ours\.txt: .*RuntimeError: no such layer"):
        worker.step()
    worker.stop()
    assert "a library's banner" in (tmp_path / "ours.txt").read_text()


def test_a_worker_that_is_not_needed_any_more_ends_by_itself(tmp_path):
    worker = start(tmp_path, 5)
    worker.step()
    worker.stop()
    assert worker.process.returncode == 0


def test_sides_take_turns_and_the_first_changes():
    calls = []

    class Side:
        def __init__(self, name):
            self.name = name

        def step(self):
            calls.append(self.name)
            return len(calls)

    dropped, measured = take_turns({"ours": Side("ours"), "peer": Side("peer")}, steps=2, warmup=1)
    assert calls == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert dropped == {"ours": [1], "peer": [2]}
    assert measured == {"ours": [4, 5], "peer": [3, 6]}


@pytest.mark.skipif(read_machine_cpu_s() is None, reason="the system has no /proc/stat")
def test_our_work_does_not_count_as_that_of_others():
    class Busy:  # as if a worker had taken all that the machine has
        def __init__(self):
            self.seconds = 0.0

        def cpu_s(self):
            return self.seconds

    busy = Busy()
    others = Others([busy])
    busy.seconds = 1e9
    assert others.cores() == 0.0


# ------------------------------------------------------------------------------------------------- medians, ratios


def answer(wall, cpu, tokens=100, loss=None, peak=10.0):
    return {"wall_s": wall, "cpu_s": cpu, "tokens": tokens, "loss": loss, "peak_mb": peak}


def make_case(ours, peer, stage="sft"):
    sides = {
        name: {
            "about": {"start_s": 2.0, "versions": {}},
            "dropped": [answer(1.5, 1.0)],
            "steps": steps,
        }
        for name, steps in (("ours", ours), ("peer", peer))
    }
    return {"stage": stage, "size": "small", "threads": 1, "others_cpu": 0.1, "sides": sides}


def test_a_line_by_hand():
    ours = [
        answer(1.0, 0.5, loss=2.0),
        answer(2.0, 0.5, loss=1.0),
        answer(4.0, 1.0, loss=1.0, peak=30.0),
    ]
    peer = [answer(5.0, 2.0, loss=2.0), answer(4.0, 1.0, loss=1.25), answer(2.5, 2.0, loss=1.0)]
    line = table.summarize_case(make_case(ours, peer), floor_rate=200.0)
    # rates 100, 50, 25 against 20, 25, 40
    assert line.rates == {"ours": table.Spread(50, 25, 100), "peer": table.Spread(25, 20, 40)}
    assert line.ratio == 2.0
    assert line.pairs == table.Spread(2.0, 0.625, 5.0)  # 100/20, 50/25, 25/40
    assert line.cpu_ratio == 200 / 50  # of 200, 200, 100 and 50, 100, 50
    assert line.floor == {"ours": 4.0, "peer": 8.0}
    assert line.peak_mb == {"ours": 30.0, "peer": 10.0}
    assert line.start_s == {"ours": 3.5, "peer": 3.5}
    assert line.loss_gap == 0.25
    assert line.same_tokens is True
    assert line.wanted_ratio == 2.5


def test_other_rows_are_seen():
    line = table.summarize_case(make_case([answer(1, 1, 100, 0.0)], [answer(1, 1, 99, 0.0)]), None)
    assert line.same_tokens is False
    assert (
        table.summarize_case(
            make_case([answer(1, 1, 100)], [answer(1, 1, 99)], "grpo"), None
        ).same_tokens
        is None
    )


def test_the_table_says_what_was_met_and_what_fails():
    fast = table.summarize_case(
        make_case([answer(1, 1, loss=1.0)], [answer(3, 3, loss=1.0)]), 200.0
    )
    slow = table.summarize_case(make_case([answer(1, 1)], [answer(1.5, 1)], "generate_32x64"), None)
    checks = {
        "small": [
            {"what": "tokens", "value": 1, "limit": 0},
            {"what": "loss", "value": 1e-7, "limit": 1e-5},
        ]
    }
    text = table.format_report("a processor", [fast, slow], checks, ["machine: m"], ["ppo: no TRL"])
    assert text.splitlines()[0] == "# Speed compared with TRL and transformers: a processor"
    rows = [line for line in text.splitlines() if line.startswith("| sft |")]
    assert rows == [
        "| sft | 100 [100, 100] | 33 [33, 33] | **3.00** [3.00, 3.00] | 2.5 met | 3.00 | 2.0 (2), 6.0 | 10, 10 | "
        "3.5, 3.5 | 0.10 |"
    ]
    assert "**1.50** [1.50, 1.50] | 3 missed | 1.00 | - |" in text
    assert (
        "| small | tokens | 1 | 0 | FAILS |" in text
        and "| small | loss | 1e-07 | 1e-05 | holds |" in text
    )
    assert "- not measured: ppo: no TRL" in text


# ----------------------------------------------------------------------------------------------------------- floor

ROUND = Shape(hidden=4, layers=1, trunk=100, head=20)


def test_parameters_are_those_of_the_model():
    from transformers import LlamaForCausalLM

    config = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
    )
    model = LlamaForCausalLM(inputs.make_config(config))
    assert Shape.of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_floor_by_hand():
    # two rows of 2 and 3 tokens, 1 head token: 2*100*5 + 2*20*1 + 2*(4 + 9)*4
    assert ROUND.forward_flops([2, 3], 1) == 1000 + 40 + 104
    assert ROUND.parameters == 100 + 40 + 12
    rates = Rates(train_flops=10.0, best_flops=20.0, read_bytes=8.0, copy_bytes=4.0)
    assert (
        compute_adamw_seconds(ROUND, rates) == 7 * 4 * 152 / 8
    )  # in the cache: the quicker of both
    # 3 rows of 2 new tokens behind 5: products 3 * (2*2*120 + 4*(5 + 6)*4) = 1968 at 20/s; prompt 1 * 2*100*5 at 10/s
    assert compute_decode_seconds(ROUND, rates, rows=3, new=2, prompt=5, unique=1) == pytest.approx(
        100 + 98.4
    )
    slow = Rates(10.0, 20.0, read_bytes=1.0, copy_bytes=4.0)
    assert (
        compute_decode_seconds(ROUND, slow, rows=3, new=2, prompt=5, unique=1) == 2 * 4 * 120
    )  # weights, read twice


def test_floor_of_the_stages_by_hand():
    rows = {
        "sft": [{"prompt": "ab", "completion": "cde"}],
        "pairs": [{"prompt": "a", "chosen": "bc", "rejected": "bcde"}],
        "prompts": [{"prompt": "ab"}, {"prompt": "abcd"}],
    }
    rates = Rates(1e3, 1e3, read_bytes=1e9, copy_bytes=1e9)
    adam = 7 * 4 * 152 / 1e9
    floors = compute_floor_rates(ROUND, rates, rows)
    forward = 32 * (2 * 100 * 6 + 2 * 20 * 4 + 2 * 36 * 4)
    assert floors["sft"] == pytest.approx(32 * 6 / (3 * forward / 1e3 + adam))
    trunk = 16 * (2 * 100 * 10 + 2 * (16 + 36) * 4)  # rows of 4 and 6 tokens
    assert floors["reward"] == pytest.approx(160 / (3 * trunk / 1e3 + adam))
    assert floors["dpo"] == pytest.approx(160 / (4 * (trunk + 16 * 2 * 20 * 8) / 1e3 + adam))
    tokens, policy = 32 * 67, 32 * (200 * 67 + 40 * 64 + 8 * 67**2)
    decoded = 32 * (64 * 240 + 16 * (64 * 3 + 63 * 32)) / 1e3
    grouped, alone = decoded + 8 * 600 / 1e3, decoded + 32 * 600 / 1e3
    assert floors["grpo"] == pytest.approx(tokens / (grouped + 3 * policy / 1e3 + adam))
    assert floors["grpo4"] == pytest.approx(tokens / (grouped + 4 * (3 * policy / 1e3 + adam)))
    values = policy - 32 * 40 * 64
    assert floors["ppo"] == pytest.approx(tokens / (alone + 4 * (policy + values) / 1e3 + 2 * adam))
    assert floors["generate_32x64"] == pytest.approx(32 * 64 / alone)


# ---------------------------------------------------------------------------------------------------------- inputs


def test_rows_are_those_that_both_sides_take():
    from speed.episodes import Scripted, order_as_drawn

    from rl_core.data.batches import DataOrder

    rows = [str(index) for index in range(7)]
    order, placed = DataOrder(7, 3, seed=5), order_as_drawn(rows, 5)
    assert [placed[index] for _ in range(3) for index in order.next_batch()] == rows
    all_rows = inputs.make_rows(count=50)
    assert all_rows == inputs.make_rows(count=50)
    assert max(len(row["prompt"]) for row in all_rows["prompts"]) <= inputs.MAX_PROMPT
    right, wrong = inputs.score("1+1=2 # 12", "12"), inputs.score("1+1=2 # 12", "13")
    assert right == pytest.approx(wrong + 1) and 0 <= wrong < 1
    assert (
        len({inputs.score("x" * length, "") for length in range(32)}) == 32
    )  # none without an advantage
    session = Scripted([1], 0, observations=[[7, 8]], limit=6)
    assert session.take_action([3, 4], [-1.0, -2.0], False) == [7, 8]
    assert session.take_action([5], [-1.0], False) is None
    assert session.completion_ids == [3, 4, 7, 8, 5] and session.sampled == 3


# --------------------------------------------------------------------------------------------------------- growth


def test_exponents_by_hand():
    fit = Fit.of([1, 2, 4], [3, 12, 48])  # 3 x^2
    assert fit == Fit(pytest.approx(2.0), pytest.approx(1.0), pytest.approx(2.0))
    # logs of x: 0, 1, 2 halvings; of y: 0, 0, 1: slope 1/2, r^2 = 1 * 1 / (2 * 2/3)
    fit = Fit.of([1, 2, 4], [1, 1, 2])
    assert (fit.exponent, fit.r_squared, fit.last) == pytest.approx((0.5, 0.75, 1.0))
    assert Fit.of([1, 2], [5, 5]) == Fit(0.0, 1.0, 0.0)
    for xs, ys in (([1], [1]), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="two points above 0"):
            Fit.of(xs, ys)


def test_a_finished_point_is_not_measured_again(tmp_path):
    from compare_speed import read_or_make

    file = tmp_path / "case.json"
    assert read_or_make(file, lambda: {"seconds": 1}) == {"seconds": 1}
    assert read_or_make(file, lambda: pytest.fail("measured again")) == {"seconds": 1}
    with pytest.raises(ZeroDivisionError):
        read_or_make(tmp_path / "other.json", lambda: 1 / 0)
    assert [path.name for path in tmp_path.iterdir()] == ["case.json"]


def test_the_processor_is_named_with_what_decides_its_speed(tmp_path):
    from compare_speed import describe_processor

    file = tmp_path / "cpuinfo"
    entry = "processor\t: {}\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu {}\n\n"
    for flags, kind in (
        ("avx2 avx512f", "AVX-512, no AMX"),
        ("avx2", "AVX2, no AMX"),
        ("avx512f amx_int8", "AVX-512, AMX"),
    ):
        file.write_text(entry.format(0, flags) + entry.format(1, flags))
        assert describe_processor(file) == f"AMD EPYC, family 25, model 17 ({kind})"
    assert "AMD" not in describe_processor(tmp_path / "none")


def test_every_curve_has_an_expectation():
    from scaling import AXES

    assert {(axis, work) for axis, (_, works, _) in AXES.items() for work in works} == set(EXPECTED)


# ------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    """With a tiny model: what it would do on a GPU, so that an hour there is not lost to a name."""
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--size", "tiny", "--steps", "1"]
    parts = [part for part in gpu.BUDGETS if part not in ("smoke", "trl_sft", "backends")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--parts", ",".join(parts)])
    gpu.main()
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert not [name for name, result in results.items() if "failed" in result]
    (decode,) = results["decode"]["runs"]
    # 4 rows, prompt 8, completion 16; 128 numbers of keys and values a token; 106,880 weights
    read = 2 * (16 * 106_880 + 4 * 128 * sum(range(8, 24)))
    assert decode["of_the_bound"] == pytest.approx(
        read / decode["seconds"] / results["limits"]["copy_bytes_per_s"]
    )
    sft, numerics = results["sft"], results["numerics"]
    assert sft["loss"] == pytest.approx(math.log(512), abs=0.15) and sft["in_rollouts"] == 0
    assert 0 < results["grpo"]["in_rollouts"] < 1 and results["grpo"]["mfu"] > 0
    assert numerics["float32"]["largest"] < 1e-3 < abs(numerics["float32"]["mean_logprob"])
    assert results["resume"]["equal"] and results["profile"]["kernels"]
    assert "left_out" in results["reads"]
    assert (
        "| grpo |" in (tmp_path / "gpu.md").read_text()
        and "| rollouts, 4 rows |" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_part_of_the_gpu_benchmark_that_fails_or_hangs_ends_no_other(tmp_path, monkeypatch):
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--size", "tiny", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--parts", "decode,sft,limits"])
    monkeypatch.setattr(gpu.Bench, "decode", lambda self: time.sleep(60))
    monkeypatch.setattr(gpu.Bench, "sft", lambda self: {}["nothing"])
    monkeypatch.setitem(gpu.BUDGETS, "decode", 1.0)
    gpu.main()
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["decode"]["failed"] == "TimeoutError: more than 1 s"
    assert results["sft"]["failed"] == "KeyError: 'nothing'"
    assert results["limits"]["matrix_flops"] > 0
    assert "`decode` failed: TimeoutError" in (tmp_path / "gpu.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_gpu_benchmark_says_that_there_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "torch sees no GPU here" in capsys.readouterr().err
