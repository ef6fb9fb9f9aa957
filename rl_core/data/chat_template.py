"""Rendering of messages by a tokenizer's chat template, with the template's variables, tools and date held fixed."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.errors import DataError
from rl_core.settings import ModelSettings

if TYPE_CHECKING:  # for annotations only; importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate"]

# For tokenizers without a template, i.e. base models. The line break after the role avoids prompts that end in a space,
# which byte-level BPE never saw in training.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant:\n{{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)

# Of strftime; the longer ones first, as their text is replaced.
_DIRECTIVES = [
    *(f"%-{letter}" for letter in "dmHIMSj"),
    *(f"%{letter}" for letter in "aAbBcdDeFGHIjmMnpRSTuUVwWxXyYzZ"),
]


class ChatTemplate:
    """The chat template of a tokenizer (its own, or a plain one where it has none) as a function of messages.

    The same messages always give the same text: `strftime_now` of a template prints `settings.chat_template_date`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: ModelSettings | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`tools`: JSON schemas, as `Toolset.schema()` gives them."""
        self.tokenizer = tokenizer
        self.settings = settings or ModelSettings()
        self.tools = [dict(tool) for tool in tools]
        self.is_plain = not tokenizer.chat_template
        named: Any = tokenizer.chat_template or PLAIN_TEMPLATE
        # A tokenizer may have several templates by name, one of them for tools.
        self.source: str = named if isinstance(named, str) else tokenizer.get_chat_template(None, self.tools or None)
        self._frozen = _with_date(self.source, datetime.date.fromisoformat(self.settings.chat_template_date))

    @property
    def can_print_date(self) -> bool:
        """The template asks for the date."""
        return "strftime_now" in self.source

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The same template with other tools."""
        return ChatTemplate(self.tokenizer, self.settings, tools)

    def with_date(self, day: str) -> ChatTemplate:
        """The same template on another day (YYYY-MM-DD)."""
        other = copy.copy(self)
        other._frozen = _with_date(self.source, datetime.date.fromisoformat(day))
        return other

    def text(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool = True) -> str:
        """Rendered messages, and the header of the next assistant message.

        Raises: DataError where the template refuses them.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list[Any](self.tools) or None,
                chat_template=self._frozen,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.settings.chat_template_kwargs,
            )
        except Exception as error:  # templates may raise any exception
            roles = ", ".join(str(message["role"]) for message in messages) or "no message"
            raise DataError(f"the tokenizer's chat template refuses this conversation ({roles}): {error}") from error
        assert isinstance(text, str)
        return text


def _with_date(source: str, day: datetime.date) -> str:
    """The template with a `strftime_now` of its own, which prints that day.

    transformers offers the real clock under this name, and lets no argument of the rendering be a function. The line
    break after the macro is removed by the rendering (trim_blocks), and keeps the template at the start of a line.
    """
    if "strftime_now" not in source:
        return source
    moment = datetime.datetime.combine(day, datetime.time())
    chain = "".join(f" | replace({json.dumps(d)}, {json.dumps(moment.strftime(d))})" for d in _DIRECTIVES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{chain} }}}}{{% endmacro %}}\n{source}"
