"""Custom policy losses and advantage estimators: the shipped ones by import path, and invalid ones."""

import functools

import pytest
import torch
from helpers.letters import LOW, FewLetters, make_trainer, weights

from rl_core.api.custom_functions import apply_custom_functions
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, SettingsError
from rl_core.losses.policy import sapo_loss
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import PolicySettings, SamplingSettings
from rl_core.trainers.policy_gradient.custom_functions import CustomAdvantages, CustomLoss
from rl_core.trainers.policy_gradient.losses import LossDenominators, compute_custom_policy_loss
from rl_core.user_code.digest import digest_function, digest_settings_code

SAPO = "rl_core.losses.policy:sapo_loss"
OFF_POLICY = {
    "importance": "geometric",
    "importance_mask": "token",
    "importance_low": 0.9,
    "importance_high": 1.1,
}
COOL = SamplingSettings(max_completion_tokens=3, temperature=0.7)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_aggregation": "sequence_mean"},
        {"loss_aggregation": "constant", "epochs": 2, "minibatches": 2, "micro_batch_tokens": 60},
        {
            "loss_aggregation": "token_mean",
            "epochs": 2,
            "sampling": COOL,
            "kl_coef": 0.1,
            **OFF_POLICY,
        },
    ],
)
def test_a_shipped_loss_by_import_path_is_the_shipped_loss(tokenizer, options):
    """Compare in micro-batches, under each aggregation, at a temperature, with importance weights; entropy runs every
    row.
    """
    results = []
    for algorithm in ({"algorithm": "sapo"}, {"loss": SAPO}):
        reference = make_trainer(tokenizer).policy if "kl_coef" in options else None
        trainer = make_trainer(
            tokenizer,
            FewLetters(),
            reference=reference,
            curriculum=LOW,
            entropy_coef=0.01,
            **{**options, **algorithm},
        )
        metrics = [trainer.step() for _ in range(3)]
        results.append(
            (
                weights(trainer),
                [{k: v for k, v in row.items() if "perf/" not in k} for row in metrics],
            )
        )
    (shipped, rows), (custom, custom_rows) = results
    assert rows[0]["policy/gate_mean"] > 0
    if "importance" in options:  # multiplied in another order
        assert torch.allclose(custom, shipped, atol=1e-6)
    else:
        assert torch.equal(custom, shipped) and custom_rows == rows
    start = weights(make_trainer(tokenizer, FewLetters()))
    assert (custom - start).norm() > 1e-3


def test_rows_of_advantage_0_are_run_for_a_loss_that_may_use_them(tokenizer):
    def unlikelihood(
        logprobs_BT,
        old_logprobs_BT,
        advantages_BT,
        loss_mask_BT,
        *,
        num_loss_tokens,
        loss_weights_BT,
    ):
        return (logprobs_BT * loss_weights_BT).sum(), {"seen": loss_mask_BT.sum() / num_loss_tokens}

    rewards = RewardOrchestrator(
        {"zero": 1.0}, functions={"zero": lambda trajectories: [0.0] * len(trajectories)}
    )
    trainer = make_trainer(
        tokenizer,
        FewLetters(),
        rewards=rewards,
        custom={"loss": unlikelihood},
        loss="unlikelihood",
        minibatches=2,
    )
    before = weights(trainer)
    metrics = trainer.step()
    assert (metrics["train/trained_rollouts"], metrics["policy/seen"]) == (36, pytest.approx(1.0))
    assert (weights(trainer) - before).norm() > 1e-3
    baseline = make_trainer(tokenizer, FewLetters(), rewards=rewards)
    assert baseline.step()["train/trained_rollouts"] == 0


def test_importance_weighs_a_loss_whatever_its_form():
    """Check a loss that is not proportional to the advantage: each token's share is multiplied, dropped ones add 0."""

    def constant(
        logprobs_BT,
        old_logprobs_BT,
        advantages_BT,
        loss_mask_BT,
        *,
        num_loss_tokens,
        loss_weights_BT,
    ):
        return ((logprobs_BT - logprobs_BT.detach() + 2.0) * loss_weights_BT).sum(), {}

    loss = CustomLoss("constant", {}, constant)
    logprobs, mask = (
        torch.full((1, 3), -1.0, requires_grad=True),
        torch.tensor([[True, True, True]]),
    )
    counts = LossDenominators(3, 3, 1, 1)
    importance = torch.tensor([[0.5, 0.0, 1.5]])
    settings = PolicySettings(loss="constant")
    value, _ = compute_custom_policy_loss(
        loss, settings, logprobs, logprobs.detach(), logprobs.detach(), mask, counts, importance
    )
    assert value.item() == pytest.approx(2.0 * (0.5 + 0.0 + 1.5) / 3)
    value.backward()
    assert logprobs.grad.tolist() == [pytest.approx([0.5 / 3, 0.0, 0.5])]


