"""Settings dataclasses as pydantic models: strict types, ranges, unknown keys, and a form for the Prefect UI.

The models are built from the dataclasses (types, defaults, and the ranges and meanings in `setting(...)`), so that
nothing is declared twice. `read` turns plain values into the dataclasses and says everything that is wrong with them.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

import annotated_types
import pydantic

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings import Settings
from rl_core.settings.base import suggest_comparison
from rl_core.settings.defaults import is_unresolved
from rl_core.settings.framework_aliases import explain_framework_block, explain_framework_name
from tasks.config.problems import ConfigProblem, Key, describe_value, keys_overlap

S = TypeVar("S", bound=Settings)

_PYDANTIC_LIMITS = {
    "gt": annotated_types.Gt,
    "ge": annotated_types.Ge,
    "lt": annotated_types.Lt,
    "le": annotated_types.Le,
}
MAX_PROBLEMS = 30  # after these the reader stops: it is no configuration of ours
_LIMIT_PHRASES = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
_STRICT_CONFIG = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


# ---------------------------------------------------------------------------------------------- dataclass -> pydantic


_MODEL_CACHE: dict[
    type[Settings], type[pydantic.BaseModel]
] = {}  # made once each: forms refer to them by name


def resolve_pydantic_model(cls: type[Settings]) -> type[pydantic.BaseModel]:
    """The pydantic model of a settings class: the same fields, defaults, ranges and meanings."""
    if cls not in _MODEL_CACHE:
        _MODEL_CACHE[cls] = _create_pydantic_model(cls)
    return _MODEL_CACHE[cls]


def _create_pydantic_model(cls: type[Settings]) -> type[pydantic.BaseModel]:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        limits = [
            _PYDANTIC_LIMITS[name](limit)
            for name, limit in field.metadata.items()
            if name in _PYDANTIC_LIMITS
        ]
        annotation = _convert_annotation(_resolve_type_hints(cls)[field.name], limits)
        fields[field.name] = (
            annotation | None if _has_model_default(field) else annotation,
            _build_pydantic_field(field),
        )
    model = pydantic.create_model(
        cls.__name__, __config__=_STRICT_CONFIG, __doc__=cls.__doc__, **fields
    )
    return typing.cast(type[pydantic.BaseModel], model)


def _resolve_type_hints(cls: type[Settings]) -> dict[str, Any]:
    if cls not in _TYPE_HINT_CACHE:
        _TYPE_HINT_CACHE[cls] = typing.get_type_hints(cls)
    return _TYPE_HINT_CACHE[cls]


_TYPE_HINT_CACHE: dict[
    Any, dict[str, Any]
] = {}  # of each class, found once: looking them up takes milliseconds


def _build_pydantic_field(field: dataclasses.Field[Any]) -> Any:
    info: dict[str, Any] = {"description": field.metadata.get("doc")}
    if _has_model_default(field):
        return pydantic.Field(default=None, **info)  # a form that fills the field in would set it
    if field.default_factory is not dataclasses.MISSING:
        return pydantic.Field(default=field.default_factory(), **info)
    if field.default is dataclasses.MISSING:
        return pydantic.Field(**info)
    if isinstance(field.default, Settings):
        return pydantic.Field(
            default=resolve_pydantic_model(type(field.default)).model_validate(
                _collect_field_values(field.default)
            ),
            **info,
        )
    return pydantic.Field(default=field.default, **info)


def _has_model_default(field: dataclasses.Field[Any]) -> bool:
    """True = left out (or null), the setting has a default that depends on the model."""
    return "by_model" in field.metadata


def _collect_field_values(settings: Settings) -> dict[str, Any]:
    """Plain values; None for a default that depends on the model."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            value = _collect_field_values(value)
        values[field.name] = None if is_unresolved(value) else value
    return values


