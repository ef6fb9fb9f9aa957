"""Reward component: score of a judge, a model behind an OpenAI-compatible URL."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import regex

from rl_core.errors import BackendError, CheckpointError, SettingsError, nearest
from rl_core.json_server import Limits, ask_server, v1_address
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component, SampleFailure
from rl_core.settings import JudgeSettings
from rl_core.storage.own_files import cache_folder
from rl_core.storage.single_files import make_folder, write_json_atomic
from rl_core.types import Rollout

__all__ = ["JudgeReward"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
_OWN = ("prompt", "completion", "target")
MATCH_S = 1.0


class JudgeReward(Component):
    """(score - lowest) / (highest - lowest) of what the judge says of each rollout.

    A judgement that could not be had, or holds no score within the scale, is asked for again a bounded number of times;
    after that the rollout is in `failed` and has no reward. As soon as `too_many` have failed, the rest is not asked
    for. Judgements are kept in a folder by the digest of what was asked, and asked for once.
    Metrics: asked, cached (judgements), failed (rollouts).
    """

    def __init__(
        self, settings: JudgeSettings, too_many: Callable[[int, int], bool] = lambda failed, played: failed > 0
    ) -> None:
        """`too_many`: as in `UserReward`. Raises: SettingsError without url or model."""
        super().__init__()
        self.settings, self._too_many = settings, too_many
        if settings.url is None or settings.model is None:
            raise SettingsError(
                "rewards.judge: needs reward_options.judge.url and model, the name that the server knows it by"
            )
        if not settings.url.startswith(("http://", "https://")):
            raise SettingsError(f"rewards.judge: reward_options.judge.url '{settings.url}' is no address of a server")
        self._url = v1_address(settings.url, "chat/completions")
        self._pattern = regex.compile(settings.pattern)
        self._folder = Path(settings.cache).expanduser() if settings.cache else cache_folder("judgements")

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """See `Component`."""
        if columns is None:
            return
        known = [*_OWN, *columns]
        for match in _NAME.finditer(self.settings.prompt):
            if match[1] and match[1] not in known:
                raise SettingsError(
                    f"reward_options.judge.prompt: '{{{match[1]}}}' is none of {', '.join(known)}; "
                    f"{nearest(match[1], known)} Braces that stand for themselves are doubled"
                )

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float | None]:
        """One number for each rollout; None = not judged."""
        questions = [self._question(rollout) for rollout in rollouts]
        keys = [_digest(question) for question in questions]
        found = {key: score for key in dict.fromkeys(keys) if (score := self._kept(key)) is not None}
        wanted = {key: question for key, question in zip(keys, questions, strict=True) if key not in found}
        reasons = self._ask_all(wanted, found, keys)
        self.failed = {
            index: SampleFailure(f"could not judge it: {reasons[key]}")
            for index, key in enumerate(keys)
            if key in reasons
        }
        self.metrics = {
            "asked": float(len(wanted)),
            "cached": float(len(set(keys)) - len(wanted)),
            "failed": float(len(self.failed)),
        }
        return [found.get(key) for key in keys]

    def _ask_all(
        self, wanted: Mapping[str, dict[str, Any]], found: dict[str, float], keys: Sequence[str]
    ) -> dict[str, str]:
        """Ask for all judgements, into `found`; returns the reasons of those that failed."""
        failed: dict[str, str] = {}
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.settings.concurrency)
        try:
            asked: dict[Future[float], str] = {
                pool.submit(self._ask, key, question, stop): key for key, question in wanted.items()
            }
            for future in as_completed(asked):
                try:
                    found[asked[future]] = future.result()
                except BackendError as error:
                    failed[asked[future]] = str(error)
                    if self._too_many(sum(key in failed for key in keys), len(keys)):
                        break
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return failed

    def _ask(self, key: str, question: dict[str, Any], stop: threading.Event) -> float:
        """Score of one judgement, which is then kept. Raises: BackendError."""
        settings = self.settings
        limits = Limits(settings.timeout_s, settings.retries, settings.retry_delay_s)

        def read(answer: Any) -> tuple[str, float]:
            reply = answer["choices"][0]["message"]["content"]
            return reply, self._score(reply)

        body = {name: value for name, value in question.items() if name != "url"}
        reply, score = ask_server(self._url, body, limits, read=read, headers=self._headers(), stop=stop)
        self._keep(key, reply)
        return score

    def _headers(self) -> dict[str, str]:
        name = self.settings.key_variable
        if name is None:
            return {}
        key = os.environ.get(name)
        if not key:
            raise BackendError(f"reward_options.judge.key_variable: the environment variable {name} is not set")
        return {"Authorization": f"Bearer {key}"}

    def _question(self, rollout: Rollout) -> dict[str, Any]:
        trajectory, settings = rollout.trajectory, self.settings
        values = {**trajectory.row, "prompt": trajectory.prompt, "target": trajectory.target}
        values["completion"] = trajectory.completion

        def fill(match: re.Match[str]) -> str:
            return match[0][0] if match[1] is None else str(values.get(match[1], match[0]))

        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        messages.append({"role": "user", "content": _NAME.sub(fill, settings.prompt)})
        return {
            "url": self._url, "model": settings.model, "messages": messages, "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }  # fmt: skip

    def _score(self, reply: Any) -> float:
        """Score within a judge's reply, scaled. Raises: ValueError."""
        if not isinstance(reply, str):
            raise ValueError("the reply holds no text")
        try:
            scores = [match[1] for match in self._pattern.finditer(reply, timeout=MATCH_S)]
        except TimeoutError:
            raise ValueError("the pattern was not matched in time") from None
        lowest, highest = self.settings.lowest, self.settings.highest
        if not scores:
            raise ValueError(f"the reply holds no score: {reply[:100]!r}")
        score = float(scores[-1])
        if not lowest <= score <= highest:
            raise ValueError(f"the score {score:g} is not from {lowest:g} to {highest:g}")
        return (score - lowest) / (highest - lowest)

    def _kept(self, key: str) -> float | None:
        """Score of a judgement in the folder; None = there is none."""
        try:
            return self._score(json.loads(self._place(key).read_text(encoding="utf-8"))["reply"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, key: str, reply: str) -> None:
        place = self._place(key)
        try:
            make_folder(place.parent)
            write_json_atomic(place, {"reply": reply})
        except CheckpointError as error:
            logger.warning("judgements cannot be kept in %s: %s", self._folder, error)

    def _place(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


def _digest(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
