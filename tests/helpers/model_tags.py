"""A registered model's tags, in memory."""

from __future__ import annotations


class ModelTags:
    """The part of `Tracking` that attempts at the gate need."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def read_model_tags(self, name: str) -> dict[str, str]:
        return dict(self.found)

    def tag_model(self, name: str, key: str, value: str) -> None:
        self.found[key] = value
