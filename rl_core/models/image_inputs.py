"""Inputs of a model that reads images: pixels of a batch, and positions by M-RoPE.

B rows, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_core.capabilities import reads_images
from rl_core.errors import DataError, SettingsError
from rl_core.types import ImagePixels, TrainBatch


def compute_image_positions(
    ids: Sequence[int], grids: Sequence[tuple[int, int, int]], image_id: int, merge_size: int
) -> torch.Tensor:
    """Compute the positions of a sequence's tokens in time, height and width.

    Text advances all three by one. The tokens of an image count from the position p after the text before it: frame t,
    row h and column w have (p + t, p + h, p + w), and text continues after the largest of them.
    Args:
        grids: frames, rows and columns of patches of each image, in order; merge_size^2 patches are one token.
        image_id: the token that stands for a part of an image.
    Returns: int64 [3, S].
    Raises: DataError if the image tokens are not those of the images.
    Source: Qwen2-VL, arXiv:2409.12191, section 2.1 (multimodal rotary position embedding).
    """
    parts: list[torch.Tensor] = []
    start = position = 0
    for number, (frames, rows, columns) in enumerate(grids):
        rows, columns = rows // merge_size, columns // merge_size
        count = frames * rows * columns
        first = next((i for i in range(start, len(ids)) if ids[i] == image_id), len(ids))
        end = first + count
        if end > len(ids) or any(token != image_id for token in ids[first:end]):
            raise DataError(f"image {number} has {count} tokens, which the sequence does not hold")
        parts.append(torch.arange(position, position + first - start).expand(3, -1))
        position += first - start
        axes = (torch.arange(size) for size in (frames, rows, columns))
        places_3N = torch.cartesian_prod(*axes).reshape(-1, 3).T
        parts.append(places_3N + position)
        position += max(frames, rows, columns)
        start = end
    if image_id in ids[start:]:
        raise DataError(
            f"the sequence has an image token at {ids.index(image_id, start)} without an image"
        )
    parts.append(torch.arange(position, position + len(ids) - start).expand(3, -1))
    return torch.cat(parts, dim=1)


def build_image_inputs(
    model: Any,
    rows: Sequence[Sequence[int]],
    images: Sequence[Sequence[ImagePixels]],
    width: int,
    *,
    left: bool = False,
) -> dict[str, torch.Tensor]:
    """Build the keyword arguments of a model that reads images, but for the tokens: positions and pixels.

    Args:
        rows: token ids of each row, without padding. images: of each row.
        width: tokens of a padded row; padding has position 0.
        left: rows are padded on the left.
    Raises: DataError as `compute_image_positions`.
    """
    config, weight = model.config, next(model.parameters())
    positions_3BS = torch.zeros(3, len(rows), width, dtype=torch.int64)
    for index, (ids, row_images) in enumerate(zip(rows, images, strict=True)):
        begin = width - len(ids) if left else 0
        positions_3BS[:, index, begin : begin + len(ids)] = compute_image_positions(
            ids,
            [image.grid for image in row_images],
            config.image_token_id,
            config.vision_config.spatial_merge_size,
        )
    inputs = {"position_ids": positions_3BS.to(weight.device)}
    if all_images := [image for row_images in images for image in row_images]:
        pixels_ND = torch.cat([image.pixels_PD for image in all_images])
        inputs["pixel_values"] = pixels_ND.to(weight.device, weight.dtype)
        grids = torch.tensor([image.grid for image in all_images])
        inputs["image_grid_thw"] = grids.to(weight.device)
    return inputs


def build_batch_image_inputs(model: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Build those arguments for a right-padded batch; {} for a model that reads no images.

    Raises: SettingsError for images that the model does not read, or rows of several sequences; DataError as
        `compute_image_positions`.
    """
    if not reads_images(model):
        if any(batch.images):
            raise SettingsError(
                f"{type(model).__name__} reads no images, and rows of this batch have some"
            )
        return {}
    if batch.position_ids_BS is not None:
        raise SettingsError(
            "a model that reads images takes one sequence a row: no packing, no episodes of several contexts"
        )
    lengths = batch.attention_mask_BS.sum(1).tolist()
    rows = [ids[:length] for ids, length in zip(batch.input_ids_BS.tolist(), lengths, strict=True)]
    images = batch.images or [()] * len(rows)
    return build_image_inputs(model, rows, images, batch.input_ids_BS.shape[1])
