"""`posttrain doctor --model`: a model's fast paths on this machine, and what its chat template does."""

from __future__ import annotations

import tempfile
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.model_references import resolve_model_references
from posttrain.cli.runs_table import detect_terminal_columns
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.capabilities import Decision


_MAX_LOADED_BYTES = (
    2 << 30
)  # of weights: up to here the model is loaded, and what only a trial run tells is tried
_MAX_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class ModelExplanation:
    """Text about a model."""

    text: str
    is_refused: bool = False  # nothing exact can be trained with its chat template
    record: dict[str, Any] = field(default_factory=dict)  # the same for programs


def explain_model(
    model: str, settings: ModelSettings | None, output: Path, tracking_uri: str | None = None
) -> ModelExplanation:
    """A table of every fast path, with the reason and the path taken otherwise; then the chat template's properties.

    Args:
        model: a model folder, a finished stage's folder, a hub name or models:/NAME@ALIAS.
        settings: dtype, device, adapters and chat template that the model is meant for; None = the defaults.
        output: the folder whose registry knows registered models.
    Raises: CheckpointError or SettingsError when there is no such model.
    """
    from transformers.utils.logging import disable_progress_bar

    from rl_core.capabilities import inspect_capabilities
    from rl_core.models import causal_lm, lora

    disable_progress_bar()
    settings = settings or ModelSettings()
    device = causal_lm.resolve_device(settings).type
    with tempfile.TemporaryDirectory(
        prefix="posttrain-"
    ) as scratch:  # a registered model may have to be downloaded
        place = _resolve_model_path(model, output, tracking_uri, Path(scratch))
        found, is_loaded = _load_model(place, settings)
        template = _explain_chat_template(place, settings)
    kind = type(lora.unwrap_model(found)).__name__
    adapters = " with adapters" if settings.lora is not None else ""
    head = (
        f"{model}: {kind}{adapters}, {causal_lm.count_parameters(found) / 1e6:,.1f} million parameters, "
        f"{settings.dtype} on {device}"
    )
    source = "its weights were loaded" if is_loaded else "its config alone was read"
    decisions = list(inspect_capabilities(found, device))
    lines = [
        head,
        f"({source})",
        "",
        *_format_decisions(decisions),
        "",
        "chat template",
        template.text,
    ]
    record = {
        "model": model,
        "class": kind,
        "adapters": bool(adapters),
        "parameters": causal_lm.count_parameters(found),
        "dtype": settings.dtype,
        "device": device,
        "weights_loaded": is_loaded,
        "fast_paths": [asdict(decision) for decision in decisions],
        "chat_template": template.text.splitlines(),
        "refused": template.is_refused,
    }
    return ModelExplanation("\n".join(lines), template.is_refused, record)


def _explain_chat_template(model_path: str, settings: ModelSettings) -> ModelExplanation:
    """The chat template's properties with an example, or the reason for which it cannot be used."""
    from rl_core.data.chat import ChatRenderer
    from rl_core.data.template_report import describe_template
    from rl_core.models import causal_lm

    try:
        tokenizer = causal_lm.load_tokenizer(model_path, settings)
    except CheckpointError as error:  # a folder of weights alone
        return ModelExplanation(f"not examined: {error}")
    try:
        return ModelExplanation("\n".join(describe_template(ChatRenderer(tokenizer, settings))))
    except (DataError, SettingsError) as error:
        return ModelExplanation(f"BAD   {error}", is_refused=True)


def _resolve_model_path(model: str, output: Path, tracking_uri: str | None, scratch: Path) -> str:
    """The model folder or hub name."""
    place = next(iter(resolve_model_references([model]).values()), model)
    if not place.startswith("models:/"):
        return place
    from tasks.tracking import Tracking

    return str(Tracking(tracking_uri, output).registry.resolve_model(place, scratch))


def _load_model(model_path: str, settings: ModelSettings) -> tuple[PreTrainedModel, bool]:
    """The model, in training mode; and whether it has its weights, which large ones and hub names are spared."""
    from transformers import AutoModelForCausalLM

    from rl_core.models import causal_lm, lora

    weights = list(Path(model_path).expanduser().glob("*.safetensors"))
    if not weights or sum(file.stat().st_size for file in weights) > _MAX_LOADED_BYTES:
        return causal_lm.load_without_weights(model_path, settings), False
    model = causal_lm.load_pretrained(AutoModelForCausalLM, model_path, settings)
    return (
        model if settings.lora is None else lora.add_adapter(model, settings.lora)
    ).train(), True


def _format_decisions(decisions: list[Decision]) -> list[str]:
    """One path a paragraph: its name, the answer, the reason, and what is used instead."""
    width = max(len(decision.name) for decision in decisions)
    columns = min(_MAX_COLUMNS, max(60, detect_terminal_columns() or _MAX_COLUMNS)) - width - 9
    lines = []
    for decision in decisions:
        answer = "trial" if decision.is_undecided else "yes" if decision.allowed else "no"
        texts = textwrap.wrap(decision.reason, columns)
        if not decision.allowed and not decision.is_undecided:
            texts += textwrap.wrap(f"-> {decision.fallback}", columns)
        lines.append(f"{decision.name.ljust(width)}  {answer:5}  {texts[0]}")
        lines += [f"{'':{width}}         {text}" for text in texts[1:]]
    return lines
