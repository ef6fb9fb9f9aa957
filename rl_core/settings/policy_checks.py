"""Checks of policy settings: single algorithms, advantages by turn, learning rates, and where rollouts are played."""

from __future__ import annotations

from typing import Any

from rl_core.errors import SettingsError


def check_algorithm_settings(settings: Any) -> None:
    """Check that the settings of sapo, dppo, maxrl and gdpo have an effect, and that these can work with the others.

    Args:
        settings: `PolicySettings`.
    Raises: SettingsError naming the setting.
    """
    clips = (settings.clip_eps, settings.clip_eps_high, settings.dual_clip)
    if settings.algorithm == "sapo" and any(clip is not None for clip in clips):
        raise SettingsError(
            "clip_eps: sapo has a soft gate instead of a clip; remove clip_eps, clip_eps_high and dual_clip, or "
            "set sapo_tau_positive and sapo_tau_negative"
        )
    fields = type(settings).__dataclass_fields__
    for prefix in ("dppo", "maxrl"):
        for name in (name for name in fields if name.startswith(f"{prefix}_")):
            if settings.algorithm != prefix and getattr(settings, name) != fields[name].default:
                raise SettingsError(
                    f"{name}: not used by {settings.algorithm}; remove it, or set algorithm: {prefix}"
                )
    if settings.maxrl_order is not None and settings.advantages is not None:
        raise SettingsError("maxrl_order: not used by a custom advantage estimator; remove it")
    if (
        settings.algorithm in ("maxrl", "gdpo")
        and settings.kl_in == "reward"
        and settings.kl_coef > 0
    ):
        reason = (
            "takes rewards as probabilities of success, which a penalty makes negative"
            if settings.algorithm == "maxrl"
            else "normalises each component of the reward, and the penalty is none of them"
        )
        raise SettingsError(f"kl_in: reward; {settings.algorithm} {reason}; set kl_in: loss")
    if settings.algorithm == "dppo":
        _check_dppo(settings)


def _check_dppo(settings: Any) -> None:
    """Check that nothing corrects twice for the sampler, and that top-K distributions can be had."""
    if settings.loss is None and settings.importance != "none":
        raise SettingsError(
            f"importance: {settings.importance}; the ratio of dppo is to the policy that sampled, so it has these "
            "weights already; remove it"
        )
    if settings.loss is None and settings.dropout:
        raise SettingsError(
            "dropout: dppo compares with the policy that sampled, which had none, so its masks would count as a "
            "divergence; set false"
        )
    if settings.dual_clip is not None:
        raise SettingsError("dual_clip: dppo masks tokens instead of clipping; remove it")
    if not settings.dppo_divergence.startswith("topk"):
        if settings.dppo_topk != 20:
            raise SettingsError(
                f"dppo_topk: not used by dppo_divergence {settings.dppo_divergence}; set topk_tv or topk_kl"
            )
        return
    if settings.replay is not None or settings.rollouts.max_staleness:
        name = "replay" if settings.replay is not None else "rollouts.max_staleness"
        raise SettingsError(
            f"dppo_divergence: {settings.dppo_divergence} compares with the policy before the update, and {name} has "
            "rollouts of older ones, whose distributions are not stored; set binary_tv or binary_kl"
        )
    if settings.launch.kind != "in_process":
        raise SettingsError(
            f"dppo_divergence: {settings.dppo_divergence} makes another pass inside the loss, which needs a single "
            "trainer process; set binary_tv or binary_kl, or leave launch.kind out"
        )


def check_reward_credit(settings: Any) -> None:
    """Check credit by turn and by step, and the judge."""
    _check_turn_credit(settings)
    _check_judge(settings)
    _check_step_credit(settings)


