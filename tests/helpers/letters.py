"""A tiny environment, and policy-gradient trainers on it: the first letter of an action decides."""

import torch

from rl_core.data.chat import ChatRenderer
from rl_core.distributed import SINGLE_PROCESS
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.inference.engine import create_rollout_backend
from rl_core.models import causal_lm
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import CurriculumStage, ModelSettings, PolicySettings, SamplingSettings
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.policy_gradient.update import PolicyUpdate


class LetterEpisode(Episode):
    """Right if the action begins with a letter of the level's half of the alphabet."""

    def reset(self):
        return [{"role": "user", "content": f"{self.level}{self.seed % 3}"}]

    def act(self, text):
        letters = "abcdefghijklm" if self.level == "low" else "nopqrstuvwxyz"
        success = text[:1].lower() in letters if text else False
        return Step(reward=float(success), terminated=True, success=success)


class Letters(Environment):
    name = "letters"
    levels = ("low", "high")

    @property
    def tools(self):
        return Toolset([])

    def episode(self, seed, level):
        self.check_level(level)
        return LetterEpisode(seed, level)


class FewLetters(Letters):
    def seeds(self, split):
        return range(5) if split == "train" else range(5, 8)


class WalkEpisode(LetterEpisode):
    """Two right letters end it; each right one earns half, each wrong one costs an eighth."""

    def act(self, text):
        step = super().act(text)
        self.row["place"] = place = self.row.get("place", 0) + int(step.reward)
        is_over = place == 2
        return Step(
            messages=[] if is_over else [{"role": "user", "content": f"{place}"}],
            reward=0.5 if step.success else -0.125,
            terminated=is_over,
            success=is_over,
        )


class Walk(Letters):
    def episode(self, seed, level):
        return WalkEpisode(seed, level)


class ParityEpisode(LetterEpisode):
    """Right if the first token's number is even: 't12' is."""

    def act(self, text):
        digits = "".join(letter for letter in text.split(" ")[0] if letter.isdigit())
        success = bool(digits) and int(digits) % 2 == 0
        return Step(reward=float(success), terminated=True, success=success)


class Parity(Letters):
    def episode(self, seed, level):
        return ParityEpisode(seed, level)


def make_trainer(
    tokenizer,
    environment=None,
    *,
    rewards=None,
    reference=None,
    model=None,
    model_seed=0,
    process_group=SINGLE_PROCESS,
    teacher=None,
    custom=None,
    kind=PolicySettings,
    context=32,
    **options,
):
    options = {
        "iterations": 50,
        "prompts_per_iteration": 6,
        "group_size": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "sampling": SamplingSettings(max_completion_tokens=3),
        **options,
    }
    rewards = rewards or RewardOrchestrator({"task": 1.0})
    torch.manual_seed(0)
    model = model or causal_lm.create_model(
        ModelSettings(preset="nano", context=context, device="cpu"), tokenizer, model_seed
    )
    renderer = ChatRenderer(tokenizer)
    # Every other token ends an action, so that an untrained policy writes actions of 1 to 3 tokens and is heard.
    backend = create_rollout_backend(
        model, eos_ids=range(0, len(tokenizer), 2), pad_id=renderer.pad_id, max_length=context
    )
    return PolicyGradientTrainer(
        model,
        reference,
        renderer,
        environment or Letters(),
        kind(rewards=dict(rewards.weights), **options),
        7,
        rewards,
        backend,
        process_group=process_group,
        teacher=teacher,
        custom_functions=custom,
    )


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def weights_of(model):
    """Return a copy of all weights, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def sample_with(trainer, change):
    """Make the sampler play with weights that `change` has altered; the trainer's weights stay the same."""
    run = trainer.backend.run_sequences

    def changed(*arguments):
        original = weights_of(trainer.policy)
        with torch.no_grad():
            change(trainer.policy)
        run(*arguments)
        trainer.policy.load_state_dict(original)

    trainer.backend.run_sequences = changed


def capture_update(monkeypatch):
    """Capture the PolicyUpdate of the next step, in a list."""
    updates = []
    original_init = PolicyUpdate.__init__

    def keep(self, *args, **options):
        original_init(self, *args, **options)
        updates.append(self)

    monkeypatch.setattr(PolicyUpdate, "__init__", keep)
    return updates


def comparable(metrics):
    return {
        name: float(value).hex() for name, value in metrics.items() if not name.startswith("perf/")
    }


def resumes_bit_for_bit(make):
    """Return whether two iterations and two by another trainer with their state have the bits of four in a row."""
    uninterrupted, first, second = make(), make(), make()
    expected = [comparable(uninterrupted.step()) for _ in range(4)]
    metrics = [comparable(first.step()) for _ in range(2)]
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer_step.load_state_dict(first.optimizer_step.state_dict())
    second.load_state_dict(first.state_dict())
    metrics += [comparable(second.step()) for _ in range(2)]
    return metrics == expected and torch.equal(weights(second), weights(uninterrupted))


LOW = (CurriculumStage(name="one", levels={"low": 1.0}),)
