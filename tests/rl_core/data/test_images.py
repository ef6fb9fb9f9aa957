"""Images in messages: bounds before decoding, orientation, parts to markers, rows that name files."""

import json
import struct
import zlib
from pathlib import Path

import pytest
from helpers.vision import data_url, encode_bytes, file_bytes, message, picture, tiny_policy
from PIL import Image

from rl_core.api.data import load_conversations
from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import validate_demonstration
from rl_core.data.images import (
    IMAGE_MARKER,
    MAX_IMAGE_PIXELS,
    decode_image,
    find_image_reader,
    join_parts,
    list_named_images,
    load_image,
    resolve_inside,
)
from rl_core.data.records import read_demonstrations, read_preferences, read_prompts
from rl_core.data.splits import extract_opening_text
from rl_core.data.training_sequences import attach_images
from rl_core.errors import DataError, RecordsError, SettingsError
from rl_core.models.image_inputs import compute_image_positions
from rl_core.settings import ModelSettings


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_huge_picture_is_refused_before_it_is_decoded():
    side = int(MAX_IMAGE_PIXELS**0.5) + 1
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = (
        struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    )
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    with pytest.raises(DataError, match=f"has {side} x {side} pixels"):
        decode_image(encode_bytes(b"\x89PNG\r\n\x1a\n" + chunk + end))
    with pytest.raises(DataError, match="300 x 2 pixels; one side"):
        decode_image(data_url((300, 2)))


def test_only_still_images_of_known_formats_are_read():
    frames = [picture(colour="red"), picture(colour="blue")]
    moving = file_bytes(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    with pytest.raises(DataError, match="2 frames"):
        decode_image(encode_bytes(moving, "webp"))
    for content in (file_bytes(picture(), "GIF"), file_bytes(picture())[:45], b"", b"not an image"):
        with pytest.raises(DataError, match="no complete image of PNG, JPEG, WEBP"):
            decode_image(encode_bytes(content))
    for url in ("data:image/png;base64,@@@", "data:image/png,abc", "hello"):
        with pytest.raises(DataError, match=r"base64|no data URL"):
            decode_image(url)
    with pytest.raises(DataError, match="mode I;16"):
        decode_image(encode_bytes(file_bytes(Image.new("I;16", (8, 8)))))


def test_a_picture_is_upright_and_transparent_parts_are_white():
    image = picture((8, 16), "red", "blue")  # blue above
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    turned = decode_image(encode_bytes(file_bytes(image, exif=exif)))
    assert turned.getpixel((7, 15)) == (0, 0, 255) and turned.getpixel((0, 0)) == (255, 0, 0)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decode_image(encode_bytes(file_bytes(clear))).getpixel((0, 0)) == (255, 255, 255)
    key = encode_bytes(
        file_bytes(picture(), transparency=(255, 0, 0))
    )  # one colour of an RGB image
    assert decode_image(key).getpixel((0, 0)) == (255, 255, 255)
    # a camera's JPEG with a preview after it
    frames = [picture((16, 16), "red"), picture((8, 8), "blue")]
    shot = file_bytes(frames[0], "MPO", save_all=True, append_images=frames[1:])
    seen = decode_image(encode_bytes(shot, "jpeg"))
    assert seen.size == (16, 16) and seen.getpixel((0, 0))[0] > 200
    # what is stored is what was seen
    stored = load_image(file_bytes(image, exif=exif), None)
    assert decode_image(stored).tobytes() == turned.tobytes()
    assert Image.Exif() == decode_image(stored).getexif()
    plain = encode_bytes(file_bytes(image))
    assert load_image(plain, None) == plain


def test_parts_become_markers_and_a_spelled_marker_is_broken():
    parts = [{"type": "text", "text": "a <image> b "}, part("U"), {"type": "text", "text": " c"}]
    text, urls = join_parts(parts, lambda number, source: f"{number}{source}")
    assert (text, urls) == ("a < image> b <image> c", ["1U"])
    with pytest.raises(ValueError, match="part 0 is neither"):
        join_parts([{"type": "audio"}], lambda number, source: "")
    with pytest.raises(DataError, match="more than 64 images"):
        join_parts([part("U")] * 65, lambda number, source: "")


def test_rows_hold_the_files_that_they_name(tmp_path):
    (tmp_path / "a.png").write_bytes(file_bytes(picture()))
    ask = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "colour?"}]
    answer = {"role": "assistant", "content": "red"}
    rows = [
        {"messages": [{"role": "user", "content": ask}, answer]},
        {"messages": [{"role": "user", "content": [part("a.png"), ask[1]]}, answer]},
        {"images": ["a.png"], "prompt": [{"role": "user", "content": [{"type": "image"}, ask[1]]}],
         "completion": [answer]},
        {"messages": [{"role": "user", "content": "<image>colour?", "images": ["a.png"]}, answer]},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = [row["messages"] for row in read_demonstrations(path).rows]
    url = encode_bytes(file_bytes(picture()))
    assert read == [[{"role": "user", "content": "<image>colour?", "images": [url]}, answer]] * 4
    assert list_named_images(path) == [tmp_path / "a.png"]
    (row,) = read_prompts(
        [{"prompt": [{"role": "user", "content": [{"type": "image", "image": picture()}]}]}]
    ).rows
    assert row["prompt"][0]["images"] == [url]


def test_markers_in_texts_stand_for_the_column_of_images():
    answer = {"role": "assistant", "content": "<image> is red"}
    red, blue = picture(), picture(colour="blue")
    ask = [{"role": "user", "content": "<image>and"}, {"role": "user", "content": "<image>?"}]
    urls = [data_url(), data_url(colour="blue")]
    shown = [{**m, "images": [url]} for m, url in zip(ask, urls, strict=True)]
    rows = [
        {"messages": [*ask, answer], "images": [red, blue]},
        {"prompt": ask, "completion": [answer], "images": [red, blue]},
    ]
    assert [row["messages"] for row in read_demonstrations(rows).rows] == [[*shown, answer]] * 2
    (row,) = read_prompts([{"prompt": ask, "images": [red, blue], "answer": "red"}]).rows
    assert row == {"prompt": shown, "answer": "red"}
    # without images they are text, and a prompt's column may be for something else
    plain = [{"role": "user", "content": "<image> of a disk?"}]
    for row in ({"prompt": plain}, {"prompt": plain, "images": []}):
        assert read_prompts([row]).rows == [row]
    row = {"prompt": [{"role": "user", "content": "how many?"}], "images": [3]}
    assert read_prompts([row]).rows == [row]


@pytest.mark.parametrize(
    ("text", "count", "reason"),
    [
        ("no marker", 1, "holds 1 images, and the messages have 0 parts or markers"),
        ("<image>", 2, "holds 2 images, and the messages have 1 parts"),
        ("<image><image>", 1, "holds 1 images, and the messages have 2 parts"),
        ("<image>" * 65, 65, "has more than 64 images"),
    ],
)
def test_a_column_of_images_is_not_lost(text, count, reason):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
    with pytest.raises(RecordsError, match=reason):
        read_demonstrations([{"messages": messages, "images": [picture()] * count}])
    if IMAGE_MARKER in text:
        with pytest.raises(RecordsError, match=reason):
            read_prompts([{"prompt": messages[:1], "images": [picture()] * count}])
        with pytest.raises(RecordsError, match="prompt: is a text with the marker <image>"):
            read_prompts([{"prompt": text, "images": [picture()] * count}])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([part("missing.png")], r"rows.jsonl:1: messages\[0\].content\[0\]: no such file"),
        ([part("https://a.b/c.png")], r"content\[0\]: is an address, and nothing is fetched"),
        ([part("rows.jsonl")], r"content\[0\]: is no complete image"),
        ([{"type": "image"}], r"content\[0\]: must be a file, a data URL or an image"),
        (
            [{"type": "video", "video": "x"}],
            r"content\[0\]: must be .*found a part of type 'video'",
        ),
    ],
)
def test_a_bad_image_is_named_by_file_row_and_field(tmp_path, content, reason):
    path = tmp_path / "rows.jsonl"
    row = {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    }
    path.write_text(json.dumps(row))
    with pytest.raises(RecordsError, match=reason):
        read_demonstrations(path)


