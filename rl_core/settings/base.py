"""Base class of settings with checks of types and ranges, and the field declaration `setting`.

`resolve_defaults` fills in the defaults that depend on the model (rl_core/settings/defaults.py).
`iter_code_paths` yields the import paths of user code in settings, from fields that are declared with `is_code`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.defaults import ModelDefault, ModelKind, is_unresolved
from rl_core.settings.deprecated_keys import (
    read_deprecated_value,
    rename_deprecated_keys,
)
from rl_core.settings.framework_aliases import explain_common_value, explain_framework_name

SettingKey = tuple[str | int, ...]
S = TypeVar("S", bound="Settings")

# Comparisons by name, as other tools write them.
_COMPARISONS = {
    ">": ("greater", "greater_than", "gt", "above", "more"),
    ">=": (
        "greater_equal",
        "greater_or_equal",
        "greater_than_or_equal",
        "ge",
        "gte",
        "at_least",
        "min",
    ),
    "<": ("less", "less_than", "lt", "below", "smaller", "lower"),
    "<=": ("less_equal", "less_or_equal", "less_than_or_equal", "le", "lte", "at_most", "max"),
}


def suggest_comparison(value: Any, choices: Iterable[Any]) -> str:
    """Suggest the sign for a comparison's name, as the end of a message; "" if there is none among the choices."""
    name = str(value).strip().casefold().replace("-", "_").replace(" ", "_")
    signs = [sign for sign, names in _COMPARISONS.items() if name in names and sign in set(choices)]
    return f"; '{value}' is written '{signs[0]}'" if signs else ""


def suggest_choice(name: str, value: str, hint: Any) -> str:
    """Suggest one of a type's choices for a wrong value, as the end of a message; "" if none is near.

    Args:
        name: the setting's.
        hint: its type; choices are those of every Literal in it.
    """
    choices = _list_choices(hint)
    if explanation := explain_common_value(name, value):
        return f"; {explanation}"
    if sign := suggest_comparison(value, choices):
        return sign
    suggestion = suggest_name(value, [choice for choice in choices if isinstance(choice, str)])
    return f"; {suggestion}" if suggestion.startswith("did you mean") else ""


