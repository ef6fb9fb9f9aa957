"""The rollout engine: sessions decoded together over preallocated key/value slots.

    prompts are prefilled once and copied to every session that begins with them;
    a slot is refilled as soon as its session ends; with nothing left to refill from, the active slots close up;
    observations are appended to the live cache in the very step in which the other slots decode;
    a token's sampling and its log-probability come from one pass over the logits, with one read-back per step.

n active slots, B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rl_core.data.batches import micro_batches, pad_rows
from rl_core.models.lora import merged
from rl_core.rollouts.decoder import Decoder, Extension
from rl_core.rollouts.sampling import (
    RolloutBackend,
    Session,
    check_observation,
    check_prompt,
    draw,
    uniforms,
)
from rl_core.rollouts.transformers_backend import TransformersBackend
from rl_core.settings import SamplingSettings

__all__ = ["Engine", "RolloutBackend", "Session", "make_backend"]

_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass
_LOOKAHEAD_TOKENS = 1024  # a refill prefills prompts of waiting sessions with it, up to this many tokens


def make_backend(model: PreTrainedModel, *, eos_ids: Collection[int], pad_id: int, max_length: int) -> RolloutBackend:
    """The engine where it knows the model's family (Llama, Qwen2, Qwen3), else transformers' own forward pass.

    Args:
        eos_ids: tokens that end an action.
        pad_id: any token; used where a batch needs filling.
        max_length: longest prompt and completion together, in tokens.
    """
    backend = Engine if Decoder.supports(model) else TransformersBackend
    return backend(model, eos_ids=eos_ids, pad_id=pad_id, max_length=max_length)


class Engine:
    """A `RolloutBackend` over the model's own weights; sampling follows them without any copy."""

    def __init__(self, model: PreTrainedModel, *, eos_ids: Collection[int], pad_id: int, max_length: int) -> None:
        self.max_length = max_length
        self._model = model
        self._pad_id = pad_id
        self._decoder = Decoder(model)
        self._is_eos = np.zeros(self._decoder.vocab_size, dtype=bool)
        self._is_eos[[token for token in eos_ids if token < len(self._is_eos)]] = True

    def refresh(self) -> None:
        """Weights are read where the model keeps them, so there is nothing to copy."""

    def run(self, sessions: Sequence[Session], sampling: SamplingSettings) -> None:
        """Play every session to its end. Adapters are merged meanwhile, and taken out again bit for bit."""
        for session in sessions:
            check_prompt(session, self.max_length)
        if not sessions:
            return
        with merged(self._model):
            self._decoder.bind()
            _Run(self._decoder, sessions, sampling, self._is_eos, self._pad_id, self.max_length).play()