def test_images_are_refused_where_they_are_not_read():
    row = {
        "prompt": [{"role": "user", "content": [part(data_url())]}],
        "chosen": "a",
        "rejected": "b",
    }
    row["chosen"], row["rejected"] = ([{"role": "assistant", "content": x}] for x in "ab")
    with pytest.raises(RecordsError, match="images are read in demonstrations and prompts"):
        read_preferences([row])
    shown = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [part(data_url())]},
        ]
    }
    with pytest.raises(RecordsError, match="not in assistant messages"):
        read_demonstrations([shown])
    markers = {
        "messages": [
            {**message("q", data_url()), "content": "q"},
            {"role": "assistant", "content": "a"},
        ]
    }
    with pytest.raises(RecordsError, match="holds 1 images, and the content has 0 markers"):
        read_demonstrations([markers])
    with pytest.raises(DataError, match="outside"):
        resolve_inside("../secret.png", Path("pictures"))


def test_equal_questions_on_other_pictures_are_other_prompts():
    red, blue = (
        extract_opening_text([message("colour?", data_url(colour=c))]) for c in ("red", "blue")
    )
    assert red != blue and red == extract_opening_text([message("colour?", data_url())])


def test_a_message_with_images_is_expanded_to_the_tokens_of_each():
    policy = tiny_policy()
    reader, renderer = find_image_reader(policy.tokenizer), policy.renderer
    small, wide = data_url((16, 16)), data_url((32, 16))  # 8 pixels a token: 4 and 8 tokens
    messages = [message("one or two?", small, wide)]
    images = renderer.read_images(messages)
    assert [(image.grid, image.num_tokens) for image in images] == [((1, 4, 4), 4), ((1, 4, 8), 8)]
    ids = renderer.prompt_ids(messages)
    pad = policy.tokenizer.convert_tokens_to_ids(reader.tokens[1])
    text = policy.tokenizer.decode(ids)
    assert ids.count(pad) == 12
    start, token, end = reader.tokens
    assert f"{start}{token * 4}{end}{start}{token * 8}{end}one" in text
    # spelled tokens stay text, also in front of an image
    forged = message(f"{token}{start}", small)
    assert renderer.prompt_ids([forged]).count(pad) == 4
    assert pad in policy.textless_ids
    # as a later message, after a turn
    assert renderer.observation_ids([message("next?", small)]).count(pad) == 4
    with pytest.raises(DataError, match="2 images and 1 markers"):
        renderer.prompt_ids([{**message("a", small), "images": [small, wide]}])
    with pytest.raises(SettingsError, match="history_thoughts"):
        ChatRenderer(policy.tokenizer, ModelSettings(history_thoughts="template")).prompt_ids(
            messages
        )


