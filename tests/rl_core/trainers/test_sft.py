"""Supervised fine-tuning: the loss by hand, micro-batches, bit-exact resume, guards."""

import math

import pytest
import torch
from helpers.tiny import PAD, VOCABULARY, logged_bits, nano, weights_digest

from rl_core.capabilities import Decision
from rl_core.errors import CheckpointError, DataError, NonFiniteError
from rl_core.models import logprobs
from rl_core.settings import SFTSettings
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.loop import run_loop


def build_tied_model(**options):
    return nano(tie_word_embeddings=True, **options)


def build_rows(count, seed=0):
    """Build ragged rows; the last tokens repeat the first ones, which can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        prompt = torch.randint(1, VOCABULARY, (2 + index % 4,), generator=generator).tolist()
        rows.append((prompt * 2, [False] * len(prompt) + [True] * len(prompt)))
    return rows


def build_trainer(model=None, train=14, **changes):
    settings = SFTSettings(
        **{"learning_rate": 5e-3, "warmup_steps": 2, "batch_size": 4, "epochs": 2.0, **changes}
    )
    return SFTTrainer(
        model or build_tied_model(), PAD, build_rows(train), build_rows(5, seed=1), settings, 7
    )


def mean_nll(model, rows):
    """Compute the NLL from the model's logits, one row at a time, without padding."""
    total, count = 0.0, 0
    for ids, mask in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        picked = [position for position, carries in enumerate(mask) if carries]
        total -= sum(float(logprobs[position - 1, ids[position]]) for position in picked)
        count += len(picked)
    return total / count


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 10_000])
def test_loss_is_the_mean_over_the_loss_tokens_of_the_step(micro_batch_tokens):
    trainer = build_trainer(micro_batch_tokens=micro_batch_tokens, train=4)
    expected = mean_nll(trainer.model, build_rows(4))
    metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/tokens"] == 4 + 6 + 8 + 10
    assert metrics["train/epoch"] == 1.0
    assert metrics["perf/tokens_per_second"] > 0


def test_micro_batches_do_not_change_the_weights():
    """Compare 8 rows as one batch and one at a time: the same gradient, so the same weights after a plain step."""
    gradients = []
    for budget in (10_000, 1):
        trainer = build_trainer(train=8, batch_size=8, micro_batch_tokens=budget, max_grad_norm=1e9)
        trainer.optimizer_step.optimizer.step = lambda t=trainer: gradients.append(
            [weight.grad.clone() for weight in t.model.parameters()]
        )
        trainer.step()
    for full_gradient, cut_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(full_gradient, cut_gradient, rtol=0, atol=1e-6)


def test_evaluation_is_the_held_out_loss_and_changes_nothing():
    trainer = build_trainer(build_tied_model(dropout=0.5))
    before, rng = weights_digest(trainer.model), torch.get_rng_state()
    metrics = trainer.evaluate()
    expected = mean_nll(trainer.model.eval(), build_rows(5, seed=1))
    assert metrics == {
        "eval/loss": pytest.approx(expected, rel=1e-5),
        "eval/perplexity": pytest.approx(math.exp(expected), rel=1e-5),
    }
    assert weights_digest(trainer.model) == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_it_learns():
    trainer = build_trainer(train=8, batch_size=8, epochs=60.0, learning_rate=2e-2)
    first = trainer.step()["train/loss"]
    outcome = run_loop(trainer, trainer.settings, iterations=trainer.total_steps)
    assert outcome.steps == 61
    assert first > 2.0
    assert trainer.step()["train/loss"] < 0.3


def test_how_many_steps_there_are():
    assert build_trainer(train=14).total_steps == 8  # two passes of 4, 4, 4, 2
    assert build_trainer(train=14, epochs=0.5).total_steps == 2
    assert build_trainer(train=14, max_steps=5).total_steps == 5
    assert build_trainer(train=14, max_steps=50).total_steps == 8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (([1, 2, 3], [False, True]), r"rows_train\[1\]: 3 token ids, but a loss mask of 2"),
        (([1, 2], [False, False]), r"rows_train\[1\]: no token carries loss"),
        (([1, 2], [True, True]), r"rows_train\[1\]: the first token carries loss"),
        (([], []), r"rows_train\[1\]: no token carries loss"),
    ],
)
def test_rows_that_cannot_be_learnt_from(row, message):
    with pytest.raises(DataError, match=message):
        SFTTrainer(build_tied_model(), PAD, [([1, 2], [False, True]), row], [], SFTSettings(), 0)
    with pytest.raises(DataError, match="no row"):
        SFTTrainer(build_tied_model(), PAD, [], [], SFTSettings(), 0)


def test_without_held_out_rows_there_is_no_evaluation():
    assert SFTTrainer(build_tied_model(), PAD, build_rows(3), [], SFTSettings(), 0).evaluate() == {}


