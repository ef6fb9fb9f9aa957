"""Reward components of a model: the reward model's score, and a judge behind an OpenAI-compatible URL."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from rl_core.errors import BackendError, CheckpointError, RewardError, SettingsError, suggest_name
from rl_core.json_client import RequestLimits, build_openai_address, post_adapted
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import RewardComponent, SampleFailure
from rl_core.rewards.judge_replies import read_reply, read_score
from rl_core.rewards.running_stats import RunningNorm
from rl_core.settings import JudgeSettings
from rl_core.storage.atomic_files import make_folder, resolve_cache_folder, write_json_atomic
from rl_core.types import Rollout

# Token ids of complete sequences -> one score each.
Scorer = Callable[[Sequence[Sequence[int]]], Sequence[float]]

logger = logging.getLogger(__name__)


class LearnedReward(RewardComponent):
    """A reward model's score of each rollout's tokens, shifted and scaled to mean 0 and deviation 1 over the run.

    Bradley-Terry scores have no natural zero or unit; normalised, a weight means the same for every reward model.
    Metrics: score (mean of the raw scores), running_mean, running_std.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.norm = RunningNorm()

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout. Raises: RewardError for a wrong number of scores or a non-finite one."""
        rows = [tuple(r.last_context) for r in rollouts]
        different = list(dict.fromkeys(rows))  # a confident policy repeats the same rollouts
        different_scores = [float(s) for s in self.scorer([list(row) for row in different])]
        if len(different_scores) != len(different):
            raise RewardError(
                f"the reward model gave {len(different_scores)} scores for {len(different)} different rollouts"
            )
        score_of = dict(zip(different, different_scores, strict=True))
        scores = [score_of[row] for row in rows]
        for index, score in enumerate(scores):
            if not math.isfinite(score):  # before it spoils the running mean
                raise RewardError(f"the reward model scored rollout {index} with {score}")
        self.norm.add_values(scores)
        if scores:
            self.metrics = {
                "score": fmean(scores),
                "running_mean": self.norm.mean,
                "running_std": self.norm.std,
            }
        return self.norm.normalise_values(scores)

    def state_dict(self) -> dict[str, Any]:
        """Return the running normalisation."""
        return {"norm": self.norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.norm.load_state_dict(state["norm"])


_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
_BUILTIN_NAMES = ("prompt", "completion", "target")


class JudgeReward(RewardComponent):
    """Judge's score of each rollout, scaled to (score - lowest) / (highest - lowest).

    A request that fails, or whose reply was cut or has no score within the scale, is repeated a bounded number of
    times; after that the rollout is in `failed` and has no reward. Once `has_too_many` have failed, no further requests
    are sent. Complete replies with a score are cached in a folder by the digest of the request, so each request is sent
    once.
    Metrics: asked, cached (judgements), failed (rollouts).
    """

    def __init__(
        self,
        settings: JudgeSettings,
        has_too_many: Callable[[int, int], bool] = lambda failed, played: failed > 0,
    ) -> None:
        """Check the settings; `has_too_many` as in `UserReward`. Raises: SettingsError without url or model."""
        super().__init__()
        self.settings, self._has_too_many = settings, has_too_many
        if settings.url is None or settings.model is None:
            raise SettingsError(
                "rewards.judge: needs reward_options.judge.url and model, the model's name on the server"
            )
        if not settings.url.startswith(("http://", "https://")):
            raise SettingsError(
                f"rewards.judge: reward_options.judge.url '{settings.url}' is not an http:// or https:// address"
            )
        self._url = build_openai_address(settings.url, "chat/completions")
        self._folder = (
            Path(settings.cache).expanduser()
            if settings.cache
            else resolve_cache_folder("judgements")
        )

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Refuse placeholders that no column fills, see `RewardComponent`."""
        if columns is None:
            return
        known = [*_BUILTIN_NAMES, *columns]
        for match in _PLACEHOLDER.finditer(self.settings.prompt):
            if match[1] and match[1] not in known:
                raise SettingsError(
                    f"reward_options.judge.prompt: '{{{match[1]}}}' is none of {', '.join(known)}; "
                    f"{suggest_name(match[1], known)} Double literal braces"
                )

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float | None]:
        """Return one number per rollout; None = not judged."""
        questions = [self._build_question(rollout) for rollout in rollouts]
        keys = [_digest_question(question) for question in questions]
        cached = {key: self._read_cached_score(key) for key in dict.fromkeys(keys)}
        scores = {key: score for key, score in cached.items() if score is not None}
        requests = {
            key: question
            for key, question in zip(keys, questions, strict=True)
            if key not in scores
        }
        reasons = self._request_judgements(requests, scores, keys)
        self.failed = {
            index: SampleFailure(f"could not judge it: {reasons[key]}")
            for index, key in enumerate(keys)
            if key in reasons
        }
        self.metrics = {
            "asked": float(len(requests)),
            "cached": float(len(set(keys)) - len(requests)),
            "failed": float(len(self.failed)),
        }
        return [scores.get(key) for key in keys]

    def _request_judgements(
        self, requests: Mapping[str, dict[str, Any]], scores: dict[str, float], keys: Sequence[str]
    ) -> dict[str, str]:
        """Request all judgements, store them in `scores`, and return the reasons of those that failed."""
        failed: dict[str, str] = {}
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.settings.concurrency)
        try:
            pending: dict[Future[float], str] = {
                pool.submit(self._request_judgement, key, question, stop): key
                for key, question in requests.items()
            }
            for future in as_completed(pending):
                try:
                    scores[pending[future]] = future.result()
                except BackendError as error:
                    failed[pending[future]] = str(error)
                    if self._has_too_many(sum(key in failed for key in keys), len(keys)):
                        break
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return failed

    def _request_judgement(
        self, key: str, question: dict[str, Any], stop: threading.Event
    ) -> float:
        """Request one judgement and cache its reply. Raises: BackendError."""
        settings = self.settings
        limits = RequestLimits(settings.timeout_s, settings.retries, settings.retry_delay_s)

        def read(answer: Any) -> tuple[str, str | None, float]:
            reply, finish_reason = read_reply(answer)
            return reply, finish_reason, read_score(reply, settings)

        body = {name: value for name, value in question.items() if name != "url"}
        reply, finish_reason, score = post_adapted(
            self._url, body, limits, parse_response=read, headers=self._build_headers(), stop=stop
        )
        self._write_cached_reply(key, reply, finish_reason)
        return score

    def _build_headers(self) -> dict[str, str]:
        name = self.settings.key_variable
        if name is None:
            return {}
        key = os.environ.get(name)
        if not key:
            raise BackendError(
                f"reward_options.judge.key_variable: the environment variable {name} is not set"
            )
        headers = {"Authorization": f"Bearer {key}"}
        if (urlsplit(self._url).hostname or "").endswith(".azure.com"):
            headers["api-key"] = key
        return headers

    def _build_question(self, rollout: Rollout) -> dict[str, Any]:
        trajectory, settings = rollout.trajectory, self.settings
        values = {**trajectory.row, "prompt": trajectory.prompt, "target": trajectory.target}
        values["completion"] = trajectory.completion

        def fill(match: re.Match[str]) -> str:
            return match[0][0] if match[1] is None else str(values.get(match[1], match[0]))

        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        messages.append({"role": "user", "content": _PLACEHOLDER.sub(fill, settings.prompt)})
        return {
            "url": self._url,
            "model": settings.model,
            "messages": messages,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }

    def _read_cached_score(self, key: str) -> float | None:
        """Return the score of a cached reply; None if there is none.

        Replies without a finish reason are of a version that also cached replies that were cut.
        """
        try:
            cached = json.loads(self._resolve_cache_path(key).read_text(encoding="utf-8"))
            return read_score(cached["reply"], self.settings) if "finish_reason" in cached else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _write_cached_reply(self, key: str, reply: str, finish_reason: str | None) -> None:
        path = self._resolve_cache_path(key)
        try:
            make_folder(path.parent)
            write_json_atomic(path, {"reply": reply, "finish_reason": finish_reason})
        except CheckpointError as error:
            logger.warning("judgements cannot be cached in %s: %s", self._folder, error)

    def _resolve_cache_path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


def _digest_question(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
