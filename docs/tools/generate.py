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
from pathlib import Path
from typing import Any, Literal, Union

DOCS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(DOCS.parent))  # called as a file, from a checkout

from rl_core.analysis.metric_reference import METRIC_GROUPS, MetricGroup  # noqa: E402
from rl_core.settings import OnlineSettings, Settings  # noqa: E402
from rl_core.settings.deprecated_keys import list_deprecated_keys  # noqa: E402
from rl_core.settings.framework_aliases import (  # noqa: E402
    TRL_VERSION,
    VERL_VERSION,
    FrameworkAlias,
    list_trl_aliases,
    list_verl_aliases,
)
from tasks.config.settings import PipelineSettings  # noqa: E402

__all__ = ["coming_from_page", "configuration_page", "main", "metrics_page", "online_page", "pages"]

NOTE = "<!-- Written by docs/tools/generate.py; edit the source named below instead. -->\n\n"

_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_TYPES = {int: "int", float: "float", str: "text", bool: "bool"}

_CONFIGURATION = """\
# Configuration reference

Every key of a pipeline's YAML file, with its type, default and range. Generated from the settings classes
(`rl_core/settings/`, `tasks/config/settings.py`), from which the loader, the error messages and the Prefect form are
built as well.

- A key that is left out takes its default; a stage that is left out (or `null`) does not run; `{}` means its defaults.
- An unknown key, a wrong type or a value out of range stops before anything runs, with file, line, key and the allowed
  values.
- Any key can be changed on the command line: `--set stages.policy.learning_rate=1e-6`.
- `posttrain validate CONFIG --show` prints all settings of a file, defaults included.

"""

LOG_FIELDS = Path(__file__).with_name("update_log_fields.csv")
_LOGS = """
## Logs of updates

A record of `update_contribution.jsonl` has these fields; `update_audit.log` has a line for each update with those of the
second column. The metrics are in [the reference](metrics.md#online-learning-online).

| field | in `update_audit.log` | meaning |
|---|---|---|
"""

_ONLINE = """\
# Settings of online learning

Every key of the YAML file of `posttrain online`, with its type, default and range. Generated from `rl_core/settings/online.py`.
[Online learning](online.md) says what they do.

"""

_METRICS = """\
# Metric reference

Every metric that a run logs, in MLflow, in `metrics.jsonl` of a stage's folder and on the monitor's page. Generated
from `rl_core/analysis/metric_reference.py`. Text in braces stands for a name: `{level}` for a level of the environment,
`{model}` for a model of the run, `{component}` for a component of the reward (an import path with `.` for `:`).

The x axis is the number of optimizer steps. Exit conditions, early stopping and rollback of the
[curriculum](curriculum.md#exit-conditions) name some of these.

"""