def test_a_broken_model_stops_after_n_skipped_steps_with_the_tensors_name():
    trainer = build_trainer(epochs=20.0, max_nonfinite=3)
    trainer.step()
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(
        NonFiniteError, match=r"3 non-finite optimizer steps.*weight model\.layers\.1\.mlp\.up_proj"
    ):
        run_loop(trainer, trainer.settings, iterations=trainer.total_steps)
    assert trainer.optimizer_step.skipped_steps == 3


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_packing_gives_the_metrics_of_padding(micro_batch_tokens, monkeypatch):
    """Check 14 demonstrations of 4, 6, 8 and 10 tokens: rows of 10 = 6 + 4, or 10, or 8."""
    padded = build_trainer(batch_size=14)
    packed = build_trainer(batch_size=14, packing=True, micro_batch_tokens=micro_batch_tokens)
    shapes = []
    compute = logprobs.compute_prefix_states

    def record_shape(model, batch, *others):
        shapes.append(tuple(batch.input_ids_BS.shape))
        return compute(model, batch, *others)

    monkeypatch.setattr(logprobs, "compute_prefix_states", record_shape)
    assert packed.evaluate() == pytest.approx(padded.evaluate(), rel=1e-5)
    for step in range(2):
        want = padded.step()
        shapes.clear()
        got = packed.step()
        assert want.keys() == got.keys()
        for name in want.keys() - {"perf/tokens_per_second"}:
            assert got[name] == pytest.approx(want[name], rel=1e-4), (step, name)
        # 3 x 10, 3 x 8, 4 x 6 and 4 x 4 tokens are 14 padded rows, packed 3 + 3 + 4
        assert shapes == ([(10, 10)] if micro_batch_tokens > 1 else [(1, 10)] * 7 + [(1, 8)] * 3)


def test_a_model_that_would_mix_packed_rows_gets_padded_ones(monkeypatch, caplog):
    refused = Decision("sequence packing", False, "it mixes them")
    monkeypatch.setattr("rl_core.trainers.sft.check_sequence_packing", lambda model: refused)
    trainer = build_trainer(packing=True, train=4)
    assert "LlamaForCausalLM with attention 'sdpa' mixes the sequences of a row" in caplog.text
    expected = mean_nll(trainer.model, build_rows(4))
    assert trainer.step()["train/loss"] == pytest.approx(expected, rel=1e-5)


def run_training(folder, tracker, *, store=CheckpointStore, **changes):
    torch.manual_seed(3)
    trainer = build_trainer(
        build_tied_model(dropout=0.2),
        eval_every=3,
        checkpoint_every=1,
        schedule="cosine",
        **changes,
    )
    run_loop(
        trainer,
        trainer.settings,
        iterations=trainer.total_steps,
        tracker=tracker,
        checkpoints=store(folder) if folder else None,
    )
    return weights_digest(trainer.model), logged_bits(tracker)


@pytest.fixture(scope="module")
def unbroken_run():
    return run_training(None, MemoryTracker())


@pytest.mark.parametrize("point", ["loop.step", "publish.written"])
@pytest.mark.parametrize("hit", range(1, 9))
def test_killed_at_any_iteration_the_numbers_are_the_same(tmp_path, unbroken_run, point, hit):
    tracker = MemoryTracker()
    faults.configure_faults(f"{point}:{hit}:raise")
    with pytest.raises((InjectedFault, CheckpointError)):
        run_training(tmp_path, tracker)
    faults.configure_faults(None)
    assert run_training(tmp_path, tracker) == unbroken_run


def test_killed_with_packed_rows_the_numbers_are_the_same(tmp_path, unbroken_run):
    uninterrupted = run_training(None, MemoryTracker(), packing=True)
    assert uninterrupted != unbroken_run  # attention dropout draws masks of other shapes
    tracker = MemoryTracker()
    faults.configure_faults("loop.step:5:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path, tracker, packing=True)
    faults.configure_faults(None)
    assert run_training(tmp_path, tracker, packing=True) == uninterrupted


@pytest.mark.parametrize(
    "item",
    ["rng/torch", "optimizer_step/optimizer", "optimizer_step/num_steps", "trainer/order", "model"],
)
def test_every_saved_item_is_needed(tmp_path, unbroken_run, item):
    """Check that dropping any item of the checkpoint changes the numbers, so the test above is sensitive to it."""

    class Dropping(CheckpointStore):
        def load_latest(self):
            state = super().load_latest()
            fresh = build_trainer(build_tied_model(dropout=0.2))
            torch.manual_seed(3)
            uninterrupted = {
                "rng": {"torch": torch.get_rng_state()},
                "optimizer_step": fresh.optimizer_step.state_dict(),
                "trainer": fresh.state_dict(),
                "model": dict(fresh.model.state_dict()),
            }
            *folders, last = item.split("/")
            target, source = state, uninterrupted
            for name in folders:
                target, source = target[name], source[name]
            target[last] = source[last]
            return state

    tracker = MemoryTracker()
    faults.configure_faults("loop.step:6:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path, tracker)
    faults.configure_faults(None)
    weights, losses = run_training(tmp_path, tracker, store=Dropping)
    assert weights != unbroken_run[0]
    assert losses != unbroken_run[1]
