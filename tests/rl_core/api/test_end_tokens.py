"""End tokens of generation_config.json, ids without text, and the texts of SentencePiece's completions."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from helpers.chat_templates import family
from helpers.scripted_sequences import ScriptedSequence
from helpers.serving import TEXTS, running_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import rl_core
from rl_core.api.policy import Policy
from rl_core.data.chat import ChatRenderer
from rl_core.data.token_ids import find_textless_ids, list_end_ids, set_end_ids
from rl_core.errors import DataError, ModelError
from rl_core.inference.engine import Engine
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.settings import EvaluationSettings, LoraSettings, ModelSettings, SamplingSettings
from rl_core.types import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = dict(preset="nano", vocab_size=400, context=128, device="cpu")
SAMPLING = SamplingSettings(max_completion_tokens=40, max_turns=1)


def save_model(folder: Path, ends: object, *, rows: int = 0) -> Path:
    """Save a model whose generation settings name these end tokens; `rows`: of its embedding."""
    policy = rl_core.create_policy(TEXTS, ModelSettings(**SIZES))
    for parameter in policy.model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    if rows:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy.model.resize_token_embeddings(rows, mean_resizing=False)
    policy.model.generation_config.eos_token_id = ends
    return policy.save(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ends") / "model", [1, *range(20, 60)])


ENDS = {1, *range(20, 60)}


def check_completions(completions: list[list[int]], ends: set[int], most: int) -> None:
    assert sum(ids[-1] in ends - {1} for ids in completions) > len(completions) / 2
    for ids in completions:
        assert not ends & set(ids[:-1])
        assert ids[-1] in ends or len(ids) == most


@pytest.mark.parametrize("backend_class", [Engine, TransformersBackend])
def test_samplers_and_evaluation_stop_at_any_of_them(
    model_folder: Path, backend_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = rl_core.load_policy(model_folder, ModelSettings(device="cpu"))
    assert set(policy.renderer.eos_ids) == ENDS
    monkeypatch.setattr(
        Policy,
        "backend",
        lambda self: backend_class(
            self.model, eos_ids=self.renderer.eos_ids, pad_id=0, max_length=self.context
        ),
    )
    result = rl_core.evaluate(
        policy,
        prompts=[{"prompt": f"colour {n}?"} for n in range(8)],
        settings=EvaluationSettings(sampling=SAMPLING, greedy=False),
    )
    check_completions([list(rollout.completion_ids) for rollout in result.rollouts], ENDS, 40)
    texts = [text for row in rl_core.generate(policy, ["colour?"], samples=4) for text in row]
    pieces = {policy.tokenizer.decode([token]) for token in ENDS}
    assert all(not text or text[-1:] not in pieces for text in texts)  # not part of the text


def test_serve_stops_at_any_of_them(model_folder: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, model_folder) as served:
        ids = []
        for seed in range(8):
            choice = served.chat(seed=seed, temperature=1.0, max_tokens=40, logprobs=True)[
                "choices"
            ][0]
            ids.append([entry["token"] for entry in choice["logprobs"]["content"]])
            assert (choice["finish_reason"] == "stop") == (len(ids[-1]) < 40)
        tokenizer = served.server.model.renderer.tokenizer
        pieces = {tokenizer.decode([token]) for token in ENDS}
        assert all(not pieces & set(row[:-1]) for row in ids)
        assert sum(row[-1] in pieces for row in ids) > 4


def test_servers_and_exports_keep_the_list(model_folder: Path, tmp_path: Path) -> None:
    settings = ModelSettings(device="cpu", lora=LoraSettings(rank=2))
    for name, options in (("plain", ModelSettings(device="cpu")), ("merged", settings)):
        policy = rl_core.load_policy(model_folder, options)
        policy.save(tmp_path / name)
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert set(written["eos_token_id"]) == ENDS
        again = rl_core.load_policy(tmp_path / name, ModelSettings(device="cpu"))
        assert again.renderer.eos_ids == policy.renderer.eos_ids
    sent = pickle.loads(pickle.dumps(policy.renderer))  # as to workers
    assert sent.eos_ids == policy.renderer.eos_ids
    pair = rl_core.load_policy((policy.model, family(CHATML)))
    assert set(pair.renderer.eos_ids) > ENDS


@pytest.mark.parametrize(
    ("configured", "ends"),
    [
        ({"eos_token_id": [2, 107, 2]}, (2, 107)),
        ({"eos_token_id": 107}, (107,)),
        ({"eos_token_id": None}, ()),
        ({}, ()),
        ({"eos_token_id": 2, "_from_model_config": True}, ()),  # a default of the model's class
        ({"eos_token_id": [2], "_from_model_config": True}, (2,)),
    ],
)
def test_forms_of_the_setting(configured: dict[str, object], ends: tuple[int, ...]) -> None:
    tokenizer = family(CHATML)
    set_end_ids(tokenizer, configured)
    assert list_end_ids(tokenizer) == ends


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "a"}', '{"eos_token_id": [true]}', "{", "[]"]
)
def test_a_bad_setting_is_refused(tmp_path: Path, content: str) -> None:
    policy = rl_core.create_policy(TEXTS, ModelSettings(**SIZES))
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        rl_core.load_policy(tmp_path, ModelSettings(device="cpu"))


def test_demonstrations_end_as_rollouts_do() -> None:
    """No token after an end token is trained on."""
    tokenizer = family(CHATML, ("<|eom|>", "</tool_call>"))
    eom, close = tokenizer.convert_tokens_to_ids(["<|eom|>", "</tool_call>"])
    (ordinary,) = tokenizer.encode("z")
    plain_end = ChatRenderer(tokenizer).eos_id
    set_end_ids(tokenizer, {"eos_token_id": [eom, close, ordinary]})
    renderer = ChatRenderer(tokenizer)
    assert renderer.eos_ids[-3:] == (eom, close, ordinary)
    assert renderer.action_ids("ab")[-1] == plain_end
    spelled = renderer.action_ids("a<|eom|>b")  # a message cannot end the turn early
    assert eom not in spelled and renderer.action_text(spelled) == "a<|eom|>b"
    assert renderer.action_ids("a</tool_call>")[-1] == close  # as a policy's turn ends
    assert renderer.action_text(renderer.action_ids("a</tool_call>")) == "a</tool_call>"
    assert renderer.action_ids("az")[-1] == ordinary
    assert renderer.action_text([*tokenizer.encode("a"), ordinary]) == "a"
    assert renderer.action_text([*tokenizer.encode("a"), eom]) == "a"
    for text, token in (("aza", "'z'"), ("a</tool_call> b", "'</tool_call>'")):
        with pytest.raises(DataError, match=f"the token {token} .* before its end"):
            renderer.action_ids(text)
    assert renderer.action_ids("a<|eom|>") == [*tokenizer.encode("a"), eom]
    assert renderer.digest != ChatRenderer(family(CHATML, ("<|eom|>", "</tool_call>"))).digest


def test_calls_that_end_with_a_token_of_their_own() -> None:
    """As gpt-oss and Llama 3.1 end them."""
    calls = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m.get('tool_calls') or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}<|eom|>"
        "{% else %}<|im_end|>{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = family(calls, ("<|eom|>",))
    function = {"name": "peek", "arguments": {"at": 1}}
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    with pytest.raises(DataError, match="a policy would not stop there"):
        ChatRenderer(tokenizer).render_assistant_text(message)
    eom = tokenizer.convert_tokens_to_ids("<|eom|>")
    set_end_ids(tokenizer, {"eos_token_id": [eom]})
    renderer = ChatRenderer(tokenizer)
    ids, mask = renderer.encode_conversation([{"role": "user", "content": "hi"}, message])
    assert ids[-1] == eom and mask[-1]
    assert tokenizer.decode(ids).endswith('<|im_start|>assistant\npeek {"at": 1}<|eom|>')


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("backend_class", [None, TransformersBackend])
def test_ids_without_text_are_never_sampled(
    tmp_path: Path, temperature: float, backend_class: type | None
) -> None:
    """An embedding of twice the tokenizer's size: half of all samples would have no text."""
    folder = save_model(tmp_path / "model", 1, rows=800)
    policy = rl_core.load_policy(folder, ModelSettings(device="cpu"))
    size = len(policy.tokenizer)
    assert policy.textless_ids == tuple(range(size, 800))
    if backend_class is None:
        backend = policy.backend()
    else:
        backend = backend_class(
            policy.model,
            eos_ids=policy.renderer.eos_ids,
            pad_id=0,
            max_length=128,
            textless_ids=policy.textless_ids,
        )
    for top_k in (0, 50):
        sequences = [ScriptedSequence([5, 6, 7 + n], seed=n) for n in range(6)]
        backend.run_sequences(
            sequences,
            SamplingSettings(max_completion_tokens=30, temperature=temperature, top_k=top_k),
        )
        for sequence in sequences:
            assert max(sequence.completion_ids) < size
    assert find_textless_ids(policy.tokenizer, size) == ()


