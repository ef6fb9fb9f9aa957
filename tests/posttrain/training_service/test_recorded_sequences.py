"""stable_reinforce over the wire: recording at sampling, provenance, sessions, lifetimes, and workers that die."""

import dataclasses

import numpy as np
import pytest
from helpers.service import bits, loss_request, make_engine
from helpers.service_clients import (
    build_datum,
    build_recorded_data,
    create,
    loss,
    open_sampler,
    publish,
    read_sequences,
    sample,
    unload,
    update,
)
from helpers.service_load import settings_of

from posttrain.training_service.store import ServiceStore
from posttrain.training_service.wire.protobuf_messages import create_message
from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.service.requests import (
    AdapterConfig,
    CreateModel,
    CreateSampler,
    Datum,
    ProvenanceSpan,
    SampleParameters,
    SampleRequest,
)
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault

DAY = 86_400.0
PROMPT = (5, 6, 7)
NO_TOKEN = -99999.0


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


class Scene:
    """A store with a worker that is replaced when it dies, and a clock that is set by hand."""

    def __init__(self, folder, base, **worker):
        self.folder, self.base, self.options = folder, base, worker
        self.clock = Clock()
        self.store = ServiceStore(f"sqlite:///{folder}/service.db", self.clock)
        self.deaths = 0
        self.worker = self.new_worker()

    def new_worker(self):
        self.store.reset_running_requests()
        return EngineProcess(settings_of(self.folder, self.base, **self.options), self.store)

    def execute(self, request):
        """Accept a request and compute it, whatever dies; return it with its answer."""
        request_id = self.store.accept_request(request).request_id
        while not self.store.find_request(request_id).is_final:
            try:
                self.worker.step(wait=0.0)
            except InjectedFault:
                self.deaths += 1
                self.worker._runs.wait_for_snapshots()
                self.worker = self.new_worker()
        return self.store.find_request(request_id)

    def read_run(self, run):
        self.worker._runs.ensure_loaded(run)
        return bits(self.worker._executor._engine.state_dict(run))


@pytest.fixture
def scene(tmp_path, base_folder):
    scene = Scene(tmp_path, base_folder)
    yield scene
    scene.store.close()


def build_data(stored, advantages=(1.0, -0.5)):
    return build_recorded_data(stored, PROMPT, advantages)


def record(scene, run="s:train:0", sampler="s:sample:0", seq=1, **options):
    """Create a run and a sampler of its weights, and sample with recording."""
    scene.execute(create(run))
    scene.execute(publish(run, seq, sampler))
    return scene.execute(sample(sampler, 0, PROMPT, record_stability_info=True, **options))


def read_output(stored):
    assert stored.state == "done", stored.error
    output = create_message("ForwardBackwardOutput")
    output.ParseFromString(stored.answer)
    return output


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_provenance_gives_the_engine_what_was_recorded(scene, base_folder, temperature):
    sampled = record(scene, temperature=temperature)
    data = build_data(sampled)
    run = "s:train:0"
    trained = read_output(scene.execute(loss(run, 2, data, "stable_reinforce", kl_coeff=0.1)))
    scene.execute(update(run, 3))
    engine = make_engine(base_folder, micro_batch_tokens=48)
    engine.create_model(
        CreateModel(model_id=run, base="base", adapter=AdapterConfig(rank=4, seed=0))
    )
    engine.create_sampler(CreateSampler(sampler_id="x", model_id=run))
    parameters = SampleParameters(max_tokens=4, stop=(), temperature=temperature)
    request = SampleRequest(
        sampler_id="x",
        prompt=np.array(PROMPT),
        seed=1000,
        num_samples=2,
        parameters=parameters,
        recorded_tokens=32,
    )
    (answer,) = engine.sample([request])
    expected = []
    for datum, sequence in zip(data, answer.sequences, strict=True):
        assert datum.inputs["target_tokens"][2:].tolist() == sequence.tokens.tolist()
        inputs = dict(datum.inputs)
        inputs["logprobs"] = np.pad(sequence.logprobs, (2, 0))
        inputs["sampler_top_tokens"] = np.pad(sequence.recorded.tokens, ((2, 0), (0, 0)))
        inputs["sampler_top_logprobs"] = np.pad(
            sequence.recorded.logprobs, ((2, 0), (0, 0)), constant_values=NO_TOKEN
        )
        expected.append(Datum(datum.tokens, inputs))
    config = {"kl_coeff": 0.1, "temperature": temperature}
    (result,) = engine.forward_backward(
        [loss_request(run, tuple(expected), "stable_reinforce", loss_fn_config=config)]
    )
    assert trained.metrics["loss:sum"] == result.loss != 0
    assert trained.metrics["sampler_kl:max"] < 1e-4  # the run is what sampled
    assert trained.metrics["recorded_mass:min"] > 0.5
    assert trained.metrics["tokens:sum"] == 8
    assert scene.store.find_run(run).steps == 1


