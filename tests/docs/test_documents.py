"""The documentation: links and anchors resolve, named files exist, blocks compile, run and validate, commands parse."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from documents import DOCS, PAGES, ROOT, anchors, blocks, commands, links, prose

import rl_core
from flows.cli.parser import build_parser
from rl_core.environments import make
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn
from tasks.config import from_dict
from tasks.config.yaml_loader import read_yaml

FOLDERS = r"configs|deployments|docs|examples|flows|rl_core|tasks|tests"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The blocks marked `run: NAME` as modules my_package.NAME, and as files NAME.py of the current folder."""
    (tmp_path / "my_package").mkdir()
    for block in blocks("python"):
        if block.note.startswith("run: "):
            for folder in (tmp_path, tmp_path / "my_package"):
                (folder / f"{block.note.removeprefix('run: ')}.py").write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_and_pictures_resolve(page):
    for is_picture, target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file(), f"{page.name}: {target}"
        if anchor and not is_picture:
            assert anchor in anchors(path), f"{page.name}: {target}; anchors: {sorted(anchors(path))}"


def test_anchors_are_found_at_all():
    """The checks above would pass on pages without a link."""
    found = [target for page in PAGES for _, target in links(page)]
    assert len(found) > 60 and sum("#" in target for target in found) > 10
    assert "10-a-limit-of-the-sampler-ends-an-episode" in anchors(DOCS / "architecture-decisions.md")
    assert "stagespolicycurriculum" in anchors(DOCS / "configuration.md")


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES}


def test_named_files_exist():
    for page in PAGES:
        for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", prose(page)):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", (DOCS / "layout.md").read_text()):
        assert (ROOT / path).exists() or (ROOT / "rl_core" / path).exists(), path


def test_code_and_configs_name_documents_that_exist():
    """`docs/page.md, 'Section'` in a message or comment; the README has no section that others send readers to."""
    named = []
    for floor in ("configs", "flows", "rl_core", "tasks"):
        for path in (path for path in (ROOT / floor).rglob("*") if path.suffix in {".py", ".yaml"}):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"README, ['\"]", text), path
            named += re.findall(r"(docs/[\w/-]+\.md)(?:, '([^']+)')?", text)
    assert len(named) > 3 and any(section for _, section in named)
    for page, section in named:
        assert not section or section.lower().replace(" ", "-") in anchors(ROOT / page), f"{page}, '{section}'"
        assert (ROOT / page).is_file(), page


@pytest.mark.parametrize("floor", ["rl_core", "tasks", "flows"])
def test_layout_names_every_room(floor):
    text = (DOCS / "layout.md").read_text().partition(f"## `{floor}/`")[2].partition("\n## ")[0]
    named = set(re.findall(r"^    (\w+)/", text, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / floor).glob("*/__init__.py")}
    assert named == rooms


def test_named_configs_exist():
    texts = [prose(page) for page in PAGES] + [block.text for block in blocks("yaml")]
    named = {path for text in texts for path in re.findall(r"configs/\w+\.yaml", text)}
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_python_compiles(block):
    compile(block.text, block.place, "exec")
    assert max(map(len, block.text.splitlines())) <= 120


def test_the_echo_environment_plays(package):
    environment = make("my_package.echo:Echo")
    for action, reward in (("7", 1.0), ("8", 0.0)):
        episode = environment.episode(17, "easy")
        assert episode.reset() == [{"role": "user", "content": "say 7"}]
        step = episode.step(action)
        assert (step.reward, step.terminated, step.success) == (reward, True, reward == 1.0)


