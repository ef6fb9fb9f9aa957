"""Episodes of letters, and a backend whose policy types what a script says: collection worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.step_pool import wait_for_observation
from rl_core.environments.tools import Toolset
from rl_core.inference.sampling import RolloutSequence
from rl_core.settings import SamplingSettings
from rl_core.types import Message, ToolCall

EOS = 1


class Renderer:
    """A token for each character, 32 for '@', up to 63; EOS ends an action."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return [self._id(c) for message in messages for c in message["content"]]

    observation_ids = prompt_ids

    def action_text(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + 32) for token in ids if token != EOS)

    def action_ids(self, text: str) -> list[int]:
        return [*(self._id(c) for c in text), EOS]

    @staticmethod
    def _id(character: str) -> int:
        return ord(character) - 32


class LookThenAnswer(Episode):
    """Answers every 'L...' with an observation of `seed` letters; 'A' is right, everything else wrong."""

    def reset(self) -> list[Message]:
        self.kind, self.target = "letters", "A"
        return [Message(role="system", content="S"), Message(role="user", content=f"Q{self.seed}")]

    def act(self, text: str) -> Step:
        if text == "TRUNCATE":
            return Step(truncated=True, reward=-1.0, success=False)
        if text.startswith("L"):
            observation = [
                Message(role="tool", content="O" * self.seed),
                Message(role="tool", content="P"),
            ]
            return Step(
                messages=observation,
                reward=-0.25,
                tool_call=ToolCall("look", {}),
                is_error=text == "LX",
            )
        return Step(terminated=True, reward=1.0 * (text == "A"), answer=text, success=text == "A")


class Looking(Environment):
    name = "looking"
    levels = ("easy", "hard")

    @property
    def tools(self) -> Toolset:
        return Toolset([])

    def episode(self, seed: int, level: str) -> Episode:
        self.check_level(level)
        return LookThenAnswer(seed, level)


class Typist:
    """A backend whose policy types what `script` says for the sequence's turn, with log-probability -0.5 a token."""

    max_length = 40

    def __init__(self, script: Callable[[RolloutSequence, int], str | list[int]]) -> None:
        self.script = script
        self.sequences: list[RolloutSequence] = []

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        self.sequences = list(sequences)
        for sequence in sequences:
            turn = 0
            while True:
                typed = self.script(sequence, turn)
                ids = Renderer().action_ids(typed) if isinstance(typed, str) else typed
                if (
                    wait_for_observation(
                        sequence.take_action(ids, [-0.5] * len(ids), ids[-1] != EOS)
                    )
                    is None
                ):
                    break
                turn += 1

    def refresh(self) -> None:
        pass