def test_arrays_of_the_client_need_no_provenance(scene):
    sampled = record(scene, topk_sample_logprobs=3)
    (_, first), _ = read_sequences(sampled)
    response = create_message("SampleResponse")
    response.ParseFromString(sampled.answer)
    top = response.sequences[0].topk_sampled_logprobs
    datum = build_datum("", first, 1.0, PROMPT)
    tokens, logprobs = (
        np.frombuffer(getattr(top, name), kind).reshape(top.length, top.k)
        for name, kind in (("token_ids", "<i4"), ("logprobs", "<f4"))
    )
    inputs = {
        **datum.inputs,
        "sampler_top_tokens": np.pad(tokens, ((2, 0), (0, 0))).astype(np.int64),
        "sampler_top_logprobs": np.pad(logprobs, ((2, 0), (0, 0)), constant_values=NO_TOKEN),
    }
    stored = scene.execute(loss("s:train:0", 2, (Datum(datum.tokens, inputs),), "stable_reinforce"))
    assert read_output(stored).metrics["tokens:sum"] == 4
    both = dataclasses.replace(build_data(sampled)[0], inputs=inputs)
    refused = scene.execute(loss("s:train:0", 3, (both,), "stable_reinforce"))
    assert "has both provenance and" in refused.error


def test_two_sequences_in_one_datum(scene):
    """A second turn whose prompt holds the first sequence, and a token of an environment between them."""
    first = record(scene)
    (name, tokens), _ = read_sequences(first)
    prompt = [*PROMPT, *tokens.tolist(), 9]
    second = scene.execute(
        sample("s:sample:0", 1, prompt, num_samples=1, record_stability_info=True)
    )
    ((second_name, second_tokens),) = read_sequences(second)
    ids = np.array([*prompt, *second_tokens])
    spans = (
        ProvenanceSpan("prompt", name, 0, 3),
        ProvenanceSpan("sampled", name, 0, len(tokens)),
        ProvenanceSpan("prompt", second_name, len(prompt) - 1, 1),
        ProvenanceSpan("sampled", second_name, 0, len(second_tokens) - 1),
    )
    targets = (
        ProvenanceSpan("prompt", name, 1, 2),
        *spans[1:3],
        ProvenanceSpan("sampled", second_name, 0, len(second_tokens)),
    )
    advantages = np.array([0, 0, *np.ones(4), 0, *-np.ones(4)], np.float32)
    inputs = {"target_tokens": ids[1:], "advantages": advantages}
    datum = Datum(ids[:-1], inputs, spans, targets)
    stored = scene.execute(loss("s:train:0", 2, (datum,), "stable_reinforce"))
    assert read_output(stored).metrics["tokens:sum"] == 8
    assert read_output(stored).metrics["sampler_difference:max"] < 1e-4  # recorded log-probs are q


def replace_span(datum, field, index, **changes):
    spans = list(getattr(datum, field))
    spans[index] = dataclasses.replace(spans[index], **changes)
    return dataclasses.replace(datum, **{field: tuple(spans)})


def test_claims_that_do_not_hold_are_refused_by_name(scene):
    sampled = record(scene)
    cold = scene.execute(
        sample("s:sample:0", 7, PROMPT, num_samples=1, temperature=0.5, record_stability_info=True)
    )
    plain = scene.execute(sample("s:sample:0", 8, PROMPT, num_samples=1))
    datum = build_data(sampled)[0]
    other_tokens = datum.inputs["target_tokens"].copy()
    other_tokens[3] = (other_tokens[3] + 1) % 60
    placed_early = {**datum.inputs, "advantages": np.ones(6, np.float32)}
    prefixed = dataclasses.replace(datum, inputs=placed_early)
    cases = [
        (dataclasses.replace(datum, token_spans=(), target_spans=()), "needs provenance on every"),
        (replace_span(datum, "target_spans", 1, length=3), "cover 5 positions, expected 6"),
        (replace_span(datum, "token_spans", 0, length=4), "cover 7 positions, expected 6"),
        (replace_span(datum, "target_spans", 1, offset=1), "tokens 1 to 5 of"),
        (replace_span(datum, "target_spans", 0, offset=2), "whose prompt has 3"),
        (replace_span(datum, "target_spans", 1, sequence_id="no"), "no recorded sequence 'no'"),
        (
            dataclasses.replace(datum, inputs={**datum.inputs, "target_tokens": other_tokens}),
            "at position 3, and the sequence has",
        ),
        (build_data(plain, (1.0,))[0], "there is no recorded sequence"),
        (prefixed, "not 0 at position 0, whose token was not sampled"),
    ]
    for seq, (wrong, text) in enumerate(cases, 2):
        refused = scene.execute(loss("s:train:0", seq, (wrong,), "stable_reinforce"))
        assert refused.state == "failed" and refused.category == "user", text
        assert text in refused.error, refused.error
    mixed = (datum, *build_data(cold, (1.0,)))
    refused = scene.execute(loss("s:train:0", 11, mixed, "stable_reinforce"))
    assert "temperatures [0.5, 1.0]" in refused.error
    refused = scene.execute(loss("s:train:0", 12, (datum,), "stable_reinforce", temperature=0.5))
    assert "were sampled at 1; leave it out" in refused.error
    # for another loss, provenance is no claim
    wrong = replace_span(datum, "target_spans", 1, sequence_id="no")
    assert read_output(scene.execute(loss("s:train:0", 13, (wrong,), "importance_sampling")))


