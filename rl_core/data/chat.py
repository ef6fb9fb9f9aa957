"""Tokenisation of chat messages, shared by demonstrations and rollouts.

A multi-turn sequence is always a concatenation of the same pieces:

    prompt_ids(opening)  action_ids(text)  observation_ids(tool messages)  action_ids(text) ...
    |-- no loss ------|  |-- loss, EOS --|  |-- no loss ----------------|

so a demonstration and a rollout with the same texts have the same token ids, and nothing is ever re-tokenised.
Works with any tokenizer: its own chat template if it has one (with or without system and tool roles, with or without
strict alternation), else a plain-text template. A thought that the template opens in its header (`<think>`) belongs to
the prompt: it is no part of the action's ids, and part of its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from rl_core.data.assistant_message import assistant_text, in_history
from rl_core.data.chat_template import PLAIN_TEMPLATE, ChatTemplate
from rl_core.data.encoder import TextEncoder
from rl_core.data.model_text import without_surrogates
from rl_core.data.reasoning import split_thought
from rl_core.data.template_probe import MARK, TemplateFacts, control_pattern, examine
from rl_core.errors import DataError
from rl_core.settings import ModelSettings
from rl_core.time_limits import CallTimeout, call_within
from rl_core.types import Message

if TYPE_CHECKING:  # for annotations only; importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

__all__ = ["PLAIN_TEMPLATE", "ChatRenderer"]

_CACHED = 16384  # cached renderings; observations of small environments repeat often
EXAMINE_S = 3.0  # processor time for the examination of a template, which takes some hundredths
_SHOWN = 40  # characters of a text in a message

_Key = tuple[tuple[str, str, str], ...]  # role, content, other fields as JSON ("" = none)


class ChatRenderer:
    """Conversion between messages and token ids with one tokenizer.

    Raises: DataError if the tokenizer has no end-of-sequence token or its template cannot hold a conversation;
        SettingsError if the template does not know a variable, or takes no tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: ModelSettings | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        encoder: TextEncoder | None = None,
    ) -> None:
        """`settings`: of the chat template. `tools`: JSON schemas for it, as `Toolset.schema()` gives them."""
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token (eos_token), so actions cannot end; set one")
        self.template = ChatTemplate(tokenizer, settings, tools)
        self.settings = self.template.settings
        try:
            self.facts: TemplateFacts = call_within(EXAMINE_S, "chat template", examine, self.template, of_cpu=True)
        except CallTimeout as error:
            raise DataError(
                f"the tokenizer's chat template takes longer than {EXAMINE_S:g} s for a few short messages; give "
                "another one with model.chat_template"
            ) from error
        self.encoder = encoder or TextEncoder(tokenizer)
        self._control = control_pattern(self.facts.control)
        self._markers = control_pattern(self.facts.markers)
        special = set(tokenizer.all_special_tokens)
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._unmarked = control_pattern([text for text in self.facts.control if text not in special])
        self.eos_id = self._id_of(self.facts.end_of_turn)
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_id
        self._control_ids = {self._id_of(text) for text in self.facts.control} | {self.eos_id}
        self._bos_ids = self._opening_ids()
        self._prompt = lru_cache(maxsize=_CACHED)(self._render_prompt)
        self._observation = lru_cache(maxsize=_CACHED)(self._render_observation)
        self._with_tools: dict[str, ChatRenderer] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes it anew: its caches and the template's environment do not travel."""
        return ChatRenderer, (self.tokenizer, self.settings, self.template.tools)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an action: the template's end of turn first, then the tokenizer's EOS."""
        return tuple(dict.fromkeys((self.eos_id, int(cast(int, self.tokenizer.eos_token_id)))))

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the text of messages: the template, its variables and date, tools and history."""
        settings = self.settings
        decisive = (
            self.template.source, settings.chat_template_kwargs, settings.chat_template_date, self.template.tools,
            settings.native_tools, settings.history_thoughts,
        )  # fmt: skip
        return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def opened_thought(self) -> str:
        """Thought that the header of every action opens, as "<think>\\n"; "" = none."""
        return self.facts.prefill if self.facts.opens_thought else ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatRenderer:
        """The renderer whose template is handed these tools; this one for none.

        Raises: SettingsError if the template takes no tools.
        """
        if not tools:
            return self
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._with_tools:
            self._with_tools[key] = ChatRenderer(self.tokenizer, self.settings, tools, self.encoder)
        return self._with_tools[key]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the opening messages and the header of the first action.

        Raises: DataError if the template refuses the messages.
        """
        return list((self._render_prompt if self.encoder.is_batching else self._prompt)(_key(messages)))

    def observation_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids to append after the policy's EOS: the messages and the header of the next action."""
        return list((self._render_observation if self.encoder.is_batching else self._observation)(_key(messages)))

    def rewrites(self, messages: Sequence[Message]) -> bool:
        """True = `history_thoughts: template`, and after these messages the template writes earlier turns anew."""
        if self.settings.history_thoughts == "keep":
            return False
        shown = {"user" if m["role"] == "tool" and not self.facts.has_tool else m["role"] for m in messages}
        return bool(shown & set(self.facts.rewrites))

    def history_ids(self, messages: Sequence[Message]) -> list[int]:
        """As `prompt_ids`, for an episode that has begun: one of its kind, so not kept for the next."""
        return list(self._render_prompt(_key(messages)))

    def action_ids(self, text: str) -> list[int]:
        """Token ids of one action and its end of turn, after a header.

        Markers of thoughts and calls are the tokens that they are; tokens that could forge a role or an end stay text.
        A thought that the header opens is not opened again; an action without one closes it.
        Raises: DataError for a thought after a header that closes it (`enable_thinking: false`).
        """
        text = self._after_header(text)
        if self._control.search(text) is None:
            return [*self._encode(text), self.eos_id]
        ids: list[int] = []
        place = 0
        for marker in self._markers.finditer(text):
            ids += [*self._spelled(text[place : marker.start()]), self._id_of(marker.group())]
            place = marker.end()
        return [*ids, *self._spelled(text[place:]), self.eos_id]

    def action_text(self, ids: Sequence[int]) -> str:
        """Text of a sampled action with its thought's opening, without control tokens; lone surrogates as '?'."""
        kept = [token for token in ids if token not in self._control_ids]
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return f"{self.opened_thought}{without_surrogates(str(text))}"

    def assistant_text(self, message: Message) -> str:
        """Text of an assistant message: its thought, content and calls. Errors: `assistant_message.assistant_text`."""
        return assistant_text(self.template, self.facts, message)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation and its loss mask; True = assistant token, EOS included.

        An assistant message with `weight` 0 carries no loss.
        Raises: DataError if there is no assistant message or the last message is not one.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError("a training conversation must end with an assistant message")
        return self.turns(messages)

    def turns(self, messages: Sequence[Message], *, after_prompt: bool = False) -> tuple[list[int], list[bool]]:
        """As `conversation`; with `after_prompt` the messages stand after `prompt_ids`, which are not repeated."""
        ids: list[int] = []
        mask: list[bool] = []
        waiting: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            first = [] if after_prompt or ids else self.prompt_ids(waiting)
            before = self.observation_ids(waiting) if ids else first
            action = self.action_ids(self.assistant_text(message))
            ids += before + action
            mask += [False] * len(before) + [message.get("weight", 1) != 0] * len(action)
            waiting = []
        return ids, mask

    def plain_text(self, text: str) -> tuple[list[int], list[bool]]:
        """Token ids of text without turns, as the tokenizer writes it, its EOS at the end; all but the first have loss.

        Raises: DataError if fewer than two tokens are left.
        """
        eos = str(self.tokenizer.eos_token)
        ids = self.encoder.ids(text if text.endswith(eos) else text + eos, special=True)
        if len(ids) < 2:
            raise DataError("text: has no token to predict")
        return ids, [False] + [True] * (len(ids) - 1)

    # -- chat template -------------------------------------------------------------------------------------------------

    def _render_prompt(self, key: _Key) -> tuple[int, ...]:
        return (*self._bos_ids, *self._encode(self.encoder.once(lambda: self.template.text(self._fit(key)))))

    def _render_observation(self, key: _Key) -> tuple[int, ...]:
        """Text after a stand-in assistant message and its end-of-turn token."""
        opening: _Key = (("user", "U", ""), ("assistant", MARK, ""))
        after = self.encoder.once(lambda: self.template.text(self._fit(opening + key))).partition(MARK)[2]
        bare = after.lstrip()  # some templates put a space between the message and its EOS; the policy does not
        end = self.facts.end_of_turn
        return tuple(self._encode(bare.removeprefix(end) if bare.startswith(end) else after))

    def _after_header(self, text: str) -> str:
        """Text of an action as it goes on after its header, which may have opened or closed a thought."""
        prefill, pair = self.facts.prefill, self.facts.thought_markers
        if not prefill or pair is None:
            return text
        opening, closing = pair
        if text.startswith(prefill):
            return text.removeprefix(prefill)
        if self.facts.opens_thought:
            if text.lstrip().startswith(opening):
                return text.lstrip().removeprefix(opening).removeprefix("\n")
            return text if closing in text else self.facts.closing + text
        thought, rest = split_thought(text, pair)
        if thought:
            raise DataError(
                f"the message has a thought ({thought[:_SHOWN]!r}), but the chat template closes it before the answer; "
                "remove enable_thinking: false from model.chat_template_kwargs, or the thought"
            )
        return text if thought is None else rest

    def _encode(self, text: str) -> list[int]:
        return self.encoder.ids(text)

    def _spelled(self, text: str) -> list[int]:
        """Token ids of text in which control tokens are plain characters."""
        cuts = [0, *(match.start() + 1 for match in self._unmarked.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        return [token for piece in pieces for token in self.encoder.ids(piece, spelled=True)]

    def _id_of(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    def _opening_ids(self) -> tuple[int, ...]:
        """BOS if the tokenizer adds one and there is no chat template."""
        if not self.template.is_plain:
            return ()
        start = self.tokenizer("")["input_ids"][:1]
        return tuple(start) if start and start[0] == self.tokenizer.bos_token_id else ()

    def _fit(self, key: _Key) -> list[dict[str, Any]]:
        """Messages converted to roles and an order that the template renders."""
        facts = self.facts
        fitted: list[dict[str, Any]] = []
        for role, content, others in key:
            if (role == "system" and not facts.has_system) or (role == "tool" and not facts.has_tool):
                role, others = "user", ""
            fields = json.loads(others) if others else {}
            if role == "assistant" and fields:
                content, fields = in_history(self.template, self.facts, content, fields)
            content = self._plain(content)
            foreign = not facts.has_system or not facts.has_repeats
            if foreign and role != "tool" and fitted and fitted[-1]["role"] == role:
                fitted[-1]["content"] = f"{fitted[-1]['content']}\n\n{content}"
            else:
                fitted.append({"role": role, "content": content, **fields})
        return fitted

    def _plain(self, content: str) -> str:
        """Text with spelled-out control tokens broken by a space, so that no message can forge a role."""
        return self._control.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", content)


def _key(messages: Sequence[Message]) -> _Key:
    keys = []
    for message in messages:
        others = {k: v for k, v in message.items() if k not in ("role", "content", "weight") and v is not None}
        keys.append(
            (message["role"], message.get("content") or "", json.dumps(others, sort_keys=True) if others else "")
        )
    return tuple(keys)
