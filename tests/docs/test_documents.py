"""The documentation: links and anchors resolve, named files exist, blocks compile, run and validate, commands parse."""

import argparse
import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from documents import (
    DOCS,
    PAGES,
    ROOT,
    list_anchors,
    list_blocks,
    list_commands,
    list_links,
    strip_blocks,
)
from helpers.chromium import PROGRAM, Chromium

import rl_core
from posttrain.cli.main import build_parser
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.losses.policy import sapo_loss
from rl_core.models import causal_lm
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import ModelSettings
from rl_core.trainers.policy_gradient.custom_functions import CustomAdvantages
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn
from tasks import stage_registry
from tasks.config import build_settings
from tasks.config.problems import ConfigError
from tasks.config.settings import PipelineSettings
from tasks.config.yaml_loader import read_yaml
from tasks.shipped import find_config

RESULTS = sorted((ROOT / "tests/benchmarks/results").glob("*.md"))
FOLDERS = r"configs|deployments|docs|examples|flows|posttrain|rl_core|tasks|tests"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write the blocks marked `run: NAME` as modules my_package.NAME, and as files NAME.py of the current folder."""
    (tmp_path / "my_package").mkdir()
    for block in list_blocks("python"):
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
    for is_picture, target in list_links(page):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file(), f"{page.name}: {target}"
        if path.suffix == ".md":  # the site has no other pages, and `make docs` fails
            assert path.is_relative_to(DOCS), f"{page.name}: {target} is no page of the site"
        if anchor and not is_picture:
            assert anchor in list_anchors(path), (
                f"{page.name}: {target}; anchors: {sorted(list_anchors(path))}"
            )


def test_there_are_anchors_to_check():
    """Check that there are links; the checks above would pass on pages without one."""
    targets = [target for page in PAGES for _, target in list_links(page)]
    assert len(targets) > 60 and sum("#" in target for target in targets) > 10
    assert "10-a-limit-of-the-sampler-ends-an-episode" in list_anchors(DOCS / "architecture.md")
    assert "stagespolicycurriculum" in list_anchors(DOCS / "configuration/policy.md")


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES}


def test_named_files_exist():
    for page in PAGES:
        for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", strip_blocks(page)):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", (DOCS / "architecture.md").read_text()):
        assert (ROOT / path).exists() or (ROOT / "rl_core" / path).exists(), path


def test_code_and_configs_name_documents_that_exist():
    """Check `docs/page.md, 'Section'` in messages and comments; none names a section of the README."""
    named = []
    for floor in ("configs", "posttrain", "flows", "rl_core", "tasks"):
        for path in (path for path in (ROOT / floor).rglob("*") if path.suffix in {".py", ".yaml"}):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"README, ['\"]", text), path
            named += re.findall(r"(docs/[\w/-]+\.md)(?:, '([^']+)')?", text)
    assert len(named) > 3 and any(section for _, section in named)
    for page, section in named:
        assert not section or section.lower().replace(" ", "-") in list_anchors(ROOT / page), (
            f"{page}, '{section}'"
        )
        assert (ROOT / page).is_file(), page


@pytest.mark.parametrize("floor", ["rl_core", "tasks", "flows", "posttrain"])
def test_the_architecture_names_every_room(floor):
    text = (
        (DOCS / "architecture.md").read_text().partition(f"## `{floor}/`")[2].partition("\n## ")[0]
    )
    named = set(re.findall(r"^    (\w+)/", text, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / floor).glob("*/__init__.py")}
    assert named == rooms


def test_named_configs_exist():
    texts = [strip_blocks(page) for page in PAGES] + [block.text for block in list_blocks("yaml")]
    named = {path for text in texts for path in re.findall(r"configs/\w+\.yaml", text)}
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("block", list_blocks("python"), ids=lambda block: block.place)
def test_python_compiles(block):
    compile(block.text, block.place, "exec")
    assert max(map(len, block.text.splitlines())) <= 120


def test_the_echo_environment_plays(package):
    environment = make_environment("my_package.echo:Echo")
    for action, reward in (("7", 1.0), ("8", 0.0)):
        episode = environment.episode(17, "easy")
        assert episode.reset() == [{"role": "user", "content": "say 7"}]
        step = episode.step(action)
        assert (step.reward, step.terminated, step.success) == (reward, True, reward == 1.0)


def test_the_guessing_environment_plays(package):
    environment = make_environment("my_package.guess:Guess")
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

    trajectory = Trajectory(
        environment="e", level="l", kind="k", seed=0, prompt="p", target="t", num_action_tokens=30
    )
    assert brevity([trajectory, trajectory]) == pytest.approx([-0.3, -0.3])  # -0.01 a token


def test_the_loss_of_the_docs_is_the_shipped_one(package):
    from my_package.sapo import sapo

    # r = (2, 1/2), A = (1, -1), one more token masked: -4 sigmoid(1) and (4 / 1.05) sigmoid(-1.05 / 2), a mean of two
    new = torch.tensor([[math.log(2.0), math.log(0.5), -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    arguments = torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 0.0]]), mask
    options = {"num_loss_tokens": 2, "loss_weights_BT": mask / 2}
    loss, metrics = sapo(new, *arguments, **options)
    p, q = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(0.525))
    assert loss.item() == pytest.approx((-4 * p + 4 / 1.05 * q) / 2)
    assert metrics["gate_mean"].item() == pytest.approx((4 * p * (1 - p) + 4 * q * (1 - q)) / 2)
    shipped, of_shipped = sapo_loss(new, *arguments, **options)
    assert loss.item() == pytest.approx(shipped.item())
    assert metrics["gate_mean"].item() == pytest.approx(float(of_shipped["gate_mean"]))
    one, other = (torch.autograd.grad(value, new)[0] for value in (loss, shipped))
    assert torch.allclose(one, other) and bool(one[0, 2] == 0)


def test_the_parts_of_the_docs_are_taken_as_shown(package):
    """Load parts by file and by import path; the estimator by hand: (1 * 2 + 0 * 6) / 8 and 1/2."""
    condition = {"function": "conditions.py:settled", "options": {"tolerance": 0.01}, "window": 20}
    curriculum = [{"name": "easy", "levels": {"easy": 1.0}, "exit_conditions": [condition]}]
    stages = {
        "sft": {},
        "evaluate": {},
        "analyze": {"measures": ["measures.py:asks_back"]},
        "policy": {
            "loss": "sapo.py:sapo",
            "loss_options": {"tau_negative": 1.1},
            "curriculum": curriculum,
            "loss_aggregation": "sequence_mean",
            "advantages": "my_package.advantages:length_weighted",
        },
    }
    settings = build_settings({"name": "x", "stages": stages}, check_files=False)
    policy = settings.stages.policy
    estimate = CustomAdvantages(policy.advantages, policy.advantage_options)
    advantages, metrics = estimate(
        [torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])], [2, 6, 1, 1]
    )
    assert [row.tolist() for row in advantages] == [[0.75, -0.25], [0.0, 0.0]] and metrics == {
        "baseline": 0.375
    }
    from my_package.conditions import settled

    assert settled({"train/success_rate": [0.5, 0.6, 0.6, 0.51]}) is True  # 0.555 after 0.55
    assert settled({"train/success_rate": [0.5, 0.6, 0.6, 0.6]}) is False
    assert settled({"train/success_rate": [0.5]}) is None
    from my_package.measures import asks_back

    trajectory = Trajectory(
        environment="e", level="l", kind="k", seed=0, prompt="p", target="t", turns=[Turn("why? ")]
    )
    assert asks_back(trajectory) == 1.0


def test_the_stage_of_the_docs_rounds_weights(package, monkeypatch, tmp_path):
    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)
    stages = {
        "sft": {},
        "custom": {"rounding": {"use": "rounding.py:STAGE", "settings": {"dtype": "float16"}}},
    }
    values = {
        "name": "x",
        "model": {"preset": "nano", "vocab_size": 320, "context": 64},
        "stages": stages,
    }
    settings = build_settings(values, check_files=False)
    assert settings.stages.active == ("sft", "rounding")
    tokenizer = train_tokenizer(["abc xyz"], 320)
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=64, device="cpu"), tokenizer, 0
    )
    causal_lm.save(model, tokenizer, tmp_path / "start")
    (tmp_path / "folder").mkdir()
    context = SimpleNamespace(
        inputs={"model": tmp_path / "start"},
        pipeline=settings,
        folder=tmp_path / "folder",
        settings=settings.stages.rounding,
    )
    assert stage_registry.find_stage("rounding").custom.body(context) == {
        "note": "weights rounded to float16"
    }
    rounded = causal_lm.load_model(tmp_path / "folder" / "model", ModelSettings(device="cpu"))[0]
    for rounded_weight, other in zip(rounded.parameters(), model.parameters(), strict=True):
        assert torch.equal(rounded_weight, other.half().float())


def test_rewards_by_column_and_tools_are_used_as_shown(package):
    rows = [{"prompt": "2 + 3 =", "answer": "5"}]
    acting = make_environment("prompts", {"rows": rows, "tools": "tools.py:TOOLS"})
    episode = acting.episode(0, "all")
    call = '<tool_call>{"name": "search", "arguments": {"words": ["a", "b"]}}</tool_call>'
    assert episode.step(call).messages == [{"role": "tool", "content": "3 articles on a b"}]
    trajectory = Trajectory(
        environment="e", level="l", kind="k", seed=0, prompt="p", target="t", row=rows[0]
    )
    trajectory.turns = [Turn("5")]
    for name, expected in (("correct", 1.0), ("of_trl", 1.0)):
        group = RolloutGroup([Rollout([1], [2], [True], [0.0], trajectory)])
        RewardOrchestrator({f"rewards.py:{name}": 1.0}).score([group])
        assert group.rewards == [expected]


def list_calls(block):
    """Return (dotted name, call or None) of every use of `rl_core.NAME` in a block."""
    tree = ast.parse(block.text)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "rl_core"
        ):
            yield node.attr, called.get(id(node))


@pytest.mark.skipif(not hasattr(rl_core, "grpo"), reason="the Python API is not there yet")
@pytest.mark.parametrize(
    "block",
    [b for b in list_blocks("python") if "import rl_core\n" in b.text],
    ids=lambda b: b.place,
)
def test_calls_of_the_python_api_fit_its_signatures(block):
    used = list(list_calls(block))
    assert used
    for name, call in used:
        function = getattr(rl_core, name)
        if call is not None:
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(function).bind(
                *call.args, **keywords
            )  # TypeError where it does not fit


@pytest.mark.parametrize("block", list_blocks("yaml"), ids=lambda block: block.place)
def test_yaml_is_a_configuration(block, package, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tasks.config.cross_checks.check_sink_installed", lambda sink: None
    )  # places of metrics are extras,
    monkeypatch.setattr(
        "tasks.config.policy_checks.check_ray_installed", lambda: None
    )  # and so is Ray
    monkeypatch.setattr(
        "tasks.config.policy_checks.check_start_settings", lambda *arguments: None
    )  # a program that this machine lacks
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
    try:
        build_settings(shown, check_files=False)
    except ConfigError as error:
        missing = re.fullmatch(r".*needs the package '\w+', which is not installed; .*", str(error))
        if missing is None:  # also where another problem stands on a further line
            raise
        pytest.skip(missing.group())


@functools.cache
def build_parser_once():
    """Return one parser for all commands of the documents; parsing leaves it as it is."""
    return build_parser()


def find_parser(words):
    """Return the parser of the command that `words` begin with: `check plan` is one."""
    parser = build_parser_once()
    for word in words:
        commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not commands or word not in commands[0].choices:
            break
        parser = commands[0].choices[word]
    return parser


@pytest.mark.parametrize(
    ("place", "line"), list_commands(), ids=[place for place, _ in list_commands()]
)
def test_commands_parse(place, line):
    words = shlex.split(line.strip("`"), comments=True)[1:]
    if line.startswith("`"):  # in a sentence a command may stand without its arguments
        parser = find_parser(words)
        known = parser._option_string_actions
        assert parser.prog != build_parser_once().prog or words[0] in known, f"{place}: {line}"
        assert [word for word in words if word.startswith("-") and word not in known] == [], (
            f"{place}: {line}"
        )
        return
    try:
        build_parser_once().parse_args(words)
    except SystemExit as stop:
        assert stop.code == 0, f"{place}: {line}"  # --help and --version end well


@pytest.mark.parametrize(
    "page", ["README.md", "docs/operations.md", "docs/promotion.md", "docs/observing.md"]
)
def test_commands_of_pages_for_operators_work_from_a_wheel_which_has_no_folder_of_configs(
    page, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lines = [
        line
        for place, line in list_commands()
        if place.startswith(f"{page}:") and not line.startswith("`")
    ]
    named = [
        getattr(build_parser().parse_args(shlex.split(line, comments=True)[1:]), "config", None)
        for line in lines
    ]
    # a file of the reader's is left out, and so is an episode, which `replay` tells from a config
    wanted = {name for name in named if name and name.count("/") < 3} - {"mine.yaml"}
    assert lines and [name for name in wanted if not find_config(name).is_file()] == []


def test_enough_is_shown():
    assert (
        len(list_commands()) > 40
        and len(list_blocks("yaml")) > 8
        and len(list_blocks("python")) > 6
    )


def list_documented_arguments():
    """Return by function or method of the API page the arguments in its tables' rows."""
    text = (DOCS / "api.md").read_text().partition("\n## Arguments\n")[2].partition("\n## ")[0]
    training, methods, others = (
        table.partition("|---|---|---|\n")[2] for table in text.split("| argument | of |")[1:]
    )
    every = set(re.findall(r"`(\w+)`", text.partition("`all` are ")[2].partition(".")[0]))
    arguments_by_name = {}
    for prefix, table in (("", training), ("Training.", methods), ("", others)):
        for arguments, of in re.findall(r"^\| ([^|]*) \| ([^|]*) \|", table, re.MULTILINE):
            for name in every if of == "all" else re.findall(r"`(\w+)`", of):
                arguments_by_name.setdefault(prefix + name, []).extend(
                    re.findall(r"`(\w+)`", arguments)
                )
    return arguments_by_name


