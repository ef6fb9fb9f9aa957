"""Hostile code and patterns that a configuration names: modules that exit, patterns that explode when compiled."""

from __future__ import annotations

import json

from hostile.case import BASE, CONFIG, Case, config

__all__ = ["CASES"]

_EXITS = {
    "nothing": "import sys\nsys.exit()\n",
    "a code": "import sys\nsys.exit(3)\n",
    "a text": "raise SystemExit('no GPU here')\n",
    "a parser": "import argparse\nargparse.ArgumentParser().parse_args(['--none'])\n",
    "quit": "quit()\n",
}
_NAMED = {
    "reward": "  policy: {rewards: {'leaves.py:f': 1.0}}\n",
    "loss": "  policy: {loss: 'leaves.py:f'}\n",
    "advantages": "  policy: {advantages: 'leaves.py:f'}\n",
    "measure": "  analyze: {measures: ['leaves.py:f']}\n",
    "stage": "  custom: {mine: {use: 'leaves.py:f'}}\n",
    "exit condition": "  policy: {early_stop: {function: 'leaves.py:f'}}\n",
}


def _leaves(name: str, text: str, code: str, command: str = "validate") -> Case:
    flags = ("--import-code",) if command == "validate" else ()
    return Case(
        f"{command}: {name}",
        (command, CONFIG, *flags),
        ("leaves.py", "sys.exit("),
        {CONFIG: text, "leaves.py": code},
    )


_ENVIRONMENT = BASE.replace("{name: pixel_grid}", "{name: 'leaves.py:E'}")
_LEAVERS = [
    *(
        _leaves(f"exit with {how}", _ENVIRONMENT, code, command)
        for how, code in _EXITS.items()
        for command in (("validate", "run") if how == "nothing" else ("validate",))
    ),
    *(_leaves(f"exit of a {kind}", BASE + text, "exit()\n") for kind, text in _NAMED.items()),
    Case(
        "validate: exit in a constructor",
        ("validate", CONFIG, "--import-code"),
        ("environment", "raised SystemExit: 3"),
        {
            CONFIG: _ENVIRONMENT,
            "leaves.py": "from rl_core.environments.pixel_grid import PixelGrid\n"
            "class E(PixelGrid):\n    def __init__(self): raise SystemExit(3)\n",
        },
    ),
    Case(
        "validate: exit in a loss",
        ("validate", CONFIG, "--import-code"),
        ("policy.loss", "raised SystemExit"),
        {
            CONFIG: BASE + _NAMED["loss"],
            "leaves.py": "def f(*_, **__): raise SystemExit\n",
        },
    ),
]

_EXPLODING = {
    "nested repeats": "((a{999}){999}){999}",
    "one repeat": "a{99999999}",
    "repeat without end": "(ab){9999999,}",
    "a repeat of 5000 digits": "a{" + "9" * 5000 + "}",
    "doubled 25 times": "(?:" * 25 + "a" + "){2}" * 25,
    "classes": "(?:[a-z]{999}[^)(]){999}",
    "escaped parentheses": r"(\)a{999}\(){999}",
    "verbose": "(?x) ( a{9 99} # )\n ) {999}",
    "nested sets": "(?V1)([[a-z]--[)]]{999}){999}",
    "comment": "((?#)a{999}(?#( )){999}",
    "fuzzy": "(?:a{999}){e<=3}{999}",
    "lazy": "(?:a{999}?){999,}+",
}
_BROKEN = {
    "open": ("(", "is not a regular expression: missing )"),
    "2000 groups": ("(" * 2000 + ")" * 2000, "nests too many groups"),
    "two versions": ("(?V0)(?V1)a", "is not a regular expression"),
    "unknown list": (r"\L<words>", "is not a regular expression"),
}


def _within(block: str, pattern: str, says: str, name: str) -> Case:
    """Build a case with a pattern as an option of a reward."""
    weight = "" if block == "judge" else f", {block}: 0.1"
    stage = (
        f"  policy: {{rewards: {{task: 1.0{weight}}}, "
        f"reward_options: {{{block}: {{pattern: {json.dumps(pattern)}}}}}}}\n"
    )
    key = f"policy.reward_options.{block}.pattern"
    return config(BASE + stage, (key, says), f"{block}.pattern: {name}")


def _verifier(pattern: str, says: str, name: str) -> Case:
    """Build a case with a pattern of the verifier of an environment of prompts."""
    options = {"path": "rows.jsonl", "verifier": {"regex": {"pattern": pattern}}}
    environment = f"{{name: prompts, options: {json.dumps(options)}}}"
    text = BASE.replace("{name: pixel_grid}", environment)
    row = '{"prompt": "p", "answer": "a"}\n'
    return config(text, ("environment", says), f"verifier: {name}", **{"rows.jsonl": row * 40})


_NESTED = _EXPLODING["nested repeats"]
_PATTERNS = [
    *(_within("format", pattern, "more than 100000", name) for name, pattern in _EXPLODING.items()),
    *(_within("format", pattern, says, name) for name, (pattern, says) in _BROKEN.items()),
    *(_within(block, _NESTED, "more than 100000", "nested") for block in ("regex", "judge")),
    *(_within(block, *_BROKEN["2000 groups"], "2000 groups") for block in ("regex", "judge")),
    _verifier(_NESTED, "more than 100000", "nested repeats"),
    *(_verifier(pattern, says, name) for name, (pattern, says) in _BROKEN.items()),
]

CASES = _LEAVERS + _PATTERNS
