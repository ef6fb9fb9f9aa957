"""Public and persisted names that the code declares: settings, commands, bodies, tables."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

import rl_core
from flows.parameters import MAIN_SETTINGS
from flows.post_training import post_training
from helpers import ROOT
from helpers.frozen_literals import PACKAGES, PROJECT, Names, scan_calls, scan_literals
from posttrain.cli.main import build_parser
from posttrain.preferences import rating_routes
from posttrain.serving import request_bodies
from posttrain.serving.chat_server import ServerMetrics
from posttrain.training_service.store import tables
from posttrain.training_service.wire import codec
from posttrain.training_service.wire import request_bodies as service_bodies
from posttrain.training_service.wire.protobuf_messages import create_message
from rl_core.analysis.metric_reference import METRIC_GROUPS, resolve_exported_metric
from rl_core.environments import SHIPPED_ENVIRONMENTS, make_environment
from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import REWARD_COMPONENTS
from rl_core.service.loss_registry import LOSSES
from rl_core.settings import OnlineSettings, ServiceSettings, Settings
from rl_core.settings.common import PRESETS
from rl_core.settings.defaults import MODEL_DEFAULTS
from rl_core.settings.deprecated_keys import list_deprecated_keys
from rl_core.settings.framework_aliases import FrameworkAlias, list_trl_aliases, list_verl_aliases
from rl_core.storage.faults import FAULT_POINTS
from tasks import shipped, stage_registry
from tasks.config import PipelineSettings

# ------------------------------------------------------------------------------------------- Python


def list_public_names() -> Names:
    """Return the names of `rl_core` with their parameters, and the members of its classes."""
    names: Names = {}
    for name in rl_core.__all__:
        value = getattr(rl_core, name)
        names[name] = describe_parameters(value)
        if isinstance(value, type):
            names |= {f"{name}.{member}": about for member, about in list_members(value)}
        if isinstance(value, type) and issubclass(value, Settings):
            names |= {f"{name}.{key}": "field" for key, _ in list_former_keys(value)}
    return names


def describe_parameters(value: Any) -> str:
    """Return the parameters of a function or class as `a, b=, *, c=`; "" for what is not called."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return " | ".join(value.__members__)
    if not callable(value) or typing.get_origin(value) is not None:
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parts = []
    for parameter in parameters:
        is_named = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if is_named and not any(part.startswith("*") for part in parts):
            parts.append("*")
        default = "" if parameter.default is inspect.Parameter.empty else "="
        parts.append(stars.get(parameter.kind, "") + parameter.name + default)
    return f"({', '.join(parts)})"


def list_members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield (name, parameters) of a class's public members, inherited ones too."""
    for owner in reversed(kind.__mro__):
        if owner.__module__.partition(".")[0] not in PACKAGES:
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or isinstance(value, types.MemberDescriptorType):
                continue
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            yield name, describe_parameters(value) if inspect.isfunction(value) else "property"
        if dataclasses.is_dataclass(owner):
            yield from ((field.name, "field") for field in dataclasses.fields(owner))


DOCUMENTS = (
    "docs/**/*.md",
    "README.md",
    "examples/**/*.py",
    "examples/**/*.ipynb",
    "deployments/**/*",
)
_DOTTED = re.compile(rf"(?<![\w./-])((?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+)(?![\w/])")
_FROM = re.compile(rf"from ((?:{'|'.join(PACKAGES)})[\w.]*) import ([\w, ]+|\([^)]*\))")


def list_import_paths(frozen: Names) -> Names:
    """Return the import paths that documents, examples and deployments name.

    Args:
        frozen: paths that were documented once: they count as long as they lead somewhere.
    """
    paths = set(frozen)
    for pattern in DOCUMENTS:
        for path in ROOT.glob(pattern):
            if path.is_file() and not set(path.parts) & {"site", "outputs"}:
                text = path.read_text(errors="replace").replace("\\n", "\n")
                paths |= set(_DOTTED.findall(text))
                for module, names in _FROM.findall(text):
                    code = re.sub(r"#[^\n]*", "", names)
                    paths |= {
                        f"{module}.{name.split(' as ')[0]}"
                        for name in re.findall(r"\w[\w ]*", code)
                    }
    kinds = {path: resolve_import_path(path) for path in sorted(paths)}
    return {
        path: kind for path, kind in kinds.items() if kind
    }  # names of files, such as rl_core.toml, lead nowhere


