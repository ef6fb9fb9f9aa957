"""Settings dataclasses as pydantic models: strict types, ranges, unknown keys, and a form for the Prefect UI.

The models are built from the dataclasses (types, defaults, and the ranges and meanings in `setting(...)`), so nothing
is declared twice. `parse_settings` converts plain values to the dataclasses and reports every problem.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

import annotated_types
import pydantic

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings import Settings
from rl_core.settings.base import suggest_choice
from rl_core.settings.defaults import is_unresolved
from rl_core.settings.deprecated_keys import list_deprecated_keys, rename_deprecated_keys
from rl_core.settings.framework_aliases import explain_framework_block, explain_framework_name
from tasks.config.problems import (
    ConfigProblem,
    Key,
    KeyLocations,
    describe_value,
    keys_overlap,
)

S = TypeVar("S", bound=Settings)

MAX_PROBLEMS = 30  # parsing stops after these: the file is no configuration of ours

_PYDANTIC_LIMITS = {
    "gt": annotated_types.Gt,
    "ge": annotated_types.Ge,
    "lt": annotated_types.Lt,
    "le": annotated_types.Le,
}
_LIMIT_PHRASES = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
_TITLE_WORDS = {
    **{
        word: word.upper()
        for word in [
            "api",
            "dpo",
            "grpo",
            "gpu",
            "id",
            "kl",
            "ppo",
            "sft",
            "tls",
            "url",
            "vllm",
            "eos",
            "bos",
            "gae",
            "kv",
        ]
    },
    "aux": "auxiliary",
    "ema": "EMA",
    "grad": "gradient",
    "lora": "LoRA",
    "lr": "learning rate",
    "nonfinite": "non-finite",
    "coef": "coefficient",
    "num": "number of",
    "max": "maximum",
    "min": "minimum",
    "ref": "reference",
    "s": "(seconds)",
    "seconds": "(seconds)",
}


def format_setting_title(name: str) -> str:
    """Format a setting's name as the label of a form's field: `kl_coef` as "KL coefficient"."""
    text = " ".join(_TITLE_WORDS.get(word, word) for word in name.split("_"))
    return text[:1].upper() + text[1:]


_STRICT_CONFIG = pydantic.ConfigDict(
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    frozen=True,
    field_title_generator=lambda name, _: format_setting_title(name),
)

_MODEL_CACHE: dict[
    type[Settings], type[pydantic.BaseModel]
] = {}  # one each: forms refer to models by name
_TYPE_HINT_CACHE: dict[Any, dict[str, Any]] = {}  # by class: resolving hints takes milliseconds


def resolve_pydantic_model(cls: type[Settings]) -> type[pydantic.BaseModel]:
    """Return the pydantic model of a settings class: the same fields, defaults, ranges and meanings."""
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
    validators: dict[str, Any] = {}
    if list_deprecated_keys(cls):
        validators["rename"] = pydantic.model_validator(mode="before")(_build_renaming(cls))
    model = pydantic.create_model(
        cls.__name__,
        __config__=_STRICT_CONFIG,
        __doc__=cls.__doc__,
        __validators__=validators,
        **fields,
    )
    return typing.cast(type[pydantic.BaseModel], model)


def _build_renaming(settings_type: type[Settings]) -> Callable[[Any, Any], Any]:
    """Build a validator that replaces former names, for parameters of a deployment that Prefect validates."""

    def rename(
        cls: Any, values: Any
    ) -> Any:  # pydantic recognises a class method by the name `cls`
        if not isinstance(values, Mapping):
            return values
        renamed, used = rename_deprecated_keys(settings_type, values)
        for old in used:
            text = f"{settings_type.__name__}: {old.describe_change()}"
            warnings.warn(text, FutureWarning, stacklevel=1)
        return renamed

    return rename


def _resolve_type_hints(cls: type[Settings]) -> dict[str, Any]:
    if cls not in _TYPE_HINT_CACHE:
        _TYPE_HINT_CACHE[cls] = typing.get_type_hints(cls)
    return _TYPE_HINT_CACHE[cls]


def _build_pydantic_field(field: dataclasses.Field[Any]) -> Any:
    info: dict[str, Any] = {"description": field.metadata.get("doc")}
    if _has_model_default(field):
        return pydantic.Field(
            default=None, **info
        )  # a form would send a filled-in default as if set
    if field.default_factory is not dataclasses.MISSING:
        return pydantic.Field(default=field.default_factory(), **info)
    if field.default is dataclasses.MISSING:
        return pydantic.Field(**info)
    if isinstance(field.default, Settings):
        model = resolve_pydantic_model(type(field.default))
        default = model.model_validate(_collect_field_values(field.default))
        return pydantic.Field(default=default, **info)
    return pydantic.Field(default=field.default, **info)


def _has_model_default(field: dataclasses.Field[Any]) -> bool:
    """Return whether the setting, if left out or null, has a default that depends on the model."""
    return "by_model" in field.metadata


def _collect_field_values(settings: Settings) -> dict[str, Any]:
    """Collect plain values; None for a default that depends on the model."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            value = _collect_field_values(value)
        values[field.name] = None if is_unresolved(value) else value
    return values


