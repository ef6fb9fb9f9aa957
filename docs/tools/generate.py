"""Writes the generated pages of the documentation: configurations, metrics, and names of TRL and verl.

`python docs/tools/generate.py` writes them, `--check` only names the stale ones. The pages are committed, so that they
can be read and reviewed without building the site; a test runs the check.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

DOCS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "tools")]  # called as a file, from a checkout

from normalisation import replace_table  # noqa: E402

from rl_core.analysis.metric_reference import METRIC_GROUPS, MetricDescription, MetricGroup  # noqa: E402
from rl_core.settings import DistillationSettings, PolicySettings, Settings  # noqa: E402
from rl_core.settings.deprecated_keys import list_deprecated_keys  # noqa: E402
from rl_core.settings.framework_aliases import (  # noqa: E402
    TRL_VERSION,
    VERL_VERSION,
    FrameworkAlias,
    list_trl_aliases,
    list_verl_aliases,
)
from rl_core.settings.training import LoopSettings, OptimizerSettings  # noqa: E402
from tasks.config.settings import PipelineSettings  # noqa: E402

NOTE = "<!-- Written by docs/tools/generate.py; edit the source named below instead. -->\n\n"
CONFIGURATION = DOCS / "configuration"
LOG_FIELDS = Path(__file__).with_name("update_log_fields.csv")
COMING_FROM = Path(__file__).with_name("coming_from.txt")
ALGORITHMS = DOCS / "algorithms.md"  # one table of it
GLOSSARY = Path(__file__).with_name("glossary.csv")

_TYPES = {int: "int", float: "float", str: "text", bool: "bool"}
_TRAINING_STAGES = "the settings of [all training stages](shared.md#training-stages)"
_INHERITED = {  # base class -> what a section says instead of repeating its rows
    LoopSettings: _TRAINING_STAGES,
    OptimizerSettings: "the [optimizer settings](shared.md#optimizer)",
}


@dataclass(frozen=True)
class ConfigurationPage:
    """One page of the configuration reference: the blocks whose place in the file begins with one of `places`."""

    file: str
    title: str
    introduction: str
    places: tuple[str, ...]


CONFIGURATION_PAGES = (
    ConfigurationPage(
        "index.md",
        "Configuration",
        """\
Look up every key of a pipeline's YAML file, one page for each kind of stage. To start a file, copy a
[recipe](../recipes.md) or run `posttrain init my_task`.

- A missing key takes its default. A missing stage (or `null`) does not run; `{}` runs it with its defaults.
- An unknown key, a wrong type or a value out of range stops the command before anything runs, with file, line, key and
  the allowed values.
- `--set stages.policy.learning_rate=1e-6` changes a key on the command line.
- `posttrain validate CONFIG --show` prints all settings of a file, defaults included.
- The type column holds the range: `int, 1 to 2^20`.

| page | keys |
|---|---|
| [Shared settings](shared.md) | `model`, LoRA, optimizer, training loop, `launch`, `sampling`, `numerics`, `replay` |
| [Data, SFT, distillation](sft.md) | `stages.prepare_data`, `stages.sft`, `stages.distill` |
| [Preferences](preference.md) | `stages.preference`, `stages.reward_model` |
| [Policy optimisation](policy.md) | `stages.policy` with critic, rollouts, curriculum and rollback |
| [Rewards](rewards.md) | `reward_options` of the policy stage and of online learning |
| [Thoughts and networks](thoughts.md) | `stages.thoughts`, `stages.network` |
| [Evaluation and promotion](evaluation.md) | `stages.evaluate`, `suites`, `analyze`, `export`, `promote`, `gguf`, `custom` |
| [Online learning](online.md) | `online`, and the fields of its logs |
| [Servers](services.md) | `serving`; `prefer` (the page of `posttrain label`) |

## Shipped configurations

`posttrain run demo` finds `configs/demo.yaml` by its name, also in an installed package.

