"""Causal language models: create from a preset, load from a folder or hub name, save as safetensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from rl_core.data.images import find_image_reader, set_image_reader
from rl_core.data.token_ids import GENERATION_CONFIG, read_generation_settings, set_end_ids
from rl_core.errors import ModelError, SettingsError
from rl_core.models import lora
from rl_core.models.adapter_folder import (
    StoredAdapter,
    build_empty_adapter,
    is_adapter_folder,
    load_adapter,
    merge_adapter,
    read_adapter_folder,
)
from rl_core.models.adapter_targets import describe_adapters
from rl_core.models.cuda_defaults import configure_cuda
from rl_core.models.image_models import (
    KNOWN_FAMILIES,
    attach_image_reader,
    build_from_config,
    build_image_preset_config,
    build_preset_reader,
    find_image_token_ids,
    save_image_processor,
    select_auto_class,
)
from rl_core.models.named_models import find_hub_problem, resolve_local_model
from rl_core.models.portable_files import adapt_config, adapt_tokenizer, write_model_card
from rl_core.models.quiet_loading import quiet_transformers
from rl_core.models.rotary import fix_frequencies, read_config_max_length
from rl_core.settings import ModelSettings
from rl_core.settings.common import PRESETS
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import replace_folder
from rl_core.storage.manifest import verify_while_reading

if TYPE_CHECKING:  # the package takes seconds to import, and many commands load no model
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 16 * 2**20  # real configs have a few KiB
MAX_LAYERS = 10_000  # each costs milliseconds before any weight is read


def resolve_device(settings: ModelSettings) -> torch.device:
    """Resolve `settings.device` on this machine.

    Raises: SettingsError if a GPU is requested but torch sees none.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            "device: 'cuda' is set, but torch sees no GPU here; use 'auto' or 'cpu'"
        )
    device = torch.device(settings.device if settings.device != "auto" else _find_device_type())
    if device.type == "cuda":
        configure_cuda()
    return device


