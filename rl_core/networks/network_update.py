"""Update of an actor-critic: a buffer of an iteration's steps, advantages by GAE or V-trace, epochs x minibatches of
PPO.

Suffixes: T steps of an iteration, N environments, M real steps of the buffer (rows), D numbers of an observation,
E segments of episodes within the buffer, L steps of the longest segment. Losses take columns: M1 is [M, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import gae, vtrace
from rl_core.losses.importance import importance_ratios
from rl_core.losses.masking import build_full_mask, masked_whiten
from rl_core.losses.policy import clipped_policy_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.losses.value import explained_variance, value_loss
from rl_core.networks.actor_critic import ActionSpace, ActorCritic
from rl_core.networks.vector_environment import VectorStep
from rl_core.rollouts.rollout_metrics import aggregate_step_metrics
from rl_core.settings import NetworkSettings
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.training.optimizers import adapt_learning_rate_scale

ValueFunction = Callable[[torch.Tensor], torch.Tensor]  # observations [B, D] to values [B]


@dataclass(frozen=True, slots=True)
class EpisodeSegments:
    """Positions of the real steps in a table with one row per segment of an episode, in the order of time."""

    rows_M: torch.Tensor  # int64
    columns_M: torch.Tensor  # int64
    mask_EL: torch.Tensor  # bool, True = a real step
    last_E: torch.Tensor  # int64, index of each segment's last step among the M steps

    def arrange_by_segment(self, values_M: torch.Tensor) -> torch.Tensor:
        """Arrange [M] as a table [E, L], 0 after a segment's end."""
        table_EL = values_M.new_zeros(self.mask_EL.shape)
        table_EL[self.rows_M, self.columns_M] = values_M
        return table_EL

    def flatten_table(self, table_EL: torch.Tensor) -> torch.Tensor:
        """Flatten a table [E, L] to [M]."""
        return table_EL[self.rows_M, self.columns_M]