def _convert_annotation(hint: Any, limits: list[Any]) -> Any:
    """The pydantic type of a type hint; limits go to the numbers inside it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Settings):
        return resolve_pydantic_model(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_convert_annotation(argument, limits) for argument in arguments)]  # noqa: UP007 (built at run time)
    if origin is tuple:
        inner = tuple(
            item if item is ... else _convert_annotation(item, limits) for item in arguments
        )
        return Annotated[
            tuple.__class_getitem__(inner), pydantic.Strict(False)
        ]  # YAML and JSON have lists, no tuples
    if origin is dict:
        return dict[str, _convert_annotation(arguments[1], [])]  # type: ignore[misc]
    if hint in (int, float) and limits:
        return Annotated[(hint, *limits)]
    return hint


# --------------------------------------------------------------------------------------------------- values -> settings


def parse_settings(cls: type[S], values: Any) -> tuple[S | None, list[ConfigProblem]]:
    """Settings from plain values, with every problem found on the way.

    Where a value is bad its default takes its place, so that what depends on other values can still be checked.
    Returns: the settings, None when nothing can be built; the problems.
    """
    if isinstance(values, pydantic.BaseModel):
        values = values.model_dump()
    if not isinstance(values, Mapping):
        return None, [
            ConfigProblem((), f"found {describe_value(values)}; settings are a block of keys")
        ]
    values = copy.deepcopy(dict(values))
    problems: list[ConfigProblem] = []
    model = resolve_pydantic_model(cls)
    while True:
        try:
            checked = model.model_validate(values)
            break
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False, include_context=True)
        if any(
            item["type"] == "invalid_key" for item in errors
        ):  # half of a surrogate pair, in a dict
            return None, [
                *problems,
                ConfigProblem((), "a key is no text that a file can store; rename it"),
            ]
        known = {
            problem.key for problem in problems
        }  # what was dropped for its own problem is not missing
        for item in errors:
            if (
                len(problems) >= MAX_PROBLEMS
            ):  # to suggest names for each of thousands takes minutes
                problems.append(
                    ConfigProblem((), f"and more; {len(errors)} values in all cannot be used")
                )
                return None, problems
            problem = _describe_pydantic_error(cls, item)
            if problem.key not in known:
                problems.append(problem)
                known.add(
                    problem.key
                )  # a number or a word: one error for each kind that it could have been
        for item in sorted(errors, key=lambda item: len(item["loc"]), reverse=True):
            if not _drop_bad_value(values, _locate_error(cls, item), item["type"]):
                return None, problems
    found: list[ConfigProblem] = []
    settings = _build_instance(cls, checked.model_dump(), (), found)
    # A block that lost a bad value may fail a check for that alone.
    found = [
        item
        for item in found
        if not any(keys_overlap(item.key, problem.key) for problem in problems)
    ]
    return typing.cast(S, settings), problems + found


def _drop_bad_value(values: Any, key: Key, kind: str) -> bool:
    """Remove what an error of this kind points at, so that the rest can be read; False when nothing is left to read."""
    if kind == "missing":
        if key == ("name",):  # the one required text at the root
            values["name"] = "unnamed"
            return True
        key = key[:-1]  # the block that lacks it
    for end in range(len(key), 0, -1):
        parent = _find_value_at(values, key[: end - 1])
        if isinstance(parent, dict):
            parent.pop(key[end - 1], None)  # it may be gone already, with an earlier error
            return True
        # an item of a list: the whole list goes, so that indices stay true for the other errors
    return False


def _locate_error(cls: type[Settings], error: Any) -> Key:
    """Path of the value that an error is about."""
    key: Key = ()
    for part in error["loc"]:
        if part == "[key]":
            continue
        if len(_split_union(_resolve_hint_at(cls, key))) > 1:
            break  # a number or a word: what follows names one of the kinds
        key = (*key, part)
    return key


def _split_union(hint: Any) -> list[Any]:
    """X and Y of `X | Y | None`; otherwise the hint itself."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [item for item in typing.get_args(hint) if item is not type(None)]
    return [hint]


