"""Models that read images: their classes, configurations from scratch, and image processors in model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from rl_core.data.images import (
    IMAGE_TOKENS,
    PROCESSOR_FILES,
    ImageReader,
    build_image_reader,
    find_image_reader,
    is_image_config,
    read_processor_settings,
    set_image_reader,
)
from rl_core.errors import DataError, ModelError
from rl_core.settings import ModelSettings
from rl_core.settings.common import IMAGE_ENCODERS, PRESETS
from rl_core.storage.folders import write_folder_file

if TYPE_CHECKING:  # the package takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

KNOWN_FAMILIES = "Qwen2-VL and Qwen2.5-VL"
# Small, as width has the lowest frequencies: with 10^4, neighbouring columns of a small picture look the same.
_ROPE_THETA = 10.0
_MAX_IMAGE_TOKENS = 256  # of a preset's image: a larger one is scaled down


def select_auto_class(reads_images: bool) -> Any:
    """Return transformers' class that loads a model of text, or of images and text."""
    import transformers

    return (
        transformers.AutoModelForImageTextToText
        if reads_images
        else transformers.AutoModelForCausalLM
    )


def build_from_config(config: PreTrainedConfig, **options: Any) -> Any:
    """Build a model with new weights from its configuration."""
    return select_auto_class(is_image_config(config.to_dict())).from_config(config, **options)


def find_image_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the tokens for images of a tokenizer made here, named as in a config; {} = it has none."""
    known = tokenizer.get_vocab()
    if not set(IMAGE_TOKENS) <= known.keys():
        return {}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    return {name: known[token] for name, token in zip(names, IMAGE_TOKENS, strict=True)}


def build_image_preset_config(
    settings: ModelSettings, vocab_size: int, **token_ids: Any
) -> PreTrainedConfig:
    """Build the configuration of a Qwen2-VL of `settings.preset`'s shape; see `causal_lm.build_preset_config`."""
    from transformers import Qwen2VLConfig

    shape, encoder = PRESETS[settings.preset], IMAGE_ENCODERS[settings.preset]
    pairs = shape["hidden_size"] // shape["num_attention_heads"] // 2  # rotated pairs of a head
    sides = 3 * pairs // 8  # of height and of width, as Qwen2-VL divides them
    return Qwen2VLConfig(
        text_config={
            **shape,
            "vocab_size": vocab_size,
            "max_position_embeddings": settings.context,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": _ROPE_THETA,
                "mrope_section": [pairs - 2 * sides, sides, sides],
            },
            **{
                name: token_ids.get(name)
                for name in ("pad_token_id", "bos_token_id", "eos_token_id")
            },
        },
        vision_config={**encoder, "hidden_size": shape["hidden_size"]},
        tie_word_embeddings=True,
        **token_ids,
    )


def build_preset_reader(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> ImageReader:
    """Build the image reader of a preset: images keep their size, up to a limit."""
    values = config.to_dict()
    patch = int(values["vision_config"]["patch_size"])
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {
            "shortest_edge": (2 * patch) ** 2,
            "longest_edge": _MAX_IMAGE_TOKENS * (2 * patch) ** 2,
        },
    }
    return build_image_reader(tokenizer, values, settings)


def attach_image_reader(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Give the tokenizer of a model that reads images its reader; do nothing for other models.

    Args:
        source: model folder or hub name.
    Raises: ModelError if the model's files do not say how it reads images.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(hf_hub_download(source, "config.json")).parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not is_image_config(config):
            return
        if not Path(source).is_dir():
            _download_processor_settings(source)
        set_image_reader(
            tokenizer, build_image_reader(tokenizer, config, read_processor_settings(folder))
        )
    except (DataError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"'{source}' reads images, but not here: {error}") from error


def _download_processor_settings(source: str) -> None:
    for name in PROCESSOR_FILES:
        try:
            hf_hub_download(source, name)
        except EntryNotFoundError:
            continue


def save_image_processor(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the image processor's settings into a model folder, as transformers reads them."""
    reader = find_image_reader(tokenizer)
    if reader is not None:
        text = json.dumps(reader.settings, indent=2, sort_keys=True)
        write_folder_file(folder / PROCESSOR_FILES[0], (text + "\n").encode())