def resolve_import_path(path: str) -> str:
    """Return what an import path leads to, `module` or `attribute`; "" = nothing."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            try:
                value = getattr(value, part)
            except AttributeError:
                return ""
        return "module" if isinstance(value, types.ModuleType) else "attribute"
    return ""


# ----------------------------------------------------------------------------------------- settings


def list_settings() -> Names:
    """Return every YAML key with its default and choices."""
    names = dict(list_keys(PipelineSettings))
    for kind, prefix in ((ServiceSettings, "service.yaml"), (OnlineSettings, "online.yaml")):
        names |= {f"{prefix}: {key}": about for key, about in list_keys(kind)}
    names |= {f"by model: {key}": row.describe_values() for key, row in MODEL_DEFAULTS.items()}
    own_stages = {key: about for key, about in names.items() if key.startswith("stages.custom.")}
    names |= {key.replace("custom", "own", 1): about for key, about in own_stages.items()}
    return names | {f"main form: {name}": key for name, key in MAIN_SETTINGS.items()}


def list_former_keys(kind: type[Settings]) -> Iterator[tuple[str, str]]:
    """Yield (former name, default) of the settings of a class; each is set and read under that name."""
    for key in list_deprecated_keys(kind):
        with pytest.warns(FutureWarning, match=f"{key.name} is now"):
            value = getattr(kind(), key.name)
            kind(**{key.name: value})
        yield key.name, describe_default(value)


def list_keys(
    kind: type[Settings], place: str = "", default: Settings | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, default and choices) of a settings class and of those within it."""
    hints = typing.get_type_hints(kind)
    yield from ((f"{place}.{key}", about) for key, about in list_former_keys(kind))
    for field in dataclasses.fields(kind):
        key = f"{place}.{field.name}" if place else field.name
        value = find_default(field) if default is None else getattr(default, field.name)
        inner = [
            inner_kind for inner_kind in list_types(hints[field.name]) if is_settings(inner_kind)
        ]
        choices = [str(choice) for choice in list_choices(hints[field.name])]
        shown = describe_default(value)
        yield key, " | ".join([shown, *choices]) if choices else shown
        for inner_kind in inner:
            mark = {tuple: "[]", dict: ".*"}.get(
                typing.get_origin(strip_none(hints[field.name])), ""
            )
            instance = value if isinstance(value, inner_kind) else None
            yield from list_keys(inner_kind, f"{key}{mark}", instance)


def strip_none(hint: Any) -> Any:
    """Return a type hint without `| None`."""
    choices = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return choices[0] if is_union and len(choices) == 1 else hint


def list_types(hint: Any) -> Iterator[Any]:
    """Yield a type hint and everything within it."""
    yield hint
    for inner in typing.get_args(hint):
        yield from list_types(inner)


def list_choices(hint: Any) -> Iterator[Any]:
    """Yield the values of the literals within a type hint."""
    for choice in list_types(hint):
        if typing.get_origin(choice) is typing.Literal:
            yield from typing.get_args(choice)


def is_settings(hint: Any) -> bool:
    """Return True for a settings class."""
    return isinstance(hint, type) and issubclass(hint, Settings)


def find_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; MISSING where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def describe_default(value: Any) -> str:
    """Return a default as text; `{}` for a block, whose keys are listed by themselves."""
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, Settings):
        return "{}"
    if isinstance(value, tuple) and any(isinstance(item, Settings) for item in value):
        return "[...]"
    return json.dumps(value)


def list_framework_names() -> Names:
    """Return the names of TRL and verl with the keys that they are here."""
    rows: tuple[FrameworkAlias, ...] = (*list_trl_aliases(), *list_verl_aliases())
    kinds_by_name: dict[str, set[str]] = {}
    for row in rows:
        for name in row.names:
            kinds_by_name.setdefault(f"{row.framework}: {name}", set()).add(
                ", ".join(row.settings_paths) or "none"
            )
    return {name: "; ".join(sorted(here)) for name, here in kinds_by_name.items()}


def list_choices_by_name() -> Names:
    """Return the names that stand for code in a configuration: environments, rewards, losses."""
    names: Names = {}
    for name in SHIPPED_ENVIRONMENTS:
        names[f"environment {name}"] = ""
        names |= {f"environment {name}: {option}": "" for option in list_options(name)}
    names |= {f"reward {name}": "" for name in REWARD_COMPONENTS}
    names |= {f"service loss {name}": "" for name in LOSSES}
    names |= {f"preset {name}": "" for name in PRESETS}
    for stage in stage_registry.list_stages():
        names[f"stage {stage.name}"] = f"takes {', '.join(stage.takes)}; gives {stage.gives}"
    names |= {f"config {name}": "" for name in shipped.list_config_names()}
    templates = sorted(path.name for path in shipped.locate_templates().iterdir() if path.is_file())
    return names | {f"template {name}": "" for name in templates}