| file | what it does |
|---|---|
| `configs/demo.yaml` | the demo on `pixel_grid`: a policy made from scratch asks tools about an image it cannot see |
| `configs/real.yaml` | GRPO on SmolLM2-135M-Instruct, without demonstrations |
| `configs/real-gpu.yaml` | the same on one GPU, for models of 0.5B to 8B; not run yet |
| `configs/grpo.yaml` | SFT, then GRPO or a relative |
| `configs/rlhf.yaml` | SFT, a reward model, then PPO against it |
| `configs/dpo.yaml` | SFT, then DPO on pairs of rollouts or on a preference file |
| `configs/gsm8k.yaml` | real questions with a calculator |
| `configs/preferences.yaml` | a reward model on real preference pairs |
| `configs/maze.yaml` | mazes seen one cell at a time |
| `configs/vision.yaml` | a policy that sees [pictures](../training.md#images), made from scratch |
| `configs/agent.yaml` | your own agent, a program that asks the policy over HTTP ([guide](../agents.md)) |
| `configs/self-play.yaml` | Kuhn poker against [past versions of itself](../training.md#self-play) |
| `configs/mixture.yaml` | one policy on two [environments](../training.md#several-environments) |
| `configs/curriculum.yaml` | exits by mean and slope, rollback, rewards that change by stage |
| `configs/cartpole.yaml` | PPO of small networks on CartPole-v1, no language model |
| `configs/acrobot.yaml` | the same on Acrobot-v1: normalised observations and rewards |
| `configs/pendulum.yaml` | the same on Pendulum-v1: continuous actions |
| `configs/mountain-car.yaml` | the same on MountainCarContinuous-v0: correlated exploration |
| `configs/lunar-lander.yaml` | the same on LunarLander-v3 |
| `configs/thoughts.yaml` | thoughts before answers, tested for being genuine |
| `configs/online.yaml` | online learning from recorded traffic: `posttrain online worker` |
| `configs/service.yaml` | the training service: `posttrain service up` |
| `configs/test.yaml` | every stage, as small as possible |
""",
        ("", "environment", "tracking", "run", "retrain", "stages"),
    ),
    ConfigurationPage(
        "shared.md",
        "Shared settings",
        "The model, the optimizer, sampling and other settings that several stages accept.\n",
        (
            "model",
            "stages.sft.launch",
            "stages.distill.sampling",
            "stages.distill.numerics",
            "stages.distill.replay",
        ),
    ),
    ConfigurationPage(
        "sft.md",
        "Data, SFT and distillation",
        "Keys of the data stage, SFT and distillation. [Data](../data.md) describes the files.\n",
        ("stages.prepare_data", "stages.sft", "stages.distill"),
    ),
    ConfigurationPage(
        "preference.md",
        "Preference optimisation and reward models",
        "Keys of DPO and its relatives, and of reward models. [Algorithms](../algorithms.md#preference-losses) has the "
        "losses.\n",
        ("stages.preference", "stages.reward_model"),
    ),
    ConfigurationPage(
        "policy.md",
        "Policy optimisation",
        "Keys of GRPO, PPO and the other policy algorithms. [Algorithms](../algorithms.md) has the equations, "
        "[Rewards](rewards.md) the options of the reward components.\n",
        ("stages.policy",),
    ),
    ConfigurationPage(
        "rewards.md",
        "Rewards",
        "Options of the reward components in `stages.policy.rewards` and `online.rewards`.\n",
        ("stages.policy.reward_options",),
    ),
    ConfigurationPage(
        "thoughts.md",
        "Thoughts and networks",
        "Keys of two stages that need no policy stage: [thoughts](../algorithms.md#thoughts) before answers, and "
        "[networks](../training.md#networks-for-plain-observations) on Gymnasium environments.\n",
        ("stages.thoughts", "stages.network"),
    ),
    ConfigurationPage(
        "evaluation.md",
        "Evaluation and promotion",
        "Keys of the stages after training, and of [custom stages](../bring-your-own.md#stage).\n",
        (
            "stages.evaluate",
            "stages.suites",
            "stages.analyze",
            "stages.export",
            "stages.promote",
            "stages.gguf",
            "stages.custom",
        ),
    ),
    ConfigurationPage(
        "online.md",
        "Online learning",
        """\
Keys of the block `online`, for `posttrain serve --learn`. The file of `posttrain online worker` has them at its top
level. [Online learning](../online.md) explains them.
""",
        ("online",),
    ),
    ConfigurationPage(
        "services.md",
        "Servers",
        "Keys of the chat server ([`posttrain serve`](../serving.md)) and of the rating page "
        "([`posttrain label`](../data.md#labels-by-people)).\n",
        ("serving", "prefer"),
    ),
)
# Place of a class in the file -> the name by which the pages call it, where several stages share it.
_SHORT_NAMES = {
    "stages.sft.launch": "launch",
    "stages.distill.sampling": "sampling",
    "stages.distill.numerics": "numerics",
    "stages.distill.replay": "replay",
    "stages.policy.reward_options": "reward_options",
}

_LOGS = """
## Logs of updates

Fields of a record of `update_contribution.jsonl`. The second column shows them in a line of `update_audit.log`.
The metrics are in [the reference](../metrics.md#online-learning-online).

| field | in `update_audit.log` | meaning |
|---|---|---|
"""

_METRICS = """\
# Metrics

Look up what a metric means and when to worry. MLflow, `metrics.jsonl`, the live page and [curriculum
conditions](training.md#exit-conditions) use these names over the number of optimizer steps. Braces stand for a name; a
`{component}` with an import path has `.` for `:`. `_low` and `_high` bound the interval, 95% if the row names no other.

## Glossary

These twenty tell whether a run is healthy.

"""


def build_pages() -> dict[Path, str]:
    """Build every generated page: its path and its text."""
    return {
        **build_configuration_pages(),
        DOCS / "metrics.md": build_metrics_page(),
        DOCS / "coming-from.md": build_coming_from_page(),
        ALGORITHMS: replace_table(ALGORITHMS.read_text(encoding="utf-8")),
    }


def build_configuration_pages() -> dict[Path, str]:
    """Build the pages of the configuration reference. A class of settings has one section, whatever blocks use it."""
    places: dict[type[Settings], list[str]] = {}
    for place, cls in _iterate_blocks("", PipelineSettings):
        places.setdefault(cls, []).append(place)
    files = {cls: _find_page(cls_places[0]) for cls, cls_places in places.items()}
    texts = {}
    for page in CONFIGURATION_PAGES:
        links = {
            cls: ("" if file == page.file else file) + f"#{_anchor(places[cls][0])}"
            for cls, file in files.items()
        }
        parts = [f"# {page.title}", page.introduction]
        if page.file == "shared.md":
            parts.append(_build_training_section(links))
        parts += [
            _build_section(cls, cls_places, links)
            for cls, cls_places in places.items()
            if files[cls] == page.file
        ]
        if page.file == "online.md":
            parts.append(_build_log_section())
        texts[CONFIGURATION / page.file] = (
            NOTE + "\n\n".join(part.strip("\n") for part in parts) + "\n"
        )
    return texts


def _find_page(place: str) -> str:
    """Find the page of a block: the one with the longest prefix of its place."""
    prefixes = {prefix: page.file for page in CONFIGURATION_PAGES for prefix in page.places}
    return prefixes[max((p for p in prefixes if place.startswith(p)), key=len)]


def _shorten(place: str) -> str:
    """Return the name of a block in its heading."""
    for prefix, name in _SHORT_NAMES.items():
        if place.startswith(prefix):
            return name + place.removeprefix(prefix)
    return place


def _anchor(place: str) -> str:
    return re.sub(r"[.\[\]]", "", _shorten(place)).lower() or "top-level"


def _build_training_section(links: Mapping[type[Settings], str]) -> str:
    """Build the section of the settings that every training stage has."""
    parts = [
        "## Training stages",
        "`sft`, `distill`, `preference`, `reward_model`, `policy`, `thoughts` and `network` accept these. A stage's "
        "page lists them again only where its default or meaning differs.",
    ]
    for title, cls in (("Loop", LoopSettings), ("Optimizer", OptimizerSettings)):
        parts += [f"### {title}", "\n".join(_build_rows(dataclasses.fields(cls), cls, links))]
    return "\n\n".join(parts)


def _build_log_section() -> str:
    """Build the table of the fields of the logs of updates."""
    with LOG_FIELDS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return _LOGS + "\n".join(
        _format_row((f"`{row['field']}`", row["in audit log"], row["meaning"])) for row in rows
    )


def _build_section(
    cls: type[Settings], places: Sequence[str], links: Mapping[type[Settings], str]
) -> str:
    """Build one block's section: its meaning, where else it occurs, and a row for each key."""
    name = _shorten(places[0])
    lines = [f"## `{name}`" if name else "## Top level", ""]
    about = (cls.__doc__ or "").split("\n\n")[0].strip()
    fields = list(dataclasses.fields(cls))
    for base, description in _INHERITED.items():
        if issubclass(cls, base) and cls is not base:
            inherited = {field.name: _describe(field) for field in dataclasses.fields(base)}
            fields = [field for field in fields if inherited.get(field.name) != _describe(field)]
            if base is LoopSettings or not issubclass(cls, LoopSettings):
                about += f" Also accepts {description}."
    if cls is DistillationSettings:
        policy = {field.name: _describe(field) for field in dataclasses.fields(PolicySettings)}
        same = [field.name for field in fields if policy.get(field.name) == _describe(field)]
        fields = [field for field in fields if field.name not in same]
        about += (
            " These keys mean the same as in [`stages.policy`](policy.md#stagespolicy): "
            + ", ".join(f"`{key}`" for key in same)
            + "."
        )
    lines += [_link_documents(about), ""]
    if len(places) > 1 or name != places[0]:
        others = ", ".join(f"`{place}`" for place in places if place != name)
        lines += [("Also " if name == places[0] else "In ") + others + ".", ""]
    lines += _build_rows(fields, cls, links)
    former = [
        f"`{key.name}` (now {' and '.join(f'`{name}`' for name in key.new_names)}"
        + (f", as a share of `{key.unit}`)" if key.unit else ")")
        for key in list_deprecated_keys(cls)
    ]
    if former:
        lines += ["", f"Former names, which work until 0.3: {', '.join(former)}."]
    return "\n".join(lines)


def _describe(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Return what a row shows of a field, without its type."""
    return (dict(field.metadata), _format_default(field))


def _build_rows(
    fields: Sequence[dataclasses.Field[Any]],
    cls: type[Settings],
    links: Mapping[type[Settings], str],
) -> list[str]:
    hints = typing.get_type_hints(cls)
    lines = ["|key|type|default|meaning|", "|---|---|---|---|"]
    for field in fields:
        limits = _format_range(field.metadata)
        row = (
            f"`{field.name}`",
            _format_type(hints[field.name], links) + (f", {limits}" if limits else ""),
            _format_default(field),
            _link_documents(field.metadata["doc"]),
        )
        lines.append(_format_row(row))
    return lines


def _link_documents(meaning: str) -> str:
    """Turn `docs/data.md` in the meaning of a key or block into a link from a page of the configuration."""
    return re.sub(
        r"docs/([\w/-]+)\.md(#[\w-]+)?",
        lambda match: f"[{match[1].replace('-', ' ')}](../{match[1]}.md{match[2] or ''})",
        meaning,
    )


def _format_row(cells: Sequence[str]) -> str:
    return "|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|"


def _format_range(metadata: Mapping[str, Any]) -> str:
    """Format the limits of a field: `1 to 64`, `above 0, at most 1`; "" without limits."""
    limits = {
        key: _format_limit(metadata[key]) for key in ("gt", "ge", "lt", "le") if key in metadata
    }
    if "ge" in limits and "le" in limits:
        return f"{limits['ge']} to {limits['le']}"
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return ", ".join(f"{words[key]} {limit}" for key, limit in limits.items())


def _format_limit(value: float) -> str:
    """Format a limit; large powers of two as `2^20`, of ten as `10^6`."""
    if value >= 2**16 and value == int(value):
        power = int(value).bit_length() - 1
        if int(value) == 1 << power:
            return f"2^{power}"
        zeros = len(str(int(value))) - 1
        if zeros >= 6 and int(value) == 10**zeros:
            return f"10^{zeros}"
    return f"{value:g}" if abs(value) < 10**6 else str(value)


def build_metrics_page() -> str:
    """Build the metric reference, the glossary first."""
    with GLOSSARY.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = {metric.name for group in METRIC_GROUPS for metric in group.metrics}
    if unknown := [row["metric"] for row in rows if row["metric"] not in known]:
        raise ValueError(f"{GLOSSARY.name}: {unknown[0]} is not in the metric reference")
    glossary = ["|metric|what it says|good|bad|", "|---|---|---|---|"]
    glossary += [
        _format_row((f"`{row['metric']}`", row["meaning"], row["good"], row["bad"])) for row in rows
    ]
    parts = [NOTE + _METRICS.strip("\n"), "\n".join(glossary)]
    parts += [_build_metric_group(group, rows) for group in METRIC_GROUPS]
    return "\n\n".join(parts) + "\n"


def _build_metric_group(group: MetricGroup, glossary: Sequence[Mapping[str, str]]) -> str:
    """Build a group's table. Bounds of an interval and metrics of equal meaning share a row."""
    lines = [f"## {group.title}", "", group.about, "", "|name (unit)|meaning|", "|---|---|"]
    by_name = {metric.name: metric for metric in group.metrics}
    merged: set[str] = set()
    alike: dict[tuple[str, ...], list[str]] = {}
    for metric in group.metrics:
        alike.setdefault((metric.unit, metric.meaning, metric.worry), []).append(metric.name)
    for metric in group.metrics:
        if metric.name in merged:
            continue
        names, meaning, worry = f"`{metric.name}`", metric.meaning, metric.worry
        same = alike[metric.unit, metric.meaning, metric.worry]
        if len(same) > 3:
            names = ", ".join(f"`{name}`" for name in same)
            merged |= set(same)
        of_model = by_name.get(metric.name.replace("/", "/{model}/", 1))
        if of_model is not None and of_model.name in same:
            names += f", `{of_model.name}`"
            merged.add(of_model.name)
        low, high = by_name.get(f"{metric.name}_low"), by_name.get(f"{metric.name}_high")
        if low is not None and high is not None:
            interval = low.meaning.removeprefix("Lower bound of its ").rstrip(".")
            if high.meaning in (f"Upper bound of its {interval}.", "Upper bound of that interval."):
                names += ", `_low`, `_high`"
                meaning += _describe_interval(interval)
                worry = " ".join(filter(None, (worry, low.worry, high.worry)))
                merged |= {low.name, high.name}
        if any(row["metric"] == metric.name for row in glossary):
            worry = worry and "[glossary](#glossary)."
        if worry:
            worry = worry[0].lower() + worry[1:] if worry[1:2].islower() else worry
            meaning += f" **Watch:** {worry}"
        unit = "" if _is_plain_unit(metric) else f" ({metric.unit})"
        lines.append(_format_row((names + unit, meaning)))
    return "\n".join(lines)


def _is_plain_unit(metric: MetricDescription) -> bool:
    """Return whether the name (`train/episodes`) or the meaning ("Rows read.", "1: it runs.") says the unit."""
    first_word = metric.meaning.split()[0].rstrip(":").lower().replace("1", "0 or 1")
    return metric.unit in ("-", metric.name.rpartition("/")[2], first_word)


def _describe_interval(interval: str) -> str:
    """Describe a row's interval where it is not the 95% interval of the page's introduction."""
    kind, _, condition = interval.replace("95% interval", "interval").partition("; ")
    text = "" if kind == "interval" else f" {kind[0].upper()}{kind[1:]}."
    if condition:
        text += f" {condition[0].upper()}{condition[1:].replace('needs it', 'needs `_low`')}."
    return text


def build_coming_from_page() -> str:
    """Build the page of the names of TRL and verl."""
    text = COMING_FROM.read_text(encoding="utf-8").format(
        trl=TRL_VERSION,
        verl=VERL_VERSION,
        trl_tables=_build_alias_tables("TRL", list_trl_aliases()),
        verl_tables=_build_alias_tables("verl", list_verl_aliases()),
    )
    return NOTE + text


def _build_alias_tables(framework: str, aliases: Sequence[FrameworkAlias]) -> str:
    """Build two tables: names of the same meaning and of another meaning. Those without equivalents are left out."""
    same = [f"|{framework}|here|", "|---|---|"]
    different = [f"|{framework}|here|difference|", "|---|---|---|"]
    for row in aliases:
        names = ", ".join(f"`{name}`" for name in row.names)
        if row.trainers:
            names += f" ({', '.join(row.trainers)})"
        paths = [path.removeprefix("stages.") for path in row.resolve_paths(None)]
        here = ", ".join(f"`{path.removeprefix('<stage>.')}`" for path in paths)
        if not here:
            continue
        if row.difference == "same":
            same.append(_format_row((names, here)))
        else:
            different.append(_format_row((names, here, row.difference)))
    return "\n\n".join(
        (
            f"### {framework}: the same",
            "\n".join(same),
            f"### {framework}: different",
            "\n".join(different),
        )
    )


def _iterate_blocks(place: str, cls: type[Settings]) -> Iterator[tuple[str, type[Settings]]]:
    """Yield the dotted place and the class of every block of settings, outer ones first."""
    yield place, cls
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner, suffix = _find_block(hints[field.name])
        if inner is not None:
            name = f"{place}.{field.name}".lstrip(".") + suffix
            yield from _iterate_blocks(name, inner)


def _find_block(hint: Any) -> tuple[type[Settings] | None, str]:
    """Find the settings class in a type, and what follows its key: [] for a list of it, .NAME for blocks by name."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        return hint, ""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments:
        return _find_block(arguments[0])[0], "[]"
    if typing.get_origin(hint) is dict:
        return _find_block(arguments[1])[0], ".NAME"
    for argument in arguments if typing.get_origin(hint) in (Union, types.UnionType) else ():
        block = _find_block(argument)
        if block[0] is not None:
            return block
    return None, ""


def _format_type(hint: Any, links: Mapping[type[Settings], str]) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(
            "null" if part is type(None) else _format_type(part, links) for part in arguments
        )
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        inner = _format_type(arguments[0], links)
        return f"list of {inner}" if arguments[-1] is ... else f"{len(arguments)} x {inner}"
    if origin is dict:
        return f"name: {'any value' if arguments[1] is Any else _format_type(arguments[1], links)}"
    block, _ = _find_block(hint)
    return f"[block]({links[block]})" if block is not None else _TYPES.get(hint, "any value")


def _format_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_format_yaml(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return "`{}`" if isinstance(field.default, Settings) else f"`{_format_yaml(field.default)}`"


def _format_yaml(value: Any) -> str:
    """Format a value as one writes it in YAML, on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_format_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_format_yaml(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace("\n", "\\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with --check name the stale ones; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is stale"
    )
    check = parser.parse_args(arguments).check
    pages = build_pages()
    stale = [
        path
        for path, text in pages.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages[path], encoding="utf-8")
        print(
            f"{path.relative_to(DOCS.parent)}: {'stale; run docs/tools/generate.py' if check else 'written'}"
        )
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
