"""GGUF files on the hub, by OWNER/REPO:QUANTISATION, in programs of their own against a stand-in on loopback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers.gguf_models import build_model
from helpers.hub_stand_in import serve_hub

from rl_core.models.gguf_export import write_gguf_file
from rl_core.models.named_models import is_local_model
from tasks.config import load_settings
from tasks.config.problems import ConfigError

pytest.importorskip("gguf")

RESOLVE = (
    "import sys\n"
    "from rl_core.errors import PosttrainError\n"
    "from rl_core.models.named_models import resolve_local_model\n"
    "for source in sys.argv[1:]:\n"
    "    try:\n"
    "        print(resolve_local_model(source, report=print))\n"
    "    except PosttrainError as error:\n"
    "        print(f'{type(error).__name__}: {error}')\n"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return the stand-in's address, its requests, the model behind its files, and an environment for programs."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    model, tokenizer = build_model()
    files = {}
    for kind in ("f32", "q8_0"):
        write_gguf_file(model, tokenizer, folder / f"{kind}.gguf", kind)
        files[kind] = (folder / f"{kind}.gguf").read_bytes()
    repositories = {
        "me/one-GGUF": {
            "README.md": b"# one",
            "one-Q8_0.gguf": files["q8_0"],
            "mmproj-F16.gguf": b"",
        },
        "me/many-GGUF": {"many-F32.gguf": files["f32"], "many-Q8_0.gguf": files["q8_0"]},
        "me/split-GGUF": {"big-Q8_0-00001-of-00002.gguf": b"", "big-Q8_0-00002-of-00002.gguf": b""},
        "me/folder": {"config.json": b"{}", "extra-Q8_0.gguf": files["q8_0"]},
        "me/cut-GGUF": {"cut-F32.gguf": files["f32"][:5000]},
    }
    with serve_hub(repositories) as (address, requests):
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": address,
            "HF_HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        yield environment, requests, model


def resolve(hub, *sources, **changed):
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *sources],
        capture_output=True,
        text=True,
        env={**hub[0], **changed},
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_file_is_named_by_its_quantisation_its_name_or_alone(hub):
    from safetensors.torch import load_file

    lines = resolve(hub, "me/many-GGUF:f32", "me/many-GGUF:many-F32.gguf", "me/one-GGUF")
    assert lines[0] == "me/many-GGUF: many-F32.gguf from the hub"
    assert lines[1].startswith("many-F32.gguf: llama, 0.1 M parameters, F32; dequantised once")
    assert lines[2] == lines[3]  # the second name of the same file converts nothing
    assert lines[4] == "me/one-GGUF: one-Q8_0.gguf from the hub" and ", Q8_0; deq" in lines[5]
    weights = load_file(f"{lines[2]}/model.safetensors")
    for name, weight in hub[2].state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)
    hub[1].clear()
    assert resolve(hub, "me/many-GGUF:F32", HF_HUB_OFFLINE="1") == [lines[2]]
    assert not hub[1]


def test_what_cannot_be_chosen_is_refused_in_one_line(hub):
    lines = resolve(
        hub,
        "me/many-GGUF",
        "me/many-GGUF:Q4_K_M",
        "me/split-GGUF:Q8_0",
        "me/nobody:Q8_0",
        "me/one-GGUF:F16",
        "me/folder",
        "me/nobody",
    )
    assert lines == [
        "ModelError: 'me/many-GGUF': the repository holds several files '.gguf'; name one of many-F32.gguf, "
        "many-Q8_0.gguf, or its quantisation, as in me/many-GGUF:Q8_0",
        "ModelError: 'me/many-GGUF:Q4_K_M': the repository holds no file 'Q4_K_M'; name one of many-F32.gguf, "
        "many-Q8_0.gguf, or its quantisation, as in me/many-GGUF:Q8_0",
        "ModelError: 'me/split-GGUF:Q8_0': the repository holds this model in 2 parts; download them, join them with "
        "llama.cpp's `llama-gguf-split --merge` and name the file",
        "ModelError: 'me/nobody:Q8_0': the hub does not answer or has no such repository that you may read, and no "
        "copy of the file is cached; check the name, or set model.path to a GGUF file on this machine",
        "ModelError: 'me/one-GGUF:F16': the repository holds no file 'F16'; name one of one-Q8_0.gguf, or its "
        "quantisation, as in me/one-GGUF:Q8_0",
        "None",  # transformers reads it
        "None",
    ]


def test_a_damaged_file_of_the_hub_is_refused_in_one_line(hub):
    report, refused = resolve(hub, "me/cut-GGUF:F32")
    assert report == "me/cut-GGUF: cut-F32.gguf from the hub"
    assert "is not a whole GGUF file" in refused


def test_the_config_takes_the_name(tmp_path):
    assert is_local_model("me/many-GGUF:Q8_0") and not is_local_model("me/many-GGUF")
    text = (
        f"name: tiny\noutput: {tmp_path}/out\nmodel: {{path: PATH}}\n"
        "environment: {name: arithmetic}\nstages: {policy: {algorithm: grpo}}\n"
    )
    (tmp_path / "run.yaml").write_text(text.replace("PATH", "'me/many-GGUF:Q8_0'"))
    assert load_settings(tmp_path / "run.yaml").model.path == "me/many-GGUF:Q8_0"
    (tmp_path / "bad.yaml").write_text(text.replace("PATH", "'many-GGUF:Q8_0'"))
    with pytest.raises(ConfigError, match=r"'many-GGUF:Q8_0' is neither a model folder"):
        load_settings(tmp_path / "bad.yaml")


def test_settings_files_keep_names_of_models(tmp_path):
    from posttrain.settings_files import resolve_model_path

    for name in ("smollm2-135m", "me/many-GGUF:Q8_0", "me/model"):
        assert resolve_model_path("model.path", name, tmp_path) == name