def list_options(environment: str) -> list[str]:
    """Return the options of a shipped environment, which refuses others."""
    module, _, name = SHIPPED_ENVIRONMENTS[environment].partition(":")
    cls = getattr(importlib.import_module(module), name)
    parameters = [option for option in inspect.signature(cls).parameters if option != "data"]
    try:
        make_environment(environment, {"no_such_option_here": 1})
    except SettingsError as error:
        assert "no_such_option_here" in str(error), error
    return parameters


# ----------------------------------------------------------------------------------------- commands


def list_commands() -> Names:
    """Return every command and option of `posttrain`, with choices and defaults."""
    return dict(list_arguments(build_parser(), "posttrain"))


def list_arguments(parser: argparse.ArgumentParser, place: str) -> Iterator[tuple[str, str]]:
    """Yield (command and option, choices and default) of a parser and of its commands."""
    yield place, ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from list_arguments(inner, f"{place} {name}")
            continue
        if isinstance(action, argparse._HelpAction):
            continue
        about = [f"choices {', '.join(map(str, action.choices))}"] if action.choices else []
        if isinstance(action.default, str | int | float) and not isinstance(action.default, bool):
            about += [] if action.default == argparse.SUPPRESS else [f"default {action.default}"]
        about += [f"takes {action.nargs}"] if action.nargs is not None else []
        for name in action.option_strings or [str(action.metavar or action.dest)]:
            yield f"{place} {name}", "; ".join(about)


def list_flows() -> Names:
    """Return flow names, deployments with entry points and parameters, automations, and events."""
    names: Names = {f"flow {name}": "" for name in scan_calls("flow", "name")}
    names |= {f"flow {post_training.name}": describe_parameters(post_training.fn)}
    places = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())
    for deployment in places["deployments"]:
        name, entry_point = f"deployment {deployment['name']}", deployment["entrypoint"]
        module, _, function = entry_point.rpartition(".")
        flow = getattr(importlib.import_module(module), function)
        names[name] = f"flow {flow.name}{describe_parameters(flow.fn)}"
        names[f"{name} at {entry_point}"] = ""
        names |= {f"{name}: {key}": "" for key in list_leaves(deployment["parameters"])}
    for rule in yaml.safe_load((ROOT / "deployments/automations.yaml").read_text())["automations"]:
        trigger = rule["trigger"]
        names[f"automation {rule['name']}"] = ", ".join(
            [*trigger.get("expect", []), *trigger.get("after", [])]
        )
    return names


def list_leaves(values: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings."""
    for key, value in values.items():
        path = f"{place}.{key}" if place else str(key)
        yield path
        if isinstance(value, Mapping):
            yield from list_leaves(value, path)


def list_project() -> Names:
    """Return scripts, entry points, extras and groups of entry points that are looked up."""
    project = PROJECT["project"]
    entries = {f"script {name}": "" for name in project["scripts"]}
    for group, names in project["entry-points"].items():
        entries |= {f"entry point {group}: {name}": "" for name in names}
    for target in (
        *project["scripts"].values(),
        *(t for g in project["entry-points"].values() for t in g.values()),
    ):
        assert resolve_import_path(target.replace(":", ".")), (
            f"pyproject.toml: {target} leads nowhere"
        )
    entries |= {f"extra {name}": "" for name in project["optional-dependencies"]}
    return entries | {
        f"group of entry points {name}": "" for name in scan_literals(r"posttrain\.[a-z]+s")
    }


# ------------------------------------------------------------------------------- metrics and faults


def list_metrics() -> Names:
    """Return every metric with its unit and its name outside, and the metrics of the server."""
    names: Names = {}
    for group in METRIC_GROUPS:
        for metric in group.metrics:
            names[metric.name] = (
                f"{metric.unit}; outside {resolve_exported_metric(metric.name).name}"
            )
    families = text_string_to_metric_families(ServerMetrics().render_metrics(None).decode())
    return names | {f"Prometheus: {family.name}": family.type for family in families}


def list_fault_points() -> Names:
    """Return the fault points with the kind of run that reaches them."""
    return {point.name: point.run for point in FAULT_POINTS.values()}


# --------------------------------------------------------------------------------------------- wire


def list_tables() -> Names:
    """Return the columns and indexes of the training service's store."""
    names: Names = {"format": str(tables.STORE_FORMAT)}
    for table in tables.metadata.sorted_tables:
        names[f"table {table.name}"] = ""
        for column in table.columns:
            null = "" if column.nullable else " not null"
            key = " key" if column.primary_key else ""
            names[f"{table.name}.{column.name}"] = f"{column.type}{null}{key}"
        names |= {f"index {index.name}": ", ".join(index.columns.keys()) for index in table.indexes}
    return names


BODIES = (service_bodies, codec, request_bodies, rating_routes)


def list_request_bodies(frozen: Names) -> Names:
    """Return the fields of every request body, with `required` or the default and choices.

    Args:
        frozen: fields by the name that their class had once, which a renamed class keeps.
    """
    kinds = {
        kind
        for module in BODIES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) and kind.model_fields
    }
    present = {kind.__name__.lstrip("_"): dict(list_body_fields(kind)) for kind in kinds}
    known: dict[str, Names] = {}
    for name, about in frozen.items():
        label, _, field = name.partition(": ")
        known.setdefault(label, {})[field] = about
    for label in known.keys() - present.keys():  # the class has another name now
        near = [
            name
            for name in present.keys() - known.keys()
            if known[label].items() <= present[name].items()
        ]
        if near:
            present[label] = present.pop(min(near, key=lambda name: len(present[name])))
    return {
        f"{label}: {field}": about
        for label, fields in present.items()
        for field, about in fields.items()
    }


