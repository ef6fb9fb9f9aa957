"""Layers with an adapter, by the names in the settings: linear layers, and experts stacked in one parameter.

transformers 5 stores the experts of a layer as one parameter of shape [experts, outputs, inputs], of which peft adapts
a matrix per expert (`ParamWrapper`). peft renames targets of some families by a table of its former names, which loses
their shared experts; targets are therefore chosen here, in a form that it does not rename.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_core.errors import SettingsError
from rl_core.settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ALL_LINEAR = "all-linear"
# names of an expert's own layers, by the parameter that stacks them
_STACKED_NAMES = {
    "gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj"),
    "gate_up_proj_weight": ("gate_up_proj", "gate_proj", "up_proj"),
}
# linear layers that peft takes for experts in a model with stacked ones
_RENAMED_BY_PEFT = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
# Mamba reads the weights of these layers without calling them, so an adapter would have no effect
_MAMBA_LAYERS = {
    "falcon_h1": ("out_proj",),
    "falcon_mamba": ("out_proj", "dt_proj"),
    "jamba": ("dt_proj",),
    "mamba": ("out_proj", "dt_proj"),
    "mamba2": ("out_proj",),
    "nemotron_h": ("out_proj",),
}
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class AdapterTargets:
    """Targets in peft's terms."""

    modules: tuple[str, ...] | str  # last or full names of linear layers, or all-linear
    parameters: tuple[str, ...] = ()  # last two names of parameters

    @property
    def is_all_linear(self) -> bool:
        """True if peft chooses the layers."""
        return self.modules == ALL_LINEAR


def resolve_targets(model: PreTrainedModel, settings: LoraSettings) -> AdapterTargets:
    """Resolve the names of the settings for this model.

    The default names are those of Llama; a model that lacks one of them gets adapters on all linear layers.
    Raises: SettingsError for a name without a layer or with shared weights, or options that stacked experts do not
        allow.
    """
    linear_names = list(_iter_linear_names(model))
    stacks = find_stacked_experts(model)
    names: tuple[str, ...] | str = settings.target_modules
    if names != ALL_LINEAR:
        missing = _find_missing_names(names, linear_names, stacks)
        if missing and names == LoraSettings().target_modules:
            names = ALL_LINEAR
        elif missing:
            known = sorted({*map(_read_last_name, linear_names), *map(_read_last_name, stacks)})
            raise SettingsError(
                f"lora.target_modules: no linear layer of this model is named {', '.join(missing)}; "
                f"there are {', '.join(known)} (all-linear: all but the output head)"
            )
    if names == ALL_LINEAR:
        return _resolve_all_layers(model, settings, linear_names, stacks)
    assert not isinstance(names, str)
    if tied := [name for name in names if name in find_tied_names(model)]:
        raise SettingsError(
            f"lora.target_modules: {tied[0]} shares its weights with the embedding here, so merging its adapter would "
            "change both; remove it"
        )
    if unsuitable := [name for name in names if name in _find_unsuitable_layers(model)]:
        raise SettingsError(
            f"lora.target_modules: {unsuitable[0]} of {type(model).__name__} can have no adapter: it is a router of "
            "experts, or Mamba reads its weights without calling the layer; remove it"
        )
    chosen = [name for name in stacks if set(_list_expert_names(name)) & set(names)]
    if not chosen:
        return AdapterTargets(names)
    last_names = {_read_last_name(name) for name in linear_names}
    return _build_targets(settings, [name for name in names if name in last_names], chosen)