def test_the_api_page_names_every_argument():
    public = {name: getattr(rl_core, name) for name in rl_core.__all__}
    public = {name: function for name, function in public.items() if inspect.isfunction(function)}
    methods = {
        f"Training.{name}": function
        for name, function in inspect.getmembers(rl_core.Training, inspect.isfunction)
    }
    public |= {name: function for name, function in methods.items() if "._" not in name}
    arguments = {
        name: sorted(inspect.signature(function).parameters) for name, function in public.items()
    }
    expected = {
        name: [argument for argument in names if argument != "self"]
        for name, names in arguments.items()
    }
    documented = {name: sorted(names) for name, names in list_documented_arguments().items()}
    assert len(documented) > 20 and documented == {
        name: names for name, names in expected.items() if names
    }


def test_the_api_page_shows_every_public_function():
    text = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^        - (\w+)$", text, re.MULTILINE))
    assert shown >= {name for name in rl_core.__all__ if inspect.isfunction(getattr(rl_core, name))}


@pytest.fixture
def generate(monkeypatch):
    """Import docs/tools/generate.py."""
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    return importlib.import_module("generate")


def test_generated_pages_are_current(generate):
    for path, text in generate.build_pages().items():
        assert path.read_text() == text, f"{path.name} is stale; run docs/tools/generate.py"


