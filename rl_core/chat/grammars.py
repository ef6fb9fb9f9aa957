"""Grammars of answers: JSON values of a schema, and calls of tools, as masks over the vocabulary (llguidance).

llguidance was chosen over xgrammar because it refuses parts of JSON schema that it does not enforce, and needs no other
package; `tests/benchmarks/results/serving.md` has the figures.

V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.chat.answer_rules import AnswerRules, ChatRequestError
from rl_core.inference.token_rules import RulesFailed, TokenRules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXTRA = "structured"  # of pyproject.toml
_MAX_GRAMMARS = 128  # compiled grammars in memory
_MAX_SCHEMA_CHARACTERS = 200_000
# JSON allows white space without end; a policy in doubt would write nothing else.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
_POSITION = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
_QUOTED_LINE = re.compile(r"^\s*(\d+ \| .*|\^+\s*)?$")
_THOUGHT_RULE = 'thought[suffix="</think>"]: /(?s:.*)/\nspace: /[ \\n\\r\\t]{0,20}/'


def is_installed() -> bool:
    """Return whether the package of the extra is installed."""
    return importlib.util.find_spec("llguidance") is not None


class CompiledGrammar:
    """A grammar of llguidance; a `Grammar` of token rules."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start_answer(self) -> MatcherState:
        """Return the state in front of the first token."""
        return MatcherState(self._matcher.deep_copy())


class MatcherState:
    """The state of a grammar within one answer; a `GrammarState` of token rules."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def read_tokens(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens. Raises: RulesFailed."""
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise RulesFailed(self._describe_error())

    def compute_mask(self) -> np.ndarray:
        """Compute bool [V], True = the token may come next. Raises: RulesFailed."""
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RulesFailed(self._describe_error())
        bits_V = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        return bits_V.astype(bool)

    def _describe_error(self) -> str:
        return f"the answer's grammar failed: {str(self._matcher.get_error())[:300]}"


