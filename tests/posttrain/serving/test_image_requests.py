"""Images in served chat requests: data URLs, files of a folder, and what is refused."""

import pytest
from helpers.serving import make_folder_of_model, running_server
from helpers.vision import data_url, file_bytes, picture


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(file_bytes(picture(colour="blue")))
    (folder / "secret.png").write_bytes(file_bytes(picture()))
    model = make_folder_of_model(folder / "model", preset="nano_vision")
    with running_server(folder, model, images_folder=str(folder / "pictures")) as server:
        yield server


def parts(*urls):
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [
        {"type": "text", "text": "row 2"}
    ]


def ask(server, content, status=200, **more):
    body = {"model": "small", "messages": [{"role": "user", "content": content}],
            "temperature": 0, "max_tokens": 8, "logprobs": True, **more}  # fmt: skip
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    return response.json()


def read_logprobs(answer):
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def test_an_answer_depends_on_the_picture(seeing):
    red, blue = (ask(seeing, parts(data_url(colour=colour))) for colour in ("red", "blue"))
    assert red["usage"]["prompt_tokens"] == ask(seeing, parts())["usage"]["prompt_tokens"] + 6
    assert read_logprobs(red) != read_logprobs(blue)
    assert read_logprobs(ask(seeing, parts("a.png"))) == read_logprobs(blue)
    two = ask(seeing, parts(data_url(), data_url((32, 16))), stream=False, n=2)
    assert len(two["choices"]) == 2


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://a.b/c.png", "is an address, and nothing is fetched"),
        ("../secret.png", "outside"),
        ("/etc/passwd", "outside"),
        ("file:///etc/passwd", "outside"),
        ("missing.png", "no such file"),
        ("data:image/png;base64,AAAA", "no complete image"),
    ],
)
def test_a_bad_address_is_refused(seeing, url, reason):
    error = ask(seeing, parts(url), 400)["error"]
    assert reason in error["message"] and error["param"] == "messages"


def test_models_of_text_and_servers_without_a_folder_say_so(served, seeing):
    assert "reads no images" in ask(served, parts(data_url()), 400)["error"]["message"]
    folder, seeing.server.prompt_builder._images_folder = (
        seeing.server.prompt_builder._images_folder,
        None,
    )
    try:
        assert "only data URLs" in ask(seeing, parts("a.png"), 400)["error"]["message"]
    finally:
        seeing.server.prompt_builder._images_folder = folder
    ask(served, [{"type": "video", "video": "x"}], 422)
    body = {"model": "small", "prompt": "<|image_pad|> row", "max_tokens": 4}
    response = seeing.client.post("/v1/completions", json=body)
    assert response.status_code == 422 and "tokens of images" in response.text
