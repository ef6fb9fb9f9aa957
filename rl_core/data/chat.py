"""Tokenisation of chat messages, shared by demonstrations and rollouts.

A multi-turn sequence is always a concatenation of the same pieces:

    prompt_ids(opening)  action_ids(text)  observation_ids(tool messages)  action_ids(text) ...
    |-- no loss ------|  |-- loss, EOS --|  |-- no loss ----------------|

so a demonstration and a rollout with the same texts have the same token ids, and nothing is ever re-tokenised.
Works with any tokenizer: its own chat template if it has one (with or without system and tool roles, with or without
strict alternation), else a plain-text template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rl_core.errors import DataError
from rl_core.types import Message

if TYPE_CHECKING:  # for annotations only; importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

__all__ = ["PLAIN_TEMPLATE", "ChatRenderer"]

# For tokenizers without a template, i.e. base models. The line break after the role avoids prompts that end in a space,
# which byte-level BPE never saw in training.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant:\n{{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)

_MARK = "Zq7MarkXw"  # placeholder message, located in the rendered text
_CACHED = 16384  # cached renderings; observations of small environments repeat often

_Key = tuple[tuple[str, str], ...]


class ChatRenderer:
    """Conversion between messages and token ids with one tokenizer.

    Raises: DataError if the tokenizer has no end-of-sequence token or its template cannot hold a conversation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._template: str | None = None if tokenizer.chat_template else PLAIN_TEMPLATE
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token (eos_token), so actions cannot end; set one")
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special_ids = frozenset(self._id_of(text) for text in special)
        self._special_pattern = re.compile("|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)))
        self._bos_ids = self._opening_ids()
        self._probe_roles()
        self.eos_id = self._find_eos()
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_id
        self._prompt = lru_cache(maxsize=_CACHED)(self._render_prompt)
        self._observation = lru_cache(maxsize=_CACHED)(self._render_observation)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an action: the template's end of turn first, then the tokenizer's EOS."""
        return tuple(dict.fromkeys((self.eos_id, int(self.tokenizer.eos_token_id))))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the opening messages and the header of the first action.

        Raises: DataError if the template refuses the messages.
        """
        return list(self._prompt(_key(messages)))

    def observation_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids to append after the policy's EOS: the messages and the header of the next action."""
        return list(self._observation(_key(messages)))

    def action_ids(self, text: str) -> list[int]:
        """Token ids of one action and its EOS; special tokens spelled out in `text` are encoded as plain text."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*ids, self.eos_id]

    def action_text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        kept = [token for token in ids if token not in self._special_ids and token != self.eos_id]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation and its loss mask; True = assistant token, EOS included.

        Raises: DataError if there is no assistant message or the last message is not one.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError("a training conversation must end with an assistant message")
        ids: list[int] = []
        mask: list[bool] = []
        waiting: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            before = self.observation_ids(waiting) if ids else self.prompt_ids(waiting)
            action = self.action_ids(message["content"])
            ids += before + action
            mask += [False] * len(before) + [True] * len(action)
            waiting = []
        return ids, mask

    # -- chat template -------------------------------------------------------------------------------------------------

    def _render_prompt(self, key: _Key) -> tuple[int, ...]:
        return (*self._bos_ids, *self._encode(self._text(self._fit(key))))

    def _render_observation(self, key: _Key) -> tuple[int, ...]:
        """Text after a placeholder assistant message and its end-of-turn token."""
        opening: _Key = (("user", "U"), ("assistant", _MARK))
        after = self._after_mark(self._text(self._fit(opening + key)))
        bare = after.lstrip()  # some templates put a space between the message and its EOS; the policy does not
        return tuple(self._encode(bare.removeprefix(self._eos_text) if bare.startswith(self._eos_text) else after))

    def _text(self, messages: list[Message], generation_prompt: bool = True) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": message["role"], "content": message["content"]} for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # templates may raise any exception
            roles = ", ".join(message["role"] for message in messages) or "no message"
            raise DataError(f"the tokenizer's chat template refuses this conversation ({roles}): {error}") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _id_of(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    def _after_mark(self, text: str) -> str:
        """Rendered text after the placeholder assistant message."""
        if _MARK not in text:
            raise DataError("the tokenizer's chat template omits assistant messages")
        return text.partition(_MARK)[2]

    def _opening_ids(self) -> tuple[int, ...]:
        """BOS if the tokenizer adds one and there is no chat template."""
        if self._template is None:
            return ()
        start = self.tokenizer("")["input_ids"][:1]
        return tuple(start) if start and start[0] == self.tokenizer.bos_token_id else ()

    def _find_eos(self) -> int:
        """Token that the template puts after an assistant message, else the tokenizer's EOS."""
        text = self._text([Message(role="user", content="U"), Message(role="assistant", content=_MARK)], False)
        match = self._special_pattern.match(self._after_mark(text).lstrip())
        self._eos_text = match.group() if match else str(self.tokenizer.eos_token)
        return self._id_of(self._eos_text)

    def _probe_roles(self) -> None:
        """Detect the role orders that the template renders; some raise for a role, others silently omit it."""

        def shows(*roles: str) -> bool:
            texts = [_MARK + str(place) for place in range(len(roles))]
            try:
                shown = self._text([Message(role=r, content=t) for r, t in zip(roles, texts, strict=True)])
            except DataError:
                return False
            return all(text in shown for text in texts)

        self._has_system = shows("system", "user")
        self._has_tool = shows("user", "assistant", "tool") and shows("user", "assistant", "tool", "tool")
        self._has_repeats = shows("user", "user") and shows("user", "assistant", "assistant")

    def _fit(self, key: _Key) -> list[Message]:
        """Messages converted to roles and an order that the template renders."""
        fitted: list[Message] = []
        for role, content in key:
            if (role == "system" and not self._has_system) or (role == "tool" and not self._has_tool):
                role = "user"
            content = self._plain(content)
            foreign = not self._has_system or not self._has_repeats
            if foreign and role != "tool" and fitted and fitted[-1]["role"] == role:
                fitted[-1] = Message(role=role, content=f"{fitted[-1]['content']}\n\n{content}")
            else:
                fitted.append(Message(role=role, content=content))
        return fitted

    def _plain(self, content: str) -> str:
        """Text with spelled-out special tokens broken by a space, so that no message can forge a role."""
        return self._special_pattern.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", content)


def _key(messages: Sequence[Message]) -> _Key:
    return tuple((message["role"], message["content"]) for message in messages)
