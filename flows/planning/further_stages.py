"""Plans of the stages beside training and evaluating policies: thoughts, networks, analysis, proof of export."""

from __future__ import annotations

from flows.planning.stage_planner import StagePlan, StagePlanner
from rl_core.resources.activations import MicroBatch
from rl_core.resources.stage_memory import (
    STAYING,
    Phase,
    StageMemory,
    forward_parts,
    frozen_bytes,
    held_by_training,
)
from rl_core.resources.stage_work import StageWork, scoring_work, training_work
from rl_core.settings import AnalysisSettings, ExportSettings, NetworkSettings, ThoughtsSettings

__all__ = ["FurtherStagePlanner"]

_PROBE_TOKENS = 4096  # as `rl_core.probe.MAX_TOKENS`
_FIXED_TOKENS = 8 * 16 + 16  # of a record of the trainer's model, and sequences of the evaluation's
_TRAIN, _ROLL = 6, 2  # operations a parameter and observation


class FurtherStagePlanner(StagePlanner):
    """Plans one stage of any kind that is planned."""

    def thoughts(self, block: ThoughtsSettings) -> StagePlan:
        """Episodes of one rollout each; answers scored with and without the thought, then an update on both."""
        shape = self.model.policy
        prompt, new = self.lengths.of_rollout(block.sampling, shape.context)
        count, length = block.episodes_per_iteration, prompt + new
        rows = 2 * count  # with the thought, and without it
        batch = self._micro_batch(block, -(-rows // self.processes), length, new)
        frozen = {"reference model": frozen_bytes(shape, self.place.item)} if block.kl_coef and not shape.ranks else {}
        beside = {**self.runtime, **frozen}
        rollouts = self._rollouts(shape, block, beside)
        rollouts = Phase(rollouts.name, {**rollouts.parts, **held_by_training(shape, block, self.place)})
        stays = {name: size for name, size in rollouts.parts.items() if name in STAYING}
        phases = [rollouts, *self._update(shape, block, batch, {**beside, **stays})]
        sizes = {"length": float(length), "loss_length": float(new), **self._savings(shape, block, batch)}
        scored = scoring_work(shape, rows=rows + count, **sizes)  # answers twice, and the baseline's states
        work = self._played(block, count, count, prompt, new) + scored
        work += training_work(shape, block, rows=rows, updates=1, micro_batches=batch.count, **sizes)
        if block.kl_coef:
            work += scoring_work(shape, rows=rows, **sizes)
        work = work.times(block.iterations)
        validations = 1 + (block.iterations // block.eval_every if block.eval_every else 0)
        # the test for genuine thoughts scores each answer four times: thought, none, shuffled, filler
        for episodes, times in ((block.validation_episodes * validations, 2), (block.check_episodes, 4)):
            work += self._played(block, episodes, episodes, prompt, new)
            work += scoring_work(shape, rows=times * episodes, length=float(length), loss_length=float(new))
        if not self.lengths.completion:
            self.notes.append("rollouts count at max_completion_tokens: --completion-tokens gives their mean")
        self.notes.append("an episode counts as one question; environment steps are not in the time")
        return self._plan(shape, phases, work)

    def analysis(self, block: AnalysisSettings) -> StagePlan:
        """Passes of every evaluated model beside the first one, and of the reward model."""
        shape = self.model.policy
        models, length = self._evaluated(), self.lengths.of_row(shape.context)
        evaluation = self.settings.stages.evaluate
        if evaluation is not None:
            length = min(shape.context, sum(self.lengths.of_rollout(evaluation.sampling, shape.context)))
        tokens = max(length, _PROBE_TOKENS // length * length)
        two = min(2, models) * self.place.item * shape.parameters
        passes = forward_parts(shape, MicroBatch(tokens, tokens, tokens), self.place)
        phase = Phase("models' passes", {**self.runtime, "weights": two, **passes})
        episodes = block.probe_episodes
        # entropy and KL: this model and the first; the coherence of turns: the first model's states
        work = scoring_work(
            shape, rows=models * 3 * episodes + models * block.probe_demonstrations, length=float(length),
            loss_length=float(length),
        )  # fmt: skip
        if self.settings.stages.reward_model is not None:
            work += scoring_work(
                self.model.trunk, rows=models * block.probe_scores, length=float(length), loss_length=1.0
            )
        self.notes.append("counting, drawing and the trajectories in memory are not in the plan")
        return self._plan(shape, [phase], work, trainable=0)

    def export(self, block: ExportSettings) -> StagePlan:
        """A fresh process that loads one written model after the other, beside this one."""
        shape = self.model.policy
        trained = self._evaluated()
        passes = forward_parts(shape, MicroBatch(_FIXED_TOKENS, _FIXED_TOKENS, _FIXED_TOKENS), self.place)
        runtime = {"runtime": 2 * self.place.runtime} if self.place.runtime else {}
        phase = Phase("fresh process", {**runtime, "weights": self.place.item * shape.parameters, **passes})
        work = scoring_work(shape, rows=float(trained * 2 * 16), length=16.0, loss_length=16.0)
        self.notes.append("the start of a fresh process, 20 s or more on a slow core, is not in the time")
        return self._plan(shape, [phase], work, trainable=0)

    def network(self, block: NetworkSettings) -> StagePlan:
        """Policy and value networks of an environment, whose spaces are looked at.

        Raises: SettingsError where the environment cannot be made.
        """
        from rl_core.networks.actor_critic import ActorCritic, NetworkShape
        from rl_core.networks.making import spaces_of

        observation, actions = spaces_of(block)
        made = ActorCritic(NetworkShape(observation, actions, block.hidden, block.activation))
        parameters = sum(parameter.numel() for parameter in made.parameters())
        steps = block.num_environments * block.rollout_steps
        row = 4 * (observation + actions.size + 6)  # and reward, ends, log-prob, value, advantage, return
        together = min(block.micro_batch_tokens, -(-steps // block.minibatches))
        layers = 4 * 2 * (observation + sum(block.hidden)) * together  # of both networks
        parts = {
            **self.runtime, "weights": 4 * parameters, "gradients": 4 * parameters, "optimizer moments": 8 * parameters,
            "best model": 4 * parameters, "steps": row * steps * (1 + block.replay), "activations": layers,
        }  # fmt: skip
        iterations = max(1, block.environment_steps // steps)
        learned = iterations * steps * block.epochs * (1 + block.replay)
        work = StageWork(
            trained_tokens=float(learned), scored_tokens=float(iterations * steps),
            updates=float(iterations * block.epochs * block.minibatches),
            training_flops=float(_TRAIN * parameters * learned),
            scoring_flops=float(_ROLL * parameters * iterations * steps),
        )  # fmt: skip
        self.notes.append("tokens are observations; environments and their time, which is most of it, are not planned")
        memory = StageMemory((Phase("update", {name: size for name, size in parts.items() if size}),))
        return StagePlan(self.name, parameters, parameters, 1, memory, work, None, tuple(self.notes))
