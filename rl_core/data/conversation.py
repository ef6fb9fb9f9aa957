"""Training sequences of a demonstration: the turns that carry loss, and a history without thoughts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from rl_core.data.chat import ChatRenderer
from rl_core.errors import DataError
from rl_core.types import Message

__all__ = ["TrainingSequence", "cut_sequences", "training_sequences"]

TrainingSequence = tuple[list[int], list[bool]]  # token ids and loss mask; True = carries loss


def training_sequences(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    loss_on: Literal["all", "last"] = "all",
    max_tokens: int | None = None,
) -> list[TrainingSequence]:
    """Sequences of one conversation, each turn with loss in exactly one of them.

    One sequence that keeps every turn as it was written (`history_thoughts: keep`), as a rollout does. With `template`,
    each turn stands after the history as the template renders it for that turn; consecutive turns share a sequence for
    as long as that history begins with the tokens before it; a template that drops thoughts starts a new one.
    A message of the role "text" alone is plain text: every token after the first carries loss.
    Args:
        tools: JSON schemas handed to the template.
        loss_on: assistant turns with loss, all or the last one; a message with `weight` 0 has none either way.
        max_tokens: tokens of a sequence that are kept, from its start; a sequence without loss among them is left out.
    Raises: DataError where no turn carries loss, none of it is left, or the template refuses the messages;
        SettingsError for tools that it does not take.
    """
    return cut_sequences(_whole_sequences(renderer.with_tools(tools), messages, loss_on), max_tokens)


def cut_sequences(found: list[TrainingSequence], max_tokens: int | None) -> list[TrainingSequence]:
    """The first tokens of each sequence, without those that have no loss left; None = all.

    Raises: DataError if none is left.
    """
    if max_tokens is None:
        return found
    cut = [(ids[:max_tokens], mask[:max_tokens]) for ids, mask in found]
    if not any(any(mask) for _, mask in cut):
        raise DataError(f"nothing that carries loss is among the first {max_tokens} tokens")
    return [(ids, mask) for ids, mask in cut if any(mask)]


def _whole_sequences(
    renderer: ChatRenderer, messages: Sequence[Message], loss_on: Literal["all", "last"]
) -> list[TrainingSequence]:
    if len(messages) == 1 and messages[0]["role"] == "text":
        return [renderer.plain_text(messages[0]["content"])]
    if loss_on == "last":
        messages = [*map(_without_loss, messages[:-1]), messages[-1]]
    if all(message.get("weight", 1) == 0 for message in messages if message["role"] == "assistant"):
        raise DataError("no assistant message carries loss: all of them have weight 0")
    if renderer.settings.history_thoughts == "keep":
        return [renderer.conversation(messages)]
    return [(ids, mask) for ids, mask in _as_rendered(renderer, messages) if any(mask)]


def _without_loss(message: Message) -> Message:
    return cast(Message, {**message, "weight": 0}) if message["role"] == "assistant" else message


def _as_rendered(renderer: ChatRenderer, messages: Sequence[Message]) -> Iterator[TrainingSequence]:
    """Sequences in which every turn follows the prompt that the template renders for it."""
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError("a training conversation must end with an assistant message")
    ids: list[int] = []
    mask: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = renderer.prompt_ids(messages[:index])
        if prompt[: len(ids)] != ids:
            yield ids, mask
            ids, mask = [], []
        action = renderer.action_ids(renderer.assistant_text(message))
        mask += [False] * (len(prompt) - len(ids)) + [message.get("weight", 1) != 0] * len(action)
        ids = [*prompt, *action]
    yield ids, mask