def _list_choices(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [choice for part in typing.get_args(hint) for choice in _list_choices(part)]


def is_valid_value(value: Any, hint: Any) -> bool:
    """Return whether a config value matches a type hint; hints that a config cannot express always match."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(is_valid_value(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (list, tuple):
        items = [argument for argument in arguments if argument is not Ellipsis]
        return isinstance(value, list | tuple) and all(
            is_valid_value(item, items[0] if items else Any) for item in value
        )
    if origin is dict or origin is Mapping:
        return isinstance(value, Mapping) and all(
            is_valid_value(key, arguments[0]) and is_valid_value(item, arguments[1])
            for key, item in value.items()
        )
    if hint in (int, float):
        # bool is an int in Python but not in a config; a whole number is a valid float
        kinds = (int, float) if hint is float else (int,)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if hint is None or hint is type(None):
        return value is None
    if isinstance(hint, type) and (hint in (str, bool) or dataclasses.is_dataclass(hint)):
        return isinstance(value, hint)
    return True


def describe_type(hint: Any) -> str:
    """Describe a type hint for messages."""
    if typing.get_origin(hint) is typing.Literal:
        choices = [repr(choice) for choice in typing.get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in typing.get_args(hint))
    if hint is type(None):
        return "None"
    descriptions = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    if hint in descriptions:
        return descriptions[hint]
    if isinstance(hint, type) and not typing.get_origin(hint):
        return hint.__name__
    return str(hint).replace("typing.", "")


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    is_code: bool = False,
) -> Any:
    """Declare a dataclass field with its meaning and allowed range.

    Args:
        default: a `ModelDefault` depends on the kind of model.
        is_code: holds import paths (see `iter_code_paths`).
    """
    limits = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    if isinstance(default, ModelDefault):
        metadata["by_model"] = default
        doc = f"{doc}; unset: {default.describe_values()}"
        default = default.build_unresolved_value()
    metadata["doc"] = doc
    if is_code:
        metadata["code"] = True
    if isinstance(default, dict):
        return dataclasses.field(
            default_factory=lambda: dict(default), metadata=metadata, kw_only=True
        )
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


# Stage of the settings that library users create by hand; only for hints.
_STAGE_NAMES = {
    "PolicySettings": "policy",
    "SFTSettings": "sft",
    "PreferenceSettings": "preference",
    "RewardModelSettings": "reward_model",
    "DistillationSettings": "distill",
}

_RANGE_CHECKS = {
    "gt": (lambda value, limit: value > limit, "greater than"),
    "ge": (lambda value, limit: value >= limit, "at least"),
    "lt": (lambda value, limit: value < limit, "less than"),
    "le": (lambda value, limit: value <= limit, "at most"),
}


class _SettingsType(type):
    """Class of the settings classes, which also accept the former names of settings, and dicts for their blocks."""

    if not TYPE_CHECKING:  # type checkers see the constructor of the dataclass

        def __call__(cls, *args: Any, **values: Any) -> Any:
            """Create settings, and those of blocks that are dicts; warn of former names."""
            fields = {field.name for field in dataclasses.fields(cls)}
            # dataclasses.replace passes every field; a former name in addition is the one to change.
            changed = values.keys() - fields if fields <= values.keys() else ()
            values, used = rename_deprecated_keys(cls, values, changed)
            for key in used:
                warnings.warn(
                    f"{cls.__name__}: {key.describe_change()}", FutureWarning, stacklevel=2
                )
            return super().__call__(*args, **_build_blocks(cls, values))

    @property
    def __signature__(cls) -> inspect.Signature:
        """Parameters of the constructor, as Python finds them without this metaclass."""
        constructor = vars(cls).get("__new__") or cls.__init__  # type: ignore[misc]
        parameters = list(inspect.signature(constructor).parameters.values())
        return inspect.Signature(parameters[1:])


@dataclass(frozen=True, kw_only=True)
class Settings(metaclass=_SettingsType):
    """Base of every settings class: checks names, types and declared ranges. Settings within it may be dicts.

    Raises: SettingsError naming the field.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read a setting by its former name."""
            return read_deprecated_value(self, name)

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Create the object after checking that every name is known."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                stage = _STAGE_NAMES.get(cls.__name__)
                prefix = f"stages.{stage}."
                hint = explain_framework_name(name, stage, omitted_prefix=prefix)
                hint = hint or suggest_name(name, known)
                raise SettingsError(f"{name}: {cls.__name__} has no such setting; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _resolve_field_types(cls)
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            if not is_valid_value(value, hint):
                correction = _suggest_correction(field.name, value, hint)
                raise SettingsError(
                    f"{field.name}: {value!r} is not {describe_type(hint)}{correction}"
                )
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                if isinstance(number, int) and not -(2**63) <= number < 2**63:
                    raise SettingsError(f"{field.name}: a whole number of more than 64 bits")
                if not math.isfinite(number):
                    raise SettingsError(f"{field.name}: {number} is not a finite number")
                for name, limit in field.metadata.items():
                    if name in _RANGE_CHECKS and not _RANGE_CHECKS[name][0](number, limit):
                        raise SettingsError(
                            f"{field.name}: {number} must be {_RANGE_CHECKS[name][1]} {limit}"
                        )
        self.check()

    def check(self) -> None:
        """Raise SettingsError for invalid combinations of settings; overridden by subclasses."""

    def _resolve_nested_defaults(self, kind: ModelKind) -> dict[str, Any]:
        """Return fields whose defaults depend on the model and on other settings; overridden by subclasses."""
        return {}


class StartingModel(Protocol):
    """Part of `ModelSettings` that decides the defaults."""

    @property
    def path(self) -> str | None:
        """Folder or hub name; None = from scratch."""

    @property
    def lora(self) -> object:
        """Settings of the adapter; None = every weight is trained."""


def resolve_model_kind(model: StartingModel) -> ModelKind:
    """Return the column of the table of defaults for a model's settings."""
    if model.path is None:
        return "preset"
    return "full" if model.lora is None else "lora"


def resolve_defaults(settings: S, model: StartingModel, context: int | None = None) -> S:
    """Fill in the defaults for this model where nothing was set, also in nested blocks.

    Args:
        context: the model's longest sequence, in tokens; None = unknown.
    Raises: SettingsError naming the key of values that are incompatible with such a default.
    """
    kind = resolve_model_kind(model)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            try:
                changed[field.name] = resolve_defaults(value, model, context)
            except SettingsError as error:
                raise SettingsError(f"{field.name}.{error}") from error
        elif is_unresolved(value):
            changed[field.name] = field.metadata["by_model"].select_value(kind, context)
    changed |= settings._resolve_nested_defaults(kind)
    return dataclasses.replace(settings, **changed) if changed else settings


def build_settings(values: S | Mapping[str, Any], kind: type[S], name: str = "") -> S:
    """Build settings from a dict; blocks within it may be dicts too. Settings are returned unchanged.

    Args:
        name: of the argument, for messages.
    Raises: SettingsError naming the key, as in model.lora.rank.
    """
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"{name or 'settings'}: expected rl_core.{kind.__name__} or a dict of its settings, found "
            f"{type(values).__name__}"
        )
    built = {
        str(key): tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
    }
    try:
        return kind(**built)
    except SettingsError as error:
        raise SettingsError(f"{name}.{error}" if name else str(error)) from error


