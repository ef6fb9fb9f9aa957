"""Tokenisation of chat messages, shared by demonstrations and rollouts.

A multi-turn sequence is always a concatenation of the same pieces:

    prompt_ids(opening)  action_ids(text)  observation_ids(tool messages)  action_ids(text) ...
    |-- no loss ------|  |-- loss, EOS --|  |-- no loss ----------------|

so a demonstration and a rollout with the same texts have the same token ids, and nothing is ever re-tokenised.
Any tokenizer works: with its chat template if it has one (with or without system and tool roles, with or without strict
alternation), else with a plain-text template. A thought that the template opens in its header (`<think>`) belongs to
the prompt: it is part of the action's text, but not of its ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from rl_core.data.chat_template import (
    PLACEHOLDER,
    ChatTemplate,
    TemplateFacts,
    compile_token_pattern,
    examine_template,
    render_assistant_text,
    render_history_message,
)
from rl_core.data.images import IMAGE_MARKER, find_image_reader
from rl_core.data.model_text import replace_surrogates, split_thought
from rl_core.data.text_encoding import TextEncoder, find_fast_backend
from rl_core.data.token_ids import GENERATION_CONFIG, find_end_texts, list_end_ids
from rl_core.errors import DataError, SettingsError
from rl_core.settings import ModelSettings
from rl_core.time_limits import CallTimeout, call_with_timeout
from rl_core.types import ImagePixels, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def compute_tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Compute the SHA-256 of what decides a tokenizer's ids; None if that is more than its backend."""
    backend = find_fast_backend(tokenizer)
    if backend is None:
        return None
    content = json.loads(backend.to_str())
    for of_calls in ("truncation", "padding"):  # as the last call of the tokenizer left them
        content.pop(of_calls, None)
    names = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    decisive = [content, names, bool(getattr(tokenizer, "split_special_tokens", False))]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


_MAX_CACHED = 16384  # cached renderings; observations of small environments repeat often
EXAMINATION_TIME_LIMIT_S = (
    3.0  # processor time for the examination of a template, which takes some hundredths
)
_PROBE: list[dict[str, Any]] = [{"role": "user", "content": "U"}]
_SHOWN = 40  # characters of a text in a message

