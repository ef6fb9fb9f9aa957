"""A tiny policy that reads images, and pictures for it."""

import base64
import io

from PIL import Image

from rl_core.api.policy import create_policy
from rl_core.data.images import encode_image
from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest
from rl_core.settings import SamplingSettings

TEXTS = [
    "what colour is it? answer red",
    "answer green",
    "row 1 column 2 blue yellow 0123456789",
] * 4
SETTINGS = {"preset": "nano_vision", "vocab_size": 300, "context": 256}


def tiny_policy(seed=0, **settings):
    """Create an untrained policy of the shape of Qwen2-VL with 0.06M parameters."""
    return create_policy(TEXTS, {**SETTINGS, **settings}, seed=seed)


def picture(size=(16, 16), colour="red", fill=None):
    """Draw a picture of one colour, with a square of another in its corner."""
    image = Image.new("RGB", size, colour)
    if fill is not None:
        image.paste(fill, (0, 0, size[0] // 2, size[1] // 2))
    return image


def data_url(size=(16, 16), colour="red", fill=None):
    """Draw a picture and return its data URL."""
    return encode_image(picture(size, colour, fill))


def file_bytes(image, kind="PNG", **options):
    """Return the bytes of an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def encode_bytes(content, kind="png"):
    """Return the data URL of any bytes."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def message(text, *urls):
    """Make a user message with images in front of its text."""
    content = "<image>" * len(urls) + text
    return {"role": "user", "content": content, **({"images": list(urls)} if urls else {})}


def serve(policy, conversations, temperature=1.0, tokens=16):
    """Answer conversations as the chat server does; return their sequences."""
    batcher = FallbackBatcher(
        policy.model, slots=4, context=policy.context, eos_ids=policy.renderer.eos_ids,
        pad_id=policy.renderer.pad_id, textless_ids=policy.textless_ids,
    )  # fmt: skip
    sampling = SamplingSettings(temperature=temperature, max_completion_tokens=tokens)
    sequences = [
        AnswerSequence(policy.renderer.prompt_ids(m), n, images=policy.renderer.read_images(m))
        for n, m in enumerate(conversations)
    ]
    requests = [ServedRequest(sequence, sampling) for sequence in sequences]
    batcher.start_requests(requests)
    while not batcher.is_empty:
        batcher.step()
    assert all(request.error is None for request in requests), requests[0].error
    return sequences