def test_the_configuration_pages_name_every_setting(generate):
    """Check rows, ranges and links of the reference, and that each block of settings has exactly one section."""
    pages = {
        page.file: (DOCS / "configuration" / page.file).read_text()
        for page in generate.CONFIGURATION_PAGES
    }
    assert (
        "|`clip_eps_high`|float or null, above 0|`null`|upper clip of the ratio"
        in pages["policy.md"]
    )
    assert "|`sampling`|[block](shared.md#sampling)|`{}`|" in pages["policy.md"]
    assert "|`temperature`|float, 0 to 5|`1.0`|" in pages["shared.md"]
    text = "".join(pages.values())
    assert len(re.findall(r"^\|`\w+`\|", text, re.MULTILINE)) > 250
    headings = re.findall(r"^## `(.+)`$", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) > 40
    places = {}  # the first place of a class decides its page
    for place, cls in generate._iterate_blocks("", PipelineSettings):
        places.setdefault(cls, place)
    for cls, place in places.items():
        # A training stage refers to the shared settings, a distillation to the policy's as well.
        shown = pages[generate._find_page(place)] + pages["shared.md"] + pages["policy.md"]
        assert all(f"`{field.name}`" in shown for field in dataclasses.fields(cls)), place


def test_a_training_stage_lists_only_what_differs(generate):
    """Check that a shared key has one row, and one more where its default differs."""
    pages = {path.name: text for path, text in generate.build_configuration_pages().items()}
    assert pages["shared.md"].count("|`max_grad_norm`|") == 1
    for name in ("sft.md", "preference.md", "policy.md"):
        assert "|`max_grad_norm`|" not in pages[name]
    assert pages["sft.md"].count("|`dropout`|") == 1  # true for SFT, false elsewhere
    assert "|`dropout`|" not in pages["preference.md"]
    assert "`clip_eps`" in pages["sft.md"] and "|`clip_eps`|" not in pages["sft.md"]


