"""Plans of several processes, adapters, GPT-2 layers and experts, compared with the formulas of the library."""

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
TWO_PROCESSES = {"launch": {"kind": "torchrun", "processes": 2}}
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
def write_model(tmp_path):
    def folder(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return {"path": str(tmp_path)}

    return folder


def make_plan(stage, block, target=CPU, lengths=None, **model):
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


def read_parts(plan, name):
    return next(dict(phase.parts) for phase in plan.memory.phases if phase.name == name)


@pytest.mark.parametrize("target", [CPU, parse_gpu_target("2xH100")])
def test_rollouts_of_several_processes_hold_whole_weights(target):
    """Compare with `Shards.run_independently_with_full_weights`: each process holds its share and all weights."""
    alone, shared = (
        make_plan("policy", POLICY, target),
        make_plan("policy", {**POLICY, **TWO_PROCESSES}, target),
    )
    full_bytes = read_parts(alone, "rollouts")["weights"]
    parts = read_parts(shared, "rollouts")
    assert parts["weights"] == full_bytes // 2 and parts["gathered weights"] == full_bytes
    assert "gathered weights" not in read_parts(alone, "rollouts")


def test_each_process_reads_the_weights_in_every_step():
    """Decode 8 rollouts of 16 tokens an iteration, on 2 slots of one process or of each of two."""
    alone, shared = make_plan("policy", POLICY), make_plan("policy", {**POLICY, **TWO_PROCESSES})
    cache_bytes = 3 * 8 * 16 * (8 + 16 / 2) * 2 * 2 * 16 * 4  # keys and values that the tokens read
    assert shared.work.decode_steps == alone.work.decode_steps / 2 == 3 * 32
    assert shared.work.decode_bytes - cache_bytes == alone.work.decode_bytes - cache_bytes > 0
    weights = 4 * alone.parameters  # the head is the embedding
    assert alone.work.decode_bytes == pytest.approx(alone.work.decode_steps * weights + cache_bytes)


def test_a_layer_under_an_adapter_leaves_out_four_operations_a_token(write_model):
    """Skip gradients of frozen weights: a token without loss saves 4, not 6, operations of the last MLP."""
    adapters = {"lora": {"rank": 2, "target_modules": ["q_proj"]}, **write_model(LLAMA)}
    block = {"batch_size": 4, "epochs": 1}
    plans = [
        make_plan("sft", block, lengths=PlanLengths(row=32, prompt=prompt), **adapters)
        for prompt in (None, 24)
    ]
    without, with_prompts = (plan.work.training_flops for plan in plans)
    rows = plans[0].work.trained_tokens / 32
    assert without - with_prompts == pytest.approx(4 * (3 * 32 * 96) * rows * 24)


def test_weights_of_gpt2_are_read_and_merged(write_model):
    """Count layers of GPT-2, which are transposed ones of transformers and no `nn.Linear`."""
    block = 32 * 96 + 32 * 32 + 2 * 32 * 128  # qkv, projection, MLP: their weights
    plan = make_plan(
        "policy", POLICY, **write_model(GPT2), lora={"rank": 2, "target_modules": "all-linear"}
    )
    assert read_parts(plan, "rollouts")["merged weights"] == 4 * block
    alone = make_plan("policy", POLICY, **write_model(GPT2))
    assert alone.work.decode_bytes > alone.work.decode_steps * 4 * (block + 512 * 32)


def test_kto_learns_from_one_side_and_reads_another_without_gradient():
    """Plan rows of 32 tokens: 2 of them (128 // 2 sides // 32) fit into a micro-batch, but 4 as pairs."""
    sampling = {"max_completion_tokens": 16}
    block = {"batch_size": 4, "micro_batch_tokens": 128, "epochs": 1, "sampling": sampling}
    data = PlanLengths(row=32, rows=40)
    kto, dpo = (
        make_plan("preference", {**block, "loss": loss}, lengths=data) for loss in ("kto", "dpo")
    )
    rows = kto.work.updates * 4
    assert rows == kto.work.trained_tokens / 32 == dpo.work.trained_tokens / 64
    extra_tokens = (
        kto.work.scored_tokens - dpo.work.scored_tokens
    )  # both score the reference on two sides
    assert extra_tokens == 32 * rows
    assert read_parts(kto, "backward")["activations"] < read_parts(dpo, "backward")["activations"]


def test_a_note_says_that_all_experts_count(write_model):
    """Record activations on the meta device, where torch's grouped product does not support float32."""
    plan = make_plan("sft", {"batch_size": 4}, **write_model(EXPERTS))
    (note,) = (note for note in plan.notes if "experts" in note)
    assert note.startswith("a token uses 2 of 8 experts, but all count in operations and time")
    larger = make_plan(
        "sft", {"batch_size": 4}, **write_model({**EXPERTS, "num_experts_per_tok": 4})
    )
    activations = [
        read_parts(expert_plan, "backward")["activations"] for expert_plan in (plan, larger)
    ]
    added = (
        4 * 4 * 64 * 2 * (32 + 48)
    )  # of two more rows for each of 4 x 64 tokens: inputs of both products
    assert activations[1] - activations[0] > added
    assert not [note for note in make_plan("sft", {"batch_size": 4}).notes if "experts" in note]


def test_a_note_says_that_gpus_are_fewer_than_processes():
    notes = make_plan("sft", {"batch_size": 4, **TWO_PROCESSES}, parse_gpu_target("H100")).notes
    assert "launch needs 2 GPUs, one a process, and there are 1; the time is theirs" in notes
    assert not [
        note
        for note in make_plan(
            "sft", {"batch_size": 4, **TWO_PROCESSES}, parse_gpu_target("2xH100")
        ).notes
        if "GPU" in note
    ]


def test_a_note_says_that_rollouts_use_other_processes():
    block = PolicySettings()
    remote = dataclasses.replace(block, rollouts=RolloutSettings(workers="ray"))
    (note,) = set(list_rollout_notes(remote, PlanLengths())) - set(
        list_rollout_notes(block, PlanLengths())
    )
    assert "are played in other processes (workers: ray)" in note


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
