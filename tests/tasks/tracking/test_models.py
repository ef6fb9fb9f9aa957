"""Model versions: stored models load with transformers, mlflow.transformers and pyfunc, and contain no pickle."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, SettingsError
from rl_core.models.heads import score_rows
from rl_core.storage import faults
from tasks.tracking import check_model_folder, digest_model

PROMPT = "what colour"


@pytest.fixture(scope="module")
def versions(tracking, models, tmp_path_factory):
    """Register two versions of a policy (the second with other weights) and one of a reward model."""
    folder = tmp_path_factory.mktemp("run")
    other = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(models["policy"], other)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(other)
    with tracking.start_run("models", folder) as run:
        tags = {"stage": "sft", "data_digest": "d1", "absent": None}
        first = run.log_model(
            models["policy"], "policy", "policy", metrics={"eval/success_rate": 0.4}, tags=tags
        )
        same = run.log_model(models["policy"], "policy", "policy", tags=tags)
        second = run.log_model(
            other, "policy", "policy", tags={"stage": "policy", "parent_version": first}
        )
        reward = run.log_model(
            models["reward_model"], "reward_model", "rewards", input_example="a b"
        )
    # the same bytes from the same run are the same version
    assert (first, same, second, reward) == (
        1,
        1,
        2,
        1,
    )
    return {"run": run, "other": other}


def test_the_stored_files_are_those_of_the_stage_and_hold_no_pickle(
    tracking, models, versions, tmp_path
):
    folder = tracking.resolve_model("models:/policy/1", tmp_path)
    assert digest_model(folder) == digest_model(models["policy"])
    artifact = Path(folder).parent
    names = {
        path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()
    }
    assert {"MLmodel", "requirements.txt", "input_example.json", "model/model.safetensors"} <= names
    assert "components/tokenizer/tokenizer.json" in names
    for path in artifact.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:2]
            assert head != b"PK" and not (
                head[:1] == b"\x80" and head[1:] in b"\x02\x03\x04\x05"
            ), path
            assert path.suffix not in (".pkl", ".pt", ".bin", ".py")
    text = (artifact / "MLmodel").read_text()
    assert "signature" in text and str(models["policy"].parent) not in text


def test_transformers_loads_the_downloaded_artifact(tracking, models, versions, tmp_path):
    import mlflow.artifacts
    from transformers import AutoModelForCausalLM, AutoTokenizer

    version = tracking.store.client.get_model_version("policy", "1")
    downloaded = mlflow.artifacts.download_artifacts(
        artifact_uri=version.source, dst_path=str(tmp_path / "d"), tracking_uri=tracking.store.uri
    )
    model = AutoModelForCausalLM.from_pretrained(f"{downloaded}/model")
    tokenizer = AutoTokenizer.from_pretrained(f"{downloaded}/model")
    original = AutoModelForCausalLM.from_pretrained(models["policy"])
    assert tokenizer.decode(tokenizer(PROMPT).input_ids) == PROMPT and tokenizer.chat_template
    for (name, left), (_, right) in zip(
        model.state_dict().items(), original.state_dict().items(), strict=True
    ):
        assert torch.equal(left, right), name


def test_mlflow_loads_policies_and_reward_models(tracking, models, versions, monkeypatch):
    import mlflow
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
    registry, before = tracking.registry, mlflow.get_tracking_uri()
    policy_uri = str(
        Path(registry.download_version(registry.fetch_version("policy", 1), Path("unused"))).parent
    )
    reward_uri = str(
        Path(registry.download_version(registry.fetch_version("rewards", 1), Path("unused"))).parent
    )
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    inputs = tokenizer(PROMPT, return_tensors="pt")
    reference = AutoModelForCausalLM.from_pretrained(models["policy"])
    tokens = reference.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=4, do_sample=False
    )
    expected = tokenizer.decode(tokens[0], skip_special_tokens=True)
    pipeline = mlflow.transformers.load_model(policy_uri)
    assert pipeline(PROMPT, max_new_tokens=4, do_sample=False)[0]["generated_text"] == expected
    head = AutoModelForSequenceClassification.from_pretrained(models["reward_model"])
    with torch.no_grad():
        reward = float(head(**tokenizer(PROMPT, return_tensors="pt")).logits)
    # The raw reward, not the sigmoid that the pipeline applies by default.
    scored = mlflow.pyfunc.load_model(reward_uri).predict([{"text": PROMPT}])
    assert mlflow.transformers.load_model(reward_uri)(PROMPT, function_to_apply="none")[0][
        "score"
    ] == pytest.approx(reward, abs=1e-5)
    assert float(scored["score"][0]) == pytest.approx(reward, abs=1e-5)
    assert mlflow.get_tracking_uri() == before


def test_a_registered_policy_answers_messages(tracking, models, versions, monkeypatch):
    """pyfunc and the server of `mlflow models serve` render messages with the chat template, once."""
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    registry = tracking.registry
    folder = registry.download_version(registry.fetch_version("policy", 1), Path("unused")).parent
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    model = AutoModelForCausalLM.from_pretrained(models["policy"])
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    num_prompt = prompt["input_ids"].shape[1]
    expected = tokenizer.decode(tokens[0, num_prompt:], skip_special_tokens=True).strip()
    function = mlflow.pyfunc.load_model(str(folder))
    # the most likely token alone
    request = {"messages": messages, "max_tokens": 4, "top_k": 1}
    answer = function.predict(request)[0]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert function.metadata.signature.inputs.input_names()[0] == "messages"
    client = TestClient(scoring_server.init(function))
    response = client.post("/invocations", json=request)
    assert response.status_code == 200, response.text
    served = response.json()
    served = served[0] if isinstance(served, list) else served
    assert served["choices"][0]["message"]["content"] == expected
    answers = {
        function.predict({"messages": messages, "max_tokens": 8})[0]["choices"][0]["message"][
            "content"
        ]
        for _ in range(4)
    }
    assert len(answers) > 1  # sampled, so that a request's temperature counts


@pytest.fixture(scope="module")
def chat_reward_model(tracking, models, tmp_path_factory):
    """Register a reward model with this project's chat template, and one without any; return both artifacts."""
    artifacts = {}
    for name in ("template", "plain"):
        folder = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(models["reward_model"], folder)
        (folder / "chat_template.jinja").unlink()
        tokenizer = train_tokenizer(["what colour is the cell"], 280)
        if name == "plain":
            tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        with tracking.start_run(name, tmp_path_factory.mktemp("run")) as run:
            version = run.log_model(folder, "reward_model", f"rewards-{name}")
        registry = tracking.registry
        fetched = registry.fetch_version(f"rewards-{name}", version)
        artifacts[name] = registry.download_version(fetched, Path("unused")).parent
    return artifacts


CONVERSATION = [
    {"role": "system", "content": "what"},
    {"role": "user", "content": "the cell"},
    {"role": "assistant", "content": "colour"},
    {"role": "user", "content": PROMPT},
    {"role": "assistant", "content": "the colour is"},
]


def test_a_registered_reward_model_scores_messages(chat_reward_model, monkeypatch):
    """Check that pyfunc and the server score the token ids of training, in each form of the input."""
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = chat_reward_model["template"]
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(folder / "model"))
    head = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    pair = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "colour"}]
    ids = [renderer.encode_conversation(messages)[0] for messages in (CONVERSATION, pair)]
    ids.append(renderer.tokenizer(PROMPT)["input_ids"])
    long, short, plain = score_rows(head, ids, pad_id=0)
    assert len({round(value, 5) for value in (long, short, plain)}) == 3
    function = mlflow.pyfunc.load_model(str(folder))

    def predict(data):
        return [pytest.approx(value, abs=1e-5) for value in function.predict(data)["score"]]

    assert [long] == predict({"messages": CONVERSATION})
    assert [short] == predict({"prompt": PROMPT, "completion": "colour"})
    mixed = [
        {"messages": CONVERSATION},
        {"messages": None, "prompt": PROMPT, "completion": "colour"},
        {"messages": None, "text": PROMPT},
        {"messages": pair},
    ]
    assert [long, short, plain, short] == predict(mixed)
    assert function.metadata.signature.inputs.input_names() == [
        "messages",
        "prompt",
        "completion",
        "text",
    ]
    client = TestClient(scoring_server.init(function))

    def invoke(body):
        response = client.post("/invocations", json=body)
        assert response.status_code == 200, response.text
        values = response.json()
        rows = values["predictions"] if isinstance(values, dict) else values
        assert {row["label"] for row in rows} == {"LABEL_0"}
        return [pytest.approx(row["score"], abs=1e-5) for row in rows]

    assert [long] == invoke({"messages": CONVERSATION})
    assert [long, short, plain, short] == invoke({"dataframe_records": mixed})
    example = json.loads((folder / "serving_input_example.json").read_text())
    assert len(invoke(example)) == 1
    for row, message in (
        ({"messages": CONVERSATION[:-1]}, "row 0: the last message must be the assistant's"),
        ({"prompt": PROMPT}, "row 0: expected messages, .* found prompt"),
        ([{"text": "a"}, {"completion": "b"}], "row 1: .* found completion"),
    ):
        with pytest.raises(ValueError, match=message):
            function.predict(row)


def test_a_reward_model_without_a_template_scores_texts(chat_reward_model, monkeypatch):
    import mlflow
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = chat_reward_model["plain"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert not tokenizer.chat_template and not (folder / "code").exists()
    head = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    (expected,) = score_rows(head, [tokenizer(PROMPT)["input_ids"]], pad_id=0)
    (scored,) = mlflow.pyfunc.load_model(str(folder)).predict([PROMPT])["score"]
    assert scored == pytest.approx(expected, abs=1e-5)


def test_lineage_metrics_and_links(tracking, models, versions):
    run_id = versions["run"].run_id
    first, second = tracking.list_versions("policy")
    assert (first.version, second.version) == (1, 2) and first.run_id == run_id
    assert (
        first.tags["stage"] == "sft"
        and first.tags["data_digest"] == "d1"
        and "absent" not in first.tags
    )
    assert (
        first.tags["model_digest"] == digest_model(models["policy"]) != second.tags["model_digest"]
    )
    assert second.tags["parent_version"] == "1"
    run = tracking.store.client.get_run(run_id)
    assert len(run.outputs.model_outputs) == 3
    logged = tracking.store.client.get_logged_model(run.outputs.model_outputs[0].model_id)
    metrics = {
        metric.key: metric.value
        for output in run.outputs.model_outputs
        for metric in tracking.store.client.get_logged_model(output.model_id).metrics or []
    }
    assert metrics == {"eval/success_rate": 0.4} and logged.status.value == "READY"
    assert (
        tracking.store.client.get_model_version("policy", "1").description
        == "sft: eval/success_rate 0.4"
    )


def test_a_model_adds_no_point_to_the_curves_of_its_run(tracking, models, tmp_path):
    """Its loss is that of step 2; its mean of three steps is no point of the curve and is left out."""
    with tracking.start_run("curves", tmp_path / "run") as run:
        for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5)):
            run.log_metrics({"eval/loss": loss, "reward/mean": float(step)}, step)
        metrics = {"eval/loss": 2.0, "reward/mean": 1.5, "reward/alone": 0.25}
        run.log_model(models["policy"], "policy", "curves", metrics=metrics)
    client = tracking.store.client
    history = client.get_metric_history(run.run_id, "eval/loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 3), (2, 2), (3, 2.5)]
    history = client.get_metric_history(run.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 1), (2, 2), (3, 3)]
    assert client.get_run(run.run_id).data.metrics["reward/mean"] == 3.0  # the newest
    (point,) = client.get_metric_history(run.run_id, "reward/alone")
    assert (point.step, point.value) == (3, 0.25)
    (output,) = client.get_run(run.run_id).outputs.model_outputs
    logged = client.get_logged_model(output.model_id)
    del metrics["reward/mean"]
    assert {metric.key: metric.value for metric in logged.metrics} == metrics


def test_a_logged_model_links_to_its_registered_versions(tracking, models, versions):
    """As the tag that MLflow's server sets, and its page of a logged model reads; a database does not set it."""
    client, run = tracking.store.client, versions["run"]
    outputs = client.get_run(run.run_id).outputs.model_outputs
    tags = [client.get_logged_model(output.model_id).tags for output in outputs]
    links = {tag["mlflow.modelVersions"]: tag["model_digest"] for tag in tags}
    digests = {
        json.dumps([{"name": version.name, "version": str(version.version)}]): version.tags[
            "model_digest"
        ]
        for name in ("policy", "rewards")
        for version in tracking.list_versions(name)
        if version.run_id == run.run_id
    }
    assert links == digests and len(links) == 3


def test_a_version_that_a_killed_delivery_left_without_its_link_gets_it(tracking, models, tmp_path):
    with tracking.start_run("linked", tmp_path / "run") as run:
        run.log_model(models["policy"], "policy", "linked")
    (output,) = tracking.store.client.get_run(run.run_id).outputs.model_outputs
    tracking.store.client.delete_logged_model_tag(output.model_id, "mlflow.modelVersions")
    with tracking.start_run("linked", tmp_path / "run") as run:
        assert run.log_model(models["policy"], "policy", "linked") == 1
        run.log_model(models["policy"], "policy", "linked")
    tags = tracking.store.client.get_logged_model(output.model_id).tags
    assert json.loads(tags["mlflow.modelVersions"]) == [{"name": "linked", "version": "1"}]


def test_aliases_move(tracking, versions):
    assert (
        tracking.find_champion("policy") is None
        and tracking.find_champion("never-heard-of") is None
    )
    tracking.set_champion("policy", 1)
    tracking.set_challenger("policy", 2)
    assert tracking.find_champion("policy").version == 1
    assert tracking.list_versions("policy")[1].aliases == ("challenger",)
    tracking.set_champion("policy", 2)
    assert tracking.find_champion("policy").version == 2
    assert [version.aliases for version in tracking.list_versions("policy")] == [(), ("champion",)]
    # it was compared with one that is champion no more
    assert not tracking.replace_champion("policy", 1, before=1)
    assert not tracking.replace_champion("policy", 1, before=None)
    assert tracking.find_champion("policy").version == 2
    assert tracking.replace_champion("policy", 1, before=2)
    tracking.set_champion("policy", 1)  # rolling back
    assert tracking.find_champion("policy").version == 1
    tracking.tag_version("policy", 1, {"gate.reason": "better", "x": None})
    assert tracking.registry.fetch_version("policy", 1).tags["gate.reason"] == "better"


