"""Log-probabilities of the tokens of a prompt, by the trainer's forward pass.

S tokens of a prompt, C positions of a chunk, H hidden, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_core.capabilities import check_chunked_head, refuse_image_model
from rl_core.inference.serving_requests import PromptScores, ServedRequest, TopTokens
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.chunked_head import compute_chunk_tokens, compute_log_softmax_chunk
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.lora import unwrap_model
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def score_prompts(model: PreTrainedModel, requests: list[ServedRequest]) -> None:
    """Score the prompts of the requests that ask for it, each alone: its numbers do not depend on the others.

    A prompt whose scoring fails gets the error; it does not concern other requests.
    """
    for request in requests:
        if request.prompt_top is None or request.prompt_scores is not None:
            continue
        try:
            refuse_image_model(model, "prompt_scores", "prompt log-probabilities")
            request.prompt_scores = score_prompt(model, request.prompt_ids, request.prompt_top)
        except Exception as error:
            request.error = error


@torch.no_grad()
def score_prompt(model: PreTrainedModel, prompt_ids: list[int], num_top: int) -> PromptScores:
    """Compute log softmax(logits) of every token of a prompt after its first.

    Args:
        num_top: most likely tokens to return for each position.
    """
    base = unwrap_model(model)
    device = next(base.parameters()).device
    ids_1S = torch.tensor([prompt_ids], dtype=torch.int64, device=device)
    if ids_1S.shape[1] < 2:
        return PromptScores([], None)
    targets_N = ids_1S[0, 1:]
    logprobs: list[float] = []
    rows: list[tuple[np.ndarray, np.ndarray, float]] = []
    with use_eval_mode(base):
        for start, log_p_CV in _iter_log_probabilities(base, ids_1S):
            targets_C1 = targets_N[start : start + len(log_p_CV), None]
            logprobs += log_p_CV.gather(1, targets_C1).squeeze(1).tolist()
            if num_top:
                rows += _select_top_tokens(log_p_CV, num_top)
    return PromptScores(logprobs, TopTokens.from_rows(rows))


def _iter_log_probabilities(base: Any, ids_1S: torch.Tensor) -> Any:
    """Yield (first position, log-probabilities float32 [C, V]) of the tokens that follow all positions but the last."""
    if not check_chunked_head(base).allowed:  # the model scales or caps its logits
        logits_NV = base(input_ids=ids_1S, use_cache=False).logits[0, :-1]
        yield 0, torch.log_softmax(logits_NV.float(), dim=-1)
        return
    real_1S = torch.ones_like(ids_1S, dtype=torch.bool)
    batch = TrainBatch(ids_1S, real_1S, torch.zeros_like(real_1S))
    states_NH = compute_hidden_states(base, batch)[0, :-1]
    head = base.get_output_embeddings()
    chunk_tokens = compute_chunk_tokens(ids_1S.device.type, head.weight.shape[0])
    for start in range(0, len(states_NH), chunk_tokens):
        chunk_CH = states_NH[start : start + chunk_tokens]
        bias_V = getattr(head, "bias", None)
        yield start, compute_log_softmax_chunk(chunk_CH, head.weight, bias_V).float()


def _select_top_tokens(
    log_p_CV: torch.Tensor, num_top: int
) -> list[tuple[np.ndarray, np.ndarray, float]]:
    best = log_p_CV.topk(min(num_top, log_p_CV.shape[-1]), dim=-1)
    ids_CK, logprobs_CK = best.indices.cpu().numpy(), best.values.cpu().numpy()
    rest_C = 1.0 - np.exp(logprobs_CK.astype(np.float64)).sum(-1)
    return [
        (ids_K, logprobs_K, max(0.0, float(rest)))
        for ids_K, logprobs_K, rest in zip(ids_CK, logprobs_CK, rest_C, strict=True)
    ]