def find_stacked_experts(model: nn.Module) -> list[str]:
    """Find the names of parameters that hold one matrix per expert."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and "expert" in f"{path}.{type(module).__name__}".lower()
    ]


def find_tied_names(model: PreTrainedModel) -> set[str]:
    """Return the last names of embedding and output head if they share their weights."""
    configs = (model.config, model.config.get_text_config())
    if not any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return set()
    shared = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {
        _read_last_name(name)
        for name, module in model.named_modules()
        if any(module is tied for tied in shared)
    }
    return names | {"lm_head", "embed_tokens"}


def describe_adapters(model: Any) -> str:
    """Describe which layers of a model of peft have an adapter, and which large ones have none."""
    from peft.tuners.lora import LoraLayer

    adapted, covered = Counter[str](), set[int]()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = read_adapted_weight(module)
            covered.add(id(weight))
            stacked = getattr(module, "parameter_name", None)
            name = _read_last_name(path.replace(".base_layer", ""))
            adapted[f"{name}.{stacked}" if stacked and stacked != "weight" else name] += 1
    plain = Counter[str]()
    for name, parameter in model.get_base_model().named_parameters():
        is_matrix = parameter.dim() >= 2 and not parameter.requires_grad
        if is_matrix and id(parameter) not in covered and ".lora_" not in name:
            parts = [
                part for part in name.split(".") if part not in ("base_layer", "original_module")
            ]
            label = parts[-2] if parts[-1] == "weight" else ".".join(parts[-2:])
            plain[label] += parameter.numel()
    base = max(1, total - trainable)
    without = [f"{name} ({size / base:.1%})" for name, size in plain.most_common(_MAX_LISTED)]
    if len(plain) > _MAX_LISTED:
        without.append(f"{len(plain) - _MAX_LISTED} more kinds")
    layers = ", ".join(f"{count} {name}" for name, count in sorted(adapted.items()))
    return (
        f"adapters: {trainable:,} parameters in {adapted.total()} modules ({layers}); layers without an adapter, with "
        f"their share of the weights: {', '.join(without) or 'none'}"
    )


def read_adapted_weight(layer: Any) -> nn.Parameter:
    """Read the weight that an adapter of peft changes: of the layer below it, or a stack of experts."""
    base = layer.get_base_layer()
    weight: nn.Parameter = getattr(base, getattr(layer, "parameter_name", None) or "weight")
    return weight


def _resolve_all_layers(
    model: PreTrainedModel, settings: LoraSettings, linear_names: list[str], stacks: list[str]
) -> AdapterTargets:
    """Resolve all linear layers but the output head, and all experts."""
    excluded = _find_unsuitable_layers(model)
    if not stacks and not excluded:
        return AdapterTargets(ALL_LINEAR)
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    names = [
        name
        for name in linear_names
        if modules[name] is not head and _read_last_name(name) not in excluded
    ]
    return _build_targets(settings, names, stacks) if stacks else AdapterTargets(tuple(names))


def _build_targets(settings: LoraSettings, names: list[str], stacks: list[str]) -> AdapterTargets:
    """Build the targets of a model with stacked experts.

    Raises: SettingsError for an option that peft cannot apply to them.
    """
    renamed = [name for name in names if _read_last_name(name) in _RENAMED_BY_PEFT]
    options = {
        "dropout": settings.dropout > 0,
        "dora": settings.dora,
        "quantize": settings.quantize != "none" and bool(renamed),
    }
    for option, is_set in options.items():
        if is_set:
            raise SettingsError(
                f"lora.{option}: peft does not support it for the experts of this model ({stacks[0]}, "
                f"{len(stacks)} in all), which are stacked in one parameter; remove it, or set lora.target_modules to "
                "the names of other layers, such as [q_proj, k_proj, v_proj, o_proj]"
            )
    parameters = {".".join(name.split(".")[-2:]) for name in stacks}
    parameters |= {f"{_read_last_name(name)}.weight" for name in renamed}
    modules = [name for name in names if name not in renamed]
    return AdapterTargets(tuple(modules), tuple(sorted(parameters)))


def _find_missing_names(
    names: tuple[str, ...] | str, linear_names: list[str], stacks: list[str]
) -> list[str]:
    known = {_read_last_name(name) for name in linear_names}
    known |= {alias for name in stacks for alias in _list_expert_names(name)}
    return [name for name in names if name not in known]


def _list_expert_names(stack: str) -> tuple[str, ...]:
    """List the names by which settings may call a stack of experts."""
    last = _read_last_name(stack)
    if last == "weight":  # a module that holds one stack
        last = stack.split(".")[-2]
    return _STACKED_NAMES.get(last, (last,))


def _iter_linear_names(model: nn.Module) -> Iterator[str]:
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield name


def _find_unsuitable_layers(model: PreTrainedModel) -> set[str]:
    """Return the last names of linear layers on which an adapter has no effect or fails."""
    routers = {
        _read_last_name(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "router" in type(module).__name__.lower()
    }
    return routers | set(_MAMBA_LAYERS.get(getattr(model.config, "model_type", ""), ()))


def _read_last_name(name: str) -> str:
    return name.rsplit(".", 1)[-1]
