"""Fresh rollouts: requests whose right answer is known from feedback are sampled again by the learning policy.

A recorded answer can be learned from once or twice: after a few updates its ratio to the sampling policy is clipped,
and if all recorded answers are wrong there is nothing to compare. A right answer named by a caller stays right: new
samples of the same request are on-policy at every update, and more samples distinguish more requests (one prompt, many
samples: arXiv:2504.20571).

The environment's judgement of the new episodes is not used: the label defines the reward, as for recorded answers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

from rl_core.api.policy import Policy
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    ServedAnswer,
    build_stop_test,
    cut_at_stop,
)
from rl_core.models.causal_lm import use_eval_mode
from rl_core.online.experience import Experience, build_served_rollout
from rl_core.online.experience_buffer import BufferedExperience
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import OnlineRolloutSettings, SamplingSettings
from rl_core.types import Rollout

logger = logging.getLogger(__name__)

# Raised for a prompt that fills the context, a failing environment, an unknown level.
_REQUEST_ERRORS = (DataError, EnvironmentFault, SettingsError)


def has_right_answer(buffered: BufferedExperience) -> bool:
    """Return whether feedback named the right answer, which new samples can be compared with."""
    label = buffered.label
    return label is not None and label.source == "feedback" and label.kind == "answer"


class FreshRolloutSampler:
    """Sampler of requests with the policy's current weights.

    Random numbers depend only on (seed, update, request, sample), so a resumed worker draws the same.
    """

    def __init__(
        self,
        policy: Policy,
        environment: Environment | None,
        settings: OnlineRolloutSettings,
        *,
        seed: int,
    ) -> None:
        """Prepare the sampler.

        Args:
            environment: whose episodes are served; None = conversations.
        """
        self.policy, self.environment = policy, environment
        self.settings, self.seed = settings, seed
        self.counts: Counter[str] = Counter()  # sampled rollouts and failed requests
        self._backend = policy.backend()
        self._max_answer_tokens = 1  # of a fresh answer

    def sample_rollouts(
        self,
        buffered: Sequence[BufferedExperience],
        update: int,
        live_version: int,
        longest_answer_tokens: int,
    ) -> dict[int, Experience]:
        """Return experiences with fresh rollouts instead of the recorded ones, by record number.

        Requests without a right answer from feedback, and those whose environment fails, are left out and learned from
        as
        recorded. The new experiences have the live policy version: the KL is measured against the policy that answers
        now.

        Args:
            update: number of the update, from 1.
            live_version: version that answers.
            longest_answer_tokens: of the recorded answers; fresh ones use at most twice as many.
        """
        requests = [experience for experience in buffered if has_right_answer(experience)]
        if not requests:
            return {}
        self._backend.refresh_weights()
        self._max_answer_tokens = min(
            self.settings.sampling.max_completion_tokens, 2 * longest_answer_tokens
        )
        with use_eval_mode(self.policy.model):
            groups = self._sample_groups(requests, update)
        fresh = {}
        for request, rollouts in zip(requests, groups, strict=True):
            if len(rollouts) > 1:
                for rollout in rollouts:
                    rollout.trajectory.policy_version = live_version
                fresh[request.number] = dataclasses.replace(
                    request.experience, rollouts=tuple(rollouts), recorded=(None,) * len(rollouts)
                )
        self.counts["rollouts"] += sum(len(experience.rollouts) for experience in fresh.values())
        self.counts["failed"] += len(requests) - len(fresh)
        return fresh

    def collect_metrics(self) -> dict[str, float]:
        """Return the numbers of sampled rollouts and failed requests since the worker started."""
        return {f"online/fresh/{name}": float(self.counts[name]) for name in ("rollouts", "failed")}

    def _build_sampling_settings(self, request: BufferedExperience) -> SamplingSettings:
        """Return the sampling settings for a request: this update's token limit, its recorded temperature."""
        return dataclasses.replace(
            self.settings.sampling,
            max_completion_tokens=self._max_answer_tokens,
            temperature=request.experience.rollouts[0].temperature,
        )

    def _sample_groups(
        self, requests: Sequence[BufferedExperience], update: int
    ) -> list[list[Rollout]]:
        """Sample rollouts of each request, those of equal settings together; [] for a request that fails."""
        by_sampling: dict[SamplingSettings, list[BufferedExperience]] = {}
        for request in requests:
            by_sampling.setdefault(self._build_sampling_settings(request), []).append(request)
        rollouts: dict[int, list[Rollout]] = {}
        for sampling, members in by_sampling.items():
            try:
                groups = self._sample_members(members, sampling, update)
            except _REQUEST_ERRORS:  # sample each alone, so that the error affects one request
                groups = [self._sample_one_request(member, sampling, update) for member in members]
            for request, group in zip(members, groups, strict=True):
                rollouts[request.number] = group
        return [rollouts[request.number] for request in requests]

    def _sample_one_request(
        self, request: BufferedExperience, sampling: SamplingSettings, update: int
    ) -> list[Rollout]:
        try:
            return self._sample_members([request], sampling, update)[0]
        except _REQUEST_ERRORS as error:
            request_id = request.experience.request_id
            logger.warning("request %s is not sampled again: %s", request_id, error)
            return []

    def _sample_members(
        self, members: Sequence[BufferedExperience], sampling: SamplingSettings, update: int
    ) -> list[list[Rollout]]:
        if self.environment is None:
            return self._sample_conversations(members, sampling, update)
        trajectories = [member.experience.rollouts[0].trajectory for member in members]
        groups = collect_rollouts(
            self.environment,
            self._backend,
            self.policy.renderer,
            [EpisodeRequest(trajectory.level, trajectory.seed) for trajectory in trajectories],
            group_size=self.settings.samples,
            sampling=sampling,
            seed=self._compute_seed(update),
            failures=EpisodeFailureMonitor(1.0),
        )
        return [list(group.rollouts) for group in groups]

    def _sample_conversations(
        self, members: Sequence[BufferedExperience], sampling: SamplingSettings, update: int
    ) -> list[list[Rollout]]:
        groups = [
            [
                self._build_sequence(member, update, sample)
                for sample in range(self.settings.samples)
            ]
            for member in members
        ]
        self._backend.run_sequences([sequence for group in groups for sequence in group], sampling)
        return [
            [self._build_rollout(member, sample, sequence) for sample, sequence in enumerate(group)]
            for member, group in zip(members, groups, strict=True)
        ]

    def _build_sequence(
        self, request: BufferedExperience, update: int, sample: int
    ) -> AnswerSequence:
        seed = compute_sequence_seed(
            self._compute_seed(update), request.experience.request_id, sample
        )
        stops = build_stop_test(self.policy.renderer.action_text, self.settings.sampling.stop)
        return AnswerSequence(list(request.experience.rollouts[0].prompt_ids), seed, stops)

    def _build_rollout(
        self, request: BufferedExperience, sample: int, sequence: AnswerSequence
    ) -> Rollout:
        experience = request.experience
        return build_served_rollout(
            ServedAnswer(
                answer_id=experience.request_id,
                choice=sample,
                policy_version=experience.policy_version,
                prompt_ids=sequence.prompt_ids,
                completion_ids=sequence.tokens,
                sampler_logprobs=sequence.logprobs,
                temperature=experience.rollouts[0].temperature,
                text=self._decode_text(sequence.tokens),
                finish_reason="length" if sequence.hit_limit else "stop",
            )
        )

    def _decode_text(self, tokens: Sequence[int]) -> str:
        return cut_at_stop(self.policy.renderer.action_text(tokens), self.settings.sampling.stop)

    def _compute_seed(self, update: int) -> int:
        return self.seed * 1_000_003 + update