@pytest.mark.parametrize(
    "limits, text",
    [
        ({"ge": 1, "le": 1024}, "1 to 1024"),
        ({"gt": 0, "le": 1}, "above 0, at most 1"),
        ({"ge": 0, "lt": 2**31}, "at least 0, below 2^31"),
        ({"ge": 1, "le": 1_000_000}, "1 to 10^6"),
        ({"ge": 1e-6, "le": 65_535}, "1e-06 to 65535"),
        ({}, ""),
    ],
)
def test_ranges_read_as_people_write_them(generate, limits, text):
    assert generate._format_range(limits) == text


def test_bounds_of_an_interval_share_a_row(generate):
    page = (DOCS / "metrics.md").read_text()
    assert (
        "|`eval/success_rate`, `_low`, `_high` (share)|Success on the validation episodes during "
        "training (policy, thoughts). **Watch:** [glossary](#glossary).|"
    ) in page
    assert "`eval/success_rate_low`" not in page
    assert "paired. Bootstrap interval (`promote.confidence`). Promotion needs `_low` above" in page
    assert "= better. Interval (`promote.confidence`). With `max_loss`, promotion needs" in page
    assert page.count("Level of its detector") == 1  # seven metrics of equal meaning
    assert page.count("|Mean of these differences.|") == 2  # two metrics, each below its maximum
    names = {metric.name for group in generate.METRIC_GROUPS for metric in group.metrics}
    missing = {
        name
        for name in names
        if f"`{name}`" not in page and name.removesuffix("_low").removesuffix("_high") not in names
    }
    assert not missing
    assert (
        len(
            re.findall(r"^\|", page.partition("## Glossary")[2].partition("\n## ")[0], re.MULTILINE)
        )
        == 22
    )


