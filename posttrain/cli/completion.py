"""`posttrain completion SHELL`: a script that completes commands, options, their choices, stages and shipped configs.

The script is static, made from the parsers: the Tab key starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from posttrain.cli.arguments import parse_stage_name
from tasks.shipped import SERVICE_CONFIG, list_config_names
from tasks.stage_registry import list_stage_names

SHELLS = ("bash", "zsh", "fish")
_CONFIG_METAVARS = ("CONFIG",)  # metavars of configurations


@dataclass(frozen=True)
class _CompletedCommand:
    """Words of one command."""

    path: tuple[str, ...]  # ("service", "key", "create")
    summary: str = ""
    subcommands: dict[str, str] = field(
        default_factory=dict
    )  # commands below it, with a line about each
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of options that take one; () = a file
    argument_choices: tuple[str, ...] = ()  # of arguments


def build_completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Completion script of a shell."""
    commands = list(_walk_parsers(parser, (), ""))
    if shell == "fish":
        return "\n".join(_render_fish_script(commands)) + "\n"
    text = "\n".join(_render_bash_script(commands)) + "\n"
    if shell == "bash":
        return text
    return (
        "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + text
    )


def _walk_parsers(
    parser: argparse.ArgumentParser, path: tuple[str, ...], summary: str
) -> Iterator[_CompletedCommand]:
    parts: dict[str, str] = {}
    flags: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below = [
                (name, child) for name, child in action.choices.items() if name in parts
            ]  # none without help
            continue
        if action.help == argparse.SUPPRESS:  # between processes of our own
            continue
        known = tuple(map(str, action.choices or _list_likely_values(action)))
        for option in action.option_strings:
            flags[option] = action.help or ""
            if action.nargs != 0:
                values[option] = known
        if not action.option_strings:
            words += known
    yield _CompletedCommand(path, summary, parts, flags, values, tuple(words))
    for name, child in below:
        yield from _walk_parsers(child, (*path, name), parts.get(name, ""))


def _list_likely_values(action: argparse.Action) -> Sequence[str]:
    """Words that the value of an option or argument is likely to be; () = a file, or a name that only a run knows."""
    if action.type is parse_stage_name:
        return list_stage_names()
    if action.metavar not in _CONFIG_METAVARS:
        return ()
    if action.dest == SERVICE_CONFIG:  # of `up`
        return (SERVICE_CONFIG,)
    return (action.default,) if isinstance(action.default, str) else list_config_names()


# ------------------------------------------------------------------------------------------------------- bash and zsh

_BASH_TEMPLATE = """\
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


def _render_bash_script(commands: list[_CompletedCommand]) -> Iterator[str]:
    paths = "|".join(f'"{" ".join(command.path)}"' for command in commands if command.path)
    values, words = [], []
    for command in commands:
        name = " ".join(command.path)
        for option, known in command.values.items():
            chosen = (
                f'COMPREPLY=($(compgen -W "{" ".join(known)}" -- "$current")); ' if known else ""
            )
            values.append(f'        "{name} {option}") {chosen}return ;;')
        all_words = " ".join([*command.subcommands, *command.argument_choices, *command.flags])
        words.append(f'        "{name}") words="{all_words}" ;;')
    text = (
        _BASH_TEMPLATE.replace("@PATHS@", paths)
        .replace("@VALUES@", "\n".join(values))
        .replace("@WORDS@", "\n".join(words))
    )
    yield text.rstrip("\n")


# --------------------------------------------------------------------------------------------------------------- fish


_FISH_TEMPLATE = """\
set -g __posttrain_paths @PATHS@
function __posttrain_at
    set -l name
    for word in (commandline -opc)[2..-1]
        contains -- (string trim "$name $word") $__posttrain_paths; and set name (string trim "$name $word")
    end
    test "$name" = "$argv"
end"""


def _render_fish_script(commands: list[_CompletedCommand]) -> Iterator[str]:
    paths = " ".join(
        _quote_shell_word(" ".join(command.path)) for command in commands if command.path
    )
    yield _FISH_TEMPLATE.replace("@PATHS@", paths)
    for command in commands:
        where = _quote_shell_word(" ".join(("__posttrain_at", *command.path)))
        for name, about in command.subcommands.items():
            yield f"complete -c posttrain -f -n {where} -a {name} -d {_quote_shell_word(about)}"
        for word in command.argument_choices:
            yield f"complete -c posttrain -n {where} -a {word}"
        for option, about in command.flags.items():
            form = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            known = command.values.get(option)
            more = (
                ""
                if known is None
                else f" -x -a {_quote_shell_word(' '.join(known))}"
                if known
                else " -r"
            )
            yield f"complete -c posttrain -n {where} {form}{more} -d {_quote_shell_word(about)}"


def _quote_shell_word(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