def _build_blocks(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Build the settings of fields, or of items of fields, that are dicts."""
    hints, built = _resolve_field_types(cls), dict(values)
    for name, value in values.items():
        is_block = isinstance(value, Mapping)
        if not is_block and not (
            isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value)
        ):
            continue
        kind = _find_settings_class(hints.get(name))
        if kind is None:
            continue
        if is_block:
            built[name] = build_settings(value, kind, name)
        else:
            built[name] = tuple(
                build_settings(item, kind, f"{name}.{index}") if isinstance(item, Mapping) else item
                for index, item in enumerate(value)
            )
    return built


def _find_settings_class(hint: Any) -> type[Settings] | None:
    """Return the settings class in a type, as in `X | None` and `tuple[X, ...]`; None if there is none or a dict."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        return hint
    if typing.get_origin(hint) in (dict, Mapping):
        return None
    classes = [_find_settings_class(part) for part in typing.get_args(hint)]
    return next((kind for kind in classes if kind is not None), None)


def replace_unchecked(settings: S, changed: Mapping[SettingKey, Any]) -> S:
    """Replace values by their keys without running checks: their problems are reported, and checking continues."""
    fields: dict[Any, dict[SettingKey, Any]] = {}
    for (name, *inner), value in changed.items():
        fields.setdefault(name, {})[tuple(inner)] = value
    result = copy.copy(settings)
    for name, values in fields.items():
        present: Any = getattr(settings, name)
        if () in values:
            present = values[()]
        elif isinstance(present, Settings):
            present = replace_unchecked(present, values)
        elif isinstance(present, tuple):  # of settings
            for index in {key[0] for key in values}:
                changed_item = {key[1:]: item for key, item in values.items() if key[0] == index}
                item = replace_unchecked(present[int(index)], changed_item)
                present = (*present[: int(index)], item, *present[int(index) + 1 :])
        else:  # options of an environment
            present = {**present, **{key[0]: item for key, item in values.items()}}
        object.__setattr__(result, name, present)
    return result


@functools.cache
def _resolve_field_types(cls: type) -> dict[str, Any]:
    """Return the resolved type of every field; cached per class."""
    return typing.get_type_hints(cls)


def _suggest_correction(name: str, value: Any, hint: Any) -> str:
    """Suggest the correction of a common mistake, for messages; "" for others."""
    is_number = isinstance(value, str) and value.strip().lstrip("+-")[:1].isdigit()
    if isinstance(value, str) and _list_choices(hint) and not is_number:
        return suggest_choice(name, value, hint)
    if isinstance(value, str) and {int, float} & {hint, *typing.get_args(hint)}:
        return "; it is text, leave out the quotes"
    return ""


def iter_code_paths(settings: Settings, key: SettingKey = ()) -> Iterator[tuple[SettingKey, str]]:
    """Yield the import paths in settings, each with its key.

    A text and the items of a list are import paths; in a mapping (rewards and their weights) the names with a colon.
    """
    for field in dataclasses.fields(settings):
        value, field_key = getattr(settings, field.name), (*key, field.name)
        if field.metadata.get("code"):
            yield from _iter_declared_paths(value, field_key)
        else:
            yield from _iter_nested_paths(value, field_key)


def _iter_declared_paths(value: Any, key: SettingKey) -> Iterator[tuple[SettingKey, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        yield from (((*key, name), name) for name in value if ":" in name)
    elif isinstance(value, tuple):
        yield from (((*key, index), path) for index, path in enumerate(value))


def _iter_nested_paths(value: Any, key: SettingKey) -> Iterator[tuple[SettingKey, str]]:
    if isinstance(value, Settings):
        yield from iter_code_paths(value, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _iter_nested_paths(item, (*key, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _iter_nested_paths(item, (*key, index))