class StepBuffer:
    """The steps of T x N actions: allocated once, filled step by step, read flat.

    It also stores steps in which an environment only reset itself, but excludes them from everything that is read.
    """

    def __init__(
        self, steps: int, environments: int, observation_size: int, actions: ActionSpace
    ) -> None:
        shape = (steps, environments)
        self.shape = shape
        self.num_filled = 0
        self.observations = np.zeros((*shape, observation_size), np.float32)
        self.after = np.zeros((*shape, observation_size), np.float32)  # where the actions led
        if actions.is_discrete:
            self.actions = np.zeros(shape, np.int64)
        else:
            self.actions = np.zeros((*shape, actions.size), np.float32)
        self.rewards = np.zeros(shape, np.float32)
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self.is_action = np.zeros(shape, bool)
        # Log-probs of the policy that acted, nats; set when the buffer is full.
        self.behaviour_logprobs_M = torch.zeros(0)

    def add_step(self, observations_ND: np.ndarray, actions: np.ndarray, step: VectorStep) -> None:
        """Add one step of all environments. Raises: DataError if the buffer is full."""
        if self.num_filled == self.shape[0]:
            raise DataError(
                f"the buffer already contains {self.shape[0]} steps; read it, then `clear_steps`"
            )
        index = self.num_filled
        self.observations[index], self.actions[index] = observations_ND, actions
        self.after[index], self.rewards[index] = step.after_ND, step.rewards_N
        self.terminated[index], self.truncated[index] = step.terminated_N, step.truncated_N
        self.is_action[index] = step.is_action_N
        self.num_filled += 1

    def clear_steps(self) -> None:
        """Empty the buffer, keeping its memory."""
        self.num_filled = 0

    @property
    def num_steps(self) -> int:
        """M, the number of real steps."""
        return int(self.is_action.sum())

    def read_real_steps(self, name: str) -> torch.Tensor:
        """Return a copy of a field's real steps, [M] or [M, ...], environment after environment."""
        values, mask = getattr(self, name).swapaxes(0, 1), self.is_action.swapaxes(0, 1)
        return torch.from_numpy(values[mask])

    def split_into_segments(self) -> EpisodeSegments:
        """Split the real steps after every end of an episode, and at the end of the buffer."""
        mask_NT = self.is_action.swapaxes(0, 1)
        ended_NT = (self.terminated | self.truncated).swapaxes(0, 1) & mask_NT
        ended_M = ended_NT[mask_NT]
        counts_N = mask_NT.sum(1)
        stops = np.flatnonzero(ended_M) + 1
        borders = np.unique(np.concatenate([[0], stops, np.cumsum(counts_N)]))
        lengths_E = np.diff(borders)
        rows_M = np.repeat(np.arange(len(lengths_E)), lengths_E)
        columns_M = np.arange(len(ended_M)) - np.repeat(borders[:-1], lengths_E)
        mask_EL = np.arange(lengths_E.max())[None, :] < lengths_E[:, None]
        return EpisodeSegments(
            torch.from_numpy(rows_M),
            torch.from_numpy(columns_M),
            torch.from_numpy(mask_EL),
            torch.from_numpy(borders[1:] - 1),
        )

    def estimate_advantages(
        self,
        values: ValueFunction,
        *,
        gamma: float,
        trace_lambda: float,
        reward_scale: float = 1.0,
        ratios_M: torch.Tensor | None = None,
        rho_cap: float = 1.0,
        c_cap: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Estimate advantages, targets of the value network and current values of the real steps; float [M] each.

        A segment that ends in a truncation, or with the buffer, is bootstrapped from the value of the observation that
        its last action led to; the value after a terminal state is 0.

        Args:
            ratios_M: probability of each action under the current policy over that of the policy that acted: V-trace.
                None = the steps are from the current policy: GAE.
        """
        segments = self.split_into_segments()
        values_M = values(self.read_real_steps("observations"))
        alive_E = ~self.read_real_steps("terminated")[segments.last_E]
        bootstrap_E = values(self.read_real_steps("after")[segments.last_E]) * alive_E
        rewards_M = self.read_real_steps("rewards") * reward_scale
        rewards_EL = segments.arrange_by_segment(rewards_M)
        values_EL = segments.arrange_by_segment(values_M)
        if ratios_M is None:
            advantages_EL, targets_EL = gae(
                rewards_EL,
                values_EL,
                segments.mask_EL,
                gamma=gamma,
                gae_lambda=trace_lambda,
                bootstrap_B=bootstrap_E,
            )
        else:
            advantages_EL, targets_EL = vtrace(
                rewards_EL,
                values_EL,
                segments.arrange_by_segment(ratios_M),
                segments.mask_EL,
                gamma=gamma,
                trace_lambda=trace_lambda,
                rho_cap=rho_cap,
                c_cap=c_cap,
                bootstrap_B=bootstrap_E,
            )
        advantages_M = segments.flatten_table(advantages_EL)
        return advantages_M, segments.flatten_table(targets_EL), values_M

    def state_dict(self) -> dict[str, Any]:
        """Return all fields of a full buffer that is replayed."""
        return {
            "observations": self.observations,
            "after": self.after,
            "actions": self.actions,
            "rewards": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "is_action": self.is_action,
            "behaviour_logprobs": self.behaviour_logprobs_M,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        for name, value in state.items():
            if name != "behaviour_logprobs":
                getattr(self, name)[:] = value
        self.behaviour_logprobs_M = state["behaviour_logprobs"]
        self.num_filled = self.shape[0]


@dataclass
class NetworkBatch:
    """Rows of a micro-batch."""

    observations_MD: torch.Tensor  # as the environment gave them
    actions: torch.Tensor  # int64 [M], or float [M, A]
    old_logprobs_M1: torch.Tensor  # of the policy before the first optimizer step, nats
    advantages_M1: torch.Tensor
    targets_M1: torch.Tensor  # of the value network
    values_M1: torch.Tensor  # of the value network before the first optimizer step

    def select_rows(self, index: torch.Tensor | slice) -> NetworkBatch:
        """Select some of the rows."""
        return NetworkBatch(*(getattr(self, name)[index] for name in BATCH_FIELDS))


BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(NetworkBatch))


class NetworkUpdate:
    """One iteration's optimizer steps on the steps of the buffers.

    L = clipped policy loss + value_coef value loss - entropy_coef entropy, each a mean over the rows of the step.
    """

    def __init__(
        self,
        model: ActorCritic,
        optimizer_step: OptimizerStep,
        settings: NetworkSettings,
        buffers: Sequence[StepBuffer],
    ) -> None:
        """Store the parts. `buffers`: of this iteration first, then of earlier ones (`replay`)."""
        self.model = model
        self.optimizer_step = optimizer_step
        self.settings = settings
        self.buffers = buffers
        self._entropies: list[torch.Tensor] = []  # of the policy before the first optimizer step
        self.num_rows = 1  # of the current optimizer step, the denominator of its losses
        self._mask_M1: torch.Tensor | None = None  # of the newest micro-batch; most are of one size

    def run_update(self, rng: np.random.Generator) -> dict[str, float]:
        """Run all optimizer steps; metrics are means over them (`_max`: the largest)."""
        settings = self.settings
        with span("measure"):
            rows = self._build_rows()
        metrics = self._compute_metrics(rows)
        if settings.normalise_advantages == "iteration" or self._is_one_minibatch:
            rows.advantages_M1 = whiten_advantages(rows.advantages_M1)
        step_metrics: list[dict[str, float]] = []
        for _ in range(settings.epochs):
            minibatches = self._split_into_minibatches(rows, rng)
            step_metrics += [self._run_optimizer_step(minibatch) for minibatch in minibatches]
        metrics |= aggregate_step_metrics(step_metrics)
        metrics["train/skipped_steps"] = float(self.optimizer_step.skipped_steps)
        if settings.desired_kl is not None:
            last_pass = aggregate_step_metrics(step_metrics[-settings.minibatches :])
            self._adapt_learning_rate(last_pass.get("policy/update_kl"))
        return metrics

    def _build_rows(self) -> NetworkBatch:
        """Compute old log-probs, values, advantages and targets of every buffer's steps, under the current model."""
        batches = [self._build_buffer_rows(buffer) for buffer in self.buffers]
        return NetworkBatch(
            *(torch.cat([getattr(batch, name) for batch in batches]) for name in BATCH_FIELDS)
        )

    @torch.no_grad()
    def _build_buffer_rows(self, buffer: StepBuffer) -> NetworkBatch:
        settings = self.settings
        observations_MD = buffer.read_real_steps("observations")
        actions = buffer.read_real_steps("actions")
        inputs_MD = self.model.normalised(observations_MD)
        logprobs_M, entropy_M = self.model.policy.logprobs_and_entropy(inputs_MD, actions)
        self._entropies.append(entropy_M)
        ratios_M = None
        if settings.advantages == "vtrace":
            behaviour_M1 = buffer.behaviour_logprobs_M[:, None]
            mask_M1 = torch.ones_like(behaviour_M1, dtype=torch.bool)
            ratios_M = importance_ratios(logprobs_M[:, None], behaviour_M1, mask_M1)[:, 0]
        advantages_M, targets_M, values_M = buffer.estimate_advantages(
            self.model.values,
            gamma=settings.gamma,
            trace_lambda=settings.gae_lambda,
            reward_scale=settings.reward_scale,
            ratios_M=ratios_M,
            rho_cap=settings.vtrace_rho,
            c_cap=settings.vtrace_c,
        )
        columns = (x_M[:, None] for x_M in (logprobs_M, advantages_M, targets_M, values_M))
        return NetworkBatch(observations_MD, actions, *columns)

    def _compute_metrics(self, rows: NetworkBatch) -> dict[str, float]:
        mask_M1 = build_full_mask(len(rows.advantages_M1), 1)
        metrics = {
            "train/advantages_mean": float(rows.advantages_M1.mean()),
            "train/advantages_std": float(rows.advantages_M1.std(correction=0)),
            "policy/entropy": float(torch.cat(self._entropies).mean()),
            "value/explained_variance": explained_variance(
                rows.values_M1, rows.targets_M1, mask_M1
            ),
        }
        if len(self.buffers) > 1:
            num_replayed = len(rows.advantages_M1) - self.buffers[0].num_steps
            metrics["train/replayed_steps"] = float(num_replayed)
        return metrics

    def _split_into_minibatches(
        self, rows: NetworkBatch, rng: np.random.Generator
    ) -> list[NetworkBatch]:
        """Split the rows into the optimizer steps of one pass, in random order; in order if there is a single step."""
        if self.settings.minibatches == 1:
            return [rows]
        order = torch.from_numpy(rng.permutation(len(rows.advantages_M1)))
        minibatches = [
            rows.select_rows(indices)
            for indices in order.tensor_split(self.settings.minibatches)
            if len(indices)
        ]
        if self.settings.normalise_advantages == "minibatch":
            for minibatch in minibatches:
                minibatch.advantages_M1 = whiten_advantages(minibatch.advantages_M1)
        return minibatches

    @property
    def _is_one_minibatch(self) -> bool:
        """True if advantages are normalised over an optimizer step's rows, equal at every step."""
        return self.settings.normalise_advantages == "minibatch" and self.settings.minibatches == 1

    def _run_optimizer_step(self, rows: NetworkBatch) -> dict[str, float]:
        """Run one optimizer step on these rows."""
        self.num_rows = len(rows.advantages_M1)
        size = self.settings.micro_batch_tokens
        if self.num_rows <= size:
            return self.optimizer_step.run_step([rows], self.compute_loss)
        batches = [
            rows.select_rows(slice(start, start + size)) for start in range(0, self.num_rows, size)
        ]
        return self.optimizer_step.run_step(batches, self.compute_loss)

    def compute_loss(self, batch: NetworkBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of one micro-batch over the rows of the optimizer step; metrics are per row."""
        settings, count = self.settings, self.num_rows
        outputs_MA, values_M1 = self.model.outputs_and_values(batch.observations_MD)
        logprobs_M1 = self.model.policy.logprob_column(outputs_MA, batch.actions)
        if self._mask_M1 is None or len(self._mask_M1) != len(logprobs_M1):
            self._mask_M1 = build_full_mask(len(logprobs_M1), 1)
        mask_M1 = self._mask_M1
        policy, policy_metrics = clipped_policy_loss(
            logprobs_M1,
            batch.old_logprobs_M1,
            batch.advantages_M1,
            mask_M1,
            num_loss_tokens=count,
            clip_eps=settings.clip_eps,
        )
        value, value_metrics = value_loss(
            values_M1,
            batch.targets_M1,
            mask_M1,
            num_loss_tokens=count,
            old_values_BT=batch.values_M1 if settings.value_clip_eps is not None else None,
            value_clip_eps=settings.value_clip_eps,
        )
        loss = policy + (value if settings.value_coef == 1 else settings.value_coef * value)
        if settings.entropy_coef > 0:
            entropy_M = self.model.policy.entropy_of(outputs_MA)
            bonus, entropy_metrics = entropy_bonus(
                entropy_M[:, None], mask_M1, num_loss_tokens=count
            )
            loss = loss + settings.entropy_coef * bonus
            policy_metrics |= entropy_metrics
        metrics = {f"policy/{name}": number for name, number in policy_metrics.items()}
        return loss, metrics | {f"value/{name}": number for name, number in value_metrics.items()}

    def _adapt_learning_rate(self, kl: float | None) -> None:
        """Adapt the learning rate to the KL of the iteration's last pass; None = every step of it was skipped."""
        settings, optimizer_step = self.settings, self.optimizer_step
        assert settings.desired_kl is not None
        if kl is not None:
            optimizer_step.learning_rate_scale = adapt_learning_rate_scale(
                optimizer_step.learning_rate_scale,
                kl,
                target=settings.desired_kl,
                factor=settings.learning_rate_factor,
                low=settings.learning_rate_low / settings.learning_rate,
                high=settings.learning_rate_high / settings.learning_rate,
            )


def compute_policy_logprobs(
    model: ActorCritic, observations_MD: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    """Compute log-probabilities of the actions under the current policy, nats, [M], without gradient."""
    with torch.no_grad():
        inputs_MD = model.normalised(observations_MD)
        return model.policy.logprobs_and_entropy(inputs_MD, actions)[0]


def whiten_advantages(advantages_M1: torch.Tensor) -> torch.Tensor:
    """Scale advantages to mean 0 and variance 1."""
    return masked_whiten(advantages_M1, build_full_mask(len(advantages_M1), 1))
