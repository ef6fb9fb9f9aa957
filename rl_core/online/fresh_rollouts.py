"""Fresh rollouts: requests whose right answer feedback named are answered anew by the policy that learns.

A recorded answer can be learned from once or twice: after a few updates its ratio to the policy that sampled it is
clipped, and where all recorded answers are wrong there is nothing to compare. A right answer that a caller named stays
right: new samples of the same request are on-policy at every update, and more of them tell more requests apart
(one prompt, many samples: arXiv:2504.20571).

The environment's own judgement of the new episodes is not looked at: the label stands for the truth in the reward, as
with recorded answers.
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

# a prompt without room, an environment, an unknown level
_REQUEST_ERRORS = (
    DataError,
    EnvironmentFault,
    SettingsError,
)


def has_right_answer(buffered: BufferedExperience) -> bool:
    """True = feedback named the right answer, which new samples can be compared with."""
    return (
        buffered.label is not None
        and buffered.label.source == "feedback"
        and buffered.label.kind == "answer"
    )


class FreshRolloutSampler:
    """Samples requests anew from the policy's present weights.

    Random numbers follow from (seed, update, request, sample) alone, so a resumed worker draws the same.
    """

    def __init__(
        self,
        policy: Policy,
        environment: Environment | None,
        settings: OnlineRolloutSettings,
        *,
        seed: int,
    ) -> None:
        """environment: whose episodes are served; None = conversations."""
        self.policy, self.environment, self.settings, self.seed = (
            policy,
            environment,
            settings,
            seed,
        )
        self.counts: Counter[str] = Counter()  # rollouts sampled, requests that could not be played
        self._backend = policy.backend()
        self._max_answer_tokens = 1  # tokens of a fresh answer

    def sample_rollouts(
        self,
        buffered: Sequence[BufferedExperience],
        update: int,
        live_version: int,
        longest_answer_tokens: int,
    ) -> dict[int, Experience]:
        """Experiences with fresh rollouts in place of the recorded ones, by number of the record.

        Left out: requests without a right answer by feedback, and those whose environment fails; they are learned from
        as recorded. Their policy version is the live one: the KL is measured against the policy that answers by now.

        Args:
            update: number of the update, from 1. live: version that answers. longest: tokens of the longest recorded
                answer; fresh ones take at most twice as many.
        """
        wanted = [one for one in buffered if has_right_answer(one)]
        if not wanted:
            return {}
        self._backend.refresh_weights()
        self._max_answer_tokens = min(
            self.settings.sampling.max_completion_tokens, 2 * longest_answer_tokens
        )
        found = {}
        with use_eval_mode(self.policy.model):
            groups = self._sample_groups(wanted, update)
        for one, fresh in zip(wanted, groups, strict=True):
            if len(fresh) > 1:
                for rollout in fresh:
                    rollout.trajectory.policy_version = live_version
                found[one.number] = dataclasses.replace(
                    one.experience, rollouts=tuple(fresh), recorded=(None,) * len(fresh)
                )
        self.counts["rollouts"] += sum(len(one.rollouts) for one in found.values())
        self.counts["failed"] += len(wanted) - len(found)
        return found

    def collect_metrics(self) -> dict[str, float]:
        """Rollouts sampled and requests that could not be sampled, since the worker began."""
        return {f"online/fresh/{name}": float(self.counts[name]) for name in ("rollouts", "failed")}

    def _build_sampling_settings(self, kept: BufferedExperience) -> SamplingSettings:
        """The settings' sampling within the room of this update, at the temperature of the recorded answers."""
        return dataclasses.replace(
            self.settings.sampling,
            max_completion_tokens=self._max_answer_tokens,
            temperature=kept.experience.rollouts[0].temperature,
        )

    def _sample_groups(
        self, wanted: Sequence[BufferedExperience], update: int
    ) -> list[list[Rollout]]:
        """Rollouts of each request, those of equal temperature together; [] for one that cannot be sampled."""
        found: dict[int, list[Rollout]] = {}
        for sampling in dict.fromkeys(map(self._build_sampling_settings, wanted)):
            members = [one for one in wanted if self._build_sampling_settings(one) == sampling]
            try:
                groups = self._sample_members(members, sampling, update)
            except _REQUEST_ERRORS:  # which spoils no other
                groups = [self._sample_one_request(one, sampling, update) for one in members]
            found |= {one.number: group for one, group in zip(members, groups, strict=True)}
        return [found[one.number] for one in wanted]

    def _sample_one_request(
        self, kept: BufferedExperience, sampling: SamplingSettings, update: int
    ) -> list[Rollout]:
        try:
            return self._sample_members([kept], sampling, update)[0]
        except _REQUEST_ERRORS as error:
            logger.warning("request %s is not sampled anew: %s", kept.experience.request_id, error)
            return []

    def _sample_members(
        self, members: Sequence[BufferedExperience], sampling: SamplingSettings, update: int
    ) -> list[list[Rollout]]:
        if self.environment is None:
            return self._sample_conversations(members, sampling, update)
        played = [one.experience.rollouts[0].trajectory for one in members]
        groups = collect_rollouts(
            self.environment,
            self._backend,
            self.policy.renderer,
            [EpisodeRequest(trajectory.level, trajectory.seed) for trajectory in played],
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
            [self._build_sequence(one, update, sample) for sample in range(self.settings.samples)]
            for one in members
        ]
        self._backend.run_sequences([sequence for group in groups for sequence in group], sampling)
        return [
            [self._build_rollout(one, sample, sequence) for sample, sequence in enumerate(group)]
            for one, group in zip(members, groups, strict=True)
        ]

    def _build_sequence(self, kept: BufferedExperience, update: int, sample: int) -> AnswerSequence:
        seed = compute_sequence_seed(self._compute_seed(update), kept.experience.request_id, sample)
        stops = build_stop_test(self.policy.renderer.action_text, self.settings.sampling.stop)
        return AnswerSequence(list(kept.experience.rollouts[0].prompt_ids), seed, stops)

    def _build_rollout(
        self, kept: BufferedExperience, sample: int, sequence: AnswerSequence
    ) -> Rollout:
        experience = kept.experience
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
