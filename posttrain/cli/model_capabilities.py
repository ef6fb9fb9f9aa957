"""Explanation of `posttrain check machine --model`: a model's fast paths on this machine, and its chat template."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import detect_terminal_columns
from posttrain.cli.model_references import resolve_model_references
from posttrain.cli.tables import format_table
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.models.named_models import resolve_local_model
from rl_core.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.capabilities import Decision

_MAX_LOADED_BYTES = 2 << 30  # of weights: smaller models are loaded and tried
_MAX_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class ModelExplanation:
    """Explanation of a model."""

    text: str
    is_refused: bool = False  # its chat template does not allow exact training
    record: dict[str, Any] = field(default_factory=dict)  # as JSON


def explain_model(
    model: str, settings: ModelSettings | None, output: Path, tracking_uri: str | None = None
) -> ModelExplanation:
    """Explain every fast path with its reason and fallback, then the properties of the chat template.

    Args:
        model: a model folder, a finished stage's folder, a hub name or models:/NAME@ALIAS.
        settings: dtype, device, adapters and chat template that the model is meant for; None = the defaults.
        output: the folder whose registry knows registered models.
    Raises: CheckpointError or SettingsError if there is no such model.
    """
    from transformers.utils.logging import disable_progress_bar

    from rl_core.capabilities import inspect_capabilities
    from rl_core.models import causal_lm, lora
    from rl_core.models.adapter_targets import describe_adapters

    disable_progress_bar()
    settings = settings or ModelSettings()
    device = causal_lm.resolve_device(settings).type
    # A registered model may have to be downloaded.
    with tempfile.TemporaryDirectory(prefix="posttrain-") as scratch:
        path = _resolve_model_path(model, output, tracking_uri, Path(scratch))
        loaded, is_loaded = _load_model(path, settings)
        template = _explain_chat_template(path, settings)
    class_name = type(lora.unwrap_model(loaded)).__name__
    adapters = " with adapters" if settings.lora is not None else ""
    title = (
        f"{model}: {class_name}{adapters}, {causal_lm.count_parameters(loaded) / 1e6:,.1f} million parameters, "
        f"{settings.dtype} on {device}"
    )
    source = "its weights were loaded" if is_loaded else "its config alone was read"
    decisions = list(inspect_capabilities(loaded, device))
    lines = [
        title,
        f"({source})",
        *([describe_adapters(loaded)] if lora.is_lora(loaded) else []),
        "",
        _format_decisions(decisions),
        "",
        "chat template",
        template.text,
    ]
    record = {
        "model": model,
        "class": class_name,
        "adapters": bool(adapters),
        "parameters": causal_lm.count_parameters(loaded),
        "dtype": settings.dtype,
        "device": device,
        "weights_loaded": is_loaded,
        "fast_paths": [asdict(decision) for decision in decisions],
        "chat_template": template.text.splitlines(),
        "refused": template.is_refused,
    }
    return ModelExplanation("\n".join(lines), template.is_refused, record)


def _explain_chat_template(model_path: str, settings: ModelSettings) -> ModelExplanation:
    """Describe the chat template with an example, or the reason why it cannot be used."""
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
    """Return the model folder or hub name."""
    path = next(iter(resolve_model_references([model]).values()), model)
    if not path.startswith("models:/"):
        return str(resolve_local_model(path) or path)
    from tasks.tracking import Tracking

    return str(Tracking(tracking_uri, output).registry.resolve_model(path, scratch))


def _load_model(model_path: str, settings: ModelSettings) -> tuple[PreTrainedModel, bool]:
    """Load the model in training mode; return it, and whether it has its weights.

    Large models and hub names are built from their config alone.
    """
    from transformers import AutoModelForCausalLM

    from rl_core.models import causal_lm, lora
    from rl_core.models.adapter_folder import is_adapter_folder

    if is_adapter_folder(model_path):
        return causal_lm.load_without_weights(model_path, settings), False
    weights = list(Path(model_path).expanduser().glob("*.safetensors"))
    if not weights or sum(file.stat().st_size for file in weights) > _MAX_LOADED_BYTES:
        return causal_lm.load_without_weights(model_path, settings), False
    model = causal_lm.load_pretrained(AutoModelForCausalLM, model_path, settings)
    if settings.lora is not None:
        model = lora.add_adapter(model, settings.lora)
    return model.train(), True


def _format_decisions(decisions: list[Decision]) -> str:
    """Format each fast path: its name, the answer, the reason and the fallback."""
    rows = []
    for decision in decisions:
        text = decision.reason
        if decision.is_undecided:
            answer = "trial"
        elif decision.allowed:
            answer = "yes"
        else:
            answer = "no"
            text += f"\n-> {decision.fallback}"
        rows.append((decision.name, answer.ljust(5), text))
    columns = detect_terminal_columns() or _MAX_COLUMNS
    return format_table(None, rows, width=min(_MAX_COLUMNS, max(60, columns)))
