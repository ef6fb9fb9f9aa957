"""An environment whose answers can be thought of beforehand, a policy that knows its format, and trainers on it."""

import copy

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.distributed import SINGLE_PROCESS
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.inference.engine import create_rollout_backend
from rl_core.models import causal_lm
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import ModelSettings, SamplingSettings, SFTSettings, ThoughtsSettings
from rl_core.thoughts.trainer import ThoughtsTrainer
from rl_core.trainers.sft import SFTTrainer


class SecretEpisode(Episode):
    """Two questions, each answered by its digit; any answer continues the episode."""

    def reset(self):
        self.turn, self.target = 0, f"{self.seed % 3} {(self.seed + 1) % 3}"
        return [{"role": "user", "content": f"q {self.seed % 3}"}]

    @property
    def next_target(self):
        return self.target.split()[self.turn]

    def act(self, text):
        right = text.rpartition("\n")[2] == f"answer {self.next_target}"
        if self.turn:
            return Step(reward=float(right), terminated=True, success=right)
        self.turn = 1
        return Step([{"role": "user", "content": f"q {self.next_target}"}], reward=float(right))


class Secrets(Environment):
    name = "secrets"
    levels = ("one", "two")

    @property
    def tools(self):
        return Toolset([])

    def episode(self, seed, level):
        self.check_level(level)
        return SecretEpisode(seed, level)


TEXTS = ["q 0", "q 1", "q 2", "0\nanswer 0", "answer 1", "1 2\nanswer 2"]


def renderer_of_texts():
    return ChatRenderer(train_tokenizer(TEXTS, 300))


def teach(renderer):
    """Train a policy that knows the format, thinks at random and answers at random."""
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=64, device="cpu"), renderer.tokenizer, 0
    )
    rows = []
    for digit in range(3):
        for thought in ("", "0\n", "1\n", "2\n"):
            for answer in range(3):
                turn = [
                    {"role": "user", "content": f"q {digit}"},
                    {"role": "assistant", "content": f"{thought}answer {answer}"},
                ]
                rows.append(renderer.encode_conversation(turn + turn))
    settings = SFTSettings(
        epochs=100, max_steps=40, batch_size=36, learning_rate=2e-2, warmup_steps=2
    )
    trainer = SFTTrainer(model, renderer.pad_id, rows, [], settings, 0)
    for _ in range(40):
        trainer.step()
    return model


def make_trainer(
    renderer, taught, *, process_group=SINGLE_PROCESS, backend=None, reference=None, **options
):
    settings = ThoughtsSettings(
        **{
            "iterations": 6,
            "episodes_per_iteration": 12,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "sampling": SamplingSettings(max_completion_tokens=40),
            **options,
        }
    )
    model = copy.deepcopy(taught)
    backend = backend or create_rollout_backend(
        model, eos_ids=renderer.eos_ids, pad_id=renderer.pad_id, max_length=64
    )
    heldout = [
        EpisodeRequest(level, seed) for level in Secrets.levels for seed in range(2**30, 2**30 + 4)
    ]
    return ThoughtsTrainer(
        model,
        renderer,
        Secrets(),
        settings,
        3,
        backend,
        heldout=heldout,
        process_group=process_group,
        reference=reference,
    )