def _convert_annotation(hint: Any, limits: list[Any]) -> Any:
    """Convert a type hint to a pydantic type; limits apply to the numbers inside it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Settings):
        return resolve_pydantic_model(hint)
    if origin in (Union, types.UnionType):
        members = tuple(_convert_annotation(argument, limits) for argument in arguments)
        return Union[members]  # noqa: UP007 (built at run time)
    if origin is tuple:
        inner = tuple(
            item if item is ... else _convert_annotation(item, limits) for item in arguments
        )
        # not strict, since YAML and JSON have lists but no tuples
        return Annotated[tuple.__class_getitem__(inner), pydantic.Strict(False)]
    if origin is dict:
        return dict[str, _convert_annotation(arguments[1], [])]  # type: ignore[misc]
    if hint in (int, float) and limits:
        return Annotated[(hint, *limits)]
    return hint


def parse_settings(
    cls: type[S], values: Any, locations: KeyLocations | None = None
) -> tuple[S | None, list[ConfigProblem]]:
    """Parse settings from plain values, with every problem.

    The default replaces a bad value, so that checks that depend on other values can still run. A former name of a
    setting counts as its new one, with a warning.
    Args:
        locations: of the values; a setting under a former name gets a location under its new one.
    Returns: the settings, or None if none can be built; the problems.
    """
    if isinstance(values, pydantic.BaseModel):
        values = values.model_dump()
    if not isinstance(values, Mapping):
        return None, [
            ConfigProblem((), f"found {describe_value(values)}; settings are a block of keys")
        ]
    problems: list[ConfigProblem] = []
    values = _rename_deprecated(
        cls, copy.deepcopy(dict(values)), (), problems, locations or KeyLocations("settings")
    )
    model = resolve_pydantic_model(cls)
    while True:
        try:
            checked = model.model_validate(values)
            break
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False, include_context=True)
        if any(item["type"] == "invalid_key" for item in errors):  # half of a surrogate pair
            text = "a key contains a character that no file can store; rename it"
            return None, [*problems, ConfigProblem((), text)]
        # A union has one error per kind, and a value that was dropped earlier is not missing.
        known = {problem.key for problem in problems}
        for item in errors:
            if len(problems) >= MAX_PROBLEMS:  # suggesting names for thousands takes minutes
                text = f"and more; {len(errors)} values in total cannot be used"
                problems.append(ConfigProblem((), text))
                return None, problems
            problem = _describe_pydantic_error(cls, item)
            if problem.key not in known:
                problems.append(problem)
                known.add(problem.key)
        for item in sorted(errors, key=lambda item: len(item["loc"]), reverse=True):
            if not _drop_bad_value(values, _locate_error(cls, item), item["type"]):
                return None, problems
    failed_checks: list[ConfigProblem] = []
    settings = _build_instance(cls, checked.model_dump(), (), failed_checks)
    # A block that lost a bad value may fail a check only because of that.
    failed_checks = [
        check
        for check in failed_checks
        if not any(keys_overlap(check.key, problem.key) for problem in problems)
    ]
    return typing.cast(S, settings), problems + failed_checks


def _rename_deprecated(
    hint: Any, value: Any, key: Key, problems: list[ConfigProblem], locations: KeyLocations
) -> Any:
    """Replace former names of settings in a plain value of this type, and warn of each."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _rename_deprecated(_unwrap_optional(hint), value, key, problems, locations)
    inner: dict[Any, Any] = {}  # type of each item
    if isinstance(value, list) and origin is tuple:
        kinds = arguments if arguments[-1] is not ... else arguments[:1] * len(value)
        inner = dict(enumerate(kinds[: len(value)]))
    elif isinstance(value, dict) and origin is dict:
        inner = dict.fromkeys(value, arguments[1])
    elif isinstance(value, dict) and isinstance(hint, type) and issubclass(hint, Settings):
        value = _rename_block_keys(hint, value, key, problems, locations)
        inner = {name: kind for name, kind in _resolve_type_hints(hint).items() if name in value}
    for part, kind in inner.items():
        value[part] = _rename_deprecated(kind, value[part], (*key, part), problems, locations)
    return value


