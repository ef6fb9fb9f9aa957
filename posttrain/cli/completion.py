"""Command `posttrain completion SHELL`: a script that completes commands, options, choices, stages and configs.

The script is static and made from the parsers, so that pressing Tab starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from posttrain.cli.arguments import parse_stage_name
from tasks.shipped import SERVICE_CONFIG, list_config_names
from tasks.stage_registry import list_stage_names

SHELLS = ("bash", "zsh", "fish")

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

_FISH_TEMPLATE = """\
set -g __posttrain_paths @PATHS@
function __posttrain_at
    set -l name
    for word in (commandline -opc)[2..-1]
        contains -- (string trim "$name $word") $__posttrain_paths; and set name (string trim "$name $word")
    end
    test "$name" = "$argv"
end"""


EXAMPLES = (
    "completion bash    (> ~/.local/share/bash-completion/completions/posttrain)",
    "completion zsh    (>> ~/.zshrc)",
    "completion fish    (> ~/.config/fish/completions/posttrain.fish)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run_command(arguments: argparse.Namespace) -> int:
    """Print the shell completion script."""
    from posttrain.cli.main import build_parser

    print(build_completion_script(arguments.shell, build_parser()), end="")
    return 0


@dataclass(frozen=True)
class _CompletedCommand:
    """Words that complete one command."""

    path: tuple[str, ...]  # ("service", "key", "create")
    summary: str = ""
    subcommands: dict[str, str] = field(default_factory=dict)  # name: summary
    flags: dict[str, str] = field(default_factory=dict)  # option: help
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)  # option: choices; () = a file
    argument_choices: tuple[str, ...] = ()  # of positional arguments


def build_completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script of a shell."""
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
    subcommands: dict[str, str] = {}
    flags: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    argument_choices: list[str] = []
    children: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands = {choice.dest: choice.help or "" for choice in action._choices_actions}
            # Commands without help are internal and not completed.
            children = [
                (name, child) for name, child in action.choices.items() if name in subcommands
            ]
            continue
        if action.help == argparse.SUPPRESS:  # internal option between processes
            continue
        choices = tuple(map(str, action.choices or _list_likely_values(action)))
        for option in action.option_strings:
            flags[option] = action.help or ""
            if action.nargs != 0:
                values[option] = choices
        if not action.option_strings:
            argument_choices += choices
    yield _CompletedCommand(path, summary, subcommands, flags, values, tuple(argument_choices))
    for name, child in children:
        yield from _walk_parsers(child, (*path, name), subcommands.get(name, ""))


def _list_likely_values(action: argparse.Action) -> Sequence[str]:
    """Return the likely values of an option or argument; () = a file, or a name known only at run time."""
    if action.type is parse_stage_name:
        return list_stage_names()
    if action.metavar not in ("CONFIG", "CONFIG|RUN"):
        return ()
    if action.dest == SERVICE_CONFIG:  # of `up`
        return (SERVICE_CONFIG,)
    return (action.default,) if isinstance(action.default, str) else list_config_names()


def _render_bash_script(commands: list[_CompletedCommand]) -> Iterator[str]:
    paths = "|".join(f'"{" ".join(command.path)}"' for command in commands if command.path)
    values, words = [], []
    for command in commands:
        name = " ".join(command.path)
        for option, choices in command.values.items():
            completion = (
                f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$current")); '
                if choices
                else ""
            )
            values.append(f'        "{name} {option}") {completion}return ;;')
        all_words = " ".join([*command.subcommands, *command.argument_choices, *command.flags])
        words.append(f'        "{name}") words="{all_words}" ;;')
    text = (
        _BASH_TEMPLATE.replace("@PATHS@", paths)
        .replace("@VALUES@", "\n".join(values))
        .replace("@WORDS@", "\n".join(words))
    )
    yield text.rstrip("\n")


def _render_fish_script(commands: list[_CompletedCommand]) -> Iterator[str]:
    paths = " ".join(
        _quote_shell_word(" ".join(command.path)) for command in commands if command.path
    )
    yield _FISH_TEMPLATE.replace("@PATHS@", paths)
    for command in commands:
        condition = _quote_shell_word(" ".join(("__posttrain_at", *command.path)))
        for name, summary in command.subcommands.items():
            yield f"complete -c posttrain -f -n {condition} -a {name} -d {_quote_shell_word(summary)}"
        for word in command.argument_choices:
            yield f"complete -c posttrain -n {condition} -a {word}"
        for option, summary in command.flags.items():
            option_form = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            choices = command.values.get(option)
            if choices is None:
                value = ""
            elif choices:
                value = f" -x -a {_quote_shell_word(' '.join(choices))}"
            else:
                value = " -r"
            yield f"complete -c posttrain -n {condition} {option_form}{value} -d {_quote_shell_word(summary)}"


def _quote_shell_word(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
