"""Byte-level BPE tokenizer for from-scratch policies, trained in about a second; the chat template of any tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl_core.data.images import IMAGE_TOKENS
from rl_core.errors import DataError
from rl_core.storage.faults import inject_fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


PAD_TOKEN = "<pad>"
END_TOKEN = "<|end|>"  # ends every message; EOS of an action
ROLES = ("system", "user", "assistant", "tool")

# One token opens a message and one ends it, as a from-scratch policy of a few million parameters has a short context.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# For tokenizers without a template, i.e. base models. The line break after the role avoids prompts that end in a space,
# which byte-level BPE never saw in training.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant:\n{{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, with_images: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`; lossless for any text.

    Digits are never merged, so that a number is tokenised independently of its context (as in Llama, arXiv:2302.13971).
    Deterministic in the texts.
    Args:
        vocab_size: maximum entries, special tokens included; fewer if the texts have no more pairs to merge.
        with_images: also the tokens that stand for images (`data.images`).
    Raises: DataError if vocab_size is too small for the 256 bytes and the special tokens.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    special = [PAD_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES)]
    special += IMAGE_TOKENS if with_images else ()
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise DataError(
            f"vocab_size: {vocab_size} must be at least {smallest} (256 bytes and {len(special)} special)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    inject_fault("data.tokenizer")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def select_chat_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool) -> str:
    """Return the tokenizer's template; of several by name, `tool_use` with tools, otherwise `default`.

    Raises: DataError if there is none for a conversation without tools.
    """
    named: Any = tokenizer.chat_template or PLAIN_TEMPLATE
    if isinstance(named, list):  # as the tokenizer's file holds them
        named = {entry["name"]: entry["template"] for entry in named}
    if isinstance(named, str):
        return named
    names = ("tool_use", "default") if has_tools else ("default",)
    template = next((str(named[name]) for name in names if name in named), None)
    if template is None and len(named) == 1:
        template = str(next(iter(named.values())))
    if template is None:
        raise DataError(
            f"the tokenizer has the chat templates {', '.join(sorted(named))} and none named 'default'; name a Jinja "
            "file in model.chat_template"
        )
    return template
