"""The test for genuine thoughts while training: every N episodes, on the validation's episodes, and by choice an end.

The stage's own test comes at the end, on other episodes. Here the same episodes are looked at again and again, so a
verdict of one of these checks is a curve to read and a reason to stop, no proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.errors import DataError, SettingsError
from rl_core.settings import ThoughtsSettings
from rl_core.thoughts import controls
from rl_core.thoughts.episodes import ThoughtEpisode, ThoughtReader, ThoughtRenderer
from rl_core.thoughts.verdict import ThoughtVerdict, judge_thoughts
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TrainingCheck", "examine"]


def examine(
    model: PreTrainedModel,
    reader: ThoughtReader,
    renderer: ThoughtRenderer,
    optimizer_step: OptimizerStep,
    episodes: Sequence[ThoughtEpisode],
    settings: ThoughtsSettings,
    *,
    pad_id: int,
    seed: int,
) -> ThoughtVerdict:
    """Controls on these episodes, and the verdict. Raises: DataError where no thought can be examined."""
    measure = functools.partial(
        controls.measure_gains,
        model,
        reader,
        episodes,
        kind=settings.reward,
        clip=settings.gain_clip,
        filler_id=renderer.action_ids(controls.FILLER)[0],
        pad_id=pad_id,
        seed=seed,
        max_tokens=settings.micro_batch_tokens,
    )
    return judge_thoughts(
        optimizer_step.sharded.with_full_weights_independent(measure),
        min_dependence=settings.min_dependence,
        bootstrap_samples=settings.bootstrap_samples,
        seed=seed,
    )


class TrainingCheck:
    """Schedule of the checks, and the end of training that one of them may ask for."""

    def __init__(self, settings: ThoughtsSettings, num_heldout: int) -> None:
        """Raises: SettingsError where checks are asked for and there are no held-out episodes."""
        self._every, self._stops = settings.check_every_episodes, settings.stop_when_genuine
        if self._every and num_heldout < 2:
            raise SettingsError("check_every_episodes: needs held-out episodes, at least 2 of each level")
        self.finished = ""  # why training ends; "" = it goes on

    def is_due(self, before: int, played: int) -> bool:
        """True = a multiple of N lies in (before, played], the episodes played before and after an iteration."""
        return bool(self._every) and before // self._every < played // self._every

    def run(self, verdict: Callable[[], ThoughtVerdict], played: int) -> dict[str, float]:
        """Check, and note if training ends; returns thoughts/check_..., genuine being 0 where nobody answers yet."""
        try:
            found = verdict()
        except DataError:  # nobody answers yet, or only one of a level does
            return {"thoughts/check_genuine": 0.0}
        metrics = {
            name.replace("thoughts/", "thoughts/check_"): value
            for name, value in found.metrics().items()
            if name == "thoughts/genuine" or name.startswith(("thoughts/gain_", "thoughts/drop_"))
        }
        if self._stops and found.genuine:
            self.finished = f"thoughts are genuine on the validation episodes, after {played} episodes"
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs."""
        return {"finished": self.finished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.finished = str(state["finished"])