def _find_value_at(values: Any, key: Key) -> Any:
    for part in key:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _build_instance(hint: Any, value: Any, key: Key, problems: list[ConfigProblem]) -> Any:
    """The dataclass (tuple, dict) of validated values; failing checks of combinations become problems."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        return _build_instance(_unwrap_optional(hint), value, key, problems)
    if origin is dict and value and _unwrap_optional(arguments[1]) is not Any:
        return {
            name: _build_instance(arguments[1], item, (*key, name), problems)
            for name, item in value.items()
        }
    if origin is tuple and not isinstance(value, str):  # a word in place of a list
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(
            _build_instance(kind, item, (*key, index), problems)
            for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if not (isinstance(hint, type) and issubclass(hint, Settings)):
        return value
    hints, fields = _resolve_type_hints(hint), hint.__dataclass_fields__
    value = {
        name: item
        for name, item in value.items()
        if item is not None or not _has_model_default(fields[name])
    }
    built = {
        name: _build_instance(hints[name], item, (*key, name), problems)
        for name, item in value.items()
    }
    try:
        return hint(**built)
    except SettingsError as error:
        name, colon, text = str(error).partition(": ")
        known = colon and name.split(".")[0] in hints
        problems.append(
            ConfigProblem((*key, *name.split(".")), text)
            if known
            else ConfigProblem(key, str(error))
        )
        unchecked = object.__new__(
            hint
        )  # each value is in its range: go on to find the other problems
        for field, item in built.items():
            object.__setattr__(unchecked, field, item)
        return unchecked


# ------------------------------------------------------------------------------------------------------------ messages


def _describe_pydantic_error(cls: type[Settings], error: Any) -> ConfigProblem:
    """A message with the found value, the allowed ones and a remedy, from pydantic's error."""
    key = _locate_error(cls, error)
    kind, found = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return ConfigProblem(key, f"unknown key; {_suggest_key(cls, key, found)}")
    if kind == "missing":
        doc = _find_dataclass_field(cls, key).metadata["doc"]
        return ConfigProblem(key, f"is missing; add it [{doc}]")
    expected = _describe_expected(cls, key)
    return ConfigProblem(
        key,
        f"found {describe_value(found)}; expected {expected}{_suggest_fix(kind, found, _resolve_hint_at(cls, key))}",
    )


def _suggest_key(cls: type[Settings], key: Key, value: Any) -> str:
    """The block below that has the key; what TRL's or verl's key is here; the nearest key; blocks elsewhere; all."""
    block = _unwrap_optional(_resolve_hint_at(cls, key[:-1]))
    names = [field.name for field in dataclasses.fields(block)]
    name, prefix = str(key[-1]), ".".join(map(str, key[:-1]))
    if isinstance(value, Mapping) and (peer := explain_framework_block(name, value)):
        return peer
    below = list(_find_blocks_with(block, name, prefix))
    if below:
        return f"it belongs to {', '.join(below)}"
    stage = str(key[1]) if len(key) > 2 and key[0] == "stages" else None
    if peer := explain_framework_name(name, stage):
        return peer
    sentence = suggest_name(name, names)
    if sentence.startswith("known"):
        elsewhere = [where for where in _find_blocks_with(cls, name, "") if where]
        if elsewhere:
            return f"it belongs to {', '.join(elsewhere)}"
        inner = [path for path in _list_setting_paths(block, "") if "." in path]
        if match := difflib.get_close_matches(
            name, {path.rsplit(".", 1)[1] for path in inner}, n=1, cutoff=0.8
        ):
            found = [path for path in inner if path.endswith("." + match[0])]
            return f"did you mean '{min(found, key=lambda path: path.count('.'))}'?"
    return sentence


def _list_setting_paths(cls: type[Settings], prefix: str) -> Iterable[str]:
    """Dotted paths of all settings in a block and in the blocks within it."""
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        inner = _unwrap_optional(_resolve_type_hints(cls)[field.name])
        if isinstance(inner, type) and issubclass(inner, Settings):
            yield from _list_setting_paths(inner, f"{prefix}{field.name}.")