def make_loss(body):
    """Make a loss whose body is an expression of the arguments x (log-probs), a, m, n, w."""

    def loss(
        logprobs_BT,
        old_logprobs_BT,
        advantages_BT,
        loss_mask_BT,
        *,
        num_loss_tokens,
        loss_weights_BT,
    ):
        return body(logprobs_BT, advantages_BT, loss_mask_BT, num_loss_tokens, loss_weights_BT)

    return loss


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda x, a, m, n, w: ((x * a)[m].mean(), {}),
            "the loss of two rows is .* with the rows one at a time, so micro",
        ),
        (
            lambda x, a, m, n, w: ((x * a * m).sum() / n, {}),
            "does not weigh each token's loss by loss_w",
        ),
        (lambda x, a, m, n, w: ((x * (w + 0.1 * (w > 0))).sum(), {}), "with twice the weights"),
        (
            lambda x, a, m, n, w: ((x * w.sum(1, keepdim=True)).sum(), {}),
            "reads tokens where loss_mask",
        ),
        (
            lambda x, a, m, n, w: ((x * w).sum(), {"gap": (x * m).sum() / m.sum()}),
            "the metric gap of two rows",
        ),
        (
            lambda x, a, m, n, w: ((x * w).sum(), {"gap": x}),
            "returned gap = a tensor of shape .2, 4.; a metric is one number",
        ),
        (lambda x, a, m, n, w: ((x * w).sum(), {"a b": n}), "a metric named 'a b'"),
        (
            lambda x, a, m, n, w: (x * w).sum(),
            "returned a Tensor; return a tensor and a dict of scalars",
        ),
        (lambda x, a, m, n, w: (x * w, {}), r"shape \(2, 4\); sum it to a scalar"),
        (lambda x, a, m, n, w: ((x.detach() * w).sum(), {}), "without gradient"),
        (lambda x, a, m, n, w: ((x * w).sum() / 0, {}), "returned -inf on a small example"),
        (
            lambda x, a, m, n, w: 1 / 0,
            "raised ZeroDivisionError on a small example: division by zero",
        ),
    ],
)
def test_a_loss_that_would_not_add_up_is_refused(body, message):
    with pytest.raises(SettingsError, match=f"^loss: 'mine'.*{message}"):
        CustomLoss("mine", {}, make_loss(body))


def test_extremes_combine_by_maximum_and_minimum():
    def with_extremes(*tensors, num_loss_tokens, loss_weights_BT):
        loss, metrics = sapo_loss(
            *tensors, num_loss_tokens=num_loss_tokens, loss_weights_BT=loss_weights_BT
        )
        masked = tensors[0].masked_fill(~tensors[3], -1.0)
        return loss, {
            "logprob_min": masked.min(),
            "logprob_max": masked.max(),
            "loss": metrics["loss"],
        }

    assert CustomLoss("mine", {}, with_extremes).name == "mine"


def test_signatures_and_paths_are_checked():
    with pytest.raises(
        SettingsError,
        match=r"'rl_core.losses.policy:reinforce_loss' takes .* it is called with \(logp",
    ):
        CustomLoss("rl_core.losses.policy:reinforce_loss", {})
    with pytest.raises(SettingsError, match="unexpected keyword argument 'tau'"):
        CustomLoss(SAPO, {"tau": 1.0})
    with pytest.raises(SettingsError, match="no function 'sapo' there"):
        CustomLoss("rl_core.losses.policy:sapo", {})
    with pytest.raises(SettingsError, match="is not an import path"):
        CustomLoss("sapo", {})
    with pytest.raises(SettingsError, match=r"raised DataError|tau_positive"):
        CustomLoss(SAPO, {"tau_positive": -1.0})
    state = torch.random.get_rng_state()
    CustomLoss(
        "noisy", {}, make_loss(lambda x, a, m, n, w: ((x * w).sum() + 0 * torch.rand(1).sum(), {}))
    )
    assert torch.equal(torch.random.get_rng_state(), state)