def test_every_shipped_configuration_is_listed():
    page = (DOCS / "configuration/index.md").read_text()
    shipped = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert set(re.findall(r"^\| `configs/([\w-]+\.yaml)` \|", page, re.MULTILINE)) == shipped


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_links_of_the_measurements_resolve(path):
    """Check the complete tables that the site leaves out; the list of them names each."""
    for _, target in list_links(path):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            linked = (path.parent / name).resolve()
            assert linked.is_file(), target
            assert not anchor or anchor in list_anchors(linked), target
    assert path.name == "README.md" or f"]({path.name})" in (path.parent / "README.md").read_text()


@pytest.mark.skipif(importlib.util.find_spec("latex2mathml") is None, reason="needs the extra docs")
def test_every_equation_becomes_mathml(monkeypatch):
    import markdown

    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    extension = importlib.import_module("site_extension")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        html = markdown.markdown(
            text, extensions=["tables", "fenced_code", extension.SiteExtension()]
        )
        bare = re.sub(r"<(pre|code)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
        assert "$" not in bare, (
            f"{page.name}: {bare[max(0, bare.find('$') - 80) : bare.find('$') + 80]}"
        )


@pytest.mark.skipif(importlib.util.find_spec("latex2mathml") is None, reason="needs the extra docs")
def test_a_picture_is_a_link_to_its_file(monkeypatch):
    import markdown

    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    extension = importlib.import_module("site_extension")
    row = "a row | ![a](b.png) | [![c](d.png)](e.html)"
    text = f"![success](../tests/benchmarks/pictures/learning.png)\n\n{row}"
    html = markdown.markdown(text, extensions=[extension.SiteExtension()])
    assert (
        '<a href="pictures/learning.png"><img alt="success" src="pictures/learning.png" /></a>'
        in html
    )
    assert '<a href="b.png"><img alt="a" src="b.png" /></a>' in html
    assert '<a href="e.html"><img alt="c" src="d.png" /></a>' in html and html.count("<a ") == 3


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does, in a copy; warnings are errors."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copytree(
        ROOT / "tests/benchmarks/pictures", folder / "docs/pictures", dirs_exist_ok=True
    )
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "paths: [.]" in settings
    (folder / "mkdocs.yml").write_text(settings.replace("paths: [.]", f"paths: [{ROOT}]"))
    path = os.pathsep.join([str(DOCS / "tools"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "docs-site"


def test_the_site_loads_nothing_from_elsewhere(site):
    built = list(site.rglob("*.html"))
    assert len(built) > len(PAGES)
    for page in built:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(https?://[^\"]+)\"",
            page.read_text(),
        )
        assert loaded == [], f"{page.name}: {loaded}"
    assert "clipped_policy_loss" in (site / "api/index.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_no_page_is_wider_than_a_phone(site):
    """Check that wide tables and code scroll by themselves at 420 px, and that code can be copied."""
    with Chromium("about:blank", (420, 900)) as browser:
        for page in sorted(site.rglob("index.html")):
            browser.call("Page.navigate", url=page.as_uri())
            browser.wait(
                f"location.href === {page.as_uri()!r} && document.readyState === 'complete'"
            )
            width = browser.run("document.documentElement.scrollWidth")
            assert width <= 420, f"{page.relative_to(site)}: {width} px"
            blocks, buttons = browser.run(
                "[document.querySelectorAll('.md-typeset pre > code').length, "
                "document.querySelectorAll('.md-code__button, .md-clipboard').length]"
            )
            assert buttons == blocks, (
                f"{page.relative_to(site)}: {buttons} of {blocks} can be copied"
            )
