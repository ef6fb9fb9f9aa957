"""Log-probabilities of continuations and texts by the engine, as evaluators ask for them.

The scorer takes token ids; `rl_core/evaluators/lm_eval_child.py` gives it those of lm-eval's requests. Rows that begin
alike, such as the choices of one question, are computed once up to where they differ.

B rows, S tokens of a row, N scored tokens, C states of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import check_chunked_head, check_prefix_sharing
from rl_core.cpu.packed_forward import PrefixStates
from rl_core.cpu.prefix_tree import encode_row
from rl_core.data.batches import build_unscored_batch, plan_shared_batches
from rl_core.data.token_ids import find_textless_ids, list_end_ids
from rl_core.errors import DataError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import AnswerSequence, build_stop_test, cut_at_stop
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.chunked_head import compute_chunk_tokens, compute_log_softmax_chunk
from rl_core.models.hidden_states import build_model_inputs, compute_prefix_states
from rl_core.models.lora import unwrap_model
from rl_core.models.rotary import read_model_max_length
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ContinuationRequest:
    """A continuation to score after its context."""

    context: list[int]  # at least one token
    continuation: list[int]  # at least one token


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a continuation."""

    logprob: float  # nats, summed over the tokens
    is_greedy: bool  # True = every token is the most likely one


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    stops: tuple[str, ...] = ()  # texts that end the answer, which is cut before them
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def split_into_windows(
    tokens: Sequence[int], first: int, max_length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Split tokens into windows that a model of `max_length` tokens can score: (context, tokens to score).

    Every token is in one window. The first window's context is `first`; a later one has at least one token of context,
    and the last as many as fit.
    """
    stop = min(max_length, len(tokens))
    yield [first], list(tokens[:stop])
    while stop < len(tokens):
        start, stop = stop, min(stop + max_length, len(tokens))
        yield list(tokens[max(0, stop - 1 - max_length) : start]), list(tokens[start:stop])


class TextScorer:
    """Scorer and sampler of texts over a model in this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Sequence[int] = (),
        pass_tokens: int = 8192,
        slots: int = 16,
        seed: int = 0,
    ) -> None:
        """Prepare the scorer; the model's weights are read where they are.

        Args:
            end_ids: tokens that end an answer besides the tokenizer's and the generation settings'.
            pass_tokens: tokens of a scoring pass. slots: answers decoded together. seed: of sampled answers.
        """
        self.model, self.tokenizer = model.requires_grad_(False), tokenizer
        self.max_length = read_model_max_length(model)
        self._pass_tokens, self._slots, self._seed = pass_tokens, slots, seed
        config: Any = model.config.get_text_config()
        self._vocab_size = int(config.vocab_size)
        self.eos_id = _read_token_id(tokenizer.eos_token_id)
        self.pad_id = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ends = (self.eos_id, *list_end_ids(tokenizer), *end_ids)
        self._end_ids = tuple(dict.fromkeys(ends))

    @property
    def prefix_id(self) -> int:
        """Token that stands before a text without context: the tokenizer's first token, else its last one."""
        bos_id = self.tokenizer.bos_token_id
        return self.eos_id if bos_id is None else _read_token_id(bos_id)

    # ------------------------------------------------------------------------------------------------------ scores

    def score_continuations(self, requests: Sequence[ContinuationRequest]) -> list[Score]:
        """Score continuations, in order.

        A context that does not fit is cut on the left. A continuation that is longer than the model's context is
        scored in windows (`split_into_windows`), so that each of its tokens counts.

        Raises: DataError for an empty context or continuation, or a token outside the vocabulary.
        """
        windows: list[ContinuationRequest] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            parts = self._build_windows(index, request)
            windows += parts
            owners += [index] * len(parts)
        totals = [0.0] * len(requests)
        are_greedy = [True] * len(requests)
        scores = self._score_windows(windows)
        for owner, score in zip(owners, scores, strict=True):
            totals[owner] += score.logprob
            are_greedy[owner] &= score.is_greedy
        return [Score(*pair) for pair in zip(totals, are_greedy, strict=True)]

    def score_texts(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Compute the log-probability of complete texts, in nats: each token of them once, in windows.

        A text without tokens has the log-probability 0.
        """
        filled = [index for index, text in enumerate(texts) if len(text)]
        requests = [ContinuationRequest([self.prefix_id], list(texts[index])) for index in filled]
        totals = [0.0] * len(texts)
        for index, score in zip(filled, self.score_continuations(requests), strict=True):
            totals[index] = score.logprob
        return totals

    def _build_windows(self, index: int, request: ContinuationRequest) -> list[ContinuationRequest]:
        context, continuation = request.context, request.continuation
        if not context or not continuation:
            part = "context" if not context else "continuation"
            raise DataError(f"request {index} has a {part} without tokens; nothing can be scored")
        for token in (*context, *continuation):
            if not 0 <= token < self._vocab_size:
                raise DataError(
                    f"request {index} holds token {token}; valid ones are below {self._vocab_size}"
                )
        if len(continuation) > self.max_length:
            windows = split_into_windows(continuation, context[-1], self.max_length)
            return [ContinuationRequest(*window) for window in windows]
        room = self.max_length + 1 - len(continuation)  # the last token is predicted, not read
        return [ContinuationRequest(context[-room:], continuation)]

    def _score_windows(self, windows: Sequence[ContinuationRequest]) -> list[Score]:
        rows = [[*window.context, *window.continuation][:-1] for window in windows]
        lengths = [len(row) for row in rows]
        scores: list[Score | None] = [None] * len(rows)

        def fill(indices: list[int]) -> None:
            continuations = [windows[index].continuation for index in indices]
            found = self._score_batch([rows[index] for index in indices], continuations)
            for index, score in zip(indices, found, strict=True):
                scores[index] = score

        with torch.no_grad(), use_eval_mode(self.model):
            encoded_rows = None
            if check_prefix_sharing(self.model).allowed:
                encoded_rows = ([encode_row(row)] for row in rows)
            batches = plan_shared_batches(lengths, self._pass_tokens, encoded_rows)
            MemoryFit("scoring of continuations").compute_batches(batches, fill, lengths=lengths)
        return [score for score in scores if score is not None]

    def _score_batch(
        self, rows: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> list[Score]:
        """Score continuations whose last tokens but one end the rows."""
        width = max(map(len, rows))
        positions, targets, counts = list[int](), list[int](), list[int]()
        for index, (row, continuation) in enumerate(zip(rows, continuations, strict=True)):
            end = index * width + len(row)
            positions += range(end - len(continuation), end)
            targets += continuation
            counts.append(len(continuation))
        base = unwrap_model(self.model)
        device = next(base.parameters()).device
        batch = build_unscored_batch(rows, self.pad_id).to(device)
        positions_N, targets_N = (
            torch.tensor(values, device=device) for values in (positions, targets)
        )
        logprobs_N, is_best_N = _compute_target_logprobs(base, batch, positions_N, targets_N)
        sums = [part.sum().item() for part in logprobs_N.double().cpu().split(counts)]
        are_greedy = [bool(part.all()) for part in is_best_N.cpu().split(counts)]
        return [Score(*pair) for pair in zip(sums, are_greedy, strict=True)]

    # ----------------------------------------------------------------------------------------------------- answers

    def generate_texts(self, requests: Sequence[TextRequest]) -> list[str]:
        """Continue prompts, in order: the text before the first stop text or end token.

        A prompt that leaves no room for `max_tokens` is cut on the left, an empty one begins with `prefix_id`.

        Raises: DataError if `max_tokens` alone exceed the model's context.
        """
        answers = [""] * len(requests)
        groups: dict[TextRequest, list[int]] = {}
        for index, request in enumerate(requests):
            if request.max_tokens >= self.max_length:
                raise DataError(
                    f"an answer may have {request.max_tokens} tokens, but the model's context is {self.max_length}; "
                    "lower the task's max_gen_toks, or where it sets none stages.suites.max_completion_tokens"
                )
            kind = dataclasses.replace(request, prompt=())
            groups.setdefault(kind, []).append(index)
        for kind, indices in groups.items():
            for index, text in zip(
                indices, self._generate_group(kind, [requests[i] for i in indices]), strict=True
            ):
                answers[index] = text
        return answers

    def _generate_group(self, kind: TextRequest, requests: Sequence[TextRequest]) -> list[str]:
        """Continue the prompts of requests that differ in nothing else."""
        stops = tuple(stop for stop in kind.stops if stop)
        room = self.max_length - kind.max_tokens
        has_stop = build_stop_test(lambda ids: str(self.tokenizer.decode(list(ids))), stops)
        sequences = [
            AnswerSequence(
                list(request.prompt[-room:]) or [self.prefix_id],
                compute_sequence_seed("suites", self._seed, index),
                has_stop,
            )
            for index, request in enumerate(requests)
        ]
        sampling = SamplingSettings(
            temperature=kind.temperature,
            top_k=kind.top_k,
            top_p=kind.top_p,
            min_p=kind.min_p,
            repetition_penalty=kind.repetition_penalty,
            max_completion_tokens=kind.max_tokens,
            stop=stops[:1],  # one suffices to have `has_stop` called
            slots=self._slots,
            max_turns=1,
        )
        backend = create_rollout_backend(
            self.model,
            eos_ids=self._end_ids,
            pad_id=self.pad_id,
            max_length=self.max_length,
            textless_ids=find_textless_ids(self.tokenizer, self._vocab_size),
        )
        backend.run_sequences(sequences, sampling)
        return [self._cut_answer(sequence.tokens, stops) for sequence in sequences]

    def _cut_answer(self, tokens: list[int], stops: tuple[str, ...]) -> str:
        if tokens and tokens[-1] in self._end_ids:
            tokens = tokens[:-1]
        return cut_at_stop(str(self.tokenizer.decode(tokens, skip_special_tokens=True)), stops)


def _read_token_id(value: Any) -> int:
    """Return a special token's id; transformers types it as an id or a list."""
    return int(value[0] if isinstance(value, list) else value)


def _compute_target_logprobs(
    base: PreTrainedModel, batch: Any, positions_N: torch.Tensor, targets_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of the token after each flat position, and whether it is the most likely one.

    A state that several rows share passes the head once.
    """
    has_plain_head = check_chunked_head(base).allowed
    if has_plain_head:
        needed_P = torch.zeros(
            batch.input_ids_BS.numel(), dtype=torch.bool, device=targets_N.device
        )
        needed_P[positions_N] = True
        states = compute_prefix_states(base, batch, needed_P.view(batch.input_ids_BS.shape))
    else:  # the model scales or caps its logits, so it computes them itself
        logits_BSV = base(**build_model_inputs(base, batch), use_cache=False).logits
        states = PrefixStates.from_padded(logits_BSV.reshape(*batch.input_ids_BS.shape, -1))
    numbers_N = states.numbers_BS.reshape(-1)[positions_N]
    order_N = numbers_N.argsort(stable=True)
    distinct_n, inverse_N = torch.unique_consecutive(numbers_N[order_N], return_inverse=True)
    logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=targets_N.device)
    is_best_N = torch.empty(len(targets_N), dtype=torch.bool, device=targets_N.device)
    head: Any = base.get_output_embeddings()
    chunk_tokens = compute_chunk_tokens(targets_N.device.type, head.weight.shape[0])
    for start in range(0, len(distinct_n), chunk_tokens):
        numbers_C = distinct_n[start : start + chunk_tokens]
        values_CH = states.states_NH.index_select(0, numbers_C)
        if has_plain_head:
            log_p_CV = compute_log_softmax_chunk(
                values_CH, head.weight, getattr(head, "bias", None)
            ).float()
        else:
            log_p_CV = torch.log_softmax(values_CH.float(), dim=-1)
        is_here_N = (inverse_N >= start) & (inverse_N < start + len(numbers_C))
        rows_n, places_n = inverse_N[is_here_N] - start, order_N[is_here_N]
        targets_n = targets_N[places_n]
        logprobs_N[places_n] = log_p_CV[rows_n, targets_n]
        is_best_N[places_n] = log_p_CV.argmax(-1)[rows_n] == targets_n
    return logprobs_N, is_best_N