def center_by_group(rewards_R, groups_R, lengths_R, *, scale=1.0):
    """Return rewards minus their group's mean, as in Dr. GRPO."""
    sums = torch.zeros(int(groups_R.max()) + 1, dtype=rewards_R.dtype)
    means = sums.index_add(0, groups_R, rewards_R) / torch.bincount(groups_R)
    return scale * (rewards_R - means[groups_R]), {"tokens": lengths_R.double().mean()}


def test_an_estimator_by_hand():
    groups = [torch.tensor([1.0, 0.0]).double(), torch.tensor([3.0, 0.0, 0.0]).double()]
    actual, metrics = CustomAdvantages("mine", {"scale": 2.0}, center_by_group)(
        groups, [1, 2, 3, 4, 5]
    )
    assert [row.tolist() for row in actual] == [[1.0, -1.0], [4.0, -2.0, -2.0]]
    assert metrics == {"tokens": 3.0}
    assert CustomAdvantages("mine", {}, center_by_group)([], []) == ([], {})


def test_an_estimator_takes_the_place_of_the_comparison(tokenizer):
    """Compare Dr. GRPO's estimator under grpo's loss with dr_grpo and a mean over tokens."""
    options = {"loss_aggregation": "token_mean", "epochs": 2, "minibatches": 2, "curriculum": LOW}
    custom = make_trainer(
        tokenizer,
        FewLetters(),
        custom={"advantages": center_by_group},
        advantages="by_group",
        **options,
    )
    shipped = make_trainer(tokenizer, FewLetters(), algorithm="dr_grpo", **options)
    metrics = [custom.step() for _ in range(2)][-1]
    [shipped.step() for _ in range(2)]
    assert torch.equal(weights(custom), weights(shipped))
    lengths = [sum(rollout.loss_mask) for group in custom.groups for rollout in group.rollouts]
    assert metrics["train/advantages/tokens"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r, g, n: (r[:-1], {}), r"returned shape \(4,\) for 5 rollouts"),
        (lambda r, g, n: (r / 0, {}), "values that are not finite"),
        (lambda r, g, n: r, "returned a Tensor; return a tensor and a dict"),
        (lambda r, g: (r, {}), r"it is called with \(rewards_R, groups_R, lengths_R"),
    ],
)
def test_wrong_estimators_are_refused(function, message):
    with pytest.raises(SettingsError, match=f"^advantages: 'mine'.*{message}"):
        CustomAdvantages("mine", {}, function)


def test_an_estimator_that_fails_later_is_named():
    function = CustomAdvantages("mine", {}, lambda r, g, n: (r / (r.numel() > 2), {}))
    with pytest.raises(DataError, match="advantages: 'mine' returned values that are not finite"):
        function([torch.tensor([1.0, 0.0]).double()], [1, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": SAPO, "clip_eps": 0.1}, "clip_eps: not used by a custom loss"),
        (
            {"advantages": "a:b", "algorithm": "ppo"},
            "advantages: replaces a comparison of rewards, but ppo has a critic",
        ),
        (
            {"loss_options": {"x": 1}},
            "loss_options: are passed to a custom function, and none is named; set loss",
        ),
        ({"advantage_options": {"x": 1}}, "set advantages"),
    ],
)
def test_settings_that_nothing_obeys_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        PolicySettings(**options)


def test_what_a_loss_with_a_ratio_allows():
    assert PolicySettings(loss=SAPO, algorithm="reinforce", epochs=2).importance == "none"
    assert PolicySettings(advantages="a:b", group_size=1).group_size == 1


def test_functions_in_the_python_api_are_named_and_digested():
    loss = functools.partial(sapo_loss, tau_positive=2.0)
    settings, functions = apply_custom_functions(
        PolicySettings(), loss=loss, advantages="mine.py:f"
    )
    assert (settings.loss, settings.advantages, functions) == (
        "sapo_loss",
        "mine.py:f",
        {"loss": loss},
    )
    assert digest_function(loss) != digest_function(functools.partial(sapo_loss, tau_positive=1.0))
    assert list(digest_settings_code(PolicySettings(), functions)) == ["loss()"]
    with pytest.raises(SettingsError, match="loss: given twice"):
        apply_custom_functions(PolicySettings(loss=SAPO), loss=loss)
    with pytest.raises(SettingsError, match="neither a function nor an import path"):
        apply_custom_functions(PolicySettings(), loss=3)
