"""Lengths that `posttrain check plan` measures with the model's tokenizer, where nobody gives them."""

import itertools
import json

import pytest

from posttrain.cli.main import main
from posttrain.planning.sampled_lengths import SAMPLE_SIZE, sample_lengths
from posttrain.planning.target import PlanLengths
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from tasks.config import build_settings

CONTEXT = 4096
POLICY = {"iterations": 1, "prompts_per_iteration": 2, "group_size": 2}
SAMPLING = {"max_completion_tokens": 16, "slots": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["what is 3 + 4? the answer is 7"], 300)
    settings = ModelSettings(preset="nano", context=CONTEXT, device="cpu")
    causal_lm.save(causal_lm.create_model(settings, tokenizer, 0), tokenizer, folder / "model")
    return folder / "model"


def build(model, environment="arithmetic", data=None, **stages):
    path = {"preset": "nano"} if model is None else {"path": str(model)}
    stages = {"prepare_data": data or {}, **stages}
    environment = environment if isinstance(environment, dict) else {"name": environment}
    values = {"name": "t", "environment": environment, "model": path, "stages": stages}
    return build_settings(values, import_code=False)


def test_prompts_count_as_the_environment_s_and_not_as_the_context(model):
    settings = build(model, policy={**POLICY, "sampling": SAMPLING})
    sampled = sample_lengths(settings, PlanLengths())
    environment = make_environment("arithmetic")
    renderer = ChatRenderer(causal_lm.load_tokenizer(model, settings.model), settings.model)
    lengths = [
        len(renderer.prompt_ids(environment.episode(seed, level).reset()))
        for level in environment.levels
        for seed in itertools.islice(environment.seeds_of("train", level), 200)
    ]
    assert min(lengths) <= sampled.sampled_prompt <= max(lengths) < CONTEXT / 4
    chosen, notes = sampled.choose_for_stage("policy", settings)
    assert chosen.prompt == sampled.sampled_prompt and chosen.row is None
    assert notes == [f"prompts count at {chosen.prompt:,} tokens, the longest of a sample"]


def test_rows_are_those_of_the_files(model, tmp_path):
    """Ten demonstrations of 1 and 3 words, and pairs; the tokenizer decides their tokens."""
    rows = [
        {"prompt": "what is 3?", "completion": "the answer is 7" if n % 2 else "7"}
        for n in range(10)
    ]
    pairs = [{"prompt": "what is 3?", "chosen": "the answer is 7", "rejected": "4"}] * 3
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    data = {"demonstrations": f"{tmp_path}/rows.jsonl", "preferences": f"{tmp_path}/pairs.jsonl"}
    settings = build(model, data=data, sft={}, preference={}, policy=POLICY)
    sampled = sample_lengths(settings, PlanLengths())
    renderer = ChatRenderer(causal_lm.load_tokenizer(model, settings.model), settings.model)
    prompt = len(renderer.prompt_ids([{"role": "user", "content": "what is 3?"}]))
    answers = [len(renderer.action_ids(text)) for text in ("the answer is 7", "7", "4")]
    assert sampled.sampled_row == round(prompt + (answers[0] + answers[1]) / 2)
    assert sampled.sampled_side == round(prompt + (answers[0] + answers[2]) / 2)
    chosen, notes = sampled.choose_for_stage("preference", settings)
    assert (chosen.row, chosen.prompt) == (sampled.sampled_side, prompt)
    assert len(notes) == 2
    chosen, _ = sampled.choose_for_stage("sft", settings)
    assert (chosen.row, chosen.prompt) == (sampled.sampled_row, None)


def test_pairs_from_rollouts_are_a_prompt_and_a_completion(model):
    settings = build(model, preference={"sampling": SAMPLING})
    sampled = sample_lengths(settings, PlanLengths())
    chosen, _ = sampled.choose_for_stage("preference", settings)
    assert chosen.row == sampled.sampled_prompt + 16


def test_what_the_user_gives_counts(model):
    settings = build(model, sft={}, policy=POLICY)
    given = PlanLengths(row=77, prompt=9)
    chosen, notes = sample_lengths(settings, given).choose_for_stage("policy", settings)
    assert (chosen.row, chosen.prompt, notes) == (77, 9, [])


def test_presets_and_code_of_the_user_are_left_alone(model, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')\n")
    assert sample_lengths(build(None, policy=POLICY), PlanLengths()) == PlanLengths()
    environment = {"name": f"{tmp_path}/mine.py:Mine"}
    settings = build(model, environment, policy=POLICY)
    assert sample_lengths(settings, PlanLengths()).sampled_prompt is None


def test_a_damaged_row_ends_the_sample_and_not_the_plan(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "what is 3?", "completion": "7"}\n{"prompt": 3}\nnot json\n')
    settings = build(model, data={"demonstrations": str(path)}, sft={})
    assert sample_lengths(settings, PlanLengths()).sampled_row > 0


def test_the_command_fits_a_real_context(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = {**POLICY, "sampling": SAMPLING}
    config = {
        "name": "t",
        "environment": {"name": "arithmetic"},
        "model": {"path": str(model)},
        "stages": {"policy": policy},
    }
    (tmp_path / "t.yaml").write_text(json.dumps(config))
    assert main(["check", "plan", "t.yaml", "--gpus", "H100"]) == 0
    printed = capsys.readouterr().out
    assert "the longest of a sample" in printed
    assert main(["check", "plan", "t.yaml", "--gpus", "H100", "--prompt-tokens", "11"]) == 0
    assert "of a sample" not in capsys.readouterr().out
    assert SAMPLE_SIZE >= 32