def list_body_fields(kind: type[pydantic.BaseModel], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, default and choices) of a body's fields and of those within them."""
    for name, field in kind.model_fields.items():
        key = f"{place}.{field.alias or name}" if place else field.alias or name
        inner = [body for body in list_types(field.annotation) if is_body(body)]
        default = (
            "required"
            if field.is_required()
            else ""
            if inner
            else json.dumps(field.default, default=str)
        )
        yield key, " | ".join(filter(None, [default, *map(str, list_choices(field.annotation))]))
        for body in inner:
            yield from list_body_fields(body, key)


def is_body(hint: Any) -> bool:
    """Return True for a class of bodies."""
    return isinstance(hint, type) and issubclass(hint, pydantic.BaseModel)


def list_messages() -> Names:
    """Return the fields of the protobuf messages with their numbers and types."""
    file = create_message("ForwardBackwardRequest").DESCRIPTOR.file
    return {
        f"{kind.name}.{field.name}": f"{field.number} type {field.type} list {field.is_repeated}"
        for kind in file.message_types_by_name.values()
        for field in kind.fields
    }


def find_application(app: Any) -> FastAPI:
    """Return the application inside its middleware."""
    while not isinstance(app, FastAPI):
        app = next(value for value in vars(app).values() if callable(value))
    return app


def list_routes(app: Any) -> set[str]:
    """Return `METHOD /path` of every route of an application."""
    inner = find_application(app)
    undescribed = [
        (route.path, route.methods or ()) for route in inner.routes if isinstance(route, Route)
    ]
    described = [(path, map(str.upper, kinds)) for path, kinds in inner.openapi()["paths"].items()]
    return {
        f"{method} {path}"
        for path, methods in [*undescribed, *described]
        for method in methods
        if method != "HEAD"
    }


def list_described_fields(app: Any) -> set[str]:
    """Return the parameters, body and answer of every operation that /openapi.json describes."""
    document = find_application(app).openapi()
    fields = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = f"{method.upper()} {path}"
            fields |= {
                f"{route} parameter: {parameter['name']}"
                for parameter in operation.get("parameters", ())
            }
            sent = operation.get("requestBody", {})
            answers = {
                f"{code}": answer
                for code, answer in operation["responses"].items()
                if code != "422"
            }
            for name, part in [("body", sent), *answers.items()]:
                schema = part.get("content", {}).get("application/json", {}).get("schema", {})
                fields |= {
                    f"{route} {name}: {field}" for field in list_schema_fields(schema, document)
                }
    return fields


def list_schema_fields(
    schema: Mapping[str, Any], document: Mapping[str, Any], place: str = ""
) -> Iterator[str]:
    """Yield the path of every field of a JSON schema, references followed."""
    if reference := schema.get("$ref"):
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    for name, inner in schema.get("properties", {}).items():
        path = f"{place}.{name}" if place else name
        yield path
        yield from list_schema_fields(inner, document, path)
    for inner in schema.get("anyOf", ()):
        yield from list_schema_fields(inner, document, place)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(inner := schema.get(key), Mapping):
            yield from list_schema_fields(inner, document, f"{place}{mark}")