class GrammarCompiler:
    """Compiler of grammars for one tokenizer; thread-safe, with a cache."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], *, opens_thought: bool
    ) -> None:
        """Prepare the compiler; nothing is imported before the first grammar.

        Args:
            end_ids: tokens that end an answer; allowed where the grammar is complete.
            opens_thought: True = answers begin within a thought, up to </think>.
        """
        self._tokenizer, self._end_ids = tokenizer, list(end_ids)
        self._opens_thought = opens_thought
        self._vocabulary: Any = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile_answer(
        self,
        schema: Mapping[str, Any] | bool | None,
        calls: Mapping[str, Mapping[str, Any]],
        *,
        is_tagged: bool,
        param: str,
    ) -> CompiledGrammar:
        """Compile the grammar of an answer.

        Args:
            schema: of the JSON value that the answer may be; None = it must be a call.
            calls: schemas of arguments of the tools that the answer may call, by name.
            is_tagged: True = calls are written between <tool_call> and </tool_call>.
            param: the request parameter to name in errors.
        Raises: ChatRequestError (400) with the reason for a schema that is wrong, cannot be satisfied or is not
            supported, for a tokenizer that is not supported, and without the package.
        """
        try:
            text = self._write_rules(schema, calls, is_tagged)
        except (ValueError, RecursionError, TypeError) as error:
            raise _refuse_schema(param, str(error)) from None
        if len(text) > _MAX_SCHEMA_CHARACTERS:
            raise _refuse_schema(param, f"it has more than {_MAX_SCHEMA_CHARACTERS} characters")
        with self._lock:
            compiled = self._compiled.pop(text, None)
            if compiled is None:
                compiled = CompiledGrammar(self._compile_rules(text, param))
            self._compiled[text] = compiled
            while len(self._compiled) > _MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _write_rules(
        self,
        schema: Mapping[str, Any] | bool | None,
        calls: Mapping[str, Mapping[str, Any]],
        is_tagged: bool,
    ) -> str:
        """Write the grammar in llguidance's dialect of Lark, where `%json` is followed by a schema."""
        choices = [] if schema is None else ["value"]
        choices += [f"call_{number}" for number in range(len(calls))]
        lines = [f"answer: {' | '.join(choices)}"]
        if schema is not None:
            lines.append(f"value: {_write_schema(schema)}")
        opening, closing = ("<tool_call>\n", "\n</tool_call>") if is_tagged else ("", "")
        for number, (name, arguments) in enumerate(calls.items()):
            before = json.dumps(f'{opening}{{"name": {json.dumps(name)}, "arguments": ')
            after = json.dumps(f"}}{closing}")
            lines.append(f"call_{number}: {before} arguments_{number} {after}")
            lines.append(f"arguments_{number}: {_write_schema(arguments)}")
        if self._opens_thought:
            return "\n".join(["start: thought space answer", _THOUGHT_RULE, *lines])
        return "\n".join(["start: answer", *lines])

    def _compile_rules(self, text: str, param: str) -> Any:
        if not is_installed():
            raise ChatRequestError(
                f"{param}: answers are restricted by the package 'llguidance', which the server lacks; install it "
                f"there with: python -m posttrain.install --extras {EXTRA}",
                param=param,
                status=400,
            )
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary(param)
        rules = llguidance.LLMatcher.grammar_from_lark(text)
        matcher = llguidance.LLMatcher(self._vocabulary, rules, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars fail at their first token only
        if matcher.is_error():
            raise _refuse_schema(param, matcher.get_error())
        return matcher

    def _read_vocabulary(self, param: str) -> Any:
        import llguidance.hf

        size = max(self._tokenizer.get_vocab().values()) + 1
        ends = [token for token in self._end_ids if token < size]
        tokenizer: Any = self._tokenizer
        try:
            return llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
        except Exception as error:  # a Python tokenizer, or one that the package cannot read
            raise ChatRequestError(
                f"{param}: answers of this tokenizer ({type(self._tokenizer).__name__}) cannot be restricted: "
                f"{str(error)[:200]}",
                param=param,
                status=400,
            ) from None


def compile_answer_rules(
    rules: AnswerRules,
    tools: Sequence[Mapping[str, Any]],
    grammars: GrammarCompiler,
    *,
    is_tagged: bool,
    vocab_size: int | None = None,
) -> TokenRules | None:
    """Compile rules for the sampler; None = there are none.

    Args:
        tools: schemas of the tools that the answer may call.
        is_tagged: True = the model writes calls between <tool_call> and </tool_call>.
        vocab_size: number of tokens that may be biased; None = unknown.
    Raises: ChatRequestError; 400 for a schema that cannot be enforced.
    """
    for token, _ in rules.bias:
        if vocab_size is not None and token >= vocab_size:
            raise ChatRequestError(
                f"logit_bias: token {token} is not in the vocabulary of {vocab_size}",
                param="logit_bias",
            )
    grammar = None
    if rules.has_grammar:
        calls = _list_callable_tools(rules, tools)
        # Without tags a JSON object could be both an answer and a call.
        grammar = grammars.compile_answer(
            None if rules.is_call_required else rules.schema,
            calls,
            is_tagged=is_tagged or not rules.is_call_required,
            param="tool_choice" if rules.is_call_required else "response_format",
        )
    compiled = TokenRules(grammar, rules.bias, rules.presence_penalty, rules.frequency_penalty)
    return None if compiled.is_empty else compiled


def _list_callable_tools(
    rules: AnswerRules, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of arguments by tool. Raises: ChatRequestError for a choice that no tool fulfils."""
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if rules.is_call_required and not functions:
        raise ChatRequestError(
            "tool_choice: demands a call, but there are no tools", param="tool_choice", status=400
        )
    if rules.tool is not None:
        if rules.tool not in functions:
            raise ChatRequestError(
                f"tool_choice: there is no tool '{rules.tool[:80]}'",
                param="tool_choice",
                status=400,
            )
        functions = {rules.tool: functions[rules.tool]}
    # What is not declared could not be read back as a call.
    return {
        name: {"type": "object", **parameters, "additionalProperties": False}
        for name, parameters in functions.items()
    }


def _write_schema(schema: Mapping[str, Any] | bool) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _refuse_schema(param: str, reason: str) -> ChatRequestError:
    # The package quotes the grammar, which the client has not written.
    lines = [line for line in str(reason).splitlines() if not _QUOTED_LINE.match(line)]
    reason = _POSITION.sub("", " ".join(" ".join(lines).split()))[:500]
    return ChatRequestError(
        f"{param}: this schema cannot be enforced: {reason}",
        param=param,
        code="unsupported_schema",
        status=400,
    )
