"""Small chat templates that behave like those of well-known model families, and tokenizers for them.

Written for the tests from the families' documented behaviour: where a thought is opened, what of it stays in the
history, where the date is printed, how calls of tools are spelt. None is the text of a family.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rl_core.data.tokenizer import train_tokenizer

TEXTS = [
    "zoom 2 3 answer red the cell is blue scan row 1 user assistant tool system think name arguments"
] * 4
CONTROL = ("<|im_start|>", "<|im_end|>")

# Opens the thought in the generation prompt; no earlier turn keeps its thought; reasoning_content is not known.
OPENS_AND_STRIPS = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in c %}"
    "{% set c = (c.split('</think>') | last).lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Opens the thought; turns after the last user message keep theirs (also through tool results), earlier ones lose it.
OPENS_KEEPS_LAST = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set c = m['content'] %}{% set r = m.get('reasoning_content') or '' %}"
    "{% if not r and '</think>' in c %}"
    "{% set r = ((c.split('</think>') | first).split('<think>') | last).strip('\n') %}"
    "{% set c = (c.split('</think>') | last).lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"
    "{% for call in m.get('tool_calls') or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% elif m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Thinks by default: enable_thinking false puts an empty thought into the generation prompt.
SWITCHED = OPENS_KEEPS_LAST.removesuffix("<think>\n{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Prints today's date into the system message, unless it gets another one.
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|im_start|>system\nToday: {{ date_string }}\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls in tags, tools in the system message, and the assistant's part marked for return_assistant_tokens_mask.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m['content'] or '' }}{% for call in m.get('tool_calls') or [] %}"
    "{% if m['content'] or not loop.first %}\n{% endif %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def family(
    template: str | None,
    markers: Sequence[str] = (),
    *,
    special: bool = True,
    texts: Sequence[str] = TEXTS,
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with <|im_start|> and <|im_end|>, `markers` as added tokens, and this chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts, 300).backend_tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    tokens = [AddedToken(marker, special=special, normalized=False) for marker in markers]
    tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer
