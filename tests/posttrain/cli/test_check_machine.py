"""Findings of `posttrain check machine`, about the machine and about a model."""

import http.server
import json
import sqlite3
import threading
from importlib import metadata

import pytest
from helpers.chat_templates import OPENS_AND_STRIPS, family
from packaging.requirements import Requirement
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from posttrain.cli import check_machine as doctor
from posttrain.cli import main as cli
from posttrain.cli.check_machine import _check_sandbox
from posttrain.cli.model_capabilities import explain_model
from rl_core.cpu import gemm
from rl_core.environments.subprocess_host import ChildFailed
from rl_core.settings import LoraSettings, ModelSettings


@pytest.fixture(autouse=True)
def no_servers(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    """Serve /health and /api/health with 200, /locked/health with 401, all else with 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            codes = {"/health": 200, "/api/health": 200, "/locked/health": 401}
            self.send_response(codes.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def find_finding(name, *arguments):
    (finding,) = [item for item in doctor.examine_machine(*arguments) if item.name == name]
    return finding


def test_a_machine_that_runs_the_tests_meets_all_requirements(tmp_path, capsys):
    assert cli.main(["check", "machine", "--output", str(tmp_path / "outputs")]) == 0
    out = capsys.readouterr().out
    for name in (
        "python",
        "torch",
        "transformers",
        "prefect",
        "mlflow",
        "threads",
        "memory",
        "disk",
        "mlflow store",
    ):
        assert f"  {name} " in out
    assert out.endswith("all requirements are met\n")
    assert list(tmp_path.iterdir()) == []  # the checks leave no files behind


def test_long_findings_are_wrapped_in_a_terminal_but_not_in_a_file(monkeypatch):
    findings = [doctor.DoctorFinding("cpu code", "note", "many words " * 12, "advice " * 15)]
    monkeypatch.setenv("COLUMNS", "80")
    lines = doctor.format_findings(findings).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > 6
    monkeypatch.delenv("COLUMNS")
    assert (
        len(doctor.format_findings(findings).splitlines()) == 4
    )  # detail, advice, an empty line, the sum


@pytest.mark.parametrize("option", ["--faults", "--repair"])
def test_lists_of_the_doctor_as_json(option, tmp_path, capsys):
    assert cli.main(["check", "machine", option, "--json", "--output", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (
        listed == ["nothing to repair: every run has ended or is alive"]
        if option == "--repair"
        else listed
    )
    if option == "--faults":
        (point,) = [item for item in listed if item["name"] == "gc.store"]
        assert (
            point["run"] == "posttrain store gc --yes"
            and point["meaning"] == "the store has removed its part"
        )


def test_output_that_is_a_file(tmp_path, capsys):
    (tmp_path / "outputs").touch()
    assert cli.main(["check", "machine", "--output", str(tmp_path / "outputs")]) == 1
    out = capsys.readouterr().out
    assert (
        "BAD   output" in out and "is a file" in out and out.endswith("1 requirement is missing\n")
    )


def test_package_versions():
    torch = metadata.version("torch")
    assert doctor._check_package(Requirement("torch>=2"), torch).state == "ok"
    assert doctor._check_package(Requirement("torch>=2"), None).state == "ok"
    other = doctor._check_package(Requirement("torch>=2"), "2.0.1")
    assert other.state == "note" and other.detail == f"{torch}; tested with 2.0.1"
    old = doctor._check_package(Requirement("torch>=99"), None)
    assert old.is_bad and old.detail == f"{torch}; needed >=99"
    missing = doctor._check_package(Requirement("no-such-package>=1"), None)
    assert missing.is_bad and "is not installed; needed >=1" in missing.detail
    assert doctor._check_python(">=99").is_bad and doctor._check_python(">=3.11").state == "ok"


def test_local_part_of_a_version_does_not_differ(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    assert doctor._check_package(Requirement("torch>=2"), "2.13.0").state == "ok"


def test_pins_are_read_from_the_constraints():
    pins = doctor._read_pinned_versions()
    assert {"torch", "prefect", "mlflow", "pyyaml"} <= set(pins)
    assert all(pins.values())


def test_not_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    (finding,) = doctor._check_packages()
    assert finding.is_bad and "make setup" in finding.advice


def test_advice_on_packages_works_in_a_checkout_and_from_a_wheel():
    """A wheel has neither a Makefile nor a constraints.txt in the current folder."""
    advice = "python -m posttrain.install"
    missing = doctor._check_package(Requirement("no-such-package>=1"), None)
    assert (missing.is_bad, missing.advice) == (True, advice)
    outdated = doctor._check_package(Requirement("packaging>=1000"), None)
    assert (outdated.is_bad, outdated.advice) == (True, advice)


def test_disk(tmp_path, monkeypatch):
    for free, state in ((0.5, "bad"), (3, "note"), (50, "ok")):
        usage = type("usage", (), {"free": int(free * doctor.GIB)})
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert doctor._check_disk_space(tmp_path / "outputs").state == state


def test_mlflow_database(tmp_path):
    assert find_finding("mlflow store", tmp_path).detail.endswith(
        "mlflow.db (created on the first run)"
    )
    path = tmp_path / "mlflow" / "mlflow.db"
    path.parent.mkdir()
    path.write_bytes(b"no database" * 1000)
    broken = doctor._check_mlflow_store(None, tmp_path)
    assert broken.is_bad and "not a database" in broken.detail
    path.unlink()
    sqlite3.connect(path).close()
    assert doctor._check_mlflow_store(None, tmp_path).state == "ok"


def test_mlflow_server(tmp_path, server, monkeypatch):
    assert doctor._check_mlflow_store(server, tmp_path).state == "ok"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{server}/locked")
    assert doctor._check_mlflow_store(None, tmp_path).state == "ok"  # requires a token, so it is up
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{server}/other")
    assert "answered 404" in doctor._check_mlflow_store(None, tmp_path).detail
    stopped = doctor._check_mlflow_store("http://127.0.0.1:9", tmp_path)
    assert (
        stopped.is_bad and "no answer" in stopped.detail and "MLFLOW_TRACKING_URI" in stopped.advice
    )


def test_passwords_are_not_shown(tmp_path):
    for uri in ("http://me:secret@127.0.0.1:9", "postgresql+nodriver://me:secret@127.0.0.1:9/db"):
        finding = doctor._check_mlflow_store(uri, tmp_path)
        assert finding.is_bad and "secret" not in finding.detail


def test_prefect_server(server, monkeypatch):
    assert "starts its own" in doctor._check_prefect_api().detail
    monkeypatch.setenv("PREFECT_API_URL", f"{server}/api")
    assert doctor._check_prefect_api() == doctor.DoctorFinding("prefect api", "ok", f"{server}/api")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert doctor._check_prefect_api().is_bad


def test_killed_runs_are_reported(tmp_path, monkeypatch):
    import json

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    events = tmp_path / "demo" / "runs" / "1" / ".tracking" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text(json.dumps({"op": "start", "time": 1, "name": "demo · 1", "key": "k"}) + "\n")
    before = events.read_bytes()
    (reported,) = [
        finding for finding in doctor.examine_machine(tmp_path) if finding.name == "runs"
    ]
    assert reported.state == "note" and reported.detail == "1 run was killed: demo-k"
    assert "--repair" in reported.advice and events.read_bytes() == before
    events.write_bytes(
        before + json.dumps({"op": "end", "time": 2, "status": "FINISHED"}).encode() + b"\n"
    )
    assert [finding for finding in doctor.examine_machine(tmp_path) if finding.name == "runs"] == []


def test_a_model_folder_is_loaded_and_tried(tmp_path, capsys):
    create_tiny_model(tmp_path / "m", family="llama")
    assert (
        cli.main(
            [
                "check",
                "machine",
                "--model",
                str(tmp_path / "m"),
                "--output",
                str(tmp_path / "outputs"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path / 'm'}: LlamaForCausalLM, 0.0 million parameters, float32 on cpu"
    assert lines[1] == "(its weights were loaded)"
    assert "training forward   yes    known family on a CPU" in out
    assert "sequence packing   yes    sequences in one row are separated" in out
    assert (
        cli.main(
            [
                "doctor",
                "--json",
                "--model",
                str(tmp_path / "m"),
                "--output",
                str(tmp_path / "outputs"),
            ]
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    allowed = {path["name"]: path["allowed"] for path in record["fast_paths"]}
    assert (
        record["class"] == "LlamaForCausalLM"
        and allowed["training forward"]
        and not record["refused"]
    )
    assert not (tmp_path / "outputs").exists()


def test_a_config_alone_leaves_trials_open_and_names_fallbacks(tmp_path, capsys):
    folder = create_tiny_model(tmp_path / "m", family="gpt2")
    (folder / "model.safetensors").unlink()
    assert cli.main(["check", "machine", "--model", str(folder), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "(its config alone was read)" in out
    assert (
        "training forward   no     GPT2Model is not of a known family (Llama, Qwen2, Qwen3)\n"
        in out
    )
    assert "                          -> transformers' own forward pass over padded rows\n" in out
    assert "sequence packing   trial  found by a trial run when training starts" in out
    assert all(len(line) <= 100 for line in out.splitlines()[1:])


def test_dtype_and_adapters_are_those_of_the_config(tmp_path):
    folder = create_tiny_model(tmp_path / "m", family="llama")
    settings = ModelSettings(
        dtype="bfloat16", lora=LoraSettings(rank=2, target_modules=("q_proj",))
    )
    text = explain_model(str(folder), settings, tmp_path).text
    assert "LlamaForCausalLM with adapters" in text and "bfloat16 on cpu" in text
    words = " ".join(text.split())
    has_products = gemm.load_bf16_gemm() is not None
    assert ("all in float32, bfloat16 weights are widened" in words) != has_products
    assert ("products round to bfloat16" in words) == has_products
    (folder / "model.safetensors").unlink()
    assert "rollout decoder    yes" in explain_model(str(folder), settings, tmp_path).text


def test_a_registered_model_is_looked_up_in_the_store_of_the_output_folder(tmp_path, monkeypatch):
    calls = []

    class Tracking:
        def __init__(self, uri, output):
            calls.append((uri, output))
            self.registry = self

        def resolve_model(self, reference, cache_folder):
            calls.append(reference)
            assert cache_folder.is_dir() and tmp_path not in cache_folder.parents
            return create_tiny_model(tmp_path / "version", family="llama")

    monkeypatch.setattr("tasks.tracking.Tracking", Tracking)
    text = explain_model("models:/policy@champion", None, tmp_path, "sqlite:///store.db").text
    assert text.startswith("models:/policy@champion: LlamaForCausalLM, ")
    assert calls == [("sqlite:///store.db", tmp_path), "models:/policy@champion"]


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert (
        cli.main(
            ["check", "machine", "--model", str(tmp_path / "nothing"), "--output", str(tmp_path)]
        )
        == 2
    )
    assert f"no model folder '{tmp_path / 'nothing'}'" in capsys.readouterr().err


def create_tiny_model(folder, *, family):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)).save_pretrained(
            folder
        )
    else:
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48)).save_pretrained(folder)
    return folder


def test_the_chat_template_is_examined_with_an_example(tmp_path, capsys):
    folder = create_tiny_model(tmp_path / "m", family="llama")
    family(OPENS_AND_STRIPS, ("<think>", "</think>")).save_pretrained(folder)
    assert cli.main(["check", "machine", "--model", str(folder), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "end of turn  <|im_end|> (written by the template)",
        r"thoughts     the prompt opens '<think>\n'; the policy continues from there and writes </think>",
        "history      not prefix-stable: after a user or tool message the template drops earlier",
        "markers      </think>, <think>",
        "tool_calls   not rendered by the template: written as <tool_call>{...}</tool_call>",
        "date         not printed",
    ):
        assert f"\n{line}" in out, line
    example = out.partition("example")[2].splitlines()[1:]
    heads = [
        (words[0], int(words[1]))
        for words in map(str.split, example)
        if words and words[0] in ("loss", "context")
    ]
    assert [kind for kind, _ in heads] == ["context", "loss", "context", "loss"]
    assert example[-1].endswith("|7<|im_end|>|")
    learned = example[
        next(index for index, line in enumerate(example) if line.startswith("loss")) :
    ]
    assert learned[0].endswith("|I look it up.\\n|"), "the opened <think> belongs to the prompt"


def test_a_template_that_cannot_be_trained_with_is_refused_with_the_way_out(tmp_path, capsys):
    folder = create_tiny_model(tmp_path / "m", family="llama")
    family("{% for m in messages %}{{ m['role'] }}{% endfor %}").save_pretrained(folder)
    assert cli.main(["check", "machine", "--model", str(folder), "--output", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert (
        "BAD   the tokenizer's chat template omits user messages" in out
        and "model.chat_template" in out
    )


@pytest.mark.parametrize(
    ("missing", "state", "parts"),
    [
        ({}, "ok", "files, network, processes, user, limits"),
        (
            {"network": "no namespaces (Operation not permitted)"},
            "note",
            "files, processes, user, limits; not network: no namespaces (Operation not permitted)",
        ),
    ],
)
def test_parts_of_the_sandbox_are_named(monkeypatch, missing, state, parts):
    monkeypatch.setattr("rl_core.environments.subprocess_host.probe_sandbox", lambda: missing)
    finding = _check_sandbox()
    assert (finding.state, finding.detail) == (state, f"of model-written code: {parts}")


def test_a_sandbox_that_does_not_start_is_bad(monkeypatch):
    def fail():
        raise ChildFailed("no memory")

    monkeypatch.setattr("rl_core.environments.subprocess_host.probe_sandbox", fail)
    assert (
        _check_sandbox().is_bad and "no child process starts: no memory" in _check_sandbox().detail
    )
