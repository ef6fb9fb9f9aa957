"""Training of thoughts before answers: REINFORCE on what a thought adds to the correct answer (after Quiet-STaR).

One iteration plays episodes, scores every correct answer after its thought and without one, rewards each thought with
the difference, estimates advantages over the questions of an episode against a learned baseline, and updates thoughts
and correct answers in one optimizer step.

    L = - sum over thought tokens of A log pi / thought tokens       A = GAE over the episode's questions (gamma .99)
        - entropy_coef entropy of the thought tokens                 decays with every episode played
        - answer_coef log p(correct answer) / answer tokens          with the thought and without it
        + kl_coef KL(pi || start) per thought token                  optional; start: the stage's initial model

The answer term is Quiet-STaR's likelihood of the text. It is also computed without the thought: otherwise a policy
could raise its reward by forgetting what it can answer immediately. Not thinking is a thought of length 0: its
advantage goes to the token that ends the thought, as always, and its reward is 0.

Thoughts are samples: pi and their entropy are of softmax(logits / temperature), from which they were drawn. Correct
answers are not sampled: their likelihood, in the reward and in the loss, is the model's at temperature 1.

Suffixes: B rows of a micro-batch or episodes, K questions of an episode, S sequence, H hidden.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_core.capabilities import refuse_image_model
from rl_core.data.batches import attention_mask, pad_rows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.errors import SettingsError
from rl_core.inference.sampling import RolloutBackend
from rl_core.losses.advantages import gae, returns
from rl_core.losses.kl import kl_penalty
from rl_core.losses.masking import fill_masked
from rl_core.losses.policy import reinforce_loss
from rl_core.losses.supervised import entropy_bonus, supervised_loss
from rl_core.losses.value import explained_variance
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.forward_modes import has_dropout, seed_dropout_masks, use_training_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import disable_adapter, draw_adapter_masks
from rl_core.rollouts.collect import list_training_seeds
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.rollout_metrics import compute_rollout_metrics
from rl_core.settings import ThoughtsSettings, build_settings
from rl_core.thoughts.baseline import LearnedBaseline
from rl_core.thoughts.episodes import (
    AnswerRows,
    ThoughtEpisode,
    ThoughtReader,
    ThoughtRenderer,
    build_answer_rows,
    compute_thought_gain,
    read_thought_episode,
)
from rl_core.thoughts.genuineness_check import GenuinenessCheck, examine_thoughts
from rl_core.thoughts.thought_batches import (
    ThoughtBatch,
    ThoughtRow,
    build_thought_batches,
    build_thought_rows,
    gather_pooled_states,
    gather_span_logprobs,
)
from rl_core.thoughts.verdict import ThoughtVerdict
from rl_core.timing import span
from rl_core.trainers.rollout_trainer import RolloutRecorder, RolloutTrainer
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import RolloutGroup, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_RECENT_EPISODES = 100  # averaged in the metric reward/mean_100_episodes


def require_kl_reference(
    reference: PreTrainedModel | None, kl_coef: float
) -> PreTrainedModel | None:
    """Return the reference, or None if no KL is computed. Raises: SettingsError if the KL needs a missing one."""
    if kl_coef > 0 and reference is None:
        raise SettingsError("kl_coef: needs a reference, the model that training starts from")
    return reference if kl_coef > 0 else None


@torch.no_grad()
def compute_reference_logprobs(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    train: TrainBatch,
    mask_seed: int | None = None,
) -> torch.Tensor:
    """Compute log-probabilities of the tokens that carry loss under the reference, float32 [B, S].

    They are at the temperatures of the batch, like the policy's.
    Args:
        reference: `model` itself = that model without its adapters.
        mask_seed: of the dropout masks of the policy's pass over this batch; None = without dropout.
    """
    assert reference is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(span("reference"))
        if reference is model:
            stack.enter_context(disable_adapter(reference))
        if mask_seed is None:
            stack.enter_context(use_eval_mode(reference))
        else:
            stack.enter_context(use_training_mode(reference, dropout=True))
            stack.enter_context(draw_adapter_masks(model, reference))
            stack.enter_context(seed_dropout_masks(train.input_ids_BS.device, mask_seed))
        return completion_logprobs(reference, train)[0]


def compute_thought_coherence(
    episodes: Sequence[ThoughtEpisode], pooled: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Compute the similarity of consecutive thoughts and their repetition; {} if no episode has two thoughts.

    thoughts/coherence: cosine of the mean last hidden states of two consecutive thoughts of an episode, averaged over
    all such pairs. thoughts/repetition: share of the second thoughts of these pairs that occur token by token in an
    earlier turn of the episode.
    Args:
        pooled: for each episode float [2 K + 1, H], mean states of the first tokens up to: the start of each of its K
            turns, the end of the episode, the end of each turn's thought.
    """
    cosines: list[float] = []
    num_repeated = 0
    for episode, states in zip(episodes, pooled, strict=True):
        earlier_thoughts: set[tuple[int, ...]] = set()
        previous_mean_H: torch.Tensor | None = None
        for turn, step in enumerate(episode.steps):
            if not step.num_thought_tokens:
                continue
            mean_H = _compute_mean_thought_state(episode, states, turn)
            thought = tuple(episode.ids[step.start : step.end])
            if previous_mean_H is not None:
                cosine = torch.nn.functional.cosine_similarity(previous_mean_H, mean_H, dim=0)
                cosines.append(float(cosine))
                num_repeated += thought in earlier_thoughts
            earlier_thoughts.add(thought)
            previous_mean_H = mean_H
    if not cosines:
        return {}
    return {
        "thoughts/coherence": sum(cosines) / len(cosines),
        "thoughts/repetition": num_repeated / len(cosines),
    }