def test_references(tracking, models, versions, tmp_path, monkeypatch):
    tracking.set_champion("policy", 1)
    champion = tracking.resolve_model("models:/policy@champion", tmp_path)
    assert digest_model(champion) == digest_model(models["policy"])
    assert digest_model(tracking.resolve_model("models:/policy/latest", tmp_path)) == digest_model(
        versions["other"]
    )
    assert tracking.resolve_model(str(models["policy"]), tmp_path) == models["policy"].resolve()
    assert tracking.resolve_model("org/some-model", tmp_path) == "org/some-model"
    assert not list(tmp_path.iterdir())  # a local store's files are read where they are
    # as from a server
    monkeypatch.setattr("tasks.tracking.registry._resolve_local_folder", lambda location: None)
    for _ in range(2):
        copied = tracking.resolve_model("models:/policy@champion", tmp_path)
        assert tmp_path in copied.parents and digest_model(copied) == digest_model(models["policy"])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("models:/polici@champion", "no registered model 'polici' .* did you mean 'policy'"),
        ("models:/polici/1", "did you mean 'policy'"),
        ("models:/polici/latest", "did you mean 'policy'"),
        ("models:/policy@champoin", "no version with alias 'champoin'; did you mean 'champion'"),
        ("models:/policy/9", "has no version 9; versions: 1, 2"),
        ("models:/policy", "must be models:/NAME@ALIAS"),
        ("models:/../x/1", "must be models:/NAME@ALIAS"),
        ("./nowhere", "does not exist"),
        ("a/b/c", "does not exist"),
    ],
)
def test_references_that_lead_nowhere(tracking, versions, tmp_path, reference, message):
    tracking.set_champion("policy", 1)
    with pytest.raises(SettingsError, match=message):
        tracking.resolve_model(reference, tmp_path)


def test_a_folder_that_is_no_model(tracking, tmp_path):
    with pytest.raises(SettingsError, match=r"config\.json is missing"):
        tracking.resolve_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.pt", b"x"),
        ("extra.pkl", b"x"),
        ("harmless.json", b"\x80\x04\x95"),
        ("archive.json", b"PK\x03\x04"),
        ("inner/modeling.py", b"import os"),
    ],
)
def test_pickles_and_code_are_refused(models, tmp_path, name, content):
    folder = tmp_path / "model"
    shutil.copytree(models["policy"], folder)
    check_model_folder(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=Path(name).name):
        check_model_folder(folder)


def test_a_refused_model_leaves_no_version(tracking, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models["policy"], folder)
    (folder / "x.pkl").write_bytes(b"x")
    with tracking.start_run("refused", tmp_path / "run") as run:
        with pytest.raises(DataError, match="may execute code"):
            run.log_model(folder, "policy", "refused")
        with pytest.raises(SettingsError, match="registered model name"):
            run.log_model(models["policy"], "policy", "../evil")
    assert "refused" not in tracking.registry.list_model_names()


@pytest.mark.parametrize(
    "point", ["model.made", "model.uploaded", "model.ready", "model.versioned"]
)
def test_an_attempt_that_failed_half_way_is_continued(tracking, models, tmp_path, point):
    """One model and one version exist; its metrics and its link to the run exist once."""
    name = point.replace(".", "-")
    faults.configure_faults(f"{point}:1:raise=EIO")
    try:
        with tracking.start_run(name, tmp_path / "run", interval_s=0.05) as run:
            version = run.log_model(models["policy"], "policy", name, metrics={"eval/loss": 0.5})
    finally:
        faults.configure_faults(None)
    assert version == 1 and len(tracking.list_versions(name)) == 1
    client = tracking.store.client
    logged_models = client.search_logged_models(
        [tracking.experiment_id], f"attributes.name = '{name}'"
    )
    assert [(str(model.status), model.source_run_id) for model in logged_models] == [
        ("READY", run.run_id)
    ]
    assert [output.model_id for output in client.get_run(run.run_id).outputs.model_outputs] == [
        logged_models[0].model_id
    ]
    assert [point.value for point in client.get_metric_history(run.run_id, "eval/loss")] == [0.5]
    assert [(metric.key, metric.value) for metric in logged_models[0].metrics] == [
        ("eval/loss", 0.5)
    ]