def _rename_block_keys(
    cls: type[Settings],
    block: dict[str, Any],
    key: Key,
    problems: list[ConfigProblem],
    locations: KeyLocations,
) -> dict[str, Any]:
    try:
        block, used = rename_deprecated_keys(cls, block, _list_overridden_names(key, locations))
    except SettingsError as error:
        name, _, text = str(error).partition(": ")
        problems.append(ConfigProblem((*key, name), text))
        names = {old.name for old in list_deprecated_keys(cls)}
        return {name: value for name, value in block.items() if name not in names}
    for old in used:
        prefix = "".join(f"{part}." for part in key)
        location = locations.find_location((*key, old.name))
        warnings.warn(f"{location}: {old.describe_change(prefix)}", FutureWarning, stacklevel=1)
        for new_name in old.new_names:
            locations.rename_key((*key, old.name), (*key, *new_name.split(".")))
    return block


def _list_overridden_names(key: Key, locations: KeyLocations) -> set[str]:
    """List the names in a block, and in blocks within it, that overrides set or reach into."""
    names = set()
    for path in locations.overrides:
        if path[: len(key)] == key:
            inner = [str(part) for part in path[len(key) :]]
            names |= {".".join(inner[:end]) for end in range(1, len(inner) + 1)}
    return names


def _drop_bad_value(values: Any, key: Key, kind: str) -> bool:
    """Remove the value that an error points at, so that the rest can be parsed; return False if nothing is left."""
    if kind == "missing":
        if key == ("name",):  # the only required text at the root
            values["name"] = "unnamed"
            return True
        key = key[:-1]  # drop the block that lacks it
    for end in range(len(key), 0, -1):
        parent = _find_value_at(values, key[: end - 1])
        if isinstance(parent, dict):
            parent.pop(key[end - 1], None)  # an earlier error may have removed it
            return True
        # an item of a list: drop the whole list, so that indices stay valid for the other errors
    return False


def _locate_error(cls: type[Settings], error: Any) -> Key:
    """Return the key of the value that an error is about."""
    key: Key = ()
    for part in error["loc"]:
        if part == "[key]":
            continue
        if len(_split_union(_resolve_hint_at(cls, key))) > 1:
            break  # inside a union: the rest of the location names one of the kinds
        key = (*key, part)
    return key


def _split_union(hint: Any) -> list[Any]:
    """Return X and Y of `X | Y | None`; otherwise the hint itself."""
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
    """Build the dataclass (tuple, dict) of validated values; failing checks become problems."""
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
    if origin is tuple and not isinstance(
        value, str
    ):  # some settings accept a word instead of a list
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
        first, *names = name.split(".")
        if colon and first in hints:
            inner: Key = tuple(names)
            if typing.get_origin(hints[first]) is tuple and names and names[0].isdigit():
                inner = (int(names[0]), *names[1:])  # the index of an item
            problems.append(ConfigProblem((*key, first, *inner), text))
        else:
            problems.append(ConfigProblem(key, str(error)))
        # each value is within its range: continue to find the other problems
        unchecked = object.__new__(hint)
        for field, item in built.items():
            object.__setattr__(unchecked, field, item)
        return unchecked


def _describe_pydantic_error(cls: type[Settings], error: Any) -> ConfigProblem:
    """Describe pydantic's error with the value, the allowed ones and a remedy."""
    key = _locate_error(cls, error)
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return ConfigProblem(key, f"unknown key; {_suggest_key(cls, key, value)}")
    if kind == "missing":
        doc = _find_dataclass_field(cls, key).metadata["doc"]
        return ConfigProblem(key, f"is missing; add it [{doc}]")
    expected = _describe_expected(cls, key)
    fix = _suggest_fix(kind, value, str(key[-1]), _resolve_hint_at(cls, key))
    return ConfigProblem(key, f"found {describe_value(value)}; expected {expected}{fix}")


