"""`posttrain completion SHELL`: a script that completes commands, options, their choices, stages and shipped configs.

The script is static, made from the parsers: the Tab key starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flows.cli.arguments import stage_name
from tasks.shipped import SERVICE, config_names
from tasks.stage_registry import names

__all__ = ["SHELLS", "script"]

SHELLS = ("bash", "zsh", "fish")
_CONFIGS = ("CONFIG",)  # metavars of configurations


@dataclass(frozen=True)
class _Command:
    """Words of one command."""

    path: tuple[str, ...]  # ("service", "key", "create")
    about: str = ""
    parts: dict[str, str] = field(default_factory=dict)  # commands below it, with a line about each
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of options that take one; () = a file
    words: tuple[str, ...] = ()  # of arguments


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Completion script of a shell."""
    commands = list(_walk(parser, (), ""))
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    text = "\n".join(_bash(commands)) + "\n"
    if shell == "bash":
        return text
    return "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + text


def _walk(parser: argparse.ArgumentParser, path: tuple[str, ...], about: str) -> Iterator[_Command]:
    parts: dict[str, str] = {}
    flags: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below = [(name, child) for name, child in action.choices.items() if name in parts]  # none without help
            continue
        if action.help == argparse.SUPPRESS:  # between processes of our own
            continue
        known = tuple(map(str, action.choices or _known(action)))
        for option in action.option_strings:
            flags[option] = action.help or ""
            if action.nargs != 0:
                values[option] = known
        if not action.option_strings:
            words += known
    yield _Command(path, about, parts, flags, values, tuple(words))
    for name, child in below:
        yield from _walk(child, (*path, name), parts.get(name, ""))


def _known(action: argparse.Action) -> Sequence[str]:
    """Words that the value of an option or argument is likely to be; () = a file, or a name that only a run knows."""
    if action.type is stage_name:
        return names()
    if action.metavar not in _CONFIGS:
        return ()
    if action.dest == SERVICE:  # of `up`
        return (SERVICE,)
    return (action.default,) if isinstance(action.default, str) else config_names()


# ------------------------------------------------------------------------------------------------------- bash and zsh

_BASH = """\
_posttrain() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
    local name="" words="" number
    for ((number = 1; number < COMP_CWORD; number++)); do
        case "$name${name:+ }${COMP_WORDS[number]}" in
            @PATHS@) name="$name${name:+ }${COMP_WORDS[number]}" ;;
        esac
    done
    COMPREPLY=()
    case "$name $previous" in
@VALUES@
    esac
    case "$name" in
@WORDS@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -o bashdefault -F _posttrain posttrain
"""


def _bash(commands: list[_Command]) -> Iterator[str]:
    paths = "|".join(f'"{" ".join(command.path)}"' for command in commands if command.path)
    values, words = [], []
    for command in commands:
        name = " ".join(command.path)
        for option, known in command.values.items():
            chosen = f'COMPREPLY=($(compgen -W "{" ".join(known)}" -- "$current")); ' if known else ""
            values.append(f'        "{name} {option}") {chosen}return ;;')
        all_words = " ".join([*command.parts, *command.words, *command.flags])
        words.append(f'        "{name}") words="{all_words}" ;;')
    text = _BASH.replace("@PATHS@", paths).replace("@VALUES@", "\n".join(values)).replace("@WORDS@", "\n".join(words))
    yield text.rstrip("\n")


# --------------------------------------------------------------------------------------------------------------- fish


_FISH = """\
set -g __posttrain_paths @PATHS@
function __posttrain_at
    set -l name
    for word in (commandline -opc)[2..-1]
        contains -- (string trim "$name $word") $__posttrain_paths; and set name (string trim "$name $word")
    end
    test "$name" = "$argv"
end"""


def _fish(commands: list[_Command]) -> Iterator[str]:
    paths = " ".join(_quoted(" ".join(command.path)) for command in commands if command.path)
    yield _FISH.replace("@PATHS@", paths)
    for command in commands:
        where = _quoted(" ".join(("__posttrain_at", *command.path)))
        for name, about in command.parts.items():
            yield f"complete -c posttrain -f -n {where} -a {name} -d {_quoted(about)}"
        for word in command.words:
            yield f"complete -c posttrain -n {where} -a {word}"
        for option, about in command.flags.items():
            form = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            known = command.values.get(option)
            more = "" if known is None else f" -x -a {_quoted(' '.join(known))}" if known else " -r"
            yield f"complete -c posttrain -n {where} {form}{more} -d {_quoted(about)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
