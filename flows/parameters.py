"""Flow parameters as typed settings, so that Prefect shows a form and its server validates them.

The ten most frequently changed settings are a separate form before all others. A deployment declares their values as
its config has them, so the form opens with them; values that a run changes are applied to the config as overrides.
All other settings are left to `overrides`.

A deployment's run may change only some settings, compared with what the deployment declares or a shipped config sets.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from flows.runtime.run_request import find_request
from rl_core.errors import PosttrainError, SettingsError
from rl_core.storage.faults import inject_fault
from rl_core.user_code.load import find_import_paths
from tasks.config import (
    PipelineSettings,
    build_pipeline_model,
    build_settings,
    dump_settings,
    list_code_paths,
    load_settings,
)
from tasks.config.displayed_settings import MASK, is_secret_option, mask_secrets
from tasks.config.problems import ConfigError, KeyLocations
from tasks.config.schema import format_setting_title, resolve_pydantic_model
from tasks.config.yaml_loader import apply_overrides, read_yaml
from tasks.shipped import find_config, shipped

MAIN_SETTINGS = {  # form field: settings key
    "seed": "seed",
    "sft_epochs": "stages.sft.epochs",
    "sft_learning_rate": "stages.sft.learning_rate",
    "algorithm": "stages.policy.algorithm",
    "iterations": "stages.policy.iterations",
    "prompts_per_iteration": "stages.policy.prompts_per_iteration",
    "group_size": "stages.policy.group_size",
    "learning_rate": "stages.policy.learning_rate",
    "kl_coef": "stages.policy.kl_coef",
    "episodes": "stages.evaluate.episodes",
}


# Settings that anyone who may start a deployment's run may change ...
CHANGEABLE_KEYS = (
    "seed",
    "threads",
    "run",
    "retrain",
    "stages",
    "model",
    "environment",
    "environments",
    "tracking.traces",
    "tracking.system_metrics_seconds",
)
# ... except those that run code, or name files and models of this machine: whoever runs `posttrain up` decides those.
PROTECTED_KEYS = (
    "model.path",
    "model.trust_remote_code",
    "model.chat_template",
    "environment.options.path",
    "environment.options.taskset",
    "environment.options.tasks",
    "environment.options.command",
    "environment.options.cwd",
    "environment.options.env",
    "environment.options.url",
    "environment.options.opponent",
    "environment.options.others",
    "environment.options.sandbox",
    "environment.options.readable",
    "environment.options.pass_variables",
    "environment.options.network",
    "stages.prepare_data.demonstrations",
    "stages.prepare_data.preferences",
)
CODE_KEY = "code"  # stands for the import paths of environments and rewards
# Variable of the worker: further keys, separated by commas.
ALLOWED_CHANGES_VARIABLE = "POSTTRAIN_RUNS_MAY_CHANGE"

_IGNORED_PREFIXES = ("run.", "output", "tracking.", "threads")  # do not affect results
_MAX_NAMED_OVERRIDES = 3  # in a flow run's name

logger = logging.getLogger(__name__)


def _build_form_field(key: str) -> tuple[Any, Any]:
    """Return the type and description of a setting, as an optional field."""
    model: Any = resolve_pydantic_model(PipelineSettings)
    *blocks, name = key.split(".")
    for block in blocks:
        annotation = model.model_fields[block].annotation
        kinds = (*getattr(annotation, "__args__", ()), annotation)
        model = next(kind for kind in kinds if hasattr(kind, "model_fields"))
    field = model.model_fields[name]
    kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    stage = f"{format_setting_title(blocks[1])}: " if len(blocks) > 1 else ""
    title = stage + format_setting_title(name)
    text = f"{key}: {field.description}"
    return kind | None, pydantic.Field(default=None, title=title, description=text)


if TYPE_CHECKING:
    PipelineForm = dict[str, Any]
else:
    PipelineForm = build_pipeline_model()  # same fields, ranges and documentation as the settings

if TYPE_CHECKING:
    MainForm = dict[str, Any]
else:
    MainForm = pydantic.create_model(
        "MainSettings",
        __config__=pydantic.ConfigDict(extra="forbid"),
        __doc__="The settings that are changed most; empty: as the config has them.",
        **{name: _build_form_field(key) for name, key in MAIN_SETTINGS.items()},
    )


def read_main_values(settings: PipelineSettings) -> dict[str, Any]:
    """Return the values of the form's fields in these settings, without those of missing stages."""
    values = {}
    for name, key in MAIN_SETTINGS.items():
        value: Any = dump_settings(settings)
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            values[name] = value
    return values