class _Run:
    """One call of `Engine.run`: the host's side of every slot.

    Slots 0..n-1 are active. `length` counts a slot's tokens in the cache; the newest token, `pending`, is taken in by
    the next step, and so are the tokens of `before`, which come before it.
    """

    def __init__(
        self,
        decoder: Decoder,
        sessions: Sequence[Session],
        sampling: SamplingSettings,
        is_eos: np.ndarray,
        pad_id: int,
        max_length: int,
    ) -> None:
        self._decoder, self._sampling, self._is_eos, self._pad_id = decoder, sampling, is_eos, pad_id
        self._queue = deque(sessions)
        self._slots = min(sampling.slots, len(sessions))
        self._limits = {id(s): min(len(s.prompt_ids) + sampling.max_completion_tokens, max_length) for s in sessions}
        most = max(self._limits[id(s)] - len(s.prompt_ids) for s in sessions)
        decoder.reserve(self._slots, max(self._limits.values()))
        self._sessions: list[Session | None] = []  # of the active slots; None = ended in this step
        self._before: dict[int, list[int]] = {}
        self._pending, self._length, self._limit, self._sampled, self._acted = (
            np.zeros(self._slots, dtype=np.int64) for _ in range(5)
        )
        self._rows = np.arange(self._slots)
        self._uniforms = np.zeros((self._slots, most))
        self._tokens = np.zeros((self._slots, most), dtype=np.int64)  # of the current action
        self._logprobs = np.zeros((self._slots, most))
        self._prefilled: dict[tuple[int, ...], tuple[torch.Tensor, int]] = {}  # prompt -> (keys and values, row)
        self._waiting: dict[tuple[int, ...], int] = {}  # prompt -> sessions that have not begun
        for session in sessions:
            prompt = tuple(session.prompt_ids)
            self._waiting[prompt] = self._waiting.get(prompt, 0) + 1

    def play(self) -> None:
        """Run every session to its end."""
        self._begin(list(range(self._slots)))
        while self._sessions:
            ended = self._step()
            if ended:
                self._begin(ended[: len(self._queue)])
                self._close_up(ended)

    # -- beginning and ending ------------------------------------------------------------------------------------------

    def _begin(self, slots: list[int]) -> None:
        """Start waiting sessions in free slots."""
        if not slots:
            return
        sessions = [self._queue.popleft() for _ in slots]
        prompts = [tuple(session.prompt_ids) for session in sessions]
        self._prefill(prompts)
        by_batch: dict[int, tuple[torch.Tensor, list[int], list[int]]] = {}
        for slot, session, prompt in zip(slots, sessions, prompts, strict=True):
            if slot == len(self._sessions):
                self._sessions.append(session)
            else:
                self._sessions[slot] = session
            if len(prompt) > 1:
                kv, row = self._prefilled[prompt]
                _, targets, rows = by_batch.setdefault(id(kv), (kv, [], []))
                targets.append(slot)
                rows.append(row)
            self._pending[slot], self._length[slot] = prompt[-1], len(prompt) - 1
            self._limit[slot], self._sampled[slot], self._acted[slot] = self._limits[id(session)], 0, 0
            room = self._limit[slot] - len(prompt)
            self._uniforms[slot, :room] = uniforms(session.seed, room)
            self._waiting[prompt] -= 1
            if not self._waiting[prompt]:
                self._prefilled.pop(prompt, None)
        for kv, targets, rows in by_batch.values():
            self._decoder.fill(self._tensor(targets), kv, self._tensor(rows))

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prefill the prompts that are not yet, all but their last token, and some that will be wanted soon."""
        missing = [p for p in dict.fromkeys(prompts) if len(p) > 1 and p not in self._prefilled]
        if not missing:
            return
        total = sum(map(len, missing))
        wanted = dict.fromkeys(missing)
        for session in self._queue:
            prompt = tuple(session.prompt_ids)
            if prompt in wanted or prompt in self._prefilled or len(prompt) < 2:
                continue
            total += len(prompt)
            if total > _LOOKAHEAD_TOKENS:
                break
            wanted[prompt] = None
        missing = list(wanted)
        for rows in micro_batches([len(prompt) - 1 for prompt in missing], _PREFILL_TOKENS):
            kv = self._decoder.prefill(pad_rows([missing[i][:-1] for i in rows], self._pad_id).to(self._decoder.device))
            for row, index in enumerate(rows):
                self._prefilled[missing[index]] = (kv, row)

    def _close_up(self, ended: list[int]) -> None:
        """Drop the slots that found no new session: the last active ones move into the holes."""
        holes = [slot for slot in ended if self._sessions[slot] is None]
        if not holes:
            return
        count = len(self._sessions) - len(holes)
        targets = [slot for slot in holes if slot < count]
        sources = [slot for slot in range(count, len(self._sessions)) if self._sessions[slot] is not None]
        if targets:
            self._decoder.move(self._tensor(sources), self._tensor(targets), int(self._length[sources].max()))
            for array in (self._pending, self._length, self._limit, self._sampled, self._acted):
                array[targets] = array[sources]
            for table in (self._uniforms, self._tokens, self._logprobs):
                table[targets] = table[sources]
            for source, target in zip(sources, targets, strict=True):
                self._sessions[target] = self._sessions[source]
                if source in self._before:
                    self._before[target] = self._before.pop(source)
        del self._sessions[count:]

    # -- one token for every slot --------------------------------------------------------------------------------------

    def _step(self) -> list[int]:
        """Sample one token in every active slot; the slots whose sessions ended by it, in order."""
        n = len(self._sessions)
        before, self._before = self._before, {}
        extension, extra_tokens, extra_positions = self._extension(before, n)
        for slot, ids in before.items():
            self._length[slot] += len(ids)
        tokens, positions = self._pending[:n], self._length[:n]
        if extension is not None:
            tokens, positions = np.concatenate([tokens, extra_tokens]), np.concatenate([positions, extra_positions])
        chosen, logprobs = self._sample(tokens, positions, n, extension)
        rows = self._rows[:n]
        self._length[:n] += 1
        self._sampled[:n] += 1
        self._pending[:n] = chosen
        self._tokens[rows, self._acted[:n]] = chosen
        self._logprobs[rows, self._acted[:n]] = logprobs
        self._acted[:n] += 1
        is_eos = self._is_eos[chosen]
        acted = np.flatnonzero(is_eos | (self._length[:n] + 1 >= self._limit[:n]))
        return [slot for slot in acted.tolist() if not self._end_turn(slot, hit_limit=not is_eos[slot])]

    def _sample(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, extension: Extension | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The device's part of a step: one upload, one read-back."""
        logits_nV = self._decoder.step(
            self._tensor(tokens), self._tensor(positions), n, int(positions[:n].max()) + 1, extension
        )
        drawn = self._uniforms[self._rows[:n], self._sampled[:n]]
        tokens_n, logprobs_n = draw(logits_nV, self._tensor(drawn), self._sampling.temperature)
        both_2n = torch.stack([tokens_n.double(), logprobs_n.double()]).cpu().numpy()  # token ids are exact in float64
        return both_2n[0].astype(np.int64), both_2n[1]

    def _end_turn(self, slot: int, hit_limit: bool) -> bool:
        """Hand a finished action over; False = the session has ended."""
        session, count = self._sessions[slot], int(self._acted[slot])
        assert session is not None
        observation = session.advance(
            self._tokens[slot, :count].tolist(), self._logprobs[slot, :count].tolist(), hit_limit
        )
        self._acted[slot] = 0
        if observation is None:
            self._sessions[slot] = None
            return False
        check_observation(observation, int(self._limit[slot] - self._length[slot]) - 1, hit_limit)
        self._before[slot] = [int(self._pending[slot]), *observation[:-1]]
        self._pending[slot] = observation[-1]
        return True

    def _extension(self, before: dict[int, list[int]], n: int) -> tuple[Extension | None, np.ndarray, np.ndarray]:
        """Indices of the observation tokens of this step, and the tokens and positions themselves."""
        if not before:
            nothing = np.zeros(0, dtype=np.int64)
            return None, nothing, nothing
        slots = np.array(list(before), dtype=np.int64)
        counts = np.array([len(ids) for ids in before.values()])
        width = int(counts.max())
        starts = np.cumsum(counts) - counts
        column = np.arange(width)
        inside = column < counts[:, None]
        within = np.minimum(column, counts[:, None] - 1)  # padding repeats a row's last token
        positions_XW = self._length[slots][:, None] + within
        extension = Extension(
            slots_X=self._tensor(slots),
            slots_E=self._tensor(np.repeat(slots, counts)),
            rows_XW=self._tensor(n + starts[:, None] + within),
            positions_XW=self._tensor(positions_XW),
            places_E=self._tensor(np.flatnonzero(inside)),
            length=int(positions_XW.max()) + 1,
        )
        tokens = np.array([token for ids in before.values() for token in ids], dtype=np.int64)
        return extension, tokens, positions_XW[inside]

    def _tensor(self, values: np.ndarray | list[int]) -> torch.Tensor:
        """On the device; integers as int64, floats as float64."""
        array = np.asarray(values)
        return torch.from_numpy(array).to(self._decoder.device, non_blocking=True)