_CacheKey = tuple[tuple[str, str, str], ...]  # role, content, other fields as JSON ("" = none)


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
            raise DataError(
                "the tokenizer has no end-of-sequence token (eos_token), so actions cannot end; set one"
            )
        self.template = ChatTemplate(tokenizer, settings, tools)
        self.settings = self.template.settings
        try:
            self.facts: TemplateFacts = call_with_timeout(
                EXAMINATION_TIME_LIMIT_S,
                "chat template",
                examine_template,
                self.template,
                counts_cpu_time=True,
            )
        except CallTimeout as error:
            raise DataError(
                f"the tokenizer's chat template takes longer than "
                f"{EXAMINATION_TIME_LIMIT_S:g} s for a few short messages; give "
                "another one with model.chat_template"
            ) from error
        self.encoder = encoder or TextEncoder(tokenizer)
        self._end_ids = frozenset(list_end_ids(tokenizer))
        control, markers = self.facts.control, self.facts.markers
        added = tokenizer.added_tokens_decoder
        self._ordinary_end_ids = {token for token in self._end_ids if token not in added}
        # An end token in a message's text would end the turn there.
        self._end_texts = find_end_texts(tokenizer)
        self._image_reader = find_image_reader(tokenizer)
        image_tokens = self._image_reader.tokens if self._image_reader is not None else ()
        control = tuple(sorted({*control, *image_tokens, *(set(self._end_texts) - set(markers))}))
        self._control = compile_token_pattern(control)
        self._markers = compile_token_pattern(markers)
        special = set(tokenizer.all_special_tokens)
        special |= {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self._unmarked = compile_token_pattern([text for text in control if text not in special])
        self.eos_id = self._find_token_id(self.facts.end_of_turn)
        self.pad_id: int = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_id
        )
        self._end_texts.pop(self.facts.end_of_turn, None)
        self._control_ids = {self._find_token_id(text) for text in control} | {self.eos_id}
        self._bos_ids = self._find_bos_ids()
        self._cached_prompt = lru_cache(maxsize=_MAX_CACHED)(self._render_prompt)
        self._cached_observation = lru_cache(maxsize=_MAX_CACHED)(self._render_observation)
        self._with_tools: dict[str, ChatRenderer] = {}
        self._decoder = self.encoder.find_completion_decoder(self.template.render_messages(_PROBE))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild in another process: caches and the template's environment are not sent."""
        return ChatRenderer, (self.tokenizer, self.settings, self.template.tools)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an action: the template's end of turn, the tokenizer's EOS, the generation settings' ones."""
        eos_id = int(cast(int, self.tokenizer.eos_token_id))
        return tuple(dict.fromkeys((self.eos_id, eos_id, *list_end_ids(self.tokenizer))))

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the text of messages: the template, its variables and date, tools and history."""
        settings = self.settings
        decisive: tuple[Any, ...] = (
            self.template.source,
            settings.chat_template_kwargs,
            settings.chat_template_date,
            self.template.tools,
            settings.native_tools,
            settings.history_thoughts,
        )
        if self._end_ids:
            decisive = (*decisive, sorted(self._end_ids))
        if self._image_reader is not None:
            decisive = (*decisive, self._image_reader.digest)
        return hashlib.sha256(
            json.dumps(decisive, sort_keys=True, default=str).encode()
        ).hexdigest()

    @property
    def opened_thought(self) -> str:
        """Thought that the header of every action opens, as "<think>\\n"; "" = none."""
        return self.facts.prefill if self.facts.opens_thought else ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatRenderer:
        """Return a renderer whose template gets these tools; this renderer if there are none.

        Raises: SettingsError if the template takes no tools.
        """
        if not tools:
            return self
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._with_tools:
            self._with_tools[key] = ChatRenderer(self.tokenizer, self.settings, tools, self.encoder)
        return self._with_tools[key]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the opening messages and the header of the first action.

        Raises: DataError if the template refuses the messages.
        """
        key = _build_cache_key(messages)
        if images := self.read_images(messages):
            return list(self._render_prompt(key, images))
        return list((self._render_prompt if self.encoder.is_batching else self._cached_prompt)(key))

    def observation_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids to append after the policy's EOS: the messages and the header of the next action."""
        key = _build_cache_key(messages)
        if images := self.read_images(messages):
            return list(self._render_observation(key, images))
        return list(
            (self._render_observation if self.encoder.is_batching else self._cached_observation)(
                key
            )
        )

    def read_images(self, messages: Sequence[Message]) -> list[ImagePixels]:
        """Return the images of messages in the order of their tokens.

        Raises: DataError for an image that cannot be read, or a model that reads none; SettingsError without Pillow, or
            where earlier turns are rendered again.
        """
        urls = [url for message in messages for url in message.get("images", ())]
        if not urls:
            return []
        if self._image_reader is None:
            raise DataError("the messages have images, and the model reads none")
        if self.settings.history_thoughts == "template":
            raise SettingsError(
                "model.history_thoughts: template renders earlier turns again, which is not supported with images; "
                "set it to keep"
            )
        return self._image_reader.read_images(urls)

    def needs_history_rewrite(self, messages: Sequence[Message]) -> bool:
        """Return whether the template rewrites earlier turns after these messages (`history_thoughts: template`)."""
        if self.settings.history_thoughts == "keep":
            return False
        shown = {
            "user" if m["role"] == "tool" and not self.facts.has_tool else m["role"]
            for m in messages
        }
        return bool(shown & set(self.facts.rewrites))

    def encode_history_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return `prompt_ids` for an episode in progress; not cached, as no other episode has the same prompt."""
        return list(self._render_prompt(_build_cache_key(messages), self.read_images(messages)))

    def action_ids(self, text: str) -> list[int]:
        """Return the token ids of one action and its end of turn, after a header.

        Markers of thoughts and calls are encoded as their tokens; tokens that could forge a role or an end remain text.
        A thought that the header opens is not opened again; an action without one closes it.
        A text that ends with an end token of generation_config.json ends there.
        Raises: DataError for a thought after a header that closes it (`enable_thinking: false`), and for text in which
            the model's generation settings would end the turn earlier.
        """
        text = self._strip_header_thought(text)
        if self._decoder.adds_space and text.startswith(" "):
            text = text[1:]  # the tokenizer puts one before any text
        end_id = self.eos_id
        for end, token in self._end_texts.items():
            if text.endswith(end):
                text, end_id = text.removesuffix(end), token
                break
        if self._control.search(text) is None:
            return self._end_action(self._encode_text(text), end_id)
        ids: list[int] = []
        place = 0
        for marker in self._markers.finditer(text):
            ids += [
                *self._encode_spelled_text(text[place : marker.start()]),
                self._find_token_id(marker.group()),
            ]
            place = marker.end()
        return self._end_action([*ids, *self._encode_spelled_text(text[place:])], end_id)

    def _end_action(self, ids: list[int], end_id: int) -> list[int]:
        """Append the end token; nothing may follow an end token, as no policy is sampled beyond one."""
        if self._end_ids:
            place = next((n for n, token in enumerate(ids) if token in self._end_ids), None)
            if place is not None and (place + 1 < len(ids) or end_id != self.eos_id):
                text = self._decoder.decode_ids(ids[place : place + 1])
                raise DataError(
                    f"the message has the token {text!r} ({ids[place]}) before its end, where a policy stops: it is "
                    f"an end token (eos_token_id) of the model's {GENERATION_CONFIG}; remove it from one of the two"
                )
            if place is not None:
                return ids
        return [*ids, end_id]

    def action_text(self, ids: Sequence[int]) -> str:
        """Return the text of a sampled action with its thought's opening, without control tokens; lone surrogates as
        '?'.
        """
        text_ids = [token for token in ids if token not in self._control_ids]
        if text_ids and text_ids[-1] in self._ordinary_end_ids and text_ids[-1] == ids[-1]:
            text_ids.pop()
        text = self._decoder.decode_ids(text_ids)
        return f"{self.opened_thought}{replace_surrogates(text)}"

    def decode_ids(self, ids: Sequence[int], *, is_start: bool = False) -> str:
        """Return the text of tokens within a conversation, or at its start; special tokens included."""
        decoder = self._decoder
        return decoder.decode_start(ids) if is_start else decoder.decode_ids(ids)

    def render_assistant_text(self, message: Message) -> str:
        """Render an assistant message: its thought, content and calls.

        Errors: `chat_template.render_assistant_text`.
        """
        return render_assistant_text(self.template, self.facts, message)

    def encode_conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation and its loss mask; True = assistant token, EOS included.

        An assistant message with `weight` 0 carries no loss.
        Raises: DataError if there is no assistant message or the last message is not one.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError("a training conversation must end with an assistant message")
        return self.encode_turns(messages)

    def encode_turns(
        self, messages: Sequence[Message], *, after_prompt: bool = False
    ) -> tuple[list[int], list[bool]]:
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
            action = self.action_ids(self.render_assistant_text(message))
            ids += before + action
            mask += [False] * len(before) + [message.get("weight", 1) != 0] * len(action)
            waiting = []
        return ids, mask

    def encode_plain_text(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the token ids of text without turns, as the tokenizer writes it, plus EOS; all but the first have
        loss.

        Raises: DataError if fewer than two tokens are left.
        """
        eos = str(self.tokenizer.eos_token)
        ids = self.encoder.encode_text(
            text if text.endswith(eos) else text + eos, add_special_tokens=True
        )
        if len(ids) < 2:
            raise DataError("text: has no token to predict")
        return ids, [False] + [True] * (len(ids) - 1)

    # -- chat template -------------------------------------------------------------------------------------------------

    def _render_prompt(self, key: _CacheKey, images: Sequence[ImagePixels] = ()) -> tuple[int, ...]:
        return (
            *self._bos_ids,
            *self._encode_text(
                self.encoder.compute_once(
                    lambda: self._expand_images(
                        self.template.render_messages(self._fit_messages(key)), images
                    )
                )
            ),
        )

    def _expand_images(self, text: str, images: Sequence[ImagePixels]) -> str:
        if not images or self._image_reader is None:
            return text
        return self._image_reader.expand_text(text, images)

    def _render_observation(
        self, key: _CacheKey, images: Sequence[ImagePixels] = ()
    ) -> tuple[int, ...]:
        """Render the text after a placeholder assistant message and its end-of-turn token."""
        opening: _CacheKey = (("user", "U", ""), ("assistant", PLACEHOLDER, ""))
        after = self.encoder.compute_once(
            lambda: self._expand_images(
                self.template.render_messages(self._fit_messages(opening + key)), images
            )
        ).partition(PLACEHOLDER)[2]
        bare = (
            after.lstrip()
        )  # some templates put a space between the message and its EOS; the policy does not
        end = self.facts.end_of_turn
        return tuple(self._encode_text(bare.removeprefix(end) if bare.startswith(end) else after))

    def _strip_header_thought(self, text: str) -> str:
        """Return an action's text as it continues after its header, which may have opened or closed a thought."""
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

    def _encode_text(self, text: str) -> list[int]:
        return self.encoder.encode_text(text)

    def _encode_spelled_text(self, text: str) -> list[int]:
        """Return the token ids of text in which control tokens are plain characters."""
        cuts = [0, *(match.start() + 1 for match in self._unmarked.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        return [
            token
            for piece in pieces
            for token in self.encoder.encode_text(piece, split_special_tokens=True)
        ]

    def _find_token_id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id

    def _find_bos_ids(self) -> tuple[int, ...]:
        """Return BOS if the tokenizer adds one and there is no chat template."""
        if not self.template.is_plain:
            return ()
        start = self.tokenizer("")["input_ids"][:1]
        return tuple(start) if start and start[0] == self.tokenizer.bos_token_id else ()

    def _fit_messages(self, key: _CacheKey) -> list[dict[str, Any]]:
        """Convert messages to roles and an order that the template renders."""
        facts = self.facts
        fitted: list[dict[str, Any]] = []
        for role, content, others in key:
            fields = json.loads(others) if others else {}
            if (role == "system" and not facts.has_system) or (
                role == "tool" and not facts.has_tool
            ):
                role, fields = "user", {n: v for n, v in fields.items() if n == "images"}
            if role == "assistant" and fields:
                content, fields = render_history_message(self.template, self.facts, content, fields)
            content = self._break_control_tokens(content)
            if num_images := fields.pop("images", 0):
                content = self._place_images(role, content, num_images)
            foreign = not facts.has_system or not facts.has_repeats
            if foreign and role != "tool" and fitted and fitted[-1]["role"] == role:
                fitted[-1]["content"] = f"{fitted[-1]['content']}\n\n{content}"
            else:
                fitted.append({"role": role, "content": content, **fields})
        return fitted

    def _place_images(self, role: str, content: str, num_images: int) -> str:
        """Replace the markers of a message by the tokens of its images."""
        assert self._image_reader is not None
        if role == "assistant":
            raise DataError("an assistant message has an image, and the policy writes text alone")
        if content.count(IMAGE_MARKER) != num_images:
            raise DataError(
                f"a message has {num_images} images and {content.count(IMAGE_MARKER)} markers {IMAGE_MARKER}"
            )
        return content.replace(IMAGE_MARKER, self._image_reader.marker_text)

    def _break_control_tokens(self, content: str) -> str:
        """Break spelled-out control tokens by a space, so that no message can forge a role."""
        return self._control.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", content)


def _build_cache_key(messages: Sequence[Message]) -> _CacheKey:
    keys = []
    for message in messages:
        others = {
            k: v
            for k, v in message.items()
            if k not in ("role", "content", "weight", "images") and v is not None
        }
        if message.get("images"):
            others["images"] = len(message["images"])
        keys.append(
            (
                message["role"],
                message.get("content") or "",
                json.dumps(others, sort_keys=True) if others else "",
            )
        )
    return tuple(keys)