def build_main_overrides(form: Any, declared: Any = None) -> list[str]:
    """Build the overrides of a run's form: its values that differ from the declared ones.

    Args:
        form: the form, or a mapping of its fields.
        declared: the deployment's form; None = all values count.
    Raises: pydantic.ValidationError for an unknown field, a wrong type or a value out of range.
    """
    values = _validate_form(form)
    declared_values = _validate_form(declared)
    return [
        f"{MAIN_SETTINGS[name]}={json.dumps(value)}"
        for name, value in values.items()
        if value is not None and value != declared_values[name]
    ]


def _validate_form(form: Any) -> dict[str, Any]:
    model: Any = MainForm
    values = form if isinstance(form, Mapping) else dict(form or {})
    return dict(model.model_validate(values).model_dump())


def read_declared_parameters() -> Mapping[str, Any] | None:
    """Return the parameters declared by the deployment of the current flow run; None without a deployment."""
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None:
        return None
    with get_client(sync_client=True) as client:
        return dict(client.read_deployment(run.deployment_id).parameters)


def refuse_undeclared_changes(
    requested: PipelineSettings, declared: PipelineSettings, allowed: str | None = None
) -> None:
    """Compare a run's settings with the declared ones.

    Args:
        allowed: further keys that may differ, separated by commas; None = those of POSTTRAIN_RUNS_MAY_CHANGE.
    Raises: SettingsError naming every key that may not differ.
    """
    text = os.environ.get(ALLOWED_CHANGES_VARIABLE, "") if allowed is None else allowed
    allowed_keys = tuple(filter(None, (key.strip() for key in text.split(","))))
    refused = [
        key
        for key in _iter_changed_keys(dump_settings(requested), dump_settings(declared))
        if not _can_change(key, allowed_keys)
    ]
    if CODE_KEY not in allowed_keys:
        new_code = _collect_import_paths(requested) - _collect_import_paths(declared)
        refused += [f"{CODE_KEY} ({path})" for path in sorted(new_code)]
    if refused:
        raise SettingsError(
            f"a run of this deployment may not change {', '.join(refused)}; leave them as declared, declare them in "
            "the deployment, or allow it where `posttrain up` is started: "
            f"{ALLOWED_CHANGES_VARIABLE}={_format_key_names(refused)}"
        )


def _format_key_names(keys: list[str]) -> str:
    return ",".join(dict.fromkeys(key.partition(" ")[0] for key in keys))


def _can_change(key: str, allowed: tuple[str, ...]) -> bool:
    if _is_at_or_below(key, allowed):
        return True
    return _is_at_or_below(key, CHANGEABLE_KEYS) and not _is_at_or_below(key, PROTECTED_KEYS)


