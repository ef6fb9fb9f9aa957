"""Recipes of policy gradients and on-policy distillation; the teacher of a distillation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.policy import (
    ModelSource,
    Policy,
    describe_model_source,
    load_policy,
    resolve_model_folder,
)
from rl_core.api.recipes import Recipe, RolloutRecorder
from rl_core.data.chat import ChatRenderer
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.errors import SettingsError
from rl_core.inference.engine import Engine
from rl_core.inference.teacher import (
    LocalTeacher,
    ServedTeacher,
    Teacher,
    has_equal_vocabulary,
)
from rl_core.models import causal_lm
from rl_core.models.adapter_folder import is_adapter_folder, read_adapter_folder
from rl_core.models.lora import select_served_rank
from rl_core.rewards.mixture_rewards import build_rewards
from rl_core.rewards.model_components import Scorer
from rl_core.rewards.process_reward import StepScorer
from rl_core.rewards.user_function import RewardFunction
from rl_core.settings import DistillationSettings, ModelSettings, PolicySettings, TeacherSettings
from rl_core.storage.atomic_files import resolve_cache_folder
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher, AnyTeacher
from rl_core.trainers.policy_gradient.self_distillation import SelfTeacher
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.rollout_workers.managed_server import ManagedServer
    from rl_core.rollout_workers.server_backend import ServerBackend

logger = logging.getLogger(__name__)


def load_teacher(
    settings: TeacherSettings,
    policy: Policy,
    source: ModelSource | None = None,
    *,
    compares_distributions: bool = False,
) -> Teacher | AlignedTeacher:
    """Load the teacher that the settings name, and compare its vocabulary with the policy's.

    Args:
        source: a model that replaces `settings.model` and may be loaded already; its weights are frozen.
        compares_distributions: its distributions are compared, not the sampled tokens.
    Returns: an aligned teacher for another vocabulary or for distributions, else a teacher of the policy's tokens.
    Raises: SettingsError without a teacher, or for a tokenizer that cannot be aligned; CheckpointError without such a
        model.
    """
    model_settings = dataclasses.replace(policy.origin or ModelSettings(), lora=None, path=None)
    scorer: LocalTeacher | ServedTeacher
    if settings.url is not None:
        if source is not None:
            raise SettingsError("teacher: a model and an address are set; set one of the two")
        scorer = ServedTeacher(settings)
        name = settings.tokenizer or str(settings.model)
        renderer = ChatRenderer(causal_lm.load_tokenizer(name, model_settings), model_settings)
    else:
        source = source if source is not None else settings.model
        if source is None:
            raise SettingsError(
                "teacher: none is named; set teacher.model to a folder or hub name, or teacher.url and model"
            )
        is_loaded = isinstance(source, ModelSettings | Mapping)
        teacher = load_policy(source, None if is_loaded else model_settings)
        if teacher.model is policy.model:
            raise SettingsError("teacher: is the policy itself, which has nothing to learn from it")
        name, renderer = describe_model_source(source), teacher.renderer
        scorer = LocalTeacher(teacher.model, context=teacher.context)
    is_equal = has_equal_vocabulary(policy.tokenizer, renderer.tokenizer)
    if is_equal and not compares_distributions:
        return scorer
    folder = settings.tokenizer or source or settings.model
    if not is_equal and model_settings.chat_template is not None and isinstance(folder, str | Path):
        # The policy's template is not that of a model of another family.
        model_settings = dataclasses.replace(model_settings, chat_template=None)
        tokenizer = causal_lm.load_tokenizer(resolve_model_folder(folder), model_settings)
        renderer = ChatRenderer(tokenizer, model_settings)
    aligned = AlignedTeacher(
        scorer,
        policy.renderer,
        renderer,
        name,
        has_equal_tokens=is_equal,
        compares_distributions=compares_distributions,
    )
    if not is_equal:
        num_shared = len(aligned.pair_tokens()[0])
        logger.info(
            "teacher: %s has another vocabulary, and shares %d of its %d tokens with the policy; it reads the rollouts "
            "as text, and is compared over spans that end at the same byte (policy/aligned_rate)",
            name,
            num_shared,
            aligned.num_tokens[1],
        )
    return aligned


def build_policy_gradient_recipe(
    policy: Policy,
    reference: PreTrainedModel | None,
    environment: Environment,
    settings: PolicySettings,
    seed: int,
    *,
    scorer: Scorer | None = None,
    functions: Mapping[str, RewardFunction] | None = None,
    evaluator: Callable[[], Mapping[str, float]] | None = None,
    best_metric: str = "eval/success_rate",
    record: RolloutRecorder | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    teacher: AnyTeacher | None = None,
    custom_functions: Mapping[str, Callable[..., Any]] | None = None,
    make_environment: Callable[[], Environment] | None = None,
    server_log: Path | None = None,
    stop_event: threading.Event | None = None,
    opponents_folder: Path | None = None,
    step_scorer: StepScorer | None = None,
) -> Recipe[PolicyGradientTrainer]:
    """Build the trainer of the algorithm in `settings.algorithm`: GRPO and its variants, PPO or REINFORCE.

    Args:
        reference: frozen model of the KL term; needed if kl_coef > 0.
        scorer, step_scorer: reward models of the components `learned` and `process`.
        functions: reward components by name.
        evaluator, record: as in `PolicyGradientTrainer`.
        best_metric: of the evaluator; selects the best weights if `settings.selects_best`.
        teacher: see `build_distillation_recipe`.
        custom_functions: as in `PolicyGradientTrainer`.
        make_environment: builds the environment in rollout workers; None = `environment` itself is sent to them.
        server_log: of an inference server that is started here; None = a temporary file.
        stop_event: ends the wait for that server.
        opponents_folder: as in `PolicyGradientTrainer`.
    Raises: also BackendError, Stopped if that server does not start.
    """
    rewards = build_rewards(
        environment,
        settings.rewards,
        scorer=scorer,
        options=settings.reward_options,
        seed=seed,
        functions=functions,
        step_scorer=step_scorer,
        decode=policy.renderer.action_text,
    )
    rewards.check_step_scorer()
    process_group.run_on_rank_zero(rewards.calibrate_judges)
    server = None
    with contextlib.ExitStack() as stack:  # no server outlives a trainer that cannot be built
        if settings.rollouts.workers == "server":
            server = _connect_server(policy, settings, server_log, stop_event)
            stack.callback(server.close)
        trainer = PolicyGradientTrainer(
            policy.model,
            reference,
            policy.renderer,
            environment,
            settings,
            seed,
            rewards,
            policy.backend(settings.autocast) if server is None else server,
            evaluator=evaluator,
            record=record,
            process_group=process_group,
            teacher=teacher,
            custom_functions=custom_functions,
            opponents_folder=opponents_folder,
        )
        stack.pop_all()
    selected_metric = best_metric if settings.selects_best else None
    rollouts = settings.rollouts
    if server is not None:
        server.weights.is_exact = not trainer.optimizer_step.computes_in_bfloat16
        trainer.server = server
        return Recipe(trainer, settings.iterations, selected_metric, close=server.close)
    if rollouts.independent and isinstance(trainer.backend, Engine):
        trainer.backend.disable_cross_row_batching()
    if rollouts.workers == "in_process" and rollouts.replay_schedule is None:
        return Recipe(trainer, settings.iterations, selected_metric)
    if make_environment is None:
        make_environment = functools.partial(_return_shipped_environment, environment)
    close = _attach_workers(policy, trainer, make_environment)
    return Recipe(trainer, settings.iterations, selected_metric, close=close)


def _connect_server(
    policy: Policy,
    settings: PolicySettings,
    log: Path | None,
    stop_event: threading.Event | None,
) -> ServerBackend:
    """Connect to the inference server of the settings, started here if they say so."""
    from rl_core.rollout_workers.server_backend import ServerBackend

    rollouts, process = settings.rollouts, None
    if rollouts.server.start:
        process = _start_server(policy, settings, log, stop_event)
        running = dataclasses.replace(rollouts.server, start=False)
        rollouts = dataclasses.replace(rollouts, address=process.address, server=running)
    try:
        return ServerBackend(
            policy.model,
            policy.tokenizer,
            rollouts,
            eos_ids=policy.renderer.eos_ids,
            max_length=policy.context,
            bound=settings.numerics.bound,
            process=process,
        )
    except BaseException:
        if process is not None:
            process.close()
        raise


def _start_server(
    policy: Policy,
    settings: PolicySettings,
    log: Path | None,
    stop_event: threading.Event | None,
) -> ManagedServer:
    """Start vLLM on the folder or hub name that the policy was loaded from."""
    from rl_core.rollout_workers import managed_server

    server, origin = settings.rollouts.server, policy.origin
    if origin is None or origin.path is None:
        raise SettingsError(
            "rollouts.server.start: the server loads the policy's base model from a folder or hub name, but the "
            "policy was created in memory; save it, and pass its folder"
        )
    model = str(resolve_model_folder(origin.path))
    if is_adapter_folder(model):
        model = read_adapter_folder(model).base
    rank = select_served_rank(policy.model)
    managed_server.check_start_settings(server, rank)
    port = managed_server.choose_free_port()
    command = managed_server.build_start_command(
        model,
        server,
        port,
        dtype=origin.dtype,
        lora_rank=rank,
        trust_remote_code=origin.trust_remote_code,
    )
    log = log or resolve_cache_folder("servers") / f"vllm-{port}.log"
    process = managed_server.ManagedServer(
        command, port, log, timeout_s=server.start_timeout_s, stop_event=stop_event
    )
    logger.info("starting vLLM on %s at %s (log: %s)", model, process.address, process.log)
    process.start()
    return process


def _attach_workers(
    policy: Policy, trainer: PolicyGradientTrainer, make_environment: Callable[[], Environment]
) -> Callable[[], None]:
    """Attach workers, which its first rollouts start, to a trainer; return the function that closes them."""
    from rl_core.rollout_workers.async_worker_group import AsyncWorkerGroup, ScheduleReplay
    from rl_core.rollout_workers.ray_cluster import RayCluster
    from rl_core.rollout_workers.worker_group import WorkerConfig, WorkerGroup

    settings = trainer.settings.rollouts
    worker_config = WorkerConfig(
        policy.model,
        trainer.backend,
        policy.renderer,
        make_environment,
        list(policy.renderer.eos_ids),
        policy.renderer.pad_id,
        is_exact=not trainer.optimizer_step.computes_in_bfloat16,
        autocast=trainer.settings.autocast,
        textless_ids=policy.textless_ids,
    )
    if settings.replay_schedule is not None:
        trainer.stream = ScheduleReplay(
            settings.replay_schedule, worker_config, settings.max_staleness
        )
        return trainer.stream.close
    if settings.max_staleness:
        trainer.stream = AsyncWorkerGroup(settings, RayCluster(settings), worker_config)
        return trainer.stream.close
    trainer.worker_group = WorkerGroup(settings, RayCluster(settings), worker_config)
    return trainer.worker_group.close


def _return_shipped_environment(environment: Environment) -> Environment:
    """Return an environment that was sent to the worker as it is."""
    return environment


def build_distillation_recipe(
    policy: Policy,
    teacher: Teacher | AlignedTeacher | None,
    environment: Environment,
    settings: DistillationSettings,
    seed: int,
    *,
    evaluator: Callable[[], Mapping[str, float]] | None = None,
    record: RolloutRecorder | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[PolicyGradientTrainer]:
    """Build on-policy distillation: the policy-gradient trainer with the teacher's advantages; other arguments as
    there.

    Args:
        teacher: None = the policy itself, as `settings.self_teacher` says.
    """
    used: AnyTeacher | None = teacher
    if settings.self_teacher is not None:
        used = SelfTeacher(
            policy.model,
            policy.renderer,
            settings.self_teacher,
            columns=environment.columns,
            context=policy.context,
        )
    return build_policy_gradient_recipe(
        policy,
        None,
        environment,
        settings.policy(),
        seed,
        evaluator=evaluator,
        record=record,
        process_group=process_group,
        teacher=used,
    )