def _compute_mean_thought_state(
    episode: ThoughtEpisode, states: torch.Tensor, turn: int
) -> torch.Tensor:
    """Compute the mean state of a thought's tokens, float64 [H], from the means up to its start and its end."""
    step = episode.steps[turn]
    start_sum_H = states[turn].double() * step.start
    end_sum_H = states[len(episode.steps) + 1 + turn].double() * step.end
    return (end_sum_H - start_sum_H) / (step.end - step.start)


class ThoughtsTrainer(RolloutTrainer):
    """A `Trainer` (see `training.callbacks`) of thoughts before answers.

    Levels, seeds and sampling follow from the seed and the iteration's number; the state is that number, the episodes
    played, and the baseline.
    """

    settings: ThoughtsSettings

    def __init__(
        self,
        model: PreTrainedModel,
        renderer: ThoughtRenderer,
        environment: Environment,
        settings: ThoughtsSettings | Mapping[str, Any],
        seed: int,
        backend: RolloutBackend,
        *,
        heldout: Sequence[EpisodeRequest] = (),
        reference: PreTrainedModel | None = None,
        pad_id: int | None = None,
        record: RolloutRecorder | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Build all parts; nothing is played yet.

        Args:
            backend: samples with `model`'s weights.
            heldout: episodes of the validation; () = `evaluate` returns no metrics.
            reference: frozen model of the KL term, needed if kl_coef > 0; the policy's model = without its adapters.
            pad_id: None = the renderer's.
            record: called with every iteration's number and rollouts, with 'thought_gain' among their rewards: the
                mean over the episode's turns.
            process_group: the processes that train this model together; each plays and scores a share of the episodes.
        Raises: SettingsError for a level that the environment lacks or that has no training episodes; DataError for a
            renderer without padding token if pad_id is None.
        """
        settings = build_settings(settings, ThoughtsSettings)
        refuse_image_model(model, "thoughts", "thoughts")
        super().__init__(
            renderer,
            environment,
            seed,
            backend,
            levels=environment.expand_levels(dict.fromkeys(settings.levels, 1.0))
            or environment.level_weights,
            pad_id=pad_id,
            record=record,
            process_group=process_group,
            max_failed_share=settings.sampling.max_failed_share,
        )
        for level in self.levels:
            list_training_seeds(environment, level)
        self.model = model
        self.settings = settings
        self.heldout = list(heldout)
        self.reader = ThoughtReader(renderer, max_thought_tokens=settings.max_thought_tokens)
        self.device = next(model.parameters()).device
        self.baseline = LearnedBaseline.from_settings(
            settings, model.config.hidden_size, self.device, seed
        )
        self.optimizer_step = OptimizerStep(
            model,
            settings.with_warmup,
            settings.iterations,
            max_nonfinite=settings.max_nonfinite,
            process_group=process_group,
        )
        self.reference = require_kl_reference(reference, settings.kl_coef)
        self.genuineness_check = GenuinenessCheck(settings, len(self.heldout))
        # The newest episodes' rewards, each the mean over an episode's turns.
        self._recent_rewards: deque[float] = deque(maxlen=NUM_RECENT_EPISODES)
        self._counts = (0, 0)  # thought and answer tokens of the current optimizer step
        self._entropy_coef = settings.entropy_coef

    def step(self) -> dict[str, float]:
        """Run one iteration: play, score, compare with the baseline, update policy and baseline."""
        start_time = time.perf_counter()
        rng = self._build_generator()
        requests = [self._draw_episode(rng) for _ in range(self.settings.episodes_per_iteration)]
        groups = self._play_single_rollouts(requests, "rollouts", self.iteration)
        rollout_seconds = time.perf_counter() - start_time
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with span("reward"):
            episodes = self._read_thought_episodes(groups)
            plan = build_answer_rows(episodes)
            rewards, metrics = self._compute_rewards(episodes, plan)
        metrics |= compute_rollout_metrics(groups) | self._collect_failure_metrics()
        for rollout, gains in zip(rollouts, rewards, strict=True):
            mean = math.fsum(gains) / len(gains)
            rollout.trajectory.rewards = {**rollout.trajectory.rewards, "thought_gain": mean}
            self._recent_rewards.append(mean)
        recent = self._recent_rewards
        metrics["reward/mean_100_episodes"] = math.fsum(recent) / len(recent)
        self._record_rollouts(rollouts)
        self._entropy_coef = self.entropy_coef
        with span("update"):
            advantages, advantage_metrics = self._compute_advantages(episodes, rewards)
            metrics |= advantage_metrics
            metrics["train/entropy_coef"] = self._entropy_coef
            metrics |= self._update_policy(episodes, plan, advantages)
        self.iteration += 1
        num_before = self.rollouts_played
        self.rollouts_played += len(rollouts)
        if self.genuineness_check.is_due(num_before, self.rollouts_played):
            metrics |= self.genuineness_check.run_check(
                self._examine_heldout_thoughts, self.rollouts_played
            )
        seconds = time.perf_counter() - start_time
        return metrics | self._compute_throughput(rollouts, seconds, rollout_seconds)

    def evaluate(self) -> dict[str, float]:
        """Return eval/success_rate, eval/thought_gain (mean reward of a turn) and eval/thought_rate of held-out
        episodes.
        """
        if not self.heldout:
            return {}
        # The same random numbers at every evaluation reduce noise.
        groups = self._play_single_rollouts(self.heldout, "validation", 0)
        episodes = self._read_thought_episodes(groups)
        _, metrics = self._compute_rewards(episodes, build_answer_rows(episodes))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return {
            "eval/success_rate": sum(bool(rollout.success) for rollout in rollouts) / len(rollouts),
            "eval/thought_gain": metrics["reward/mean"],
            "eval/thought_rate": metrics["thoughts/rate"],
        }

    def play_heldout_episodes(self, requests: Sequence[EpisodeRequest]) -> list[ThoughtEpisode]:
        """Play episodes with the current policy and read their thoughts, for the controls."""
        return self._read_thought_episodes(self._play_single_rollouts(requests, "check", 0))

    def _examine_heldout_thoughts(self) -> ThoughtVerdict:
        """Test thoughts for being genuine on the validation episodes."""
        with span("check"):
            return examine_thoughts(
                self.model,
                self.reader,
                self.renderer,  # type: ignore[arg-type]
                self.optimizer_step,
                self.play_heldout_episodes(self.heldout),
                self.settings,
                pad_id=self.pad_id,
                seed=self.seed,
            )

    @property
    def finished(self) -> str:
        """Reason to stop training before its last iteration; "" = continue."""
        return self.genuineness_check.finished

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides weights and optimizer."""
        return {
            "iteration": self.iteration,
            "episodes_played": self.rollouts_played,
            "baseline": self.baseline.state_dict(),
            "failures": self.failures.state_dict(),
            "recent_rewards": list(self._recent_rewards),
            "check": self.genuineness_check.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.iteration = int(state["iteration"])
        self.rollouts_played = int(state["episodes_played"])
        self.baseline.load_state_dict(state["baseline"])
        self.failures.load_state_dict(state["failures"])
        self._recent_rewards.clear()
        self._recent_rewards.extend(state["recent_rewards"])
        self.genuineness_check.load_state_dict(state["check"])

    def _draw_episode(self, rng: np.random.Generator) -> EpisodeRequest:
        level = self.levels[int(rng.integers(len(self.levels)))]
        seeds = list_training_seeds(self.environment, level)
        return EpisodeRequest(level=level, seed=int(seeds[int(rng.integers(len(seeds)))]))

    def _play_single_rollouts(
        self, requests: Sequence[EpisodeRequest], purpose: str, iteration: int
    ) -> list[RolloutGroup]:
        """Play groups of one rollout each."""
        return self._play_groups(
            requests, group_size=1, sampling=self.settings.sampling, purpose=(purpose, iteration)
        )

    def _read_thought_episodes(self, groups: Sequence[RolloutGroup]) -> list[ThoughtEpisode]:
        return [
            read_thought_episode(self.environment, self.reader, group.rollouts[0])
            for group in groups
        ]

    def _compute_rewards(
        self, episodes: Sequence[ThoughtEpisode], plan: AnswerRows
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Compute one reward per turn: its thought's gain, or minus the clip if no answer was given."""
        settings = self.settings
        logprobs_N = gather_span_logprobs(
            self.model,
            self.optimizer_step.sharded,
            plan.rows,
            [*plan.with_thought, *plan.without],
            pad_id=self.pad_id,
            max_tokens=settings.micro_batch_tokens,
        )
        with_thought_N, without_N = logprobs_N[: len(plan.steps)], logprobs_N[len(plan.steps) :]
        gains_N = compute_thought_gain(
            with_thought_N, without_N, kind=settings.reward, clip=settings.gain_clip
        )
        rewards = [[-settings.gain_clip] * len(episode.steps) for episode in episodes]
        for (index, turn), gain in zip(plan.steps, gains_N.tolist(), strict=True):
            rewards[index][turn] = gain
        all_rewards = [reward for episode_rewards in rewards for reward in episode_rewards]
        steps = [step for episode in episodes for step in episode.steps]
        num_answered = max(1, len(plan.steps))
        return rewards, {
            "reward/mean": math.fsum(all_rewards) / len(all_rewards),
            "reward/std": float(np.std(all_rewards)),
            "thoughts/gain": float(gains_N.sum()) / num_answered,  # of the turns with an answer
            "thoughts/logprob": float(with_thought_N.sum()) / num_answered,
            "thoughts/logprob_without": float(without_N.sum()) / num_answered,
            "thoughts/rate": sum(step.num_thought_tokens > 0 for step in steps) / len(steps),
            "thoughts/tokens": sum(step.num_thought_tokens for step in steps) / len(steps),
            "thoughts/unanswered_rate": 1 - len(plan.steps) / len(steps),
        }

    def _compute_pooled_states(self, episodes: Sequence[ThoughtEpisode]) -> list[torch.Tensor]:
        """Compute `gather_pooled_states`, on the trainer's device."""
        pooled = gather_pooled_states(
            self.model,
            self.optimizer_step.sharded,
            episodes,
            pad_id=self.pad_id,
            max_tokens=self.settings.micro_batch_tokens,
        )
        return [states.to(self.device) for states in pooled]

    def _compute_advantages(
        self, episodes: Sequence[ThoughtEpisode], rewards: Sequence[Sequence[float]]
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Compute advantages of each episode's turns against the baseline, then fit the baseline to the returns."""
        counts = [len(episode.steps) for episode in episodes]
        with span("measure"):
            pooled = self._compute_pooled_states(episodes)
            inputs = [states[: count + 1] for states, count in zip(pooled, counts, strict=True)]
            values_N = self.baseline.predict_values(torch.cat(inputs)).cpu()
        episode_values = values_N.split([count + 1 for count in counts])
        mask_BK = attention_mask(counts)
        values_BK = pad_rows(
            [values[:-1].tolist() for values in episode_values], 0.0, dtype=torch.float32
        )
        rewards_BK = pad_rows(rewards, 0.0, dtype=torch.float32)
        # A truncated episode is bootstrapped from its last state; the value after a terminal state is 0.
        is_truncated_B = torch.tensor([episode.is_truncated for episode in episodes])
        bootstrap_B = torch.stack([values[-1] for values in episode_values]) * is_truncated_B
        gamma = self.settings.gamma
        if self.settings.advantages == "returns":
            returns_BK = returns(rewards_BK, mask_BK, gamma=gamma, bootstrap_B=bootstrap_B)
            advantages_BK = fill_masked(returns_BK - values_BK, mask_BK)
        else:
            advantages_BK, returns_BK = gae(
                rewards_BK,
                values_BK,
                mask_BK,
                gamma=gamma,
                gae_lambda=self.settings.gae_lambda,
                bootstrap_B=bootstrap_B,
            )
        explained = explained_variance(values_BK, returns_BK, mask_BK)
        states_NH = torch.cat([states[:-1] for states in inputs])
        loss = self.baseline.fit_returns(states_NH, returns_BK[mask_BK].to(self.device))
        advantages = [row[:n].tolist() for row, n in zip(advantages_BK, counts, strict=True)]
        return advantages, {
            "train/baseline_loss": loss,
            "train/explained_variance": explained,
            "train/value_mean": float(values_BK[mask_BK].mean()),
            "train/advantages_mean": float(advantages_BK[mask_BK].mean()),
            "train/advantages_std": float(advantages_BK[mask_BK].std(correction=0)),
            **compute_thought_coherence(episodes, pooled),
        }

    def _update_policy(
        self,
        episodes: Sequence[ThoughtEpisode],
        plan: AnswerRows,
        advantages: Sequence[Sequence[float]],
    ) -> dict[str, float]:
        """Run one optimizer step over all thoughts and answers."""
        rows = build_thought_rows(
            episodes, plan, advantages, with_answers=self.settings.answer_coef > 0
        )
        self._counts = (
            sum(sum(row.thought_mask) for row in rows),
            sum(sum(row.answer_mask) for row in rows),
        )

        def build_batches(local_rows: Sequence[ThoughtRow]) -> list[ThoughtBatch]:
            max_tokens = self.settings.micro_batch_tokens
            models = [model for model in (self.model, self.reference) if model is not None]
            return build_thought_batches(
                local_rows,
                max_tokens,
                self.pad_id,
                shares_prefixes=self.optimizer_step.can_share_prefixes(*models),
            )

        batches = self.optimizer_step.process_group.build_local_batches(
            rows, [len(row.ids) for row in rows], build_batches
        )
        return self.optimizer_step.run_step(batches, self.compute_loss)

    def _build_temperatures(self, thought_BS: torch.Tensor) -> torch.Tensor | None:
        """Return the sampling temperature for thought tokens (including the one that ends it) and 1 for correct
        answers.
        """
        temperature = self.settings.sampling.temperature
        return torch.where(thought_BS, temperature, 1.0).float() if temperature != 1 else None

    def _draw_mask_seed(self) -> int | None:
        """Draw a seed of dropout masks that policy and reference share; None = they compare nothing under dropout."""
        if not (self.settings.dropout and self.settings.kl_coef > 0 and has_dropout(self.model)):
            return None
        return int(torch.randint(2**62, ()))

    def compute_loss(self, batch: ThoughtBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of one micro-batch over the denominators of the whole optimizer step."""
        num_thought, num_answer = self._counts
        thought_BS = batch.thought_mask_BS.to(self.device)
        answer_BS = batch.answer_mask_BS.to(self.device)
        attention_mask_BS = attention_mask(batch.lengths_B.tolist(), batch.input_ids_BS.shape[1])
        train_batch = TrainBatch(
            input_ids_BS=batch.input_ids_BS.to(self.device),
            attention_mask_BS=attention_mask_BS.to(self.device),
            loss_mask_BS=thought_BS | answer_BS,
            temperatures_BS=self._build_temperatures(thought_BS),
        )
        mask_seed = self._draw_mask_seed()
        masks = (
            contextlib.nullcontext()
            if mask_seed is None
            else seed_dropout_masks(self.device, mask_seed)
        )
        with masks:
            logprobs_BS, entropy_BS = completion_logprobs(
                self.model, train_batch, with_entropy=True
            )
        assert entropy_BS is not None
        loss, loss_metrics = reinforce_loss(
            logprobs_BS,
            batch.advantages_BS.to(self.device),
            thought_BS,
            num_loss_tokens=num_thought,
        )
        bonus, entropy_metrics = entropy_bonus(
            fill_masked(entropy_BS, thought_BS), thought_BS, num_loss_tokens=num_thought
        )
        policy_metrics = loss_metrics | entropy_metrics
        loss = loss + self._entropy_coef * bonus
        if self.settings.kl_coef > 0:
            kl, kl_metrics = kl_penalty(
                logprobs_BS,
                compute_reference_logprobs(self.model, self.reference, train_batch, mask_seed),
                thought_BS,
                num_loss_tokens=num_thought,
                estimator=self.settings.kl_estimator,
            )
            loss = loss + self.settings.kl_coef * kl
            policy_metrics |= kl_metrics
        metrics: dict[str, Any] = {f"policy/{name}": v for name, v in policy_metrics.items()}
        if num_answer:
            nll, nll_metrics = supervised_loss(logprobs_BS, answer_BS, num_loss_tokens=num_answer)
            loss = loss + self.settings.answer_coef * nll
            metrics["train/answer_nll"] = nll_metrics["nll"]
        return loss, metrics
