"""`posttrain check plan CONFIG`: memory by part compared with hand calculation, work, changes that fit, refusals."""

import json
import re

import pytest
import yaml

from posttrain.cli.main import main
from posttrain.planning.pipeline_plan import plan_pipeline, plan_stage
from posttrain.planning.resource_report import find_fitting_changes, fits_target
from posttrain.planning.target import (
    PlanLengths,
    PlanTarget,
    build_machine_target,
    count_known_rows,
    parse_gpu_target,
)
from rl_core.errors import SettingsError
from rl_core.settings.planning import MachineSettings, MeasuredSpeed
from tasks.config import build_settings

GIB = 2**30
# A Llama of the preset nano with 512 tokens: 2 layers, H 32, E 32, K 16, I 96.
EMBEDDING = 512 * 32
LAYER = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 96 + 2 * 32  # qkv, o, mlp, two norms
PARAMETERS = EMBEDDING + 2 * LAYER + 32
SPEED = {"hidden_size": 32, "median": 1e9, "slowest": 5e8, "fastest": 2e9}
MACHINE = {
    "name": "a machine",
    "threads": 1,
    "memory_bytes": GIB,
    "library_bytes": 1000,
    "pipeline_bytes": 24,
    "training": [SPEED],
    "scoring": [SPEED],
    "decoding": [SPEED],
    "decode_step_seconds": 0.5,
    "decode_row_seconds": 0.25,
    "copy_bytes_per_second": 1e9,
    "read_bytes_per_second": 1e18,
}


def make_plan(stages, target=None, lengths=None, **model):
    """Plan the last of these stages for the model nano."""
    settings = build_stage_settings(stages, **model)
    return plan_stage(
        list(stages)[-1], settings, target or make_roomy_target(), lengths or PlanLengths()
    )


def build_stage_settings(stages, **model):
    stages = {"prepare_data": {}, **stages}
    values = {
        "name": "planned",
        "model": {"preset": "nano", "context": 64, **model},
        "stages": stages,
    }
    return build_settings(values, check_files=False, import_code=False)


def make_roomy_target(**changes):
    """Return a CPU with 1 GiB whose runtime takes no memory."""
    return PlanTarget("a machine", "cpu", **{"memory_bytes": GIB, "runtime_bytes": 0, **changes})