_COMING_FROM = """\
# Coming from TRL or verl

Every name of TRL {trl} (`GRPOConfig`, `RLOOConfig`, `SFTConfig`, `DPOConfig`, `KTOConfig`, `RewardConfig`,
`DistillationConfig`, `ModelConfig`, the fields of transformers' `TrainingArguments` among them) and of verl's
`ppo_trainer` ({verl}), with what it is here. Error messages on unknown keys and `posttrain convert` read the same
tables: `rl_core/settings/trl_aliases.csv` and `rl_core/settings/verl_aliases.csv`. "Same" means the same quantity; where
the meaning differs, the last column says how. Losses were compared number by number:
[losses against TRL](benchmarks/losses.md).

```bash
posttrain convert grpo.yaml --out mine.yaml       # a file of TRL or verl; --trainer where its names fit several
posttrain validate mine.yaml
```

The converted file has the peer's name beside each value, its defaults where ours differ, and at the end, in comments,
what was not taken over and why.

## Counting

The largest difference is what a batch is. Here one **iteration** samples `prompts_per_iteration` (P) prompts with
`group_size` (G) rollouts each and takes `epochs` x `minibatches` optimizer steps on them. P and G count over all processes;
memory is bounded by `micro_batch_tokens` alone, which changes no result but for rounding.

| | TRL `GRPOConfig` | verl | here |
|---|---|---|---|
| rollouts per prompt | `num_generations` | `actor_rollout_ref.rollout.n` | `group_size` |
| prompts per round | `generation_batch_size` / `num_generations` | `data.train_batch_size` | `prompts_per_iteration` |
| optimizer steps per round | `steps_per_generation` / `gradient_accumulation_steps` x `num_iterations` | `data.train_batch_size` / `ppo_mini_batch_size` x `ppo_epochs` | `minibatches` x `epochs` |
| size of a forward pass | `per_device_train_batch_size` (rows) | `ppo_micro_batch_size_per_gpu` (rows), `ppo_max_token_len_per_gpu` (tokens) | `micro_batch_tokens` (padded tokens) |
| length of training | `num_train_epochs`, `max_steps` | `trainer.total_epochs` | `iterations` (rounds, not epochs over a data set) |

In TRL batch sizes count completions, in verl prompts.

## Metrics

| TRL metric | here |
|---|---|
| `reward`, `reward_std` | `reward/mean`, `reward/std` |
| `rewards/NAME/mean` | `reward/NAME` |
| `frac_reward_zero_std` | `train/zero_advantage_rate` (samples, not groups) |
| `completions/mean_length` | `train/completion_tokens`, `train/action_tokens` |
| `completions/clipped_ratio` | `train/truncation_rate` |
| `kl` (to the reference) | `policy/ref_kl`; `policy/update_kl` is the KL of one update |
| `entropy` | `policy/entropy` |
| `clip_ratio/low_mean`, `clip_ratio/high_mean` | `policy/clip_fraction_low`, `policy/clip_fraction_high` |
| `sampling/sampling_logp_difference/max` | `policy/sampler_difference_max` |
| `tools/call_frequency`, `tools/failure_frequency` | `tool/calls` (per rollout), `tool/misuse_rate` (per turn) |

## TRL

Where a row holds for several trainers, the setting is that of the trainer's stage: `policy` for GRPO and RLOO, `sft`, `preference` for DPO and KTO, `reward_model`,
`distill`. A row without trainers holds for all of them.

"""
_VERL_NOTE = (
    "Dotted as in verl's file; `*` stands for any part, and the most specific row counts. A reference to another key "
    "(`${data.max_response_length}`) is resolved by `posttrain convert`."
)
_OTHER_TRAINERS = """\
| TRL, beside the names | here | difference |
|---|---|---|
| `tools`, `chat_template_kwargs` (columns) | `tools` is the same column; `model.chat_template_kwargs` | variables of the template hold for the whole run |
| `ORPOTrainer` | `preference.loss: orpo`, `beta` | TRL's cross-entropy is over prompt and completion, a mean over the batch's tokens; ours over the completion, a mean per pair, as in the paper |
| `CPOTrainer` with `loss_type: simpo` | `preference.loss: simpo` | same loss |
| `margin` column of the reward trainer | `margin` in the rows | same term; negative ones are refused |
| a reward function `f(prompts, completions, **columns)` | a function of `Trajectory` objects | columns are `trajectory.row` |
"""


def pages() -> dict[Path, str]:
    """Path of each generated page -> its text."""
    return {
        DOCS / "configuration.md": configuration_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "online-settings.md": online_page(),
        DOCS / "coming-from.md": coming_from_page(),
    }


def configuration_page() -> str:
    """Markdown of the configuration reference."""
    return _settings_page(_CONFIGURATION, PipelineSettings)


def online_page() -> str:
    """Markdown of the settings of online learning, and of the fields of its logs of updates."""
    with LOG_FIELDS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [f"| `{row['field']}` | {row['in audit log']} | {row['meaning']} |" for row in rows]
    return _settings_page(_ONLINE, OnlineSettings) + _LOGS + "\n".join(lines) + "\n"


