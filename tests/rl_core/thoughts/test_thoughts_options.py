"""Options of the thoughts trainer: KL, baselines, advantages, warm-up, coherence, checks; each resumes bit for bit."""

import copy

import numpy as np
import pytest
import torch
from helpers.thinkers import make_trainer

from rl_core.errors import DataError, SettingsError
from rl_core.models import lora
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import LoraSettings, SamplingSettings, ThoughtsSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.thoughts.baseline import BaselineHead, LearnedBaseline
from rl_core.thoughts.episodes import ThoughtEpisode, ThoughtStep, build_answer_rows
from rl_core.thoughts.genuineness_check import GenuinenessCheck
from rl_core.thoughts.thought_batches import build_thought_batches, build_thought_rows
from rl_core.thoughts.trainer import compute_thought_coherence
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop

CPU = torch.device("cpu")


def shift_weights(model, scale=0.3, seed=9):
    """Return a model whose distribution differs clearly."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(
                scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
            )
    return other


def log_softmax(model, ids, temperature):
    """Return float64 [S, V]: log-probabilities of the token after each, by numpy."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy() / temperature
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def play_answered_episodes(trainer, count=3):
    episodes = trainer.play_heldout_episodes([EpisodeRequest("one", seed) for seed in range(12)])
    return [episode for episode in episodes if all(step.answered for step in episode.steps)][:count]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_to_the_start_by_an_oracle(renderer, taught, estimator, temperature):
    """Compare value and gradient with float64."""
    options = {
        "answer_coef": 0.0,
        "entropy_coef": 0.0,
        "entropy_floor": 0.0,
        "kl_estimator": estimator,
        "sampling": SamplingSettings(max_completion_tokens=40, temperature=temperature),
    }
    reference = shift_weights(taught)
    trainer = make_trainer(renderer, taught, reference=reference, kl_coef=0.3, **options)
    episodes = play_answered_episodes(trainer)
    plan = build_answer_rows(episodes)
    nothing = [
        [0.0] * len(episode.steps) for episode in episodes
    ]  # no advantages: only the KL is left

    def compute_kl(model):
        total, count = 0.0, 0
        for episode in episodes:
            custom, start = (log_softmax(m, episode.ids, temperature) for m in (model, reference))
            for step in episode.steps:
                for index in range(step.start, step.end + 1):
                    token = episode.ids[index]
                    d = custom[index - 1, token] - start[index - 1, token]
                    total += {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator]
                    count += 1
        return total / count

    expected = compute_kl(trainer.model)
    assert abs(expected) > 0.01
    metrics = trainer._update_policy(episodes, plan, nothing)
    assert metrics["policy/ref_kl"] == pytest.approx(expected, abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(0.3 * expected, abs=1e-5)

    trainer = make_trainer(renderer, taught, reference=reference, kl_coef=0.3, **options)
    trainer._counts = (sum(len(s.thought_positions) for e in episodes for s in e.steps), 0)
    rows = build_thought_rows(episodes, plan, nothing, with_answers=False)
    loss = sum(
        trainer.compute_loss(batch)[0]
        for batch in build_thought_batches(rows, 4096, renderer.pad_id)
    )
    loss.backward()
    double = copy.deepcopy(taught).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for episode in episodes:
        custom = torch.log_softmax(double(torch.tensor([episode.ids])).logits[0] / temperature, -1)
        start = log_softmax(reference, episode.ids, temperature)
        for step in episode.steps:
            for index in range(step.start, step.end + 1):
                token = episode.ids[index]
                d = custom[index - 1, token] - float(start[index - 1, token])
                total = total + {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
                count += 1
    (0.3 * total / count).backward()
    for actual, exact in zip(trainer.model.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_the_kl_holds_the_policy_at_its_start_and_is_zero_there(renderer, taught):
    trainer = make_trainer(renderer, taught, reference=copy.deepcopy(taught), kl_coef=1.0)
    assert trainer.step()["policy/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    free, penalised = [], []
    for coef, actual in ((1e-9, free), (20.0, penalised)):
        trainer = make_trainer(
            renderer, taught, reference=copy.deepcopy(taught), kl_coef=coef, warmup_steps=0
        )
        actual += [trainer.step()["policy/ref_kl"] for _ in range(6)]
    assert 0 < penalised[-1] < 0.5 * free[-1]


def test_with_adapters_the_reference_is_the_policy_without_them(renderer, taught):
    def build_adapted():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            settings = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"), dropout=0.2)
            model = lora.add_adapter(copy.deepcopy(taught), settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.3)
        return model

    trainer = make_trainer(renderer, build_adapted(), kl_coef=0.5, reference=copy.deepcopy(taught))
    same = make_trainer(renderer, build_adapted(), kl_coef=0.5, reference=copy.deepcopy(taught))
    same.reference = same.model
    first, second = trainer.step(), same.step()
    assert (
        first["policy/ref_kl"] == pytest.approx(second["policy/ref_kl"], rel=1e-4)
        and first["policy/ref_kl"] > 1e-3
    )
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("kind", ["itself", "full weights", "without adapters"])
def test_policy_and_reference_have_the_same_dropout_masks(renderer, taught, kind):
    """Check that the KL is 0 before the first step, with dropout in the base and in fresh adapters."""
    base = copy.deepcopy(taught)
    base.config.attention_dropout = 0.2
    for layer in base.model.layers:
        layer.self_attn.attention_dropout = 0.2
    model, reference = copy.deepcopy(base), copy.deepcopy(base)
    if kind != "without adapters":
        settings = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"), dropout=0.3)
        model = lora.add_adapter(model, settings)
    trainer = make_trainer(renderer, model, kl_coef=0.5, reference=reference, dropout=True)
    if kind == "itself":
        trainer.reference = trainer.model
    assert trainer.step()["policy/ref_kl"] == pytest.approx(0, abs=1e-6)


def test_a_kl_without_reference_is_refused(renderer, taught):
    with pytest.raises(SettingsError, match="kl_coef: needs a reference"):
        make_trainer(renderer, taught, kl_coef=0.1)


def test_an_mlp_starts_at_zero_and_learns_what_no_linear_head_can():
    states = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(BaselineHead(32, 2, 256, seed=3)(states), torch.zeros(64))
    assert [tuple(p.shape) for p in BaselineHead(32, 2).parameters()] == [
        (256, 32),
        (256,),
        (1, 256),
        (1,),
    ]
    outcome = (states[:, 0] * states[:, 3]).sign()
    losses = {}
    for layers, rate in ((1, 0.05), (2, 0.01)):
        baseline = LearnedBaseline(32, rate, CPU, layers=layers, seed=0)
        for _ in range(300):
            losses[layers] = baseline.fit_returns(states, outcome)
    assert losses[1] > 0.1 > 10 * losses[2]


def test_a_deeper_head_draws_nothing_from_the_global_generator_but_the_output_layer():
    def draw_after_head(**options):
        torch.manual_seed(4)
        LearnedBaseline(32, 0.1, CPU, **options)
        return float(torch.rand(()))

    torch.manual_seed(4)
    torch.nn.Linear(32, 1)
    expected_draw = float(torch.rand(()))  # other heads were tested before
    assert draw_after_head() == draw_after_head(layers=3, width=32) == expected_draw


def test_a_step_of_sgd_by_hand_with_its_coefficient():
    """Check v = 0: the gradient of coef / 2 mean (v - R)^2 is -coef mean(R x), x the normalised states over sqrt(H)."""
    states = torch.tensor([[1.0, -1.0], [-2.0, 2.0]])  # normalised: (1, -1) and (-1, 1)
    baseline = LearnedBaseline(2, 0.5, CPU, coef=3.0, optimizer="sgd")
    assert baseline.fit_returns(states, torch.tensor([2.0, 4.0])) == pytest.approx(
        0.5 * (4 + 16) / 2
    )
    x = np.array([[1.0, -1.0], [-1.0, 1.0]]) / np.sqrt(2)
    step = 0.5 * 3.0 * (np.array([2.0, 4.0])[:, None] * x).mean(0)
    np.testing.assert_allclose(baseline.head.linear.weight.detach().numpy()[0], step, rtol=1e-4)
    assert float(baseline.head.linear.bias) == pytest.approx(0.5 * 3.0 * 3.0)


def test_advantages_without_gae_by_hand(renderer, taught):
    trainer = make_trainer(
        renderer, taught, gamma=0.5, advantages="returns", baseline_learning_rate=1e-9
    )
    trainer.baseline.head.linear.bias.data.fill_(1.0)  # V = 1 everywhere

    def episode(starts, truncated):
        steps = [ThoughtStep(s, s + 1, s + 2, [1], 0, True) for s in starts]
        return ThoughtEpisode(list(range(1, starts[-1] + 3)), steps, "one", truncated)

    episodes = [episode([2, 5, 8], False), episode([3], False), episode([2, 5], True)]
    actual, metrics = trainer._compute_advantages(episodes, [[1.0, 0.0, 2.0], [3.0], [0.0, 1.0]])
    # returns: 1 + .25 * 2 = 1.5, 1, 2; 3; truncated, the rest is worth V: 1 + .5 = 1.5, so .75 and 1.5
    for row, expected in zip(actual, [[0.5, 0.0, 1.0], [2.0], [-0.25, 0.5]], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    squares = [0.25, 0.0, 1.0, 4.0, 0.0625, 0.25]
    assert metrics["train/baseline_loss"] == pytest.approx(0.5 * sum(squares) / 6, abs=1e-5)


def test_coherence_by_hand():
    """Check two thoughts with states (1, 0) and (0, 2) after a prefix; the third repeats the first word by word."""
    steps = [
        ThoughtStep(1, 2, 3, [1], 0, True),
        ThoughtStep(4, 6, 7, [1], 0, True),
        ThoughtStep(8, 9, 10, [1], 0, True),
    ]
    ids = [5, 7, 8, 5, 6, 6, 8, 5, 7, 8]
    tokens = np.array(
        [[4, 4], [1, 0], [9, 9], [3, 3], [0, 1], [0, 3], [8, 8], [2, 2], [2, 2], [7, 7]],
        dtype=np.float64,
    )
    ends = [1, 4, 8, 10, 2, 6, 9]
    pooled = torch.tensor(np.stack([tokens[:end].mean(0) for end in ends]))
    episode = ThoughtEpisode(ids, steps, "one", False)
    actual = compute_thought_coherence([episode, episode], [pooled, pooled])
    # (1, 0), (0, 2), (2, 2): cosines 0 and 1 / sqrt 2
    assert actual["thoughts/coherence"] == pytest.approx((0 + 2**-0.5) / 2)
    assert actual["thoughts/repetition"] == 0.5  # the third is [7], like the first
    alone = ThoughtEpisode(ids[:3], steps[:1], "one", False)
    assert compute_thought_coherence([alone], [pooled[[0, 3, 4]]]) == {}
    unanswered = ThoughtEpisode(
        ids, [ThoughtStep(s.start, s.end, s.stop, [1], 0, False) for s in steps], "one", False
    )
    assert compute_thought_coherence([unanswered], [pooled]) == {}


def test_coherence_of_real_states(renderer, taught):
    trainer = make_trainer(renderer, taught)
    episodes = [
        e
        for e in play_answered_episodes(trainer, 12)
        if all(step.num_thought_tokens for step in e.steps)
    ]
    actual = compute_thought_coherence(episodes, trainer._compute_pooled_states(episodes))
    cosines = []
    for episode in episodes:
        with torch.no_grad():
            states = taught.model(torch.tensor([episode.ids])).last_hidden_state[0].double().numpy()
        a, b = (states[step.start : step.end].mean(0) for step in episode.steps)
        cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert (
        actual["thoughts/coherence"] == pytest.approx(np.mean(cosines), abs=1e-4)
        and len(cosines) > 1
    )


def test_the_mean_reward_of_the_last_hundred_episodes(renderer, taught):
    trainer = make_trainer(renderer, taught, episodes_per_iteration=40)
    observed = []
    trainer.record = lambda iteration, rollouts: observed.extend(
        r.trajectory.rewards["thought_gain"] for r in rollouts
    )
    for _ in range(3):
        metrics = trainer.step()
    assert len(observed) == 120 and metrics["reward/mean_100_episodes"] == pytest.approx(
        np.mean(observed[-100:]), rel=1e-12
    )


@pytest.mark.parametrize(("episodes", "steps"), [(36, 3), (37, 4), (0, 0), (None, 2)])
def test_warm_up_in_episodes(renderer, taught, episodes, steps):
    """Check 12 episodes per iteration, one optimizer step each."""
    trainer = make_trainer(
        renderer, taught, warmup_episodes=episodes, schedule="constant", learning_rate=1e-3
    )
    rates = [trainer.step()["train/learning_rate"] for _ in range(4)]
    expected = [1e-3 * min(1, (number + 1) / max(1, steps)) for number in range(4)]
    assert rates == pytest.approx(expected)
    assert trainer.settings.warmup_episodes == episodes


def test_checks_come_every_n_episodes_and_are_a_curve(renderer, taught):
    trainer = make_trainer(renderer, taught, check_every_episodes=30)
    rows = [trainer.step() for _ in range(5)]  # after 12, 24, 36, 48, 60 episodes
    assert ["thoughts/check_genuine" in row for row in rows] == [False, False, True, False, True]
    assert {
        "thoughts/check_gain_own",
        "thoughts/check_gain_own_low",
        "thoughts/check_drop_filler",
    } <= rows[2].keys()
    assert trainer.finished == ""
    baseline = make_trainer(renderer, taught)
    others = [baseline.step() for _ in range(5)]
    selected = [
        {k: v for k, v in row.items() if "check" not in k and not k.startswith("perf/")}
        for row in rows
    ]
    assert selected == [
        {k: v for k, v in row.items() if not k.startswith("perf/")} for row in others
    ], "it only looks"


def test_a_genuine_check_ends_the_training_and_a_resume_knows(
    renderer, taught, tmp_path, monkeypatch
):
    def build_verdict(genuine):
        class StubVerdict:
            def collect_metrics(self):
                return {
                    "thoughts/genuine": float(genuine),
                    "thoughts/gain_own": 0.5,
                    "thoughts/p_own": 0.1,
                }

        actual = StubVerdict()
        actual.genuine = genuine
        return actual

    def run_trainer(iterations):
        trainer = make_trainer(
            renderer, taught, check_every_episodes=12, stop_when_genuine=True, checkpoint_every=1
        )
        observed = []
        monkeypatch.setattr(
            trainer,
            "_examine_heldout_thoughts",
            lambda: (
                observed.append(trainer.rollouts_played)
                or build_verdict(trainer.rollouts_played >= 36)
            ),
        )
        outcome = run_loop(
            trainer, trainer.settings, iterations=iterations, checkpoints=CheckpointStore(tmp_path)
        )
        return outcome, observed

    outcome, observed = run_trainer(6)
    assert outcome.iterations == 3 and observed == [12, 24, 36]
    assert (
        outcome.stop_reason == "thoughts are genuine on the validation episodes, after 36 episodes"
    )
    outcome, observed = run_trainer(6)
    assert (outcome.iterations, outcome.resumed_iteration, observed) == (3, 3, [])


def test_a_check_without_answers_is_not_genuine():
    def fail_without_answers():
        raise DataError("no turn of these episodes has an answer")

    check = GenuinenessCheck(ThoughtsSettings(check_every_episodes=1, stop_when_genuine=True), 8)
    assert (
        check.run_check(fail_without_answers, 5) == {"thoughts/check_genuine": 0.0}
        and check.finished == ""
    )
    with pytest.raises(SettingsError, match="check_every_episodes: needs held-out episodes"):
        GenuinenessCheck(ThoughtsSettings(check_every_episodes=1), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantages": "returns", "gae_lambda": 0.5}, "gae_lambda: 0.5 has no effect"),
        ({"stop_when_genuine": True}, "stop_when_genuine: needs check_every_episodes"),
    ],
)
def test_settings_without_effect_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        ThoughtsSettings(**options)


OPTIONS = {
    "kl": {"kl_coef": 0.3},
    "mlp": {"baseline_layers": 2, "baseline_width": 16, "baseline_coef": 0.5},
    "sgd": {"baseline_optimizer": "sgd", "baseline_learning_rate": 0.5},
    "returns": {"advantages": "returns", "warmup_episodes": 30},
    "checks": {"check_every_episodes": 20, "bootstrap_samples": 100},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_resumes_bit_for_bit(renderer, taught, tmp_path, name):
    reference = shift_weights(taught) if name == "kl" else None

    def run_trainer(folder, iterations):
        trainer = make_trainer(
            renderer,
            taught,
            reference=reference,
            eval_every=2,
            checkpoint_every=1,
            episodes_per_iteration=6,
            **OPTIONS[name],
        )
        tracker = MemoryTracker()
        store = CheckpointStore(tmp_path / folder)
        run_loop(
            trainer, trainer.settings, iterations=iterations, tracker=tracker, checkpoints=store
        )
        return trainer, {
            (step, key): value.hex()
            for step, row in tracker.metrics
            for key, value in row.items()
            if not key.startswith("perf/")
        }

    uninterrupted, expected = run_trainer("whole", 4)
    run_trainer("cut", 2)
    second, rest = run_trainer("cut", 4)
    late = {key: value for key, value in expected.items() if key[0] > 2}
    assert late and {key: rest[key] for key in late} == late
    for first, resumed in zip(
        uninterrupted.model.parameters(), second.model.parameters(), strict=True
    ):
        assert torch.equal(first, resumed)
    for first, resumed in zip(
        uninterrupted.baseline.head.parameters(), second.baseline.head.parameters(), strict=True
    ):
        assert torch.equal(first, resumed)
    assert list(second._recent_rewards) == list(uninterrupted._recent_rewards)