def test_the_guessing_environment_plays(package):
    environment = make("my_package.guess:Guess")
    number = environment.episode(3, "easy").number
    assert environment.episode(3, "easy").number == number and 1 <= number <= 10
    assert len({environment.episode(seed, "hard").number for seed in range(200)}) > 50
    episode = environment.episode(3, "easy")
    episode.reset()
    assert episode.step(f"compare {number}").messages == [{"role": "tool", "content": "equal"}]
    assert episode.step(f"compare {number - 1}").messages[0]["content"] == "higher"
    assert episode.step(f"compare {number + 1}").messages[0]["content"] == "lower"
    assert episode.step("compare five").is_error
    end = episode.step(f"answer {number}")
    assert (end.reward, end.terminated, end.success) == (1.0, True, True)
    wrong = environment.episode(3, "easy").step(f"answer {number + 1}")
    assert (wrong.reward, wrong.success) == (0.0, False)


def test_the_reward_is_called_as_shown(package):
    from my_package.rewards import brevity

    trajectory = Trajectory(environment="e", level="l", kind="k", seed=0, prompt="p", target="t", num_action_tokens=30)
    assert brevity([trajectory, trajectory]) == pytest.approx([-0.3, -0.3])  # -0.01 a token


def test_rewards_by_column_and_tools_are_used_as_shown(package):
    rows = [{"prompt": "2 + 3 =", "answer": "5"}]
    acting = make("prompts", {"rows": rows, "tools": "tools.py:TOOLS"})
    episode = acting.episode(0, "all")
    call = '<tool_call>{"name": "search", "arguments": {"words": ["a", "b"]}}</tool_call>'
    assert episode.step(call).messages == [{"role": "tool", "content": "3 articles on a b"}]
    trajectory = Trajectory(environment="e", level="l", kind="k", seed=0, prompt="p", target="t", row=rows[0])
    trajectory.turns = [Turn("5")]
    for name, expected in (("correct", 1.0), ("of_trl", 1.0)):
        group = RolloutGroup([Rollout([1], [2], [True], [0.0], trajectory)])
        RewardOrchestrator({f"rewards.py:{name}": 1.0}).score([group])
        assert group.rewards == [expected]


def calls_of(block):
    """(dotted name, call or None) of every use of `rl_core.NAME` in a block."""
    tree = ast.parse(block.text)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rl_core":
            yield node.attr, called.get(id(node))


@pytest.mark.skipif(not hasattr(rl_core, "grpo"), reason="the Python API is not there yet")
@pytest.mark.parametrize("block", [b for b in blocks("python") if "import rl_core\n" in b.text], ids=lambda b: b.place)
def test_calls_of_the_python_api_fit_its_signatures(block):
    used = list(calls_of(block))
    assert used
    for name, call in used:
        function = getattr(rl_core, name)
        if call is not None:
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(function).bind(*call.args, **keywords)  # TypeError where it does not fit


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.place)
def test_yaml_is_a_configuration(block, package, tmp_path):
    (tmp_path / "shown.yaml").write_text(block.text)
    document = read_yaml(tmp_path / "shown.yaml")
    assert document.problems == []
    values = document.data
    shown = {"name": "shown", "model": {"path": "a/b"}, **values}
    stages = shown.setdefault("stages", {"sft": {}})
    if {"sft", "preference", "reward_model"} & set(stages):
        stages.setdefault("prepare_data", {"preferences": "pairs.jsonl"})
    if "promote" in stages:
        stages.setdefault("policy", {})
        stages.setdefault("evaluate", {})
    from_dict(shown, check_files=False)


@pytest.mark.parametrize(("place", "line"), commands(), ids=[place for place, _ in commands()])
def test_commands_parse(place, line):
    words = shlex.split(line.strip("`"), comments=True)[1:]
    if line.startswith("`"):  # in a sentence a command may stand without its arguments
        parsers = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
        known = (parsers.choices[words[0]] if words[0] in parsers.choices else build_parser())._option_string_actions
        assert words[0] in parsers.choices or words[0] in known, f"{place}: {line}"
        assert [word for word in words if word.startswith("-") and word not in known] == [], f"{place}: {line}"
        return
    try:
        build_parser().parse_args(words)
    except SystemExit as stop:
        assert stop.code == 0, f"{place}: {line}"  # --help and --version end well


