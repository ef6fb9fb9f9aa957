"""Scores and answers for evaluators, against transformers' own forward pass."""

import pytest
import torch
from helpers.gguf_models import TEXTS, build_model
from transformers import GPT2Config, GPT2LMHeadModel

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError
from rl_core.evaluators.text_scoring import (
    ContinuationRequest,
    TextRequest,
    TextScorer,
    split_into_windows,
)
from rl_core.models.lora import add_adapter
from rl_core.settings import LoraSettings


def build_scorer(kind="llama", **options):
    torch.manual_seed(3)
    if kind == "gpt2":  # not a family of the packed forward pass
        tokenizer = train_tokenizer(TEXTS * 20, 400)
        config = GPT2Config(
            vocab_size=400, n_positions=48, n_embd=32, n_layer=2, n_head=2, eos_token_id=1
        )
        model = GPT2LMHeadModel(config).eval()
    else:
        model, tokenizer = build_model("llama", max_position_embeddings=48)
    if kind == "lora":
        model = add_adapter(model, LoraSettings(rank=2))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.5)
    with torch.no_grad():  # sharp enough for answers to differ
        for weight in model.parameters():
            weight.mul_(2.0 if weight.ndim > 1 else 1.0)
    return TextScorer(model, tokenizer, **{"pass_tokens": 64, **options})


def score_alone(scorer, context, continuation):
    """Return the log-probability by one pass of transformers over the row, and whether it is greedy."""
    row = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        log_p = torch.log_softmax(scorer.model(input_ids=row).logits[0].float(), -1)
    rows = log_p[len(context) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(continuation)[:, None])
    return float(chosen.sum()), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def test_windows_by_hand():
    assert list(split_into_windows([5, 6], 1, 4)) == [([1], [5, 6])]
    # each token once; a later window has one token of context, the last as many as fit into 4
    assert list(split_into_windows(range(10, 20), 1, 4)) == [
        ([1], [10, 11, 12, 13]),
        ([13], [14, 15, 16, 17]),
        ([15, 16, 17], [18, 19]),
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora"])
def test_scores_are_those_of_a_pass_over_each_row_alone(kind):
    scorer = build_scorer(kind)
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(5, 390, (n,), generator=generator).tolist()  # noqa: E731
    contexts = [draw(n) for n in (1, 7, 20)]
    pairs = [(context, draw(n)) for context in contexts for n in (1, 1, 4)]
    pairs += [pairs[0], (contexts[2], contexts[2][:3])]  # a repeated request, a long one
    best = contexts[1]
    for _ in range(3):  # what the model itself would say
        with torch.no_grad():
            best = [*best, int(scorer.model(input_ids=torch.tensor([best])).logits[0, -1].argmax())]
    pairs.append((contexts[1], best[len(contexts[1]) :]))
    scores = scorer.score_continuations([ContinuationRequest(*pair) for pair in pairs])
    for score, pair in zip(scores, pairs, strict=True):
        logprob, is_greedy = score_alone(scorer, *pair)
        assert score.logprob == pytest.approx(logprob, rel=2e-5, abs=2e-5)
        assert score.is_greedy is is_greedy
    assert scores[-1].is_greedy and not all(score.is_greedy for score in scores)


def test_a_long_context_is_cut_on_the_left():
    scorer = build_scorer()
    context = [5 + n % 300 for n in range(100)]
    (score,) = scorer.score_continuations([ContinuationRequest(context, [7, 8])])
    assert score.logprob == pytest.approx(score_alone(scorer, context[-47:], [7, 8])[0], rel=1e-5)
    # 47 + 2 tokens: the last one is predicted and not read, so 48 are read
    assert score.logprob != pytest.approx(score_alone(scorer, context[-46:], [7, 8])[0], rel=1e-6)


def test_a_continuation_longer_than_the_context_counts_every_token():
    scorer = build_scorer()
    continuation = [5 + n * 7 % 300 for n in range(70)]
    (score,) = scorer.score_continuations([ContinuationRequest([9, 10], continuation)])
    windows = list(split_into_windows(continuation, 10, 48))
    assert [len(part) for _, part in windows] == [48, 22]
    expected = sum(score_alone(scorer, *window)[0] for window in windows)
    assert score.logprob == pytest.approx(expected, rel=1e-5)
    (text,) = scorer.score_texts([continuation])
    first = score_alone(scorer, [scorer.prefix_id], continuation[:48])[0]
    assert text == pytest.approx(first + score_alone(scorer, *windows[1])[0], rel=1e-5)
    assert scorer.score_texts([[], [5]])[0] == 0.0


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ContinuationRequest([], [5]), "context without tokens"),
        (ContinuationRequest([5], []), "continuation without tokens"),
        (ContinuationRequest([5], [400]), "token 400; valid ones are below 400"),
    ],
)
def test_what_cannot_be_scored_is_refused(request_, text):
    with pytest.raises(DataError, match=text):
        build_scorer().score_continuations([ContinuationRequest([5], [6]), request_])


def generate_alone(scorer, prompt, tokens):
    """Return the greedy continuation by passes over the whole row, until the end token."""
    row = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            logits = scorer.model(input_ids=torch.tensor([row])).logits[0, -1]
        row.append(int(logits.argmax()))
        if row[-1] == scorer.eos_id:
            return row[len(prompt) : -1]
    return row[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_greedy_answers_and_stop_texts(kind):
    scorer = build_scorer(kind)
    prompts = [
        tuple(scorer.tokenizer.encode(text)) for text in ("Two and", "A line\n\n  é 你", "x")
    ]
    decode = scorer.tokenizer.decode
    plain = scorer.generate_texts([TextRequest(prompt, max_tokens=12) for prompt in prompts])
    expected = [decode(generate_alone(scorer, prompt, 12)) for prompt in prompts]
    assert plain == expected
    whole = expected[0]
    middle = whole[len(whole) // 3 : len(whole) // 3 + 5]  # a stop of several tokens
    assert len(scorer.tokenizer.encode(middle)) > 1
    (cut,) = scorer.generate_texts([TextRequest(prompts[0], ("", "@@never", middle), 12)])
    assert cut == whole[: whole.index(middle)]
    # other options are another group; an empty prompt begins with the first token of texts
    empty, cut_prompt = scorer.generate_texts(
        [TextRequest((), max_tokens=5), TextRequest(prompts[0] * 40, max_tokens=20)]
    )
    assert empty == decode(generate_alone(scorer, [scorer.prefix_id], 5))
    assert cut_prompt == decode(generate_alone(scorer, (prompts[0] * 40)[-28:], 20))


def test_sampled_answers_depend_on_the_seed_alone():
    request = TextRequest((5, 6, 7), max_tokens=10, temperature=1.0, top_k=50)
    first = build_scorer(seed=1).generate_texts([request, request])
    assert first == build_scorer(seed=1, slots=1).generate_texts([request, request])
    assert first != build_scorer(seed=2).generate_texts([request, request])
    assert first[0] != first[1]


def test_an_answer_longer_than_the_context_is_refused():
    with pytest.raises(DataError, match="48 tokens, but the model's context is 48"):
        build_scorer().generate_texts([TextRequest((5,), max_tokens=48)])


def test_a_text_without_context_begins_with_the_first_token_of_texts_or_the_last():
    scorer = build_scorer()
    scorer.tokenizer.bos_token = None
    assert scorer.prefix_id == scorer.eos_id
    scorer.tokenizer.bos_token = scorer.tokenizer.convert_ids_to_tokens(7)
    assert scorer.prefix_id == 7 != scorer.eos_id