def _find_blocks_with(cls: type[Settings], name: str, prefix: str) -> Iterable[str]:
    for field in dataclasses.fields(cls):
        if field.name == name:
            yield prefix
        inner = _unwrap_optional(_resolve_type_hints(cls)[field.name])
        if isinstance(inner, type) and issubclass(inner, Settings):
            yield from _find_blocks_with(inner, name, f"{prefix}.{field.name}".lstrip("."))


def _unwrap_optional(hint: Any) -> Any:
    """X of `X | None`, the first of several kinds; otherwise the hint itself."""
    return _split_union(hint)[0]


def _resolve_hint_at(cls: Any, key: Key) -> Any:
    """The type hint at a key's path."""
    hint = cls
    for part in key:
        hint = _unwrap_optional(hint)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            hint = arguments[0] if arguments[-1] is ... else arguments[int(part)]
        elif origin is dict:
            hint = arguments[1]
        else:
            hint = _resolve_type_hints(hint)[str(part)]
    return hint


def _find_dataclass_field(cls: type[Settings], key: Key) -> dataclasses.Field[Any]:
    """The dataclass field that a key's path belongs to (for an item of a list or dict: the list or dict)."""
    block: Any = cls
    found: dataclasses.Field[Any] | None = None
    for end in range(len(key)):
        block = _unwrap_optional(_resolve_hint_at(cls, key[:end]))
        if isinstance(block, type) and issubclass(block, Settings):
            found = block.__dataclass_fields__[str(key[end])]
    assert found is not None
    return found


def _describe_expected(cls: type[Settings], key: Key) -> str:
    field = _find_dataclass_field(cls, key)
    limits = [
        f"{_LIMIT_PHRASES[name]} {limit}"
        for name, limit in field.metadata.items()
        if name in _LIMIT_PHRASES
    ]
    return f"{_describe_type(_resolve_hint_at(cls, key), ' and '.join(limits))} [{field.metadata['doc']}]"


def _describe_type(hint: Any, limits: str = "") -> str:
    """Description of a type, with the limits of the numbers in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        named = [_describe_type(kind, limits) for kind in _split_union(hint)] + ["null"] * (
            type(None) in arguments
        )
        return f"{', '.join(named[:-1])} or {named[-1]}"
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(
            str(argument) for argument in arguments
        )
    if origin is tuple:
        if arguments[-1] is ...:
            return f"a list, each item {_describe_type(arguments[0], limits)}"
        return f"a list of exactly {len(arguments)}, each {_describe_type(arguments[0], limits)}"
    if origin is dict:
        return "a block of `name: value`" + (
            "" if arguments[1] is Any else f", each value {_describe_type(arguments[1])}"
        )
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "a block of keys ({} = its defaults)"
    if hint in (int, float) and limits:
        return f"{_describe_type(hint)} {limits}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
        hint, "a value"
    )


def _suggest_fix(kind: str, found: Any, hint: Any = None) -> str:
    """Remedy for a common slip; "" for any other."""
    if kind == "literal_error":
        return suggest_comparison(found, typing.get_args(hint))
    if kind in ("int_type", "int_from_float") and isinstance(found, float) and found == int(found):
        return f"; write {int(found)}"
    if kind in ("int_type", "float_type") and isinstance(found, str):
        try:
            float(found.replace("_", "").replace(",", ""))
        except ValueError:
            return ""
        return "; write it without quotes, commas and underscores"
    if kind == "string_type" and isinstance(found, int | float):
        return "; put quotes around it"
    if kind == "bool_type" and str(found).lower() in ("yes", "on", "1"):
        return "; write true"
    if kind == "bool_type" and str(found).lower() in ("no", "off", "0"):
        return "; write false"
    if kind == "tuple_type":
        return f"; write [{found}]" if isinstance(found, str) and len(found) < 40 else ""
    if kind == "finite_number":
        return "; it must be finite"
    return ""