def _check_turn_credit(settings: Any) -> None:
    """Check that turns can be compared, and that the comparison would not be ignored.

    Args:
        settings: `PolicySettings`.
    Raises: SettingsError naming the setting.
    """
    if settings.turn_credit is None:
        return
    if settings.is_taught:
        raise SettingsError("turn_credit: a distillation compares no rewards; remove it")
    if not settings.compares_groups:
        raise SettingsError(
            f"turn_credit: compares the turns of a group, but {settings.algorithm} compares no groups; remove it, "
            "or set algorithm to grpo, dr_grpo or rloo"
        )
    if settings.algorithm in ("maxrl", "gdpo"):
        raise SettingsError(
            f"turn_credit: compares returns as grpo, dr_grpo or rloo do, not as {settings.algorithm}; set one of them"
        )
    if settings.algorithm == "gspo":
        raise SettingsError(
            "turn_credit: gspo has one ratio and one advantage for the whole sequence; set algorithm to grpo"
        )
    if settings.advantages is not None:
        raise SettingsError(
            "turn_credit: not used by a custom advantage estimator; remove one of the two"
        )
    if settings.sampling.max_turns == 1:
        raise SettingsError(
            "turn_credit: sampling.max_turns 1 leaves no turns to tell apart; raise it, or remove turn_credit"
        )
    options = settings.reward_options
    if options.clip is not None or "task" in options.normalise:
        name = "clip" if options.clip is not None else "normalise"
        raise SettingsError(
            f"turn_credit: reward_options.{name} changes the episode's reward, so that those of its turns would "
            "not sum to it; remove one of the two"
        )


def _check_judge(settings: Any) -> None:
    """Check that a judge that compares samples has several of a prompt. Raises: SettingsError naming the setting."""
    judge = settings.reward_options.judge
    if "judge" in settings.rewards and judge.compares and settings.group_size == 1:
        raise SettingsError(
            f"group_size: 1 leaves a judge of mode {judge.mode} nothing to compare; use at least 2, or "
            "reward_options.judge.mode score or rubric"
        )


def _check_step_credit(settings: Any) -> None:
    """Check that the steps of a completion can have advantages, or rewards, and that none would be ignored.

    Args:
        settings: `PolicySettings`.
    Raises: SettingsError naming the setting.
    """
    if not settings.uses_step_credit:
        return
    advice = "; set reward_options.process.credit to rollout, or"
    has_critic = settings.value_function is not None
    if not has_critic and settings.algorithm in ("reinforce", "maxrl", "gdpo", "gspo"):
        raise SettingsError(
            f"rewards.process: {settings.algorithm} has no advantages by step{advice} algorithm to grpo, dr_grpo, rloo "
            "or ppo"
        )
    for name in ("turn_credit", "advantages", "role_baseline", "self_play"):
        if getattr(settings, name) is not None:
            raise SettingsError(
                f"rewards.process: not used by step with {name}{advice} remove {name}"
            )
    options = settings.reward_options
    if options.clip is not None or "process" in options.normalise:
        name = "clip" if options.clip is not None else "normalise"
        raise SettingsError(
            f"rewards.process: reward_options.{name} changes the value of a completion, so that its steps would not "
            f"add up to it{advice} remove {name}"
        )


def check_learning_rate_control(settings: Any) -> None:
    """Check that the learning rate can follow the KL, and nothing else. Raises: SettingsError naming the setting."""
    if settings.learning_rate_control is not None and settings.epochs * settings.minibatches == 1:
        raise SettingsError(
            "learning_rate_control: the KL is measured before each optimizer step, so it is 0 with a single one; "
            "raise epochs or minibatches"
        )
    if settings.learning_rate_control is not None and settings.plateau_patience is not None:
        raise SettingsError(
            "plateau_patience: learning_rate_control sets the learning rate already; remove one of the two"
        )


def check_rollouts(settings: Any) -> None:
    """Check that workers serve one trainer, and stale rollouts have importance weights, with a critic V-trace.

    Raises: SettingsError naming the setting.
    """
    rollouts = settings.rollouts
    if rollouts.workers != "in_process" and settings.launch.kind != "in_process":
        raise SettingsError(
            f"rollouts.workers: {rollouts.workers} serves a single trainer process, but launch.kind is torchrun, "
            "whose processes each play a share; remove one of the two"
        )
    if not rollouts.max_staleness:
        return
    stale = f"rollouts.max_staleness: {rollouts.max_staleness}"
    if settings.value_function is not None and settings.importance != "vtrace":
        raise SettingsError(
            f"{stale} with a critic ({settings.algorithm}), whose values belong to the current policy; set importance: "
            "vtrace, which corrects its targets, or use an algorithm that compares rewards, such as grpo"
        )
    if settings.importance == "none" and not settings.anchors_sampler:
        raise SettingsError(
            f"{stale} trains on rollouts of older weights; set importance: token or sequence"
        )
    if settings.rollback is not None:
        raise SettingsError(
            f"{stale} has rollouts in flight that a rollback would not undo; set 0, or no rollback"
        )
    if settings.is_taught:
        raise SettingsError(f"{stale}: a distillation alternates rollouts and updates; set 0")
