"""Settings of `posttrain prefer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.parts import SamplingSettings

__all__ = ["RatingSettings"]

REASONS = ("right answer", "clearer", "follows the instruction", "better use of tools", "safer", "shorter")


@dataclass(frozen=True, kw_only=True)
class RatingSettings(Settings):
    """The page of `posttrain prefer`: what people are shown and asked, and in which order."""

    ask: Literal["pairs", "scores", "thumbs"] = setting(
        "pairs", doc="pairs: which of two answers is better; scores: 1 to 5 for one answer; thumbs: up or down"
    )
    question: str | None = setting(None, doc="the question above the answers; left out: one that fits `ask`")
    reasons: tuple[str, ...] = setting(REASONS, doc="reasons to choose from; none or one of them is kept with a rating")
    models: tuple[str, ...] = setting(
        (),
        doc="who answers: models:/NAME@ALIAS, model or stage folders, or hub names, one (two rollouts of it) or two; "
        "left out: the pipeline's champion",
    )
    prompts: int = setting(100, ge=1, le=1_000_000, doc="training episodes that they answer")
    levels: tuple[str, ...] = setting((), doc="levels of these episodes, in turn; left out: all of the environment")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how the answers are drawn")
    reward_model: str | None = setting(
        None, doc="folder of a reward model whose uncertainty chooses; left out: that of a new head on the first model"
    )
    choose: Literal["uncertainty", "random"] = setting(
        "uncertainty",
        doc="the next pair; uncertainty: of which a label tells the reward model most (BALD, arXiv:1112.5745)",
    )
    overlap: float = setting(0.2, ge=0, le=1, doc="share of pairs that every rater is asked, for their agreement")
    repeat: float = setting(0.05, ge=0, lt=1, doc="share of questions that a rater is asked again, later on")
    port: int = setting(8331, ge=1, le=65_535, doc="loopback port of the page; if taken, the next free one")

    def check(self) -> None:
        """Answers of one model differ; reasons are short texts, each once."""
        if len(self.models) > 2:
            raise SettingsError(f"models: {len(self.models)} are named; one or two answer")
        if len(set(self.reasons)) != len(self.reasons) or not all(0 < len(r.strip()) <= 60 for r in self.reasons):
            raise SettingsError("reasons: each is there once and has 1 to 60 characters")
        if len(self.models) < 2:
            self.sampling.check_varied()