def _find_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(settings: ModelSettings) -> torch.dtype:
    """Return the torch dtype of `settings.dtype`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        settings.dtype
    ]


def count_parameters(model: torch.nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def use_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put every module into eval mode; restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def build_preset_config(
    settings: ModelSettings, vocab_size: int, **token_ids: Any
) -> PreTrainedConfig:
    """Build the configuration of a Llama of `settings.preset`'s shape, or of Qwen2-VL's if it reads images.

    Args:
        token_ids: `pad_token_id` and the like.
    """
    from transformers import LlamaConfig

    if settings.sees_images:
        return build_image_preset_config(settings, vocab_size, **token_ids)
    return LlamaConfig(
        **PRESETS[settings.preset],
        vocab_size=vocab_size,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        **token_ids,
    )


def create_model(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Create a model of `settings.preset`'s shape for this tokenizer, with weights drawn from `seed` alone.

    Weights are drawn on the CPU under a forked generator, so they do not depend on the device and the global random
    state is not changed. Adapters are added if `settings.lora` is set. The tokenizer of a model that reads images gets
    the model's image processor.
    """
    config = build_preset_config(
        settings,
        len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **find_image_token_ids(tokenizer),
    )
    if settings.sees_images:
        set_image_reader(tokenizer, build_preset_reader(tokenizer, config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = build_from_config(config)
        fix_frequencies(model, settings.rope_context)
        if settings.lora is not None:
            model = lora.add_adapter(model, settings.lora)
    return model.to(device=resolve_device(settings), dtype=resolve_dtype(settings)).train()


def load_model(
    path: str | Path,
    settings: ModelSettings,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the causal language model and tokenizer from a folder or hub name.

    Only safetensors weights are read. Adapters are added if `settings.lora` is set, drawn from `seed`. A tokenizer
    without a padding token pads with its end-of-sequence token.

    A folder with an adapter alone (adapter_config.json) names its base model: the adapter is trained on, or merged
    if `settings.lora` is not set.

    Args:
        options: further arguments of `from_pretrained` that place the model, such as a quantisation.
    Raises: ModelError if there is no such model or its files cannot be used.
    """
    tokenizer = load_tokenizer(path, settings)
    quantized = options or lora.build_quantization_options(
        settings.lora, resolve_device(settings), resolve_dtype(settings)
    )
    adapter = read_adapter_folder(path) if is_adapter_folder(path) else None
    base = path if adapter is None else adapter.base
    auto_class = select_auto_class(find_image_reader(tokenizer) is not None)
    model: Any = load_pretrained(auto_class, base, settings, **quantized)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if settings.lora is not None or adapter is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _add_adapter(model, settings, adapter)
    return (model if quantized else model.to(resolve_device(settings))).train(), tokenizer


def _add_adapter(model: Any, settings: ModelSettings, adapter: StoredAdapter | None) -> Any:
    """Add a new adapter or the one of a folder, and log which layers have one; merge it without `settings.lora`."""
    if settings.lora is None:
        assert adapter is not None
        logger.info("%s: its adapter is merged, as model.lora is not set", adapter.path)
        return merge_adapter(model, adapter)
    if adapter is None:
        model = lora.add_adapter(model, settings.lora)
    else:
        model = load_adapter(model, adapter, settings.lora)
        logger.info("%s: its adapter is continued on %s", adapter.path, adapter.base)
    logger.info("%s", describe_adapters(model))
    return model


def load_without_weights(path: str | Path, settings: ModelSettings) -> PreTrainedModel:
    """Build the causal language model of a folder or hub name on the meta device, from its config alone.

    Adapters are added if `settings.lora` is set.
    Raises: ModelError as `load_model`.
    """
    from transformers import AutoConfig

    adapter = read_adapter_folder(path) if is_adapter_folder(path) else None
    source = _resolve_model_path(path)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
        with torch.device("meta"):
            model: Any = build_from_config(
                config, dtype=resolve_dtype(settings), trust_remote_code=settings.trust_remote_code
            )
            fix_frequencies(model, settings.rope_context)
            if settings.lora is not None and adapter is not None:
                model = build_empty_adapter(model, adapter)
            elif settings.lora is not None:
                model = lora.add_adapter(model, settings.lora)
    except SettingsError:
        raise
    except Exception as error:
        raise _build_load_error(source, "config", error) from error
    return model.train()


def load_tokenizer(path: str | Path, settings: ModelSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name, with a padding token and the settings' chat template.

    Raises: ModelError if there is no tokenizer or it has no end-of-sequence token; SettingsError for a chat template
        that cannot be read.
    """
    from transformers import AutoTokenizer

    source = model_source = _resolve_model_path(path)
    if is_adapter_folder(path) and read_adapter_folder(path).has_tokenizer:
        source = str(Path(path).expanduser())
    with verify_while_reading(source, lambda name: not _is_weights_file(name)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                source, trust_remote_code=settings.trust_remote_code
            )
        except Exception as error:
            raise _build_load_error(source, "tokenizer", error) from error
        set_end_ids(tokenizer, _read_generation_settings(source))
        attach_image_reader(tokenizer, model_source)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of '{source}' has no end-of-sequence token (eos_token); it needs one"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    set_chat_template(tokenizer, settings)
    return tokenizer


def _read_generation_settings(source: str) -> dict[str, Any]:
    """Return the generation settings in a model folder or under a hub name."""
    if Path(source).is_dir():
        settings_path = Path(source) / GENERATION_CONFIG
        return read_generation_settings(
            settings_path if settings_path.is_file() else None, Path(source) / "config.json"
        )
    try:
        settings_path = Path(hf_hub_download(source, GENERATION_CONFIG))
    except EntryNotFoundError:  # as many older models
        return read_generation_settings(None, Path(hf_hub_download(source, "config.json")))
    return read_generation_settings(settings_path, settings_path)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, settings: ModelSettings) -> None:
    """Give the tokenizer the chat template of the settings, if they name one.

    Raises: SettingsError if the file cannot be read.
    """
    if settings.chat_template is None:
        return
    try:
        tokenizer.chat_template = (
            Path(settings.chat_template).expanduser().read_text(encoding="utf-8")
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model.chat_template: {settings.chat_template} cannot be read ({error}); name a Jinja file"
        ) from error


def read_context_length(path: str | Path, settings: ModelSettings) -> int:
    """Return the longest sequence in tokens of the model in a folder or under a hub name; 2^20 if its config names
    none.

    Raises: ModelError if there is no such model; SettingsError if `settings.rope_context` does not fit it.
    """
    from transformers import AutoConfig

    source = _resolve_model_path(path)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    except Exception as error:
        raise _build_load_error(source, "config", error) from error
    return read_config_max_length(config, settings.rope_context)


def load_pretrained(
    auto_class: Any,
    path: str | Path,
    settings: ModelSettings,
    *,
    allowed_missing: tuple[str, ...] = (),
    **options: Any,
) -> PreTrainedModel:
    """Call `auto_class.from_pretrained`, restricted to safetensors, with typed errors and the settings' dtype.

    Args:
        allowed_missing: weights that may be missing in the files; transformers initialises them. Other missing
            weights are errors.
    """
    if is_adapter_folder(path):
        raise ModelError(
            f"'{path}' is an adapter, which only a policy can start from; name a folder with a complete model"
        )
    source = _resolve_model_path(path)
    if Path(source).is_dir():
        _check_weight_files(Path(source))
    with verify_while_reading(source, lambda name: _is_weights_file(name) or name == "config.json"):
        try:
            with quiet_transformers():  # what its report lists is checked below
                model, report = auto_class.from_pretrained(
                    source,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below with the name of the weight
                    dtype=resolve_dtype(settings),
                    use_safetensors=True,
                    trust_remote_code=settings.trust_remote_code,
                    **options,
                )
        except Exception as error:
            raise _build_load_error(source, "model", error) from error
    if report["mismatched_keys"]:
        name, file_shape, config_shape = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"the weights in '{source}' do not fit {type(model).__name__}: {name} is {list(file_shape)} in the file, "
            f"but {list(config_shape)} by the config"
        )
    absent = sorted(set(map(str, report["missing_keys"])) - set(allowed_missing))
    if absent:
        raise ModelError(
            f"the weights in '{source}' do not fit {type(model).__name__}: {len(absent)} are missing, first {absent[0]}"
        )
    unused = sorted(map(str, report["unexpected_keys"]))
    if allowed_missing:  # another head replaces the one of the language model
        unused = [name for name in unused if not name.startswith("lm_head.")]
    if unused:
        logger.warning(
            "'%s': %d weights of the files are not part of %s and stay unused, first %s",
            source,
            len(unused),
            type(model).__name__,
            unused[0],
        )
    fix_frequencies(model, settings.rope_context)
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write model and tokenizer into `folder` in Hugging Face format, weights as safetensors.

    With adapters, the folder holds the merged model, which loads without peft, and `adapter/` holds the adapter
    alone. transformers 4 and llama.cpp's converter read it, too. The caller publishes the folder atomically.
    """
    folder = Path(folder)
    with quiet_transformers():
        save_weights(model, folder)
        if lora.is_lora(model):
            model.save_pretrained(folder / "adapter", safe_serialization=True)
    save_tokenizer_and_card(model, tokenizer, folder)
    inject_fault("model.saved")


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write only config and weights, adapters merged."""
    if lora.is_lora(model):
        lora.save_merged(model, folder)
    else:
        model.save_pretrained(folder)
    adapt_config(folder, lora.unwrap_model(model).config)


def save_tokenizer_and_card(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the tokenizer and the model card into a folder with the model's weights."""
    base: Any = lora.unwrap_model(model)
    max_length = read_config_max_length(base.config)
    tokenizer.save_pretrained(folder)
    adapt_tokenizer(folder, max_length)
    save_image_processor(tokenizer, folder)
    parameters = sum(
        parameter.numel() for name, parameter in base.named_parameters() if ".lora_" not in name
    )
    write_model_card(
        folder,
        base,
        tokenizer,
        parameters=parameters,
        max_length=max_length,
        source=base.name_or_path,
    )


def publish_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Save into a folder that appears, or replaces an earlier model, only when it is complete.

    Its `manifest.json` holds the SHA-256 of every file, which `load_model` verifies.
    Raises: CheckpointError if writing fails or the folder holds other files.
    """
    replace_folder(folder, lambda temporary: save(model, tokenizer, temporary), {"kind": "model"})


def _is_weights_file(name: str) -> bool:
    return name.endswith(".safetensors")


def _resolve_model_path(path: str | Path) -> str:
    """Return the folder or hub name of a model, or that of the base model of an adapter's folder.

    A named model or GGUF file is converted into a folder on first use.

    Raises: ModelError if it can only be a folder and is none.
    """
    source = str(path)
    if is_adapter_folder(source):
        base = read_adapter_folder(source).base
        if not is_adapter_folder(base):
            return _resolve_model_path(base)
        raise ModelError(f"'{source}' is an adapter for '{base}', which is itself an adapter")
    local = resolve_local_model(path) or Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(f"'{source}' is a folder without a config.json, not a model folder")
        _check_config(local / "config.json")
        return str(local)
    if (
        isinstance(path, Path)
        or source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or local.exists()
    ):
        hint = " (it is a file)" if local.exists() else ""
        raise ModelError(f"no model folder '{source}'{hint}")
    problem = find_hub_problem(source)
    if problem:
        raise ModelError(
            f"no model folder or cached hub model named '{source}': {problem}; check the name, or download the model "
            "first if this machine is offline"
        )
    try:  # one small request or cache lookup, before the many of loading
        hf_hub_download(source, "config.json")
    except Exception as error:
        raise _build_load_error(source, "config.json", error) from error
    return source


def _check_config(path: Path) -> None:
    """Raise ModelError for a config that would take transformers hours or gigabytes."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(
            f"'{path}' is larger than {MAX_CONFIG_BYTES // 2**20} MiB, too large for a model's config"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"the config '{path}' cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"the config '{path}' is not a JSON object")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, value in section.items():
            if _is_layer_count(name) and isinstance(value, int) and value > MAX_LAYERS:
                raise ModelError(
                    f"the config '{path}' sets {name} to {value}; at most {MAX_LAYERS} are allowed"
                )


def _is_layer_count(name: str) -> bool:
    """Return whether a config's entry counts layers; others are sizes of one (vocab_size_per_layer_input)."""
    return "layer" in name and "per_layer" not in name and not name.endswith(("_size", "_dim"))


def _check_weight_files(folder: Path) -> None:
    """Raise ModelError if a folder holds no safetensors weights."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)
    )
    if pickles:
        raise ModelError(
            f"'{folder}' has its weights in {pickles[0]}, a pickle, which can run code and is never read here; "
            "convert it to safetensors first"
        )
    raise ModelError(f"'{folder}' holds no weights (*.safetensors)")


def _build_load_error(source: str, part: str, error: Exception) -> ModelError:
    """Build a readable error from one that transformers raised."""
    reason = " ".join(str(error).split())[:300]
    if Path(source).is_dir():
        return ModelError(
            f"the {part} in '{source}' cannot be read: {type(error).__name__}: {reason}"
        )
    if "Unrecognized configuration class" in reason:
        reason = f"a kind of model that is not trained here; of those that read images, {KNOWN_FAMILIES} are"
    if "trust_remote_code" in reason:
        return ModelError(
            f"'{source}' needs Python code from the hub; set trust_remote_code: true if you trust it"
        )
    return ModelError(
        f"no model folder or cached hub model named '{source}' ({part}: {type(error).__name__}: {reason}); "
        "check the name, or download the model first if this machine is offline"
    )