def make_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer as Llama 2 and Mistral have it: words carry their space, a text's first one is dropped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["[INST] it is Oslo [/INST] Oslo it is"] * 50, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
        "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
    )
    return wrapped


def test_completions_keep_their_leading_space() -> None:
    tokenizer = make_sentencepiece_tokenizer()
    renderer = ChatRenderer(tokenizer)
    ids = renderer.action_ids("Oslo it is")
    prompt = renderer.prompt_ids([{"role": "user", "content": "it"}])
    together = tokenizer.decode([*prompt, *ids[:-1]])
    assert together == tokenizer.decode(prompt) + " Oslo it is"
    assert tokenizer.decode(ids[:-1]) == "Oslo it is"  # alone: without it
    assert renderer.action_text(ids) == " Oslo it is"
    assert renderer.action_ids(" Oslo it is") == ids  # a sampled text has its tokens again
    assert renderer.action_text([]) == ""
    assert renderer.decode_ids(ids[:1]).startswith(" ")
    byte_level = ChatRenderer(family(CHATML))
    for text in ("Oslo", " Oslo", "  x"):
        assert byte_level.action_text(byte_level.action_ids(text)) == text


def test_named_templates() -> None:
    tokenizer = family("{{ 'D' }}")
    with_tools = CHATML.replace(
        "{% for", "{{ (tools or [])|map(attribute='function.name')|join }}{% for", 1
    )
    tokenizer.chat_template = {"default": CHATML, "tool_use": with_tools, "rag": "{{ 'R' }}"}
    tool = {"type": "function", "function": {"name": "peek", "description": "", "parameters": {}}}
    renderer = ChatRenderer(tokenizer)
    plain = renderer.prompt_ids([{"role": "user", "content": "hi"}])
    told = renderer.with_tools([tool]).prompt_ids([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(told) == "peek" + tokenizer.decode(plain)
    assert renderer.template.tool_source == with_tools and renderer.template.source == CHATML
    no_tool_role = (
        "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tool') }}{% endif %}"
    )
    tokenizer.chat_template = {"default": no_tool_role + CHATML, "tool_use": with_tools}
    assert not ChatRenderer(tokenizer).facts.has_tool
    assert ChatRenderer(tokenizer, tools=[tool]).facts.has_tool  # those of the template in use
    needs_tools = with_tools.replace("(tools or [])", "tools")
    tokenizer.chat_template = {"default": CHATML, "tool_use": needs_tools}
    needing = ChatRenderer(tokenizer, tools=[tool]).prompt_ids([{"role": "user", "content": "hi"}])
    assert needing == told
    tokenizer.chat_template = [{"name": "default", "template": CHATML}]
    assert ChatRenderer(tokenizer).template.tool_source == CHATML
    tokenizer.chat_template = {"rag": CHATML, "other": CHATML}
    with pytest.raises(DataError, match="other, rag and none named 'default'"):
        ChatRenderer(tokenizer)