def test_sequences_belong_to_the_session_that_sampled(scene):
    data = build_data(record(scene))
    foreign = dataclasses.replace(create("t:train:0"), session_id="t")
    scene.execute(foreign)
    request = dataclasses.replace(loss("t:train:0", 1, data, "stable_reinforce"), session_id="t")
    assert "there is no recorded sequence" in scene.execute(request).error


def count_sequences(scene, session="s"):
    ids = [f"s:sample:0-0-{index}" for index in range(2)]
    return len(scene.store.find_recorded_sequences(session, ids))


def test_a_day_after_the_last_use_sequences_expire(scene):
    data = build_data(record(scene))
    scene.clock.now += DAY - 10
    read_output(scene.execute(loss("s:train:0", 2, data[:1], "stable_reinforce")))
    scene.clock.now += 20  # the other one has expired, this one's day began again
    again = scene.execute(loss("s:train:0", 3, data[:1], "stable_reinforce"))
    assert read_output(again)
    refused = scene.execute(loss("s:train:0", 4, data[1:], "stable_reinforce"))
    assert "expire a day after" in refused.error
    assert count_sequences(scene) == 2
    assert scene.store.remove_expired_sequences(DAY) == 0  # requests that may be replayed need them
    scene.execute(unload("s:train:0", 5))
    scene.store.expire_results(result_seconds=0.0, memory_seconds=0.0)
    scene.clock.now += 1
    scene.store.expire_results(result_seconds=0.0, memory_seconds=0.0)
    assert scene.store.remove_expired_sequences(DAY) == 1 and count_sequences(scene) == 1
    scene.clock.now += 2 * DAY
    scene.worker._housekeeping.run_now()
    assert count_sequences(scene) == 0


def test_replay_after_the_lifetime_uses_what_was_recorded(tmp_path, base_folder):
    """A worker that died is started again two days later: housekeeping first, then the run is computed again."""
    scene = Scene(tmp_path, base_folder, snapshot_steps=1000, snapshot_seconds=1e6)
    data = build_data(record(scene))
    scene.execute(loss("s:train:0", 2, data, "stable_reinforce"))
    scene.execute(update("s:train:0", 3))
    before = scene.read_run("s:train:0")
    scene.clock.now += 2 * DAY
    scene.worker = scene.new_worker()
    scene.worker._housekeeping.run_now()
    assert count_sequences(scene) == 2
    assert scene.read_run("s:train:0") == before
    assert scene.store.read_worker_counters().get("replay_differences", 0) == 0
    assert scene.store.read_worker_counters()["replayed"] >= 2
    scene.store.close()


def train(folder, base, plan):
    """Sample with recording and train on it, three times; return answers, weights and the number of deaths."""
    faults.configure_faults(plan)
    folder.mkdir()
    scene = Scene(folder, base, snapshot_steps=2, snapshot_seconds=1e6)
    run, seq, digests = "s:train:0", 0, []
    scene.execute(create(run))
    for step in range(4):
        sampler = f"s:sample:{step}"
        scene.execute(publish(run, seq + 1, sampler))
        sampled = scene.execute(sample(sampler, 0, PROMPT, record_stability_info=True))
        data = build_data(sampled)
        passed = scene.execute(loss(run, seq + 2, data, "stable_reinforce", kl_coeff=0.05))
        updated = scene.execute(update(run, seq + 3))
        digests += [stored.answer for stored in (sampled, passed, updated)]
        assert scene.execute(loss(run, seq + 2, data, "stable_reinforce", kl_coeff=0.05)) == passed
        scene.worker._runs.wait_for_snapshots()
        seq += 3
    faults.configure_faults(None)
    state = scene.read_run(run)
    assert scene.store.read_worker_counters().get("replay_differences", 0) == 0
    scene.store.close()
    return digests, state, scene.deaths


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, base_folder):
    return train(tmp_path_factory.mktemp("undisturbed") / "s", base_folder, None)


@pytest.mark.parametrize("hit", [2, 4, 5, 8])
@pytest.mark.parametrize("point", ["claimed", "computed", "finishing", "finished", "covered"])
def test_a_worker_that_dies_changes_nothing(tmp_path, base_folder, undisturbed, point, hit):
    hit = 1 if point == "covered" else hit
    plan = f"service.{point}:{hit}:raise,service.replayed:1:raise"
    answers, state, deaths = train(tmp_path / "s", base_folder, plan)
    assert deaths >= 1
    assert answers == undisturbed[0] and state == undisturbed[1]


def test_a_base_model_is_recorded_too(scene):
    scene.execute(open_sampler("s:sample:9", base="base"))
    stored = scene.execute(sample("s:sample:9", 0, PROMPT, record_stability_info=True))
    assert len(read_sequences(stored)) == 2
    ids = stored.facts["sample_sequence_ids"]
    assert len(scene.store.find_recorded_sequences("s", ids)) == 2
    assert scene.store.find_recorded_sequences("t", ids) == {}
