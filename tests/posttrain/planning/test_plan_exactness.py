"""Plans of several processes, of adapters, of GPT-2's layers and of experts: by hand, as the library computes them."""

import dataclasses
import json

import pytest

from posttrain.planning.pipeline_plan import plan_stage
from posttrain.planning.resource_report import _format_count, _format_duration
from posttrain.planning.target import PlanLengths, PlanTarget, list_rollout_notes, parse_gpu_target
from rl_core.settings import PolicySettings, RolloutSettings
from tasks.config import build_settings

POLICY = {
    "prompts_per_iteration": 2,
    "group_size": 4,
    "iterations": 3,
    "sampling": {"max_completion_tokens": 16, "slots": 2},
}
TWO = {"launch": {"kind": "torchrun", "processes": 2}}
CPU = PlanTarget("a machine", "cpu", 2**30, 0)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 64,
}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 8,
}


@pytest.fixture
def model_of(tmp_path):
    def folder(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return {"path": str(tmp_path)}

    return folder


def planned(stage, block, target=CPU, lengths=None, **model):
    stages = {"prepare_data": {"preferences": "rows.jsonl"}, stage: block}
    values = {
        "name": "planned",
        "model": {"preset": "nano", "context": 64, **model},
        "stages": stages,
    }
    if "path" in model:
        values["model"] = {"context": 64, **model}
    settings = build_settings(values, check_files=False, import_code=False)
    return plan_stage(stage, settings, target, lengths or PlanLengths(prompt=8))


def parts_of(plan, name):
    return next(dict(one.parts) for one in plan.memory.phases if one.name == name)


@pytest.mark.parametrize("target", [CPU, parse_gpu_target("2xH100")])
def test_rollouts_of_several_processes_hold_whole_weights(target):
    """`Shards.run_independently_with_full_weights`: beside its share, each process has all of them."""
    alone, shared = planned("policy", POLICY, target), planned("policy", {**POLICY, **TWO}, target)
    whole = parts_of(alone, "rollouts")["weights"]
    parts = parts_of(shared, "rollouts")
    assert parts["weights"] == whole // 2 and parts["gathered weights"] == whole
    assert "gathered weights" not in parts_of(alone, "rollouts")


def test_each_process_reads_the_weights_in_every_step():
    """8 rollouts of 16 tokens an iteration, on 2 slots of one process or of each of two."""
    alone, shared = planned("policy", POLICY), planned("policy", {**POLICY, **TWO})
    kept = 3 * 8 * 16 * (8 + 16 / 2) * 2 * 2 * 16 * 4  # keys and values that the tokens read
    assert shared.work.decode_steps == alone.work.decode_steps / 2 == 3 * 32
    assert shared.work.decode_bytes - kept == alone.work.decode_bytes - kept > 0
    weights = 4 * alone.parameters  # the head is the embedding
    assert alone.work.decode_bytes == pytest.approx(alone.work.decode_steps * weights + kept)


def test_a_layer_under_an_adapter_leaves_out_four_operations_a_token(model_of):
    """Of frozen weights no gradient is taken: without loss a token leaves out 4, not 6, of the last MLP's."""
    adapters = {"lora": {"rank": 2, "target_modules": ["q_proj"]}, **model_of(LLAMA)}
    block = {"batch_size": 4, "epochs": 1}
    plans = [
        planned("sft", block, lengths=PlanLengths(row=32, prompt=prompt), **adapters)
        for prompt in (None, 24)
    ]
    without, with_prompts = (plan.work.training_flops for plan in plans)
    rows = plans[0].work.trained_tokens / 32
    assert without - with_prompts == pytest.approx(4 * (3 * 32 * 96) * rows * 24)


def test_weights_of_gpt2_are_read_and_merged(model_of):
    """Its layers are transposed ones of transformers, no `nn.Linear`."""
    block = 32 * 96 + 32 * 32 + 2 * 32 * 128  # qkv, projection, MLP: their weights
    plan = planned(
        "policy", POLICY, **model_of(GPT2), lora={"rank": 2, "target_modules": "all-linear"}
    )
    assert parts_of(plan, "rollouts")["merged weights"] == 4 * block
    alone = planned("policy", POLICY, **model_of(GPT2))
    assert alone.work.decode_bytes > alone.work.decode_steps * 4 * (block + 512 * 32)


def test_kto_learns_from_one_side_and_reads_another_without_gradient():
    """Rows of 32 tokens, 2 of which (128 // 2 sides // 32) fit into a micro-batch; pairs would have 4 there."""
    sampling = {"max_completion_tokens": 16}
    block = {"batch_size": 4, "micro_batch_tokens": 128, "epochs": 1, "sampling": sampling}
    data = PlanLengths(row=32, rows=40)
    kto, dpo = (
        planned("preference", {**block, "loss": loss}, lengths=data) for loss in ("kto", "dpo")
    )
    rows = kto.work.updates * 4
    assert rows == kto.work.trained_tokens / 32 == dpo.work.trained_tokens / 64
    read = kto.work.scored_tokens - dpo.work.scored_tokens  # both read the reference's on two sides
    assert read == 32 * rows
    assert parts_of(kto, "backward")["activations"] < parts_of(dpo, "backward")["activations"]


def test_experts_are_said_to_count_all(model_of):
    """torch's grouped product takes no float32 on the meta device, where activations are recorded."""
    plan = planned("sft", {"batch_size": 4}, **model_of(EXPERTS))
    (note,) = (note for note in plan.notes if "experts" in note)
    assert note.startswith("a token meets 2 of 8 experts, but all count in operations and time")
    more = planned("sft", {"batch_size": 4}, **model_of({**EXPERTS, "num_experts_per_tok": 4}))
    kept = [parts_of(one, "backward")["activations"] for one in (plan, more)]
    beside = (
        4 * 4 * 64 * 2 * (32 + 48)
    )  # of two more rows for each of 4 x 64 tokens: inputs of both products
    assert kept[1] - kept[0] > beside
    assert not [note for note in planned("sft", {"batch_size": 4}).notes if "experts" in note]


def test_fewer_gpus_than_processes_are_said():
    notes = planned("sft", {"batch_size": 4, **TWO}, parse_gpu_target("H100")).notes
    assert "launch needs 2 GPUs, one a process, and there are 1; the time is theirs" in notes
    assert not [
        note
        for note in planned("sft", {"batch_size": 4, **TWO}, parse_gpu_target("2xH100")).notes
        if "GPU" in note
    ]


def test_rollouts_beside_the_process_are_said():
    block = PolicySettings()
    beside = dataclasses.replace(block, rollouts=RolloutSettings(workers="ray"))
    (note,) = set(list_rollout_notes(beside, PlanLengths())) - set(
        list_rollout_notes(block, PlanLengths())
    )
    assert "but are played beside it (workers: ray)" in note


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.6, "1k"),
        (1234, "1.23k"),
        (999_960, "1M"),
        (7.2e9, "7.2G"),
        (1.5e15, "1,500T"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(number, shown):
    assert _format_count(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(59.0, "59 s"), (90, "1.5 min"), (3600, "1 h"), (3600 * 1234.4, "1,234 h")],
)
def test_long_times_have_no_exponent(seconds, shown):
    assert (
        _format_duration(seconds) == shown
        and _format_duration(-seconds, signed=True) == f"-{shown}"
    )