def _is_at_or_below(key: str, others: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def _iter_changed_keys(
    requested: Mapping[str, Any], declared: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield dotted keys of values that differ; a list is one value, and an absent key is null."""
    for name in dict.fromkeys([*requested, *declared]):
        new, old = requested.get(name), declared.get(name)
        if isinstance(new, Mapping) or isinstance(old, Mapping):
            yield from _iter_changed_keys(new or {}, old or {}, f"{prefix}{name}.")
        elif new != old:
            yield f"{prefix}{name}"


def _collect_import_paths(settings: PipelineSettings) -> set[str]:
    return {*list_code_paths(settings), *find_import_paths(dict(settings.environment.options))}


def build_settings_parameter(settings: PipelineSettings) -> dict[str, Any]:
    """Build the parameter that stands for settings in a flow called in this process.

    Prefect stores parameters, so secrets are masked. The flow's `RunRequest` holds the settings themselves.
    """
    return mask_secrets(dump_settings(settings))


def read_settings(
    settings: PipelineSettings | Mapping[str, Any] | str,
    overrides: Sequence[str] | None = None,
    main: Any = None,
    *,
    check_servers: bool = True,
) -> PipelineSettings:
    """Read the settings of a flow from a config file's path or contents, or settings, with `--set`-style overrides.

    The settings of a flow that a command called here are those of its request, which the command has checked.
    In a deployment's run only some keys may differ from the declared ones. That is checked before anything that the
    settings name is imported.
    Args:
        main: the form of the most frequently changed settings; `overrides` come after it.
        check_servers: False for flows that sample no rollouts, whose server may be unreachable.
    Raises: ConfigError with every problem; SettingsError for a key that the run may not change.
    """
    if isinstance(settings, PipelineSettings):  # of a script that calls the flow
        settings = dump_settings(settings)
    declared = read_declared_parameters()
    overrides = [*build_main_overrides(main, (declared or {}).get("main")), *(overrides or ())]
    requested = find_request().settings
    if requested is not None and not isinstance(settings, str):
        masked = build_settings_parameter(requested)
        if declared is None and not overrides and settings == masked:
            return requested
        if settings.get("environment") == masked["environment"]:
            settings = {**settings, "environment": dump_settings(requested)["environment"]}
        if settings.get("environments") == masked["environments"]:
            settings = {**settings, "environments": dump_settings(requested)["environments"]}
    if declared is not None:
        refuse_undeclared_changes(
            _read_parameter(settings, overrides, import_code=False),
            _read_declared_settings(settings, declared),
        )
        inject_fault("deployment.checked")
    return _read_parameter(settings, overrides, import_code=True, check_servers=check_servers)


def _read_declared_settings(
    settings: Mapping[str, Any] | str, declared: Mapping[str, Any]
) -> PipelineSettings:
    """Read the settings to compare a deployment's run with: a shipped config that it names, else the declared ones."""
    base = declared.get("settings")
    if isinstance(settings, str):
        is_shipped = find_config(settings) == shipped("configs") / f"{settings}.yaml"
        base = settings if is_shipped else base
    if base is None:
        raise SettingsError(
            "settings: the deployment declares none, so its runs can only name a shipped config"
        )
    return _read_parameter(base, declared.get("overrides"), import_code=False)


def _read_parameter(
    settings: Mapping[str, Any] | str,
    overrides: Sequence[str] | None,
    *,
    import_code: bool,
    check_servers: bool = False,
) -> PipelineSettings:
    if isinstance(settings, str):
        return load_settings(
            settings,
            overrides or (),
            import_code=import_code,
            check_servers=check_servers,
            warn=logger.warning,
        )
    values = copy.deepcopy(dict(settings))
    if overrides:
        locations = KeyLocations("settings")
        problems = apply_overrides(values, overrides, locations)
        if problems:
            raise ConfigError(problems, locations)
    return build_settings(values, import_code=import_code, check_servers=check_servers)


def extract_pipeline_name(settings: PipelineSettings | Mapping[str, Any] | str) -> str:
    """Return the pipeline's name for the flow run's name; of a file that cannot be read, the file's name."""
    if isinstance(settings, str):
        name = None
        with contextlib.suppress(PosttrainError):
            name = read_yaml(find_config(settings)).data.get("name")
        return str(name) if name else Path(settings).stem
    return settings.name if isinstance(settings, PipelineSettings) else str(settings["name"])


def describe_run_changes(parameters: Mapping[str, Any]) -> str:
    """Describe a flow run's changes to its config, for its name: the form's changed values, then overrides."""
    declared = read_declared_parameters() or {}
    changed = [*find_request().overrides, *(parameters.get("overrides") or ())]
    main = build_main_overrides(parameters.get("main"), declared.get("main"))
    return describe_overrides([*main, *changed])


def describe_overrides(overrides: Sequence[str] | None) -> str:
    """Describe overrides in a flow run's name: `sft learning_rate=3e-4, seed=1`; "" if none affects results."""
    parts = []
    for override in overrides or ():
        if not override.startswith(_IGNORED_PREFIXES):
            key, _, value = override.partition("=")
            parts.append(f"{_shorten_key(key)}={_format_override_value(key, value)}")
    text = ", ".join(parts[:_MAX_NAMED_OVERRIDES])
    if len(parts) > _MAX_NAMED_OVERRIDES:
        text += f" and {len(parts) - _MAX_NAMED_OVERRIDES} more"
    return text


def _format_override_value(key: str, value: str) -> str:
    """Format a value; secrets are masked as in the parameters, and so is a block of the environment."""
    parts = key.split(".")
    may_be_secret = any(map(is_secret_option, parts)) or "{" in value
    return MASK if parts[0].startswith("environment") and may_be_secret else value[:24]


def _shorten_key(key: str) -> str:
    """Return the last part of a key, after its stage, because several stages have a learning rate."""
    parts = key.split(".")
    stage = parts[1].replace("_", " ") if parts[0] == "stages" and len(parts) > 2 else ""
    return " ".join(filter(None, (stage, parts[-1])))
