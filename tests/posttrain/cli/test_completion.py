"""Completion scripts: the words that a shell offers."""

import shutil
import subprocess

import pytest

from posttrain.cli.completion import build_completion_script
from posttrain.cli.main import build_parser

# line before the cursor -> words that are among the offered ones, words that are not
LINES = {
    "posttrain --v": ({"--version"}, {"run"}),
    "posttrain ru": ({"run", "runs"}, {"resume"}),
    "posttrain run --f": ({"--fresh"}, {"--quiet"}),
    "posttrain run de": ({"demo"}, {"run"}),
    "posttrain run demo --only ": ({"sft", "policy"}, {"demo"}),
    "posttrain check ": ({"machine", "plan"}, {"demo"}),
    "posttrain ": ({"run", "validate", "check", "store"}, {"--fresh", "demo", "stage", "doctor"}),
    "posttrain evaluate de": ({"demo"}, {"run"}),
    "posttrain replay de": ({"demo"}, {"run"}),
    "posttrain runs --": ({"--json", "--csv"}, {"--format", "--config"}),
    "posttrain promote --": ({"--approve", "--pending"}, {"--config"}),
    "posttrain check profile --stage ": ({"sft", "policy"}, {"demo"}),
    "posttrain service ": ({"up", "key", "queue"}, {"create"}),
    "posttrain service up ": ({"service"}, {"demo", "online"}),
    "posttrain up --service ": ({"service"}, {"demo"}),
    "posttrain up --serve ": ({"demo"}, {"service"}),
    "posttrain online ": ({"worker", "report"}, {"standby"}),
    "posttrain online worker ": ({"online"}, {"demo"}),
    "posttrain online worker --": ({"--set"}, {"--heartbeat"}),
    "posttrain service key ": ({"create", "list", "revoke"}, {"up"}),
    # `up` is also a top-level command.
    "posttrain service up --": ({"--set"}, {"--database", "--detach"}),
    "posttrain up --": ({"--database", "--detach"}, {"--set"}),
    # The stage, not the command of that name.
    "posttrain run demo --only evaluate --": ({"--model", "--fresh"}, {"--config"}),
    # The configuration check.yaml or the command `check` behind `run`: still `run`.
    "posttrain run check --": ({"--dry-run"}, {"--calibrate"}),
}


def list_offered_words(shell: str, text: str, line: str) -> set[str]:
    if shell == "fish":
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"{text}\ncomplete -C '{line}'"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return {offer.split("\t")[0] for offer in done.stdout.splitlines()}
    words = line.split(" ")
    script = (
        f"{text}\nCOMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}\n"
        'complete() { :; }; _posttrain; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    script = script.replace("complete -o default", ": -o default")
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_words_that_are_offered(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    text = build_completion_script(shell, build_parser())
    for line, (among, missing) in LINES.items():
        words = list_offered_words(shell, text, line)
        assert among <= words and not missing & words, (line, words)


def test_zsh_takes_the_script():
    text = build_completion_script("zsh", build_parser())
    assert "bashcompinit" in text and text.endswith(build_completion_script("bash", build_parser()))
    if shutil.which("zsh") is None:
        pytest.skip("no zsh here")
    done = subprocess.run(
        ["zsh", "-f", "-c", f"{text}\nwhence -w _posttrain"], capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("_posttrain: function"), done.stderr