def _suggest_key(cls: type[Settings], key: Key, value: Any) -> str:
    """Suggest a key: in a block below, for a key of TRL or verl, the nearest name, in another block, or all keys."""
    block = _unwrap_optional(_resolve_hint_at(cls, key[:-1]))
    names = [field.name for field in dataclasses.fields(block)]
    name, prefix = str(key[-1]), ".".join(map(str, key[:-1]))
    if isinstance(value, Mapping) and (explanation := explain_framework_block(name, value)):
        return explanation
    inner_blocks = list(_find_blocks_with(block, name, prefix))
    if inner_blocks:
        return f"it belongs to {', '.join(inner_blocks)}"
    stage = str(key[1]) if len(key) > 2 and key[0] == "stages" else None
    inner_block = str(key[-2]) if stage and len(key) > 3 else ""
    if explanation := explain_framework_name(name, stage, block=inner_block):
        return explanation
    suggestion = suggest_name(name, names)
    if not suggestion.startswith("known"):
        return suggestion
    other_blocks = list(filter(None, _find_blocks_with(cls, name, "")))
    if other_blocks:
        return f"it belongs to {', '.join(other_blocks)}"
    inner_paths = [path for path in _list_setting_paths(block, "") if "." in path]
    inner_names = {path.rsplit(".", 1)[1] for path in inner_paths}
    if match := difflib.get_close_matches(name, inner_names, n=1, cutoff=0.8):
        candidates = [path for path in inner_paths if path.endswith("." + match[0])]
        return f"did you mean '{min(candidates, key=lambda path: path.count('.'))}'?"
    return suggestion


def _list_setting_paths(cls: type[Settings], prefix: str) -> Iterable[str]:
    """Yield the dotted paths of all settings in a block and in the blocks inside it."""
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
    """Return X of `X | None`, the first of several kinds; otherwise the hint itself."""
    return _split_union(hint)[0]


def _resolve_hint_at(cls: Any, key: Key) -> Any:
    """Return the type hint at a key's path."""
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
    """Find the dataclass field that a key belongs to (for an item of a list or dict: that of the list or dict)."""
    block: Any = cls
    field: dataclasses.Field[Any] | None = None
    for end in range(len(key)):
        block = _unwrap_optional(_resolve_hint_at(cls, key[:end]))
        if isinstance(block, type) and issubclass(block, Settings):
            field = block.__dataclass_fields__[str(key[end])]
    assert field is not None
    return field


def _describe_expected(cls: type[Settings], key: Key) -> str:
    field = _find_dataclass_field(cls, key)
    limits = " and ".join(
        f"{_LIMIT_PHRASES[name]} {limit}"
        for name, limit in field.metadata.items()
        if name in _LIMIT_PHRASES
    )
    kind = _describe_type(_resolve_hint_at(cls, key), limits)
    return f"{kind} [{field.metadata['doc']}]"


def _describe_type(hint: Any, limits: str = "") -> str:
    """Describe a type, with the limits of the numbers in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_describe_type(kind, limits) for kind in _split_union(hint)]
        if type(None) in arguments:
            kinds.append("null")
        return f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    if origin is Literal:
        choices = ", ".join(str(argument) for argument in arguments)
        return f"one of {choices}" if len(arguments) > 1 else choices
    if origin is tuple:
        if arguments[-1] is ...:
            return f"a list, each item {_describe_type(arguments[0], limits)}"
        return f"a list of exactly {len(arguments)}, each {_describe_type(arguments[0], limits)}"
    if origin is dict:
        values = "" if arguments[1] is Any else f", each value {_describe_type(arguments[1])}"
        return f"a block of `name: value`{values}"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "a block of keys ({} = its defaults)"
    if hint in (int, float) and limits:
        return f"{_describe_type(hint)} {limits}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
        hint, "a value"
    )


def _suggest_fix(kind: str, value: Any, name: str = "", hint: Any = None) -> str:
    """Suggest the fix of a common mistake; "" for any other."""
    if kind == "literal_error":
        return suggest_choice(name, value, hint) if isinstance(value, str) else ""
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value == int(value):
        return f"; write {int(value)}"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        try:
            float(value.replace("_", "").replace(",", ""))
        except ValueError:
            return ""
        return "; write it without quotes, commas and underscores"
    if kind == "string_type" and isinstance(value, int | float):
        return "; put quotes around it"
    if kind == "bool_type" and str(value).lower() in ("yes", "on", "1"):
        return "; write true"
    if kind == "bool_type" and str(value).lower() in ("no", "off", "0"):
        return "; write false"
    if kind == "tuple_type":
        return f"; write [{value}]" if isinstance(value, str) and len(value) < 40 else ""
    if kind == "finite_number":
        return "; it must be finite"
    return ""