@pytest.fixture
def model_folder(tmp_path):
    """Write a model folder that holds only a config: the preset nano."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def make_machine(**changes):
    speeds = {name: tuple(MACHINE[name]) for name in ("training", "scoring", "decoding")}
    points = {
        name: tuple(MeasuredSpeed(**point) for point in rows) for name, rows in speeds.items()
    }
    return MachineSettings(**{**MACHINE, **points, **changes})


def phase(plan, name):
    return next(dict(row.parts) for row in plan.memory.phases if row.name == name)


SFT = {"sft": {"batch_size": 4, "epochs": 1}}


def test_parameters_and_what_training_holds():
    plan = make_plan(SFT)
    assert plan.parameters == plan.trainable_parameters == PARAMETERS
    held = phase(plan, "optimizer step")
    assert (
        held["weights"] == held["gradients"] == 4 * PARAMETERS
        and held["optimizer moments"] == 8 * PARAMETERS
    )
    averaged = phase(
        make_plan({"sft": {"ema_decay": 0.9, "grokfast_lambda": 2.0}}), "optimizer step"
    )
    assert averaged["EMA"] == averaged["Grokfast"] == 4 * PARAMETERS


def test_muon_keeps_one_moment_of_hidden_matrices():
    """Give Muon all of a layer but its norms; AdamW has the embedding, which is the head, and the norms."""
    muon = 2 * (LAYER - 2 * 32)
    held = phase(make_plan({"sft": {"optimizer": "muon"}}), "optimizer step")
    assert held["optimizer moments"] == 4 * muon + 8 * (PARAMETERS - muon)
    assert held["optimizer temporaries"] == 10 * 32 * 96


def test_bfloat16_weights_have_masters():
    held = phase(make_plan(SFT, dtype="bfloat16"), "optimizer step")
    assert (
        held["weights"] == 2 * PARAMETERS
        and held["master weights"] == held["gradients"] == 4 * PARAMETERS
    )


def test_activations_of_the_packed_forward_pass():
    """Pack 4 rows of 64 tokens, all with loss.

    A token keeps in a layer 4 H + 2 E + 2 K + 3 I + 4 heads + 2 scales.
    """
    layer = 4 * 32 + 2 * 32 + 2 * 16 + 3 * 96 + 4 + 2
    saved = 256 * (2 * layer + (32 + 2 * 32) + 32)
    parts = phase(make_plan(SFT), "backward")
    temporary, logits = 256 * (2 * 32 + 3 * 96), 256 * 512 * 2
    assert logits > temporary  # so the peak is at the head, next to its gradient
    assert parts["activations"] == 4 * saved and parts["logits"] == 4 * logits
    assert parts["gradients"] == 4 * EMBEDDING


def test_small_micro_batches_take_less_and_hold_all_gradients():
    parts = phase(
        make_plan({"sft": {**SFT["sft"], "micro_batch_tokens": 100}}), "backward"
    )  # one row of 64
    one_batch = phase(make_plan(SFT), "backward")
    assert parts["activations"] * 3 < one_batch["activations"] and parts["gradients"] == 4 * (
        PARAMETERS + 32 * 96
    )


def test_checkpointing_keeps_only_inputs_of_layers():
    plan = make_plan({"sft": {**SFT["sft"], "activation_checkpointing": True}}, dtype="float32")
    without = make_plan({"sft": {**SFT["sft"], "autocast": "bfloat16"}})
    assert phase(plan, "backward")["activations"] < phase(without, "backward")["activations"]
    assert plan.work.training_flops == pytest.approx(make_plan(SFT).work.training_flops * 4 / 3)


def test_adapters_train_little(model_folder):
    plan = make_plan(
        SFT, path=model_folder, lora={"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    )
    adapters = 2 * 4 * (32 + 32 + 96 + 32)
    assert plan.trainable_parameters == adapters and plan.parameters == PARAMETERS + adapters
    assert phase(plan, "optimizer step")["optimizer moments"] == 8 * adapters
    played = phase(
        make_plan(POLICY, path=model_folder, lora={}, lengths=PlanLengths(prompt=8)), "rollouts"
    )
    assert played["merged weights"] == 4 * 2 * (LAYER - 64)  # the originals of all layers


POLICY = {
    "policy": {
        "prompts_per_iteration": 2,
        "group_size": 4,
        "iterations": 3,
        "sampling": {"max_completion_tokens": 16, "slots": 6},
    }
}


def test_times_in_bfloat16_take_their_speeds():
    """Give training eight times the speed of float32, scoring four times and decoding twice."""

    def make_speed(factor):
        return (MeasuredSpeed(hidden_size=32, **{k: factor * SPEED[k] for k in RANGE}),)

    RANGE = ("median", "slowest", "fastest")
    machine = make_machine(
        training_bfloat16=make_speed(8),
        scoring_bfloat16=make_speed(4),
        decoding_bfloat16=make_speed(2),
    )
    lengths = PlanLengths(prompt=8, rows=8)
    stages = {"policy": {**POLICY["policy"], "kl_coef": 0.1}}
    in_half = {"policy": {**stages["policy"], "autocast": "bfloat16"}}
    plain = make_plan(stages, make_roomy_target(machine=machine), lengths)
    half = make_plan(in_half, make_roomy_target(machine=machine), lengths)
    work = half.work
    assert work.training_flops > 0 and work.scoring_flops > 0 and work.decoding_flops > 0
    fixed = 0.5 * work.decode_steps + 0.25 * work.decode_rows + work.traffic_bytes / 1e9
    products = work.training_flops / 8 + work.scoring_flops / 4 + work.decoding_flops / 2
    assert half.time.likely == pytest.approx(products / 1e9 + fixed)
    assert half.time.high == pytest.approx(2 * products / 1e9 + fixed)
    assert half.time.low == pytest.approx(products / 2e9 + fixed)
    assert plain.time.likely == pytest.approx(plain.work.flops / 1e9 + fixed)
    assert not [note for note in (*plain.notes, *half.notes) if "bfloat16" in note]
    old = make_plan(in_half, make_roomy_target(machine=make_machine()), lengths)
    assert old.time.likely == pytest.approx(work.flops / 1e9 + fixed)
    assert [note for note in old.notes if "the time is that of float32" in note]


def test_holes_of_the_heap_are_calibrated_with_or_without_adapters(model_folder):
    target = make_roomy_target(machine=make_machine(heap_share=0.25, heap_share_adapters=0.75))
    for adapters, share in ((None, 0.25), ({"rank": 2}, 0.75)):
        options = {"path": model_folder, **({"lora": adapters} if adapters else {})}
        without = make_plan(SFT, lengths=PlanLengths(row=64), **options)
        parts = phase(make_plan(SFT, target, PlanLengths(row=64), **options), "backward")
        uncalibrated = dict(phase(without, "backward"))
        # without a calibration only adapters have some
        assert (uncalibrated.pop("holes of the heap", 0) > 0) == bool(adapters)
        holes = parts["holes of the heap"]
        assert sum(parts.values()) == sum(uncalibrated.values()) + holes
        assert parts["holes of the heap"] >= int(share * parts["activations"])


def test_rollouts_reserve_keys_and_values_of_all_slots():
    """Reserve 6 slots of 24 tokens: 2 layers, keys and values of width 16, float32.

    The multiplied weights are packed.
    """
    parts = phase(make_plan(POLICY, lengths=PlanLengths(prompt=8)), "rollouts")
    assert parts["KV cache"] == 6 * 24 * 2 * 2 * 16 * 4
    assert parts["packed weights"] == 4 * (2 * (LAYER - 64) + EMBEDDING)
    assert parts["weights"] == 4 * PARAMETERS and parts["optimizer moments"] == 8 * PARAMETERS
    update = phase(make_plan(POLICY, lengths=PlanLengths(prompt=8)), "backward")
    assert (
        update["KV cache"] == parts["KV cache"]
        and update["packed weights"] == parts["packed weights"]
    )


def test_references_critics_and_reward_models(model_folder):
    kl = {"policy": {**POLICY["policy"], "kl_coef": 0.1}}
    assert phase(make_plan(kl), "rollouts")["reference model"] == 4 * PARAMETERS
    assert "reference model" not in phase(make_plan(kl, path=model_folder, lora={}), "rollouts")
    rounded = {"policy": {**kl["policy"], "reference_precision": "int8"}}
    linear = 2 * (LAYER - 64)
    assert (
        phase(make_plan(rounded), "rollouts")["reference model"]
        == 4 * (PARAMETERS - linear) + linear
    )
    ppo = make_plan({"policy": {**POLICY["policy"], "algorithm": "ppo"}})
    critic = PARAMETERS + 32  # its trunk has the embedding, and a head of width 32
    assert phase(ppo, "rollouts")["critic"] == 12 * critic
    assert phase(ppo, "critic's optimizer step")["gradients"] == 4 * critic


def test_processes_share_weights_and_gather_them():
    launch = {"launch": {"kind": "torchrun", "processes": 2}}
    plan = make_plan({"sft": {**SFT["sft"], **launch}})
    step = phase(plan, "optimizer step")
    assert plan.processes == 2 and step["weights"] == step["gradients"] == 2 * PARAMETERS
    assert phase(plan, "backward")["gathered weights"] == 4 * PARAMETERS  # all together on a CPU


def test_work_of_an_iteration_by_hand():
    """Play 8 rollouts of 8 + 16 tokens on 6 slots, 3 times; the model takes 6 operations a weight and token.

    Of each group of 4, three prompts are not computed again, and at prompts the last layer skips its MLP.
    """
    work = make_plan(POLICY, lengths=PlanLengths(prompt=8)).work
    assert (
        work.decoded_tokens == 3 * 8 * 16 and work.scored_tokens == 3 * 2 * 8 and work.updates == 3
    )
    assert work.decode_steps == pytest.approx(3 * 8 * 16 / 6) and work.decode_rows == 3 * 128
    tokens, products = 3 * 8 * 24, PARAMETERS
    attention = 6 * 2 * 32 * 3 * 8 * 24**2
    left_out = 6 * (3 * 32 * 96) * 3 * 8 * 8
    computed = 1 - 2 * 3 * 8 / (8 * 24)
    assert work.trained_tokens == tokens
    assert work.training_flops == pytest.approx(
        (6 * products * tokens + attention - left_out) * computed
    )


def test_times_of_a_machine_are_an_interval_around_the_median():
    plan = make_plan(
        POLICY, target=build_machine_target(make_machine()), lengths=PlanLengths(prompt=8)
    )
    work, time = plan.work, plan.time
    fixed = work.decode_steps * 0.5 + work.decode_rows * 0.25 + work.traffic_bytes / 1e9
    assert time.likely == pytest.approx(fixed + work.flops / 1e9)
    assert time.low == pytest.approx(fixed + work.flops / 2e9) and time.high == pytest.approx(
        fixed + work.flops / 5e8
    )
    assert plan.memory.peak.parts["runtime"] == 1024


def test_gpus_have_published_intervals_or_lower_bounds():
    known = make_plan(SFT, target=parse_gpu_target("2xH100"))
    memory = known.work.traffic_bytes / 3.35e12
    assert known.time.low == pytest.approx(known.work.training_flops / (0.43 * 989e12) + memory)
    assert known.time.high == pytest.approx(known.work.training_flops / (0.38 * 989e12) + memory)
    assert "launch uses 1 of 2 GPUs: set launch.processes" in known.notes
    assert make_plan(SFT, target=parse_gpu_target("B200")).time.high is None  # no MFU is published
    assert (
        make_plan(POLICY, target=parse_gpu_target("h100")).time.high is None
    )  # rollouts: the device's limit alone
    assert parse_gpu_target("4xA100-40GB").memory_bytes == 40 * 10**9


def test_rows_come_from_files_and_settings(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert (
        count_known_rows(str(path)) == 2
        and count_known_rows(str(tmp_path / "rows.csv")) is None
        and count_known_rows(None) is None
    )
    data = {"prepare_data": {"num_demonstrations": 100, "heldout_fraction": 0.2}}
    assert make_plan({**data, **SFT}).work.updates == 20  # 80 rows in batches of 4
    unknown = make_plan({"prepare_data": {"demonstrations": "rows.csv"}, **SFT})
    assert (
        unknown.work is unknown.time is None
        and "rows of the data are not known" in unknown.notes[-1]
    )
    assert (
        make_plan(
            {"prepare_data": {"demonstrations": "rows.csv"}, **SFT}, lengths=PlanLengths(rows=5)
        ).work
        is not None
    )


def test_a_plan_says_that_rows_count_at_their_longest():
    (note,) = (note for note in make_plan(SFT).notes if "rows count" in note)
    assert note == "rows count at 64 tokens, the longest that fit: --row-tokens gives their mean"
    assert not [
        note for note in make_plan(SFT, lengths=PlanLengths(row=16)).notes if "rows count" in note
    ]


def test_all_stages_of_a_pipeline_are_planned_or_named():
    stages = {
        "prepare_data": {},
        "sft": {},
        "preference": {},
        "reward_model": {},
        "policy": {},
        "evaluate": {},
        "analyze": {},
    }
    plan = plan_pipeline(
        build_stage_settings(stages, context=128), make_roomy_target(), PlanLengths()
    )
    assert [stage_plan.name for stage_plan in plan.stages] == [
        "sft",
        "preference",
        "reward_model",
        "policy",
        "evaluate",
        "analyze",
    ]
    assert plan.unplanned_stages == ("prepare_data",)
    reward = plan.stages[2]
    assert reward.parameters == PARAMETERS + 32  # the head is the embedding; a vector is added
    assert [stage_plan.trainable_parameters for stage_plan in plan.stages[-2:]] == [0, 0]


def test_thoughts_by_hand():
    """Play 3 episodes of 8 + 20 tokens: each answer with and without its thought, 2 rows a turn."""
    thoughts = {
        "iterations": 5,
        "episodes_per_iteration": 3,
        "eval_every": 0,
        "patience": None,
        "validation_episodes": 2,
        "check_episodes": 2,
        "sampling": {"max_completion_tokens": 20},
    }
    plan = make_plan(
        {"sft": {}, "thoughts": thoughts}, lengths=PlanLengths(prompt=8, completion=20)
    )
    work = plan.work
    assert work.updates == 5 and work.trained_tokens == 5 * 6 * 28
    assert (
        work.decoded_tokens == 5 * 3 * 20 + 2 * 20 + 2 * 20
    )  # a validation at the end, and the test
    # Rewards of 6 rows, baseline states of 3 and prompts of 3; then 2 x 2 and 4 x 2 rows, prompts of 2 and 2.
    assert work.scored_tokens == 5 * (9 * 28 + 3 * 8) + (4 + 8) * 28 + 4 * 8
    backward = next(phase for phase in plan.memory.phases if phase.name == "backward")
    assert (
        backward.parts["optimizer moments"] == 8 * PARAMETERS
        and "reference model" not in backward.parts
    )
    with_reference = make_plan(
        {"sft": {}, "thoughts": {**thoughts, "kl_coef": 0.1}},
        lengths=PlanLengths(prompt=8, completion=20),
    )
    assert with_reference.memory.peak.parts["reference model"] == 4 * PARAMETERS
    assert with_reference.work.scored_tokens == work.scored_tokens + 5 * 6 * 28


def test_analysis_holds_two_models_and_export_one_in_a_separate_process():
    """Score rows of 64 + 64 tokens, 32 of them in a pass of 4096 tokens."""
    stages = {
        "sft": {},
        "policy": {},
        "evaluate": {},
        "analyze": {"probe_episodes": 10, "probe_demonstrations": 4},
        "export": {},
    }
    settings = build_stage_settings(stages, context=128)
    plans = {
        plan.name: plan
        for plan in plan_pipeline(
            settings, make_roomy_target(runtime_bytes=1000), PlanLengths()
        ).stages
    }
    parts = plans["analyze"].memory.peak.parts
    assert parts["weights"] == 2 * 4 * PARAMETERS and parts["runtime"] == 1000
    assert parts["activations"] == 4 * (4 * 32 + 32 + 2 * 16 + 3 * 96) * 4096
    assert plans["analyze"].work.scored_tokens == (2 * 3 * 10 + 2 * 4) * 128
    parts = plans["export"].memory.peak.parts
    assert parts["weights"] == 4 * PARAMETERS and parts["runtime"] == 2000
    assert plans["export"].work.scored_tokens == 2 * 2 * 16 * 16
    alone = make_plan({"sft": {}, "evaluate": {}, "analyze": {"probe_episodes": 10}}, context=128)
    assert alone.memory.peak.parts["weights"] == 4 * PARAMETERS, (
        "one model is not compared with itself"
    )


def test_a_gguf_file_is_planned_with_its_size():
    """Two models in float32, and blocks of 32 bytes with a scale of two on the disk."""
    plan = make_plan({"sft": {}, "gguf": {"type": "q8_0"}}, context=128)
    assert plan.memory.peak.parts["weights"] == 2 * 4 * PARAMETERS
    size = 34 / 32 * PARAMETERS / 1e9
    assert f"the file takes {size:,.2f} GB in the output folder" in plan.notes


def test_networks_by_hand(monkeypatch):
    """Plan CartPole (4 numbers, 2 actions): a policy of 4-8-2 and a value of 4-8-1, with biases."""
    pytest.importorskip("gymnasium")
    settings = {
        "environment_steps": 640,
        "num_environments": 4,
        "rollout_steps": 16,
        "hidden": [8],
        "epochs": 3,
    }
    plan = make_plan({"network": settings})
    parameters = (4 * 8 + 8 + 8 * 2 + 2) + (4 * 8 + 8 + 8 + 1)
    assert plan.parameters == plan.trainable_parameters == parameters and plan.time is None
    parts = plan.memory.peak.parts
    assert parts["optimizer moments"] == 8 * parameters and parts["steps"] == 4 * (4 + 2 + 6) * 64
    assert plan.work.updates == 10 * 3 and plan.work.training_flops == 6 * parameters * 640 * 3

    def fail(settings):
        raise SettingsError("environment: cannot be made")

    pipeline = build_stage_settings({"network": settings})
    monkeypatch.setattr("rl_core.networks.vector_environment.read_spaces", fail)
    left_out = plan_pipeline(pipeline, make_roomy_target(), PlanLengths()).unplanned_stages
    assert left_out == ("prepare_data", "network (environment: cannot be made)")


def plan_without_room(stages, share, **model):
    """Return the plan and the changes for a machine whose memory is this share of the peak."""
    settings, name = build_stage_settings(stages, **model), list(stages)[-1]
    plan = plan_stage(name, settings, make_roomy_target(), PlanLengths())
    target = make_roomy_target(memory_bytes=int(plan.memory.peak.total * share))
    assert not fits_target(plan, target) and fits_target(plan, make_roomy_target())
    return plan, find_fitting_changes(plan, settings, target, PlanLengths())


def test_the_mildest_value_that_fits_is_taken():
    plan, changes = plan_without_room({"sft": {"batch_size": 64}}, 0.9)
    (micro,) = [change for change in changes if change.description == "smaller micro-batches"]
    assert (
        micro.fits and micro.yaml == "stages.sft.micro_batch_tokens=2048"
    )  # 64 rows of 64 tokens are 4096
    assert micro.saved_bytes == plan.memory.peak.total - micro.plan.memory.peak.total > 0


def test_changes_that_fit_come_first():
    stages = {"policy": {**POLICY["policy"], "kl_coef": 0.1}}
    _, changes = plan_without_room(stages, 0.97)
    assert changes and [change.fits for change in changes] == sorted(
        (change.fits for change in changes), reverse=True
    )
    assert len(changes) <= 3
    _, hopeless = plan_without_room(stages, 0.01)
    assert hopeless and not any(change.fits for change in hopeless)
    assert [change.saved_bytes for change in hopeless] == sorted(
        (change.saved_bytes for change in hopeless), reverse=True
    )


def test_adapters_are_offered_for_models_with_a_path(model_folder):
    _, changes = plan_without_room(
        {"sft": {"optimizer": "adamw", "micro_batch_tokens": 64}}, 0.99, path=model_folder
    )
    assert "LoRA" not in [change.description for change in plan_without_room(SFT, 0.9)[1]]
    (adapters,) = [change for change in changes if change.description == "LoRA"]
    assert adapters.yaml == "model.lora={}" and adapters.plan.trainable_parameters < PARAMETERS


def test_processes_are_offered_only_on_gpus():
    target = PlanTarget("4 GPUs", "cuda", 10, 0, gpu=parse_gpu_target("H100").gpu, gpus=4)
    settings = build_stage_settings(SFT)
    plan = plan_stage("sft", settings, target, PlanLengths())
    changes = find_fitting_changes(plan, settings, target, PlanLengths(), max_changes=9)
    (processes,) = [
        change for change in changes if change.description == "more processes with FSDP"
    ]
    assert (
        processes.yaml == 'stages.sft.launch={"kind": "torchrun", "processes": 4}'
        and processes.plan.processes == 4
    )
    assert "more processes with FSDP" not in [
        change.description for change in plan_without_room(SFT, 0.9)[1]
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "name": "planned",
        "model": {"preset": "nano"},
        "stages": {**SFT, "prepare_data": {}, **POLICY},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(MACHINE))
    return tmp_path


def test_the_command_prints_parts_times_and_changes(folder, capsys):
    assert main(["check", "plan", "mine.yaml", "--machine", "machine.yaml"]) == 0
    text = capsys.readouterr().out
    assert "sft: " in text and "policy: " in text and "KV cache" in text and "VmHWM" in text
    assert (
        re.search(r"time .* \[.*\]", text)
        and "not planned: prepare_data" in text
        and "fits" in text
    )
    small = yaml.safe_dump({**MACHINE, "memory_bytes": 400_000})
    (folder / "small.yaml").write_text(small)
    assert main(["check", "plan", "mine.yaml", "--machine", "small.yaml"]) == 0
    assert re.search(r"DOES NOT FIT(.|\n)*-> .*=.*# .*: saves", capsys.readouterr().out)


def test_the_command_for_programs(folder, capsys):
    assert main(["check", "plan", "mine.yaml", "--gpus", "2xH200", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["target"]["name"] == "2 x H200" and [
        stage["stage"] for stage in document["stages"]
    ] == [
        "sft",
        "policy",
    ]
    sft = document["stages"][0]
    assert (
        sft["fits"] and sft["seconds"]["high"] is None and sft["phases"][0]["bytes"]["weights"] > 0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpus", "8xH900"],
            r"--gpus: no GPU 'H900' is known; did you mean .* \(known: A10, A100",
        ),
        (["--gpus", "8xFOO"], r"--gpus: no GPU 'FOO' is known; known: A10, [^()]*$"),
        (["--gpus", "00xH100"], r"--gpus: '00xH100' is no number and kind of GPU"),
        (["--machine", "nothere"], r"nothere: no such file; [^;]*$"),
        (["--gpus", "8"], "--gpus: 8 of which kind"),
        (["--gpus", "0xH100"], "write 8xH200"),
        (["--machine", "none.yaml"], "none.yaml"),
        (["--machine", "damaged.yaml"], r"damaged.yaml:\d+: "),
        (["--machine", "short.yaml"], "short.yaml: .*training"),
        (["--gpus", "H100", "--set", "stages.sft.epochs=-1"], "stages.sft.epochs: found -1"),
        (["--gpus", "H100", "--set", "model.path=empty"], "contains no config.json"),
        (
            [
                *["--gpus", "H100", "--set", "environment.name=arithmetic"],
                *["--set", "model.path=models:/mine@champion"],
            ],
            "model.path: .* is in the registry",
        ),
        (["--simulate", "--gpus", "8xH100"], "--simulate takes --gpus N"),
    ],
)
def test_refusals_are_one_line(folder, capsys, arguments, message):
    (folder / "empty").mkdir()
    (folder / "damaged.yaml").write_text(yaml.safe_dump({**MACHINE, "threads": -1}))
    (folder / "short.yaml").write_text(
        yaml.safe_dump({key: MACHINE[key] for key in MACHINE if key != "training"})
    )
    assert main(["check", "plan", "mine.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error), error