def test_enough_is_shown():
    assert len(commands()) > 40 and len(blocks("yaml")) > 8 and len(blocks("python")) > 6


def documented_arguments():
    """By function or method of the API page: the arguments in its tables' rows."""
    text = (DOCS / "api.md").read_text().partition("\n## Arguments\n")[2].partition("\n## ")[0]
    training, methods, others = (table.partition("|---|---|---|\n")[2] for table in text.split("| argument | of |")[1:])
    every = set(re.findall(r"`(\w+)`", text.partition("`all` are ")[2].partition(".")[0]))
    found = {}
    for prefix, table in (("", training), ("Training.", methods), ("", others)):
        for arguments, of in re.findall(r"^\| ([^|]*) \| ([^|]*) \|", table, re.MULTILINE):
            for name in every if of == "all" else re.findall(r"`(\w+)`", of):
                found.setdefault(prefix + name, []).extend(re.findall(r"`(\w+)`", arguments))
    return found


def test_the_api_page_names_every_argument():
    public = {name: getattr(rl_core, name) for name in rl_core.__all__}
    public = {name: one for name, one in public.items() if inspect.isfunction(one)}
    methods = {f"Training.{name}": one for name, one in vars(rl_core.Training).items() if inspect.isfunction(one)}
    public |= {name: one for name, one in methods.items() if "._" not in name}
    arguments = {name: sorted(inspect.signature(one).parameters) for name, one in public.items()}
    expected = {name: [one for one in names if one != "self"] for name, names in arguments.items()}
    found = {name: sorted(names) for name, names in documented_arguments().items()}
    assert len(found) > 20 and found == {name: names for name, names in expected.items() if names}


def test_the_api_page_shows_every_public_function():
    text = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^        - (\w+)$", text, re.MULTILINE))
    assert shown >= {name for name in rl_core.__all__ if inspect.isfunction(getattr(rl_core, name))}


def test_generated_pages_are_current(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    generate = importlib.import_module("generate")
    for path, text in generate.pages().items():
        assert path.read_text() == text, f"{path.name} is stale; run docs/tools/generate.py"


def test_the_configuration_page_names_every_setting():
    text = (DOCS / "configuration.md").read_text()
    assert "| `clip_eps_high` | float or null | `null` | upper clip of the ratio" in text
    assert "| `sampling` | [block](#stagesdistillsampling) | its defaults |" in text
    assert "; at least 0 and at most 5 |" in text  # temperature
    assert len(re.findall(r"^\| `\w+` \|", text, re.MULTILINE)) > 250


@pytest.mark.skipif(importlib.util.find_spec("latex2mathml") is None, reason="needs the extra docs")
def test_every_equation_becomes_mathml(monkeypatch):
    import markdown

    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    extension = importlib.import_module("site_extension")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        html = markdown.markdown(text, extensions=["tables", "fenced_code", extension.SiteExtension()])
        bare = re.sub(r"<(pre|code)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
        assert "$" not in bare, f"{page.name}: {bare[max(0, bare.find('$') - 80) : bare.find('$') + 80]}"


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs the extra docs")
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    """As `make docs` builds it, in a copy."""
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copytree(ROOT / "tests/benchmarks/pictures", tmp_path / "docs/pictures", dirs_exist_ok=True)
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "paths: [.]" in settings
    (tmp_path / "mkdocs.yml").write_text(settings.replace("paths: [.]", f"paths: [{ROOT}]"))
    path = os.pathsep.join([str(DOCS / "tools"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = list((tmp_path / "docs-site").rglob("*.html"))
    assert len(built) > len(PAGES)
    for page in built:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(https?://[^\"]+)\"", page.read_text())
        assert loaded == [], f"{page.name}: {loaded}"
    assert "clipped_policy_loss" in (tmp_path / "docs-site/api/index.html").read_text()