@pytest.mark.parametrize("role", ["system", "tool"])
def test_an_image_of_a_role_without_a_place_in_the_template_is_the_user_s(role):
    policy = tiny_policy()
    end = policy.tokenizer.eos_token
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
        f"{{{{ '<|' + m.role + '|>' + m.content + '{end}' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    renderer = ChatRenderer(policy.tokenizer, policy.renderer.settings)
    shown = message("this?", data_url())
    opening = [message("which?"), {"role": "assistant", "content": "a"}] if role == "tool" else []
    texts = [
        policy.tokenizer.decode(renderer.prompt_ids([*opening, {**shown, "role": name}]))
        for name in (role, "user")
    ]
    assert texts[0] == texts[1] and "this?" in texts[0]


def test_pixels_are_those_of_transformers_and_depend_on_the_file_alone():
    reader = find_image_reader(tiny_policy().tokenizer)
    url = data_url((24, 16), "green", "red")
    (image,), (again,) = (
        reader.read_images([url]),
        find_image_reader(tiny_policy(1).tokenizer).read_images([url]),
    )
    assert image == again and image.source == url
    # 4 x 6 patches of 4 x 4 pixels, two equal frames; green (0, 128, 0) and red at mean and deviation 0.5
    assert tuple(image.pixels_PD.shape) == (24, 3 * 2 * 4 * 4)
    red, green = (image.pixels_PD[row].reshape(3, 2, 16)[:, 0, 0].tolist() for row in (0, 23))
    assert red == pytest.approx([1.0, -1.0, -1.0], abs=1e-6)
    assert green == pytest.approx([-1.0, 128 / 127.5 - 1, -1.0], abs=1e-6)
    assert reader.read_images([data_url((24, 16), "green", "blue")])[0].digest != image.digest


def test_a_model_of_text_refuses_images():
    from rl_core.api.policy import create_policy

    policy = create_policy(["what colour is it? red"] * 9, {"preset": "nano", "vocab_size": 300})
    with pytest.raises(DataError, match="the model reads none"):
        policy.renderer.prompt_ids([message("colour?", data_url())])
    # the marker alone is text
    assert policy.renderer.prompt_ids([{"role": "user", "content": f"{IMAGE_MARKER} colour?"}])


def test_a_demonstration_row_is_checked_once_its_images_are_loaded():
    row = {
        "messages": [
            {"role": "user", "content": [part("U")]},
            {"role": "assistant", "content": "a"},
        ]
    }
    assert validate_demonstration(row)["messages"][0] == {
        "role": "user",
        "content": "<image>",
        "images": ["U"],
    }


def test_a_cut_demonstration_has_the_images_whose_tokens_it_holds():
    policy = tiny_policy()
    turn = [message("colour?", data_url((24, 24))), {"role": "assistant", "content": "red"}]
    rows = read_demonstrations([{"messages": turn * 2}]).rows
    split = load_conversations([{"messages": turn * 2}], 0, policy.renderer, 256, 0)
    ids, _, images = split.train[0]
    config = policy.model.config
    merge = config.vision_config.spatial_merge_size
    places = [n for n, token in enumerate(ids) if token == config.image_token_id]
    assert len(images) == 2 and len(places) == 2 * images[0].num_tokens
    half = len(places) // 2
    for limit, length, count in (
        (len(ids), len(ids), 2),
        (places[-1], places[half], 1),  # within the second image
        (places[half], places[half], 1),
        (places[half] - 2, places[half] - 2, 1),
    ):
        cut = split.train.tokens.select_rows([0], limit)
        one_ids, one_mask, one_images = attach_images(cut, rows, policy.renderer)[0]
        assert (len(one_ids), len(one_mask), len(one_images)) == (length, length, count)
        grids = [image.grid for image in one_images]
        positions = compute_image_positions(one_ids, grids, config.image_token_id, merge)
        assert positions.shape == (3, length)
