"""Images in chat messages: content parts to text with markers, bounded decoding, pixels as the model reads them.

A message with images has the marker `<image>` in its content at the place of each, and their files as data URLs in
`images`, so that messages stay JSON. `ImageReader` replaces a marker by the model's image tokens and computes the
pixels by transformers' image processor. Pixels follow from the file alone; `ImagePixels.digest` says which they were.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_core.errors import DataError, SettingsError
from rl_core.types import ImagePixels, Message

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase

IMAGE_MARKER = "<image>"
# tokens that a tokenizer made here has for images, named as those of Qwen2-VL
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
FORMATS = ("PNG", "JPEG", "WEBP")
MAX_IMAGE_BYTES = 16 * 2**20  # of a file
MAX_IMAGE_PIXELS = 2**24  # width times height, before it is decoded
MAX_ASPECT_RATIO = 100  # longer side to the shorter one; image processors refuse more
MAX_IMAGES = 64  # of one message
_ORIENTATION = 0x0112  # EXIF tag
_CACHE_BYTES = 256 * 2**20  # of pixels that a reader holds
_ATTRIBUTE = (
    "posttrain_image_reader"  # of a tokenizer; copied and pickled with it, never written by it
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SOURCE_FIELDS = (
    "image",
    "url",
    "path",
    "base64",
)  # of a part of type image, as transformers names them
# Patches of an image are of one of these classes of transformers, by the model's type.
_PROCESSORS = {"qwen2_vl": "Qwen2VLImageProcessorPil", "qwen2_5_vl": "Qwen2VLImageProcessorPil"}


def _import_pillow() -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise SettingsError(
            "images need the package 'pillow', which is not installed: pip install pillow"
        ) from error
    return Image, ImageOps


def encode_data_url(content: bytes) -> str:
    """Return a data URL of an image file's bytes; its type is read from the first bytes."""
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
    kind = next((kind for start, kind in kinds.items() if content.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def encode_image(image: Any) -> str:
    """Return the data URL of an image of Pillow, as PNG. Raises: DataError for one that PNG cannot store."""
    buffer = io.BytesIO()
    try:
        image.save(buffer, format="PNG")
    except (OSError, ValueError) as error:
        raise DataError(f"the image cannot be stored as PNG: {error}") from None
    return encode_data_url(buffer.getvalue())


def encode_thumbnail(url: str, max_side: int) -> bytes:
    """Return an image as PNG, scaled down to `max_side` pixels at most. Raises: DataError."""
    image = decode_image(url)
    image.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def decode_image(url: str) -> Image.Image:
    """Decode a data URL to RGB, upright by its EXIF orientation, transparent parts on white.

    An image that needs no change has its file's `format`.
    Size and format are checked before anything is decoded.
    Raises: DataError saying what is wrong with the file; SettingsError without Pillow.
    """
    image_module, image_ops = _import_pillow()
    head, comma, text = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise DataError("is no data URL (data:image/png;base64,...)")
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise DataError(f"is larger than {MAX_IMAGE_BYTES // 2**20} MiB")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"is not base64: {error}") from None
    try:
        image = image_module.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise DataError(
                f"has {width} x {height} pixels; at most {MAX_IMAGE_PIXELS:,} are allowed"
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise DataError(
                f"has {width} x {height} pixels; one side may be {MAX_ASPECT_RATIO} times the other at most"
            )
        # MPO is a JPEG of a camera with its previews after it, of which the first is the picture.
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise DataError(f"has {image.n_frames} frames; only still images are read")
        if image.mode.startswith(("I", "F")):
            raise DataError(f"has values of mode {image.mode}; save it with 8 bits per value")
        image.load()
        is_opaque = image.mode == "RGB" and not image.has_transparency_data
        if is_opaque and image.getexif().get(_ORIENTATION, 1) == 1:
            return image
        image = image_ops.exif_transpose(image)
        if image.has_transparency_data:
            layers = image.convert("RGBA")
            image = image_module.new("RGBA", layers.size, "white")
            image.alpha_composite(layers)
        return image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds, some from its decoders
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"is no complete image of {', '.join(FORMATS)}: {type(error).__name__}: {reason}"
        ) from None


def load_image(source: object, folder: Path | None) -> str:
    """Return the data URL of an image, which is decoded once to check it; as PNG if it is not RGB or not upright.

    Args:
        source: a data URL, a file, bytes, an image of Pillow, or {"bytes", "path"}, as data sets of the hub store it.
        folder: of relative paths; None = no file is read.
    Raises: DataError.
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes):
        url = encode_data_url(source)
    elif hasattr(source, "save") and hasattr(source, "size"):
        url = encode_image(source)
    elif not isinstance(source, str) or not source:
        raise DataError("must be a file, a data URL or an image")
    elif source.startswith("data:"):
        url = source
    elif source.startswith(("http://", "https://")):
        raise DataError("is an address, and nothing is fetched; name a file or pass a data URL")
    elif folder is None:
        raise DataError("names a file, and only data URLs are read here")
    else:
        url = encode_data_url(
            _read_image_file(folder / Path(source.removeprefix("file://")).expanduser())
        )
    image = decode_image(url)
    is_plain = image.format is not None  # as it is in the file
    return url if is_plain else encode_image(image)


def resolve_inside(address: str, folder: Path) -> Path:
    """Return the file in a folder that an address names. Raises: DataError for one outside, links followed."""
    root = folder.expanduser().resolve()
    try:
        path = (root / address.removeprefix("file://")).resolve()
    except (OSError, ValueError, RuntimeError):
        raise DataError("names no file") from None
    if not path.is_relative_to(root):
        raise DataError(f"names a file outside {folder}, the only folder whose files are read")
    return path


def _read_image_file(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise DataError(f"no such file: {path}")
        with path.open("rb") as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if len(content) > MAX_IMAGE_BYTES:
        raise DataError(f"{path} is larger than {MAX_IMAGE_BYTES // 2**20} MiB")
    return content


def find_image_source(part: Mapping[str, Any]) -> Any:
    """Return what a part of type image or image_url names as its image; None = nothing."""
    if part.get("type") == "image_url":
        address = part.get("image_url")
        return address.get("url") if isinstance(address, Mapping) else address
    name = next((name for name in _SOURCE_FIELDS if part.get(name) is not None), None)
    if name == "base64":
        return f"data:image/png;base64,{part[name]}"
    return None if name is None else part[name]


def is_image_part(part: object) -> bool:
    """Return whether a content part is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def join_parts(parts: Sequence[Any], load: Callable[[int, Any], str]) -> tuple[str, list[str]]:
    """Join the parts of a message's content to its text with markers, and the data URLs of its images.

    A marker that is spelled in a text is broken by a space.
    Args:
        load: returns the data URL of the image of part number n, whose source it gets.
    Raises: DataError for more than MAX_IMAGES images, and what `load` raises; ValueError for a part of another type.
    """
    texts: list[str] = []
    images: list[str] = []
    for number, part in enumerate(parts):
        if is_image_part(part):
            if len(images) == MAX_IMAGES:
                raise DataError(f"has more than {MAX_IMAGES} images")
            images.append(load(number, find_image_source(part)))
            texts.append(IMAGE_MARKER)
        elif (
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            texts.append(
                part["text"].replace(IMAGE_MARKER, f"{IMAGE_MARKER[0]} {IMAGE_MARKER[1:]}")
            )
        else:
            raise ValueError(f"part {number} is neither text nor an image")
    return "".join(texts), images


def join_message_parts(message: Message) -> Message:
    """Return a message whose content is text, images as markers and data URLs; one of text is returned unchanged.

    An image may be a data URL, bytes or an image of Pillow, as an environment has it.
    Raises: ValueError for a part that cannot be read.
    """
    parts: Any = message.get("content")
    if not isinstance(parts, list):
        return message
    try:
        text, images = join_parts(parts, lambda number, source: load_image(source, None))
    except ValueError as error:  # a DataError is one
        raise ValueError(
            f"content of a message of the role {message.get('role')}: {error}"
        ) from error
    joined = cast(Message, {**message, "content": text})
    if images:
        joined["images"] = images
    return joined


def list_named_images(path: Path) -> list[Path]:
    """List the image files that the rows of a JSONL file name, as far as they exist; without errors for bad rows."""
    if path.suffix.lower() != ".jsonl":
        return []
    files: dict[Path, None] = {}
    with path.open("rb") as file:
        for line in file:
            if b'"image' not in line:
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            for source in _iter_sources(row):
                named = path.parent / Path(source.removeprefix("file://")).expanduser()
                with contextlib.suppress(OSError):
                    if not source.startswith(("data:", "http")) and named.is_file():
                        files[named] = None
    return list(files)


def _iter_sources(row: Any) -> Iterator[str]:
    """Yield the texts that name the images of a row: of its parts, and in columns `images`."""
    if isinstance(row, Mapping):
        sources = [find_image_source(row)] if is_image_part(row) else []
        named = row.get("images")
        sources += named if isinstance(named, list) else []
        yield from (source for source in sources if isinstance(source, str) and source)
    for inner in row.values() if isinstance(row, Mapping) else row if isinstance(row, list) else ():
        if isinstance(inner, Mapping | list):
            yield from _iter_sources(inner)


def describe_images(message: Mapping[str, Any]) -> str:
    """Return a text that tells messages with other images apart; "" without images."""
    digests = [hashlib.sha256(url.encode()).hexdigest()[:32] for url in message.get("images", ())]
    return "".join(f" [{IMAGE_MARKER[1:-1]} {digest}]" for digest in digests)


class ImageReader:
    """The image processor of one model, and the tokens that stand for its images; thread-safe."""

    def __init__(
        self, kind: str, settings: Mapping[str, Any], tokens: tuple[str, str, str], merge_size: int
    ) -> None:
        """Store the settings; nothing of Pillow is imported before the first image.

        Args:
            kind: the model's type, as in its config.
            settings: of the image processor, as in preprocessor_config.json.
            tokens: texts of the tokens before an image, for each of its parts, and after it.
            merge_size: patches per side of a part.
        """
        self.kind, self.settings, self.tokens = kind, dict(settings), tokens
        self._merge_size = merge_size
        self._reset_cache()

    def _reset_cache(self) -> None:
        self._processor: Any = None
        self._cache: OrderedDict[str, ImagePixels] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageReader, (self.kind, self.settings, self.tokens, self._merge_size)

    @property
    def digest(self) -> str:
        """SHA-256 of what decides pixels and tokens of an image."""
        decisive = [self.kind, self.settings, self.tokens, self._merge_size]
        text = json.dumps(decisive, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def marker_text(self) -> str:
        """Text that replaces a marker before the template is rendered, with one token for the whole image."""
        return "".join(self.tokens)

    def read_images(self, urls: Sequence[str]) -> list[ImagePixels]:
        """Return the pixels of images. Raises: DataError, SettingsError."""
        return [self._read_image(url) for url in urls]

    def expand_text(self, text: str, images: Sequence[ImagePixels]) -> str:
        """Repeat the token of each image as often as it has parts. Raises: DataError if the template lost an image."""
        pieces = text.split(self.tokens[1])
        if len(pieces) != len(images) + 1:
            raise DataError(
                f"the chat template renders {len(pieces) - 1} of the {len(images)} images of these messages"
            )
        pads = [self.tokens[1] * image.num_tokens for image in images]
        return pieces[0] + "".join(pad + piece for pad, piece in zip(pads, pieces[1:], strict=True))

    def _read_image(self, url: str) -> ImagePixels:
        with self._lock:
            image = self._cache.get(url)
            if image is not None:
                self._cache.move_to_end(url)
                return image
            image = self._process_image(url)
            self._cache[url] = image
            self._num_bytes += image.pixels_PD.nbytes
            while self._num_bytes > _CACHE_BYTES and len(self._cache) > 1:
                self._num_bytes -= self._cache.popitem(last=False)[1].pixels_PD.nbytes
            return image

    def _process_image(self, url: str) -> ImagePixels:
        picture = decode_image(url)
        if self._processor is None:
            import transformers

            # Not the one of torchvision, which rounds otherwise: the same file has the same pixels everywhere.
            self._processor = getattr(transformers, _PROCESSORS[self.kind]).from_dict(self.settings)
        try:
            outputs = self._processor(images=[picture], return_tensors="pt")
        except ValueError as error:
            raise DataError(f"the model's image processor refuses an image: {error}") from None
        pixels_PD, grid = (
            outputs["pixel_values"].float(),
            tuple(outputs["image_grid_thw"][0].tolist()),
        )
        digest = hashlib.sha256(str(grid).encode() + pixels_PD.numpy().tobytes()).hexdigest()
        num_tokens = grid[0] * grid[1] * grid[2] // self._merge_size**2
        return ImagePixels(pixels_PD, grid, num_tokens, digest, url)


def find_image_reader(tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Return the reader of the tokenizer's model; None = it reads no images."""
    return getattr(tokenizer, _ATTRIBUTE, None)


def list_image_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the tokens around and for images; empty for a model that reads none."""
    reader = find_image_reader(tokenizer)
    texts = reader.tokens if reader is not None else ()
    return {cast(int, tokenizer.convert_tokens_to_ids(text)) for text in texts}


def set_image_reader(tokenizer: PreTrainedTokenizerBase, reader: ImageReader) -> None:
    """Give a tokenizer the reader of its model's images."""
    setattr(tokenizer, _ATTRIBUTE, reader)


def build_image_reader(
    tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> ImageReader:
    """Build the reader of a model by its configuration.

    Raises: DataError if the tokenizer lacks the model's image tokens.
    """
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    tokens: list[Any] = [tokenizer.convert_ids_to_tokens(config[name]) for name in names]
    if None in tokens:
        missing = names[tokens.index(None)]
        raise DataError(
            f"the tokenizer has no token {config[missing]} ({missing} of the model's config)"
        )
    merge_size = int(config["vision_config"].get("spatial_merge_size", 2))
    kind = str(config["model_type"])
    return ImageReader(kind, settings, (tokens[0], tokens[1], tokens[2]), merge_size)


def is_image_config(config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration is of a family whose images are read here."""
    return config.get("model_type") in _PROCESSORS and "vision_config" in config


def read_processor_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of the image processor in a model folder. Raises: DataError if there are none."""
    for name in PROCESSOR_FILES:
        path = folder / name
        if path.is_file():
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))
                settings = settings.get("image_processor", settings)
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                raise DataError(f"{path}: is no JSON object: {error}") from None
            if isinstance(settings, dict):
                return settings
    raise DataError(f"{folder}: has no {PROCESSOR_FILES[0]}, which says how the model reads images")