def _settings_page(head: str, settings: type[Settings]) -> str:
    parts = [NOTE, head]
    blocks = list(_blocks("", settings))
    places: dict[type[Settings], list[str]] = {}
    for place, cls in blocks:
        places.setdefault(cls, []).append(place)
    anchors = {cls: re.sub(r"[.\[\]]", "", found[0]).lower() for cls, found in places.items()}
    parts += [_section(cls, found, anchors) for cls, found in places.items()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def metrics_page() -> str:
    """Markdown of the metric reference."""
    return "\n".join(
        [NOTE + _METRICS.rstrip("\n") + "\n", *(_group(group) for group in METRIC_GROUPS)]
    )


def coming_from_page() -> str:
    """Markdown of the names of TRL and verl."""
    trl = ["| TRL | here | difference, or why there is no equal | trainers |", "|---|---|---|---|"]
    trl += [
        _peer_row(row, row.resolve_paths(None), ", ".join(row.trainers))
        for row in list_trl_aliases()
    ]
    verl = ["| verl | here | difference, or why there is no equal |", "|---|---|---|"]
    verl += [_peer_row(row, row.resolve_paths(None)) for row in list_verl_aliases()]
    head = _COMING_FROM.format(trl=TRL_VERSION, verl=VERL_VERSION)
    parts = (
        NOTE + head.rstrip("\n"),
        "\n".join(trl),
        _OTHER_TRAINERS.rstrip("\n"),
        "## verl",
        _VERL_NOTE,
        "\n".join(verl),
    )
    return "\n\n".join(parts) + "\n"


def _peer_row(row: FrameworkAlias, paths: Sequence[str], *more: str) -> str:
    names = ", ".join(f"`{name}`" for name in row.names)
    here = (
        ", ".join(
            f"`{path.removeprefix('stages.<stage>.').removeprefix('stages.')}`" for path in paths
        )
        or "none"
    )
    cells = (names, here, row.difference, *more)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _blocks(place: str, cls: type[Settings]) -> Iterator[tuple[str, type[Settings]]]:
    """Dotted place and class of every block of settings, outer ones first."""
    yield place, cls
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner, suffix = _inner(hints[field.name])
        if inner is not None:
            name = f"{place}.{field.name}".lstrip(".") + suffix
            yield from _blocks(name, inner)


def _inner(hint: Any) -> tuple[type[Settings] | None, str]:
    """The settings class in a type, and what follows its key: [] for a list of it, .NAME for blocks by name."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        return hint, ""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments:
        return _inner(arguments[0])[0], "[]"
    if typing.get_origin(hint) is dict:
        return _inner(arguments[1])[0], ".NAME"
    for argument in arguments if typing.get_origin(hint) in (Union, types.UnionType) else ():
        found = _inner(argument)
        if found[0] is not None:
            return found
    return None, ""


def _section(
    cls: type[Settings], places: Sequence[str], anchors: Mapping[type[Settings], str]
) -> str:
    title = f"`{places[0]}`" if places[0] else "Top level"
    lines = [f"## {title}", "", (cls.__doc__ or "").split("\n\n")[0].strip(), ""]
    if len(places) > 1:
        lines += ["Also " + ", ".join(f"`{place}`" for place in places[1:]) + ".", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        limits = " and ".join(
            f"{_LIMITS[name]} {limit}" for name, limit in field.metadata.items() if name in _LIMITS
        )
        meaning = field.metadata["doc"] + (f"; {limits}" if limits else "")
        row = (f"`{field.name}`", _type(hints[field.name], anchors), _default(field), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    former = [
        f"`{key.name}` (now {' and '.join(f'`{name}`' for name in key.new_names)}"
        + (f", as a share of `{key.unit}`)" if key.unit else ")")
        for key in list_deprecated_keys(cls)
    ]
    if former:
        lines += ["", f"Former names, which work until 0.3: {', '.join(former)}."]
    return "\n".join(lines) + "\n"


def _type(hint: Any, anchors: Mapping[type[Settings], str]) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(
            "null" if part is type(None) else _type(part, anchors) for part in arguments
        )
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        inner = _type(arguments[0], anchors)
        return f"list of {inner}" if arguments[-1] is ... else f"{len(arguments)} x {inner}"
    if origin is dict:
        return f"name: {'any value' if arguments[1] is Any else _type(arguments[1], anchors)}"
    block, _ = _inner(hint)
    return f"[block](#{anchors[block]})" if block is not None else _TYPES.get(hint, "any value")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_yaml(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return "its defaults" if isinstance(field.default, Settings) else f"`{_yaml(field.default)}`"


def _yaml(value: Any) -> str:
    """A value as one writes it in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _group(group: MetricGroup) -> str:
    lines = [
        f"## {group.title}",
        "",
        group.about,
        "",
        "| name | unit | meaning | when to worry |",
        "|---|---|---|---|",
    ]
    for metric in group.metrics:
        row = (f"`{metric.name}`", metric.unit, metric.meaning, metric.worry)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with --check name the stale ones; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is stale"
    )
    check = parser.parse_args(arguments).check
    stale = [
        path
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
        print(
            f"{path.relative_to(DOCS.parent)}: {'stale; run docs/tools/generate.py' if check else 'written'}"
        )
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
