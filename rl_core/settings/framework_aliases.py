"""Names of TRL 1.16 (configuration classes and `ModelConfig`) with what they are here.

A row: the names, separated by spaces; our settings ("" = no equal; "=" before one = the value stays as it is; STAGE =
the stage of the trainer); the difference in meaning, or the reason why there is no equal; the trainers for which the
row holds ("" = all). Source: the fields of the dataclasses, by reflection.

Names of verl's `ppo_trainer` configuration with what they are here; rows as in `list_trl_aliases.py`.

Names are dotted as in verl's file; `*` stands for any part (also none or several). The first row that fits counts.

Settings of TRL and verl by what they are called here: for error messages, `posttrain convert` and the documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# ruff: noqa: E501 (rows of a table)


TRL_VERSION = "1.16.0"

# Class of TRL without "Config" -> stage here
TRAINER_STAGES = {
    "GRPO": "policy",
    "RLOO": "policy",
    "SFT": "sft",
    "DPO": "preference",
    "KTO": "preference",
    "Reward": "reward_model",
    "Distillation": "distill",
}

_ON_POLICY = "GRPO RLOO Distillation"
_FROM_DATA = "SFT DPO KTO Reward"

TRL_ALIASES: tuple[tuple[str, str, str, str], ...] = (
    # ---------------------------------------------------------------- counting
    ("num_generations", "=STAGE.group_size", "same: rollouts of one prompt", "GRPO RLOO"),
    (
        "num_generations_eval",
        "stages.evaluate.samples",
        "of the stage evaluate; validations while training play one",
        "GRPO RLOO",
    ),
    (
        "generation_batch_size",
        "STAGE.prompts_per_iteration",
        "counts completions there, prompts here: divide it by num_generations",
        "GRPO RLOO",
    ),
    (
        "steps_per_generation",
        "STAGE.minibatches",
        "forward batches there, optimizer steps here: divide it by gradient_accumulation_steps",
        "GRPO RLOO",
    ),
    ("num_iterations", "=STAGE.epochs", "same: passes over the rollouts of one round", "GRPO RLOO"),
    (
        "per_device_train_batch_size",
        "STAGE.prompts_per_iteration, STAGE.micro_batch_tokens",
        "completions of one forward pass on one device there; here P prompts x G rollouts make a round over all processes, and memory is bounded in padded tokens, which changes no result",
        _ON_POLICY,
    ),
    (
        "per_device_train_batch_size",
        "STAGE.batch_size, STAGE.micro_batch_tokens",
        "rows of one forward pass on one device there; batch_size here is the rows of one optimizer step over all processes (per device x accumulation x devices), and memory is bounded in padded tokens, which changes no result",
        _FROM_DATA,
    ),
    (
        "gradient_accumulation_steps",
        "STAGE.prompts_per_iteration, STAGE.micro_batch_tokens",
        "follows from the round and the memory bound",
        _ON_POLICY,
    ),
    (
        "gradient_accumulation_steps",
        "STAGE.batch_size, STAGE.micro_batch_tokens",
        "a factor of batch_size here; passes follow from the memory bound",
        _FROM_DATA,
    ),
    (
        "per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size",
        "STAGE.micro_batch_tokens",
        "one memory bound for training and evaluation, in padded tokens",
        "",
    ),
    (
        "num_train_epochs",
        "STAGE.iterations",
        "rounds of sampling here, not passes over a data set",
        _ON_POLICY,
    ),
    ("num_train_epochs", "=STAGE.epochs", "same", _FROM_DATA),
    (
        "max_steps",
        "STAGE.iterations",
        "optimizer steps there; a round here takes epochs x minibatches of them",
        _ON_POLICY,
    ),
    (
        "max_steps",
        "=STAGE.max_steps",
        "same, but -1 is null here; the smaller of it and epochs binds, and the log says which",
        _FROM_DATA,
    ),
    # --------------------------------------------------------------- optimizer
    (
        "learning_rate",
        "=STAGE.learning_rate",
        "same; TRL's schedule is linear by default, here constant after warm-up",
        "",
    ),
    (
        "lr_scheduler_type",
        "STAGE.schedule",
        "constant, cosine or linear; constant_with_warmup is constant here",
        "",
    ),
    (
        "lr_scheduler_kwargs",
        "STAGE.min_lr_ratio",
        "the final rate as a share of the peak (0.1; TRL's linear and cosine end at 0)",
        "",
    ),
    (
        "warmup_steps",
        "STAGE.warmup_steps",
        "a count (10 by default); below 1 it is a share of all steps in TRL",
        "",
    ),
    ("warmup_ratio", "STAGE.warmup_steps", "a count of optimizer steps here", ""),
    ("weight_decay", "=STAGE.weight_decay", "same; on matrices only here", ""),
    ("max_grad_norm", "=STAGE.max_grad_norm", "same; it cannot be 0 here", ""),
    (
        "adam_beta1 adam_beta2",
        "STAGE.betas",
        "both in one list, (0.9, 0.95) by default; TRL's adam_beta2 is 0.999",
        "",
    ),
    ("adam_epsilon", "=STAGE.eps", "same", ""),
    ("optim", "STAGE.optimizer", "adamw or muon", ""),
    (
        "optim_args optim_target_modules",
        "",
        "adamw and muon have settings of their own, by name",
        "",
    ),
    (
        "label_smoothing_factor",
        "",
        "no label smoothing of the cross-entropy; preference.label_smoothing is another quantity",
        "",
    ),
    ("neftune_noise_alpha", "", "no noise on embeddings", ""),
    (
        "average_tokens_across_devices",
        "",
        "always on: a loss is divided by the tokens of the whole optimizer step",
        "",
    ),
    (
        "train_sampling_strategy length_column_name",
        "",
        "rows come in a seeded order, a new one each epoch; micro-batches are sorted by length",
        "",
    ),
    ("shuffle_dataset", "", "always on, seeded, a new order each epoch", ""),
    # --------------------------------------------------------------- precision, memory, machine
    (
        "bf16",
        "STAGE.autocast",
        "bf16: true is autocast: bfloat16; it is off by default here, on where it can in TRL",
        "",
    ),
    ("fp16", "", "no loss scaling; use autocast: bfloat16", ""),
    ("tf32", "", "torch's own switch, left as it is", ""),
    (
        "bf16_full_eval fp16_full_eval",
        "model.dtype",
        "one dtype of the weights for training and evaluation",
        "",
    ),
    (
        "gradient_checkpointing activation_checkpointing",
        "=STAGE.activation_checkpointing",
        "same; off by default here, on in TRL",
        "",
    ),
    (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        "",
        "one kind of checkpointing, per layer",
        "",
    ),
    (
        "activation_offloading",
        "",
        "activations are recomputed, not moved: activation_checkpointing",
        "",
    ),
    ("use_liger_kernel liger_kernel_config", "", "logits are computed in chunks anyway", ""),
    ("torch_compile torch_compile_backend torch_compile_mode", "", "the model is not compiled", ""),
    ("use_cache cache_implementation", "", "rollouts always use the built-in engine's cache", ""),
    ("torch_empty_cache_steps", "", "the allocator is left alone", ""),
    ("use_cpu", "model.device", "use_cpu: true is device: cpu", ""),
    ("seed", "=seed", "same; of the whole pipeline here", ""),
    ("data_seed", "seed", "one seed for data and training", ""),
    (
        "full_determinism enable_jit_checkpoint",
        "",
        "runs and resumes are bit-exact by default on one machine",
        "",
    ),
    (
        "deepspeed fsdp fsdp_config accelerator_config parallelism_config local_rank ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ds3_gather_for_generation",
        "STAGE.launch",
        "kind: torchrun shards by FSDP2; it has no further options",
        "",
    ),
    ("ddp_timeout", "STAGE.launch.timeout_seconds", "same, in seconds (3600 here)", ""),
    ("dataloader_drop_last", "", "the last, smaller batch of an epoch is always trained on", ""),
    (
        "dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor",
        "",
        "no loader processes: rows are tokenised before training",
        "",
    ),
    ("dataset_num_proc", "", "rows are tokenised by the stage itself", ""),
    ("pad_to_multiple_of", "", "rows are padded to the longest of their micro-batch", ""),
    (
        "padding_free",
        "STAGE.packing",
        "packed rows whose sequences attend to themselves alone, for sft",
        "SFT",
    ),
    ("padding_free", "", "pairs are padded to the longest of their micro-batch", "DPO"),
    # ------------------------------------------------------------------ loop
    ("output_dir", "=output", "same, but each pipeline has its folder `name` in it", ""),
    (
        "run_name",
        "name",
        "of the pipeline: letters, digits, '.', '_' and '-'; names its folder, experiment and model",
        "",
    ),
    ("project", "tracking.experiment", "MLflow's experiment", ""),
    (
        "report_to",
        "tracking.sinks",
        "places beside MLflow, which has every run; in Python tracker=",
        "",
    ),
    ("do_train do_predict", "stages", "a stage runs if it stands there", ""),
    ("do_eval eval_strategy", "STAGE.eval_every", "in iterations; 0 = only at the end", ""),
    (
        "eval_steps",
        "STAGE.eval_every",
        "in iterations; below 1 it is a share of all steps in TRL",
        "",
    ),
    ("eval_on_start", "", "the stage evaluate plays the starting model beside the trained one", ""),
    ("eval_delay", "", "evaluations begin with the first interval of eval_every", ""),
    (
        "save_steps",
        "STAGE.checkpoint_every",
        "in iterations; below 1 it is a share of all steps in TRL",
        "",
    ),
    ("save_strategy", "STAGE.checkpoint_every", "in iterations; 0 = only when stopped", ""),
    ("save_total_limit", "STAGE.keep_checkpoints", "same; at least 2 here", ""),
    (
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
        "",
        "the same command resumes, bit-exactly, from the last checkpoint",
        "",
    ),
    (
        "save_only_model save_on_each_node",
        "",
        "checkpoints always hold all that a resume needs, written once",
        "",
    ),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "STAGE.patience",
        "the stages choose by their own evaluation metric; patience = evaluations without improvement before stopping",
        "",
    ),
    (
        "logging_steps logging_strategy logging_first_step logging_nan_inf_filter",
        "",
        "every optimizer step is logged",
        "",
    ),
    (
        "log_completions num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo",
        "",
        "every rollout is kept with the stage's results; posttrain monitor shows them",
        "",
    ),
    (
        "log_level log_level_replica log_on_each_node disable_tqdm debug",
        "",
        "posttrain --quiet and the logging module of Python",
        "",
    ),
    (
        "include_num_input_tokens_seen skip_memory_metrics",
        "",
        "always logged: train/tokens, system/...",
        "",
    ),
    (
        "include_for_metrics label_names prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object",
        "",
        "no Trainer of transformers behind it",
        "",
    ),
    (
        "remove_unused_columns",
        "",
        "every column reaches reward functions; a message field that is not understood is refused",
        "",
    ),
    (
        "push_to_hub hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token",
        "tracking.registered_model",
        "models are registered with MLflow; the stage's model folder is in Hugging Face format",
        "",
    ),
    ("trackio_bucket_id trackio_space_id trackio_static_space_id", "", "no Trackio", ""),
    # ----------------------------------------------------------------- model
    ("model_name_or_path", "=model.path", "same", ""),
    ("model_revision", "model.path", "a local folder, or the hub's default revision", ""),
    ("model_init_kwargs", "model", "dtype, device and chat template are settings of their own", ""),
    ("dtype torch_dtype", "model.dtype", "float32 (default), bfloat16 or float16", ""),
    ("trust_remote_code", "=model.trust_remote_code", "same", ""),
    (
        "attn_implementation",
        "",
        "chosen by what the model takes; posttrain doctor --model tells",
        "",
    ),
    ("use_peft", "model.lora", "`lora: {}` = adapters with their defaults", ""),
    ("lora_r", "=model.lora.rank", "same", ""),
    ("lora_alpha", "=model.lora.alpha", "same", ""),
    ("lora_dropout", "=model.lora.dropout", "same; only where the stage trains with dropout", ""),
    (
        "lora_target_modules",
        "model.lora.target_modules",
        "a list of names of layers, or all-linear",
        "",
    ),
    ("lora_modules_to_save", "model.lora.modules_to_save", "same", ""),
    ("use_rslora", "model.lora.rank_stabilized", "same", ""),
    ("use_dora", "model.lora.dora", "same", ""),
    (
        "lora_target_parameters lora_task_type",
        "",
        "adapters are on linear layers of causal language models",
        "",
    ),
    (
        "load_in_4bit load_in_8bit",
        "model.lora.quantize",
        "nf4 or int8, of the frozen weights under adapters",
        "",
    ),
    (
        "bnb_4bit_quant_storage bnb_4bit_quant_type use_bnb_nested_quant",
        "",
        "4 bits are nf4 with nested quantisation",
        "",
    ),
    (
        "chat_template_path",
        "=model.chat_template",
        "a Jinja file; for the whole pipeline, part of the stages' keys",
        "",
    ),
    (
        "chat_template_kwargs",
        "=model.chat_template_kwargs",
        "same; for the whole pipeline, part of the stages' keys",
        "",
    ),
    (
        "eos_token pad_token",
        "",
        "the tokenizer's own; the end of turn is read from the chat template",
        "",
    ),
    ("cast_lm_head_to_fp32", "", "logits and losses are computed in float32 anyway", ""),
    (
        "router_aux_loss_coef",
        "=STAGE.router_aux_loss_coef",
        "same; off by default",
        "GRPO RLOO SFT",
    ),
    ("router_aux_loss_coef", "", "no load-balancing term in this stage", "DPO KTO"),
    (
        "disable_dropout",
        "STAGE.dropout",
        "the other way round: dropout: false is disable_dropout: true; off by default here but for sft",
        "",
    ),
    # ------------------------------------------------------------------ data
    (
        "dataset_name dataset_train_split dataset_config dataset_streaming datasets streaming",
        "stages.prepare_data.demonstrations, stages.prepare_data.preferences, environment",
        "a JSONL, CSV or Parquet file or a folder of them; prompts of policy optimisation by environment: {name: prompts, options: {path: FILE}}",
        "",
    ),
    (
        "dataset_test_split test_split_size",
        "stages.prepare_data.heldout_fraction",
        "held out by prompt from the same file",
        "",
    ),
    ("ignore_bias_buffers", "", "no DDP", ""),
    (
        "dataset_text_field",
        "",
        "columns are recognised by their names; plain text is the column text",
        "",
    ),
    ("dataset_kwargs", "", "rows are always checked and tokenised by the data stage", ""),
    (
        "max_length",
        "stages.prepare_data.max_tokens, stages.prepare_data.long_rows",
        "a pair with a longer side is left out there: long_rows: drop",
        "Reward",
    ),
    (
        "max_length",
        "stages.prepare_data.max_tokens, stages.prepare_data.long_rows",
        "longer rows are cut there (default: 1024): long_rows: cut; here they are refused unless it says so, and the default is the model's context",
        "SFT DPO KTO",
    ),
    (
        "truncation_mode",
        "stages.prepare_data.long_rows",
        "cut keeps the first tokens (keep_start); keep_end has no equal",
        "SFT DPO",
    ),
    ("packing", "=STAGE.packing", "same idea; sequences attend to themselves alone", "SFT"),
    (
        "packing_strategy eval_packing",
        "STAGE.packing",
        "best-fit-decreasing, whole sequences; for training and evaluation",
        "SFT",
    ),
    (
        "completion_only_loss assistant_only_loss",
        "STAGE.loss_on",
        "always on: only the assistant's tokens carry loss; loss_on: last, or a message's weight: 0, leaves turns out",
        "SFT",
    ),
    ("loss_type", "", "cross-entropy (nll)", "SFT"),
    # ------------------------------------------------------------------ GRPO
    (
        "beta",
        "=STAGE.kl_coef",
        "TRL multiplies k3 by the ratio to the old policy (use_bias_correction_kl, on by default); here plain k3. Divided as the policy loss in both",
        "GRPO",
    ),
    (
        "beta",
        "=STAGE.kl_coef",
        "k1 in the reward there: set kl_in: reward as well (default there 0.05, here 0)",
        "RLOO",
    ),
    (
        "use_bias_correction_kl",
        "STAGE.kl_estimator",
        "k3 without the ratio; k1 and k2 besides",
        "GRPO",
    ),
    ("epsilon", "=STAGE.clip_eps", "same", "GRPO RLOO"),
    (
        "epsilon_high",
        "STAGE.clip_eps_high",
        "same; under cispo TRL's value is the cap itself, here the cap above 1 (1.2 there = 0.2 here)",
        "GRPO RLOO",
    ),
    ("delta", "=STAGE.dual_clip", "same", "GRPO"),
    (
        "loss_type",
        "STAGE.algorithm, STAGE.loss_aggregation",
        "dapo (TRL's default) and bnpo are algorithm: grpo; grpo is loss_aggregation: sequence_mean; dr_grpo, cispo and sapo are algorithms; vespo and luspo have no equal",
        "GRPO",
    ),
    (
        "importance_sampling_level",
        "STAGE.algorithm",
        "sequence is algorithm: gspo, which has clip bounds of its own",
        "GRPO",
    ),
    (
        "scale_rewards",
        "STAGE.algorithm",
        "group is grpo (both add 1e-4 to the std; groups with a std below 1e-3 get advantage 0 here); none is dr_grpo; batch is nearest to reinforce",
        "GRPO",
    ),
    (
        "normalize_advantages",
        "=STAGE.whiten_advantages",
        "over the iteration's loss tokens here",
        "RLOO",
    ),
    (
        "reward_clip_range",
        "STAGE.reward_options.clip",
        "one number, each component is clipped to +- it before weighting",
        "RLOO",
    ),
    ("sapo_temperature_pos", "=STAGE.sapo_tau_positive", "same", "GRPO"),
    ("sapo_temperature_neg", "=STAGE.sapo_tau_negative", "same", "GRPO"),
    ("vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg", "", "no VESPO", "GRPO"),
    (
        "reward_weights reward_funcs",
        "STAGE.rewards",
        "a mapping of component or import path to its weight",
        "GRPO RLOO",
    ),
    (
        "multi_objective_aggregation",
        "STAGE.reward_options.normalise",
        "components are weighted and added; those named there are normalised before",
        "GRPO",
    ),
    (
        "mask_truncated_completions",
        "=STAGE.mask_truncated",
        "same: no loss on completions that the limit cut",
        "GRPO RLOO",
    ),
    (
        "entropy_coef",
        "=STAGE.entropy_coef",
        "a token mean there, aggregated as the policy loss here; with entropy_decay and entropy_floor",
        "GRPO",
    ),
    (
        "use_adaptive_entropy entropy_target entropy_coef_min entropy_coef_max entropy_coef_delta",
        "STAGE.entropy_decay, STAGE.entropy_floor",
        "the coefficient decays to a floor here; it follows no target",
        "GRPO",
    ),
    ("top_entropy_quantile", "", "all loss tokens count", "GRPO"),
    (
        "off_policy_mask_threshold",
        "STAGE.importance_mask",
        "drops tokens or sequences by their ratio; TRL's threshold is a KL of sequences with negative advantage",
        "GRPO",
    ),
    (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "STAGE.importance, STAGE.importance_mask",
        "truncated: importance; masked: importance_mask. sequence_mask is `sequence` for both; off by default, since sampler and trainer agree to 1e-4 in float32",
        "GRPO",
    ),
    (
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "STAGE.importance_cap, STAGE.importance_high",
        "the cap of importance, or the upper limit of importance_mask",
        "GRPO",
    ),
    (
        "vllm_importance_sampling_clip_min",
        "=STAGE.importance_low",
        "lower limit of importance_mask",
        "GRPO",
    ),
    (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "",
        "the reference is the stage's starting model",
        "",
    ),
    # -------------------------------------------------------------- sampling
    (
        "max_completion_length",
        "=STAGE.sampling.max_completion_tokens",
        "includes observations of tools here",
        _ON_POLICY,
    ),
    ("max_prompt_length", "", "a prompt that leaves no room in the context is refused", ""),
    (
        "temperature",
        "=STAGE.sampling.temperature",
        "same: also applied to all log-probs",
        _ON_POLICY,
    ),
    (
        "top_p",
        "=STAGE.sampling.top_p",
        "in evaluation, pairs and generate; refused where rollouts train a policy, whose log-probs are of the full distribution",
        _ON_POLICY,
    ),
    ("top_k", "=STAGE.sampling.top_k", "as top_p; 0 = all", _ON_POLICY),
    ("min_p", "=STAGE.sampling.min_p", "as top_p", _ON_POLICY),
    ("repetition_penalty", "=STAGE.sampling.repetition_penalty", "as top_p", _ON_POLICY),
    ("generation_kwargs", "STAGE.sampling", "each option is a setting of its own", _ON_POLICY),
    (
        "max_tool_calling_iterations",
        "STAGE.sampling.max_turns",
        "turns include the answer: one more than tool calls",
        _ON_POLICY,
    ),
    (
        "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
        "",
        "the built-in engine samples, in the trainer's process; a vLLM server of its own may: stages.policy.rollouts, workers: server",
        _ON_POLICY,
    ),
    (
        "vllm_max_model_length",
        "model.context",
        "the model's own context; the setting is for presets",
        _ON_POLICY,
    ),
    (
        "vllm_structured_outputs_regex",
        "",
        "no constrained decoding; the reward component format rewards a pattern",
        _ON_POLICY,
    ),
    # ------------------------------------------------------------ preferences
    ("beta", "=STAGE.beta", "same", "DPO KTO"),
    (
        "label_smoothing",
        "=STAGE.label_smoothing",
        "same under sigmoid: conservative DPO; TRL's robust subtracts the flipped loss instead",
        "DPO",
    ),
    (
        "loss_type",
        "STAGE.loss",
        "sigmoid is dpo, ipo is ipo; simpo and orpo are losses here, trainers there; the others have no equal",
        "DPO",
    ),
    (
        "loss_type",
        "STAGE.loss",
        "kto; TRL mismatches completions within each device's batch, in a fixed order; here the partner comes from a seeded order of all rows (never the same prompt), and the reference point is the mean over the optimizer step",
        "KTO",
    ),
    (
        "loss_weights",
        "STAGE.sft_coef",
        "one loss, and the cross-entropy of the chosen completions beside it",
        "DPO",
    ),
    ("desirable_weight", "=STAGE.desirable_weight", "same", "KTO"),
    ("undesirable_weight", "=STAGE.undesirable_weight", "same", "KTO"),
    (
        "f_divergence_type f_alpha_divergence_coef discopop_tau ld_alpha use_weighting",
        "",
        "reverse KL, every token and pair with equal weight",
        "DPO",
    ),
    (
        "precompute_ref_log_probs precompute_ref_batch_size",
        "",
        "always: the reference's log-probs are computed once and cached",
        "DPO KTO",
    ),
    ("simpo_gamma", "=STAGE.simpo_gamma", "same; beta keeps our default (0.1)", "CPO"),
    ("cpo_alpha", "=STAGE.sft_coef", "same", "CPO"),
    (
        "center_rewards_coefficient",
        "=STAGE.center_coef",
        "same term; 0.01 by default here, off in TRL",
        "Reward",
    ),
    # ----------------------------------------------------------- distillation
    (
        "teacher_model_name_or_path",
        "=STAGE.teacher.model",
        "same; or a server by teacher.url",
        "Distillation",
    ),
    (
        "teacher_model_revision teacher_model_init_kwargs",
        "STAGE.teacher.model",
        "a local folder, or the hub's default revision",
        "Distillation",
    ),
    (
        "beta",
        "",
        "always reverse KL (beta 1 there); TRL takes it over the whole vocabulary and differentiates it, here it is a policy gradient from the sampled token, so a server that tells one log-prob is enough",
        "Distillation",
    ),
    ("lmbda", "", "always 1: all rollouts are the student's own", "GKD"),
)


# ruff: noqa: E501 (rows of a table)


VERL_VERSION = "035682e (verl/trainer/config/_generated_ppo_trainer.yaml)"

_P = "stages.policy"
_A = "actor_rollout_ref.actor"
_R = "actor_rollout_ref.rollout"
_MEMORY = "one memory bound, in padded tokens, which changes no result"
_OFFLOAD = "no offloading and no options of FSDP beside the number of processes"

VERL_ALIASES: tuple[tuple[str, str, str], ...] = (
    # --------------------------------------------------------------- counting
    (f"{_R}.n critic.rollout_n", f"={_P}.group_size", "same: rollouts of one prompt"),
    ("data.train_batch_size", f"={_P}.prompts_per_iteration", "same: prompts of one round"),
    (
        f"{_A}.ppo_mini_batch_size critic.ppo_mini_batch_size",
        f"{_P}.minibatches",
        "a size in prompts there, a number of parts here: minibatches = train_batch_size / ppo_mini_batch_size",
    ),
    (
        f"{_A}.ppo_epochs critic.ppo_epochs",
        f"={_P}.epochs",
        "same: passes over the rollouts of one round, for policy and critic",
    ),
    (
        f"{_A}.ppo_max_token_len_per_gpu",
        f"={_P}.micro_batch_tokens",
        "tokens of one forward pass; padded ones here",
    ),
    (
        "*.ppo_micro_batch_size *.ppo_micro_batch_size_per_gpu *.log_prob_micro_batch_size *.log_prob_micro_batch_size_per_gpu *.forward_micro_batch_size *.forward_micro_batch_size_per_gpu *.micro_batch_size *.micro_batch_size_per_gpu *.ppo_max_token_len_per_gpu *.forward_max_token_len_per_gpu *.log_prob_max_token_len_per_gpu",
        f"{_P}.micro_batch_tokens",
        "rows or tokens of one forward pass there; here " + _MEMORY,
    ),
    (
        "*.use_dynamic_bsz *.log_prob_use_dynamic_bsz *.use_remove_padding trainer.balance_batch",
        f"{_P}.micro_batch_tokens",
        "always: micro-batches are sorted by length under " + _MEMORY,
    ),
    (
        "trainer.total_epochs",
        f"{_P}.iterations",
        "rounds of sampling here, not passes over a data set",
    ),
    ("trainer.total_training_steps", f"={_P}.iterations", "same: rounds of sampling and updating"),
    ("*.optim.total_training_steps", f"{_P}.iterations", "the schedule's length follows from it"),
    # -------------------------------------------------------------- algorithm
    (
        "algorithm.adv_estimator",
        f"{_P}.algorithm",
        "gae is ppo, grpo and rloo are the same (groups with a std below 1e-3 get 0 here), reinforce_plus_plus is nearest to reinforce (normalised over rollouts and without a ratio here)",
    ),
    ("algorithm.norm_adv_by_std_in_grpo", f"{_P}.algorithm", "false is algorithm: dr_grpo"),
    ("algorithm.gamma", f"={_P}.gamma", "same"),
    ("algorithm.lam", f"={_P}.gae_lambda", "same; 0.95 by default here, 1.0 there"),
    (f"{_A}.clip_ratio {_A}.clip_ratio_low", f"={_P}.clip_eps", "same"),
    (f"{_A}.clip_ratio_high", f"={_P}.clip_eps_high", "same"),
    (f"{_A}.clip_ratio_c", f"={_P}.dual_clip", "same; off by default here, 3.0 there"),
    (
        f"{_A}.loss_agg_mode",
        f"{_P}.loss_aggregation",
        "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum-norm constant; here over the whole optimizer step: all micro-batches, all processes",
    ),
    ("critic.loss_agg_mode", "", "the value loss is a token mean over the optimizer step"),
    (
        f"{_A}.policy_loss.loss_mode",
        f"{_P}.algorithm",
        "vanilla is the algorithm's own loss, gspo is algorithm: gspo; clip_cov and kl_cov have no equal",
    ),
    (f"{_A}.policy_loss.*", "", "no loss by covariance (clip_cov, kl_cov)"),
    (f"{_A}.entropy_coeff", f"={_P}.entropy_coef", "same"),
    (f"{_A}.use_kl_loss", f"{_P}.kl_in", "true is kl_in: loss; kl_coef above 0 switches it on"),
    (f"{_A}.kl_loss_coef", f"{_P}.kl_coef", "with kl_in: loss; only where use_kl_loss is true"),
    (f"{_A}.kl_loss_type", f"{_P}.kl_estimator", "kl is k1, mse k2, low_var_kl k3"),
    ("algorithm.use_kl_in_reward", f"{_P}.kl_in", "true is kl_in: reward"),
    ("algorithm.kl_penalty", f"{_P}.kl_estimator", "in the reward it is k1 alone"),
    ("algorithm.kl_ctrl.type", f"{_P}.kl_controller", "fixed or adaptive; banded besides"),
    (
        "algorithm.kl_ctrl.kl_coef",
        f"{_P}.kl_coef",
        "with kl_in: reward; only where use_kl_in_reward is true",
    ),
    ("algorithm.kl_ctrl.horizon", f"={_P}.kl_horizon", "same"),
    ("algorithm.kl_ctrl.target_kl", f"{_P}.kl_target", "nats per token here"),
    ("algorithm.use_pf_ppo algorithm.pf_ppo.*", "", "no reweighting of rollouts by reward"),
    # -------------------------------------------------------------- optimizer
    ("critic.optim.lr", f"={_P}.critic.learning_rate", "same"),
    ("critic.optim.*", "", "schedule, warm-up and decay are the policy's"),
    (f"{_A}.optim.lr", f"={_P}.learning_rate", "same"),
    (f"{_A}.optim.lr_warmup_steps", f"{_P}.warmup_steps", "same; -1 there leaves it to the ratio"),
    (f"{_A}.optim.lr_warmup_steps_ratio", f"{_P}.warmup_steps", "a count of optimizer steps here"),
    (f"{_A}.optim.weight_decay", f"={_P}.weight_decay", "same; on matrices only here"),
    (f"{_A}.optim.min_lr_ratio", f"={_P}.min_lr_ratio", "same"),
    (f"{_A}.optim.num_cycles", "", "half a cosine (0.5 there)"),
    (
        f"{_A}.optim.warmup_style",
        f"{_P}.schedule",
        "of the time after the warm-up: constant, cosine or linear",
    ),
    (f"{_A}.grad_clip", f"={_P}.max_grad_norm", "same"),
    ("critic.grad_clip", f"{_P}.max_grad_norm", "one bound for policy and critic"),
    # ----------------------------------------------------------------- critic
    ("critic.cliprange_value", f"{_P}.critic.value_clip_eps", "same; off by default here"),
    ("critic.enable", f"{_P}.critic", "`critic: {}` = its defaults; ppo has one anyway"),
    ("trainer.critic_warmup", f"={_P}.critic.warmup_iterations", "same"),
    (
        "critic.model.*",
        f"{_P}.critic.kind",
        "the critic starts as a copy of the policy, or is a head on it",
    ),
    # --------------------------------------------------------------- sampling
    (f"{_R}.temperature", f"={_P}.sampling.temperature", "same"),
    (
        f"{_R}.val_kwargs.temperature {_R}.val_kwargs.top_k {_R}.val_kwargs.top_p",
        "stages.evaluate.sampling",
        "sampling of the evaluation",
    ),
    (f"{_R}.val_kwargs.n", "=stages.evaluate.samples", "same"),
    (
        f"{_R}.val_kwargs.do_sample",
        "stages.evaluate.greedy",
        "greedy decoding is reported beside samples",
    ),
    (
        f"{_R}.top_k",
        f"{_P}.sampling.top_k",
        "-1 there is 0 here; refused where rollouts train a policy, whose log-probs are of the full distribution",
    ),
    (f"{_R}.top_p", f"={_P}.sampling.top_p", "refused below 1 where rollouts train a policy"),
    (f"{_R}.do_sample", f"{_P}.sampling.temperature", "rollouts are always sampled"),
    (
        f"data.max_response_length {_R}.response_length",
        f"={_P}.sampling.max_completion_tokens",
        "includes observations here",
    ),
    (
        f"data.max_prompt_length {_R}.prompt_length data.filter_overlong_prompts data.filter_overlong_prompts_workers data.truncation",
        "",
        "a prompt that leaves no room in the context is refused, never cut",
    ),
    (
        f"{_R}.multi_turn.max_assistant_turns {_R}.multi_turn.max_turns",
        f"={_P}.sampling.max_turns",
        "same: actions of an episode",
    ),
    (f"{_R}.multi_turn.*", "environment", "the environment holds tools and turns"),
    (f"{_R}.agent.*", "environment", "the environment is the agent's loop"),
    (
        f"{_R}.over_sample_rate",
        f"{_P}.dynamic_sampling_tries",
        "resampling of groups with equal rewards",
    ),
    (f"{_R}.calculate_log_probs", "", "always: a rollout carries the sampler's log-probs"),
    (f"{_R}.ignore_eos", "", "the end of turn always ends an action"),
    (f"{_R}.max_num_seqs", f"={_P}.sampling.slots", "episodes decoded at the same time"),
    (f"{_R}.max_model_len", "model.context", "the model's own context; the setting is for presets"),
    (f"{_R}.dtype", "model.dtype", "one dtype for sampler and trainer, so that they agree"),
    (
        f"{_R}.name {_R}.mode {_R}.gpu_memory_utilization {_R}.enforce_eager {_R}.cudagraph_capture_sizes {_R}.chat_scheduler {_R}.use_fire_sampling {_R}.free_cache_engine {_R}.tensor_model_parallel_size {_R}.max_num_batched_tokens {_R}.disable_log_stats {_R}.multi_stage_wake_up {_R}.engine_kwargs.* {_R}.update_weights_bucket_megabytes {_R}.enable_chunked_prefill {_R}.load_format {_R}.layered_summon actor_rollout_ref.hybrid_engine",
        "",
        "the built-in engine samples, in the trainer's process, with the trainer's weights; a vLLM server of its own may: stages.policy.rollouts, workers: server",
    ),
    (
        f"{_R}.trace.* {_R}.skip_rollout {_R}.skip_dump_dir trainer.rollout_data_dir trainer.validation_data_dir trainer.log_val_generations",
        "",
        "every rollout and evaluated episode is kept with the stage's results",
    ),
    # ------------------------------------------------------------------ model
    ("actor_rollout_ref.model.path", "=model.path", "same"),
    (
        "actor_rollout_ref.model.custom_chat_template",
        "model.chat_template",
        "the path of a Jinja file here, the template's text there",
    ),
    ("data.apply_chat_template_kwargs", "=model.chat_template_kwargs", "same"),
    ("actor_rollout_ref.model.lora_rank", "model.lora.rank", "same; 0 there is lora: null"),
    ("actor_rollout_ref.model.lora_alpha", "model.lora.alpha", "same"),
    (
        "actor_rollout_ref.model.target_modules",
        "model.lora.target_modules",
        "a list of names of layers, or all-linear",
    ),
    ("actor_rollout_ref.model.exclude_modules", "", "name the layers in model.lora.target_modules"),
    (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        f"={_P}.activation_checkpointing",
        "same; off by default here",
    ),
    (
        "actor_rollout_ref.model.trust_remote_code data.trust_remote_code",
        "=model.trust_remote_code",
        "same",
    ),
    ("*.trust_remote_code", "model.trust_remote_code", "of all models of a pipeline"),
    ("actor_rollout_ref.ref.model", "", "the reference is the stage's starting model"),
    (
        "*.override_config *.external_lib *.use_shm *.enable_activation_offload *.use_liger *.use_fused_loss *.return_last_hidden_state *.use_fused_kernels *.fused_kernel_options.* *.use_torch_compile *.entropy_from_logits_with_chunking *.entropy_checkpointing",
        "",
        "no such switch: what a model takes is decided by its architecture (posttrain doctor --model), logits are computed in chunks",
    ),
    # ------------------------------------------------------------------- data
    (
        "data.train_files",
        "environment",
        "environment: {name: prompts, options: {path: FILE}}, a JSONL, JSON, CSV or Parquet file or a folder; in Python prompts=FILE",
    ),
    (
        "data.val_files",
        "stages.prepare_data.heldout_fraction",
        "held-out questions come from the same environment",
    ),
    (
        "data.prompt_key data.reward_fn_key data.image_key data.video_key data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.return_multi_modal_inputs data.custom_cls.* data.sampler.* data.datagen.*",
        "environment",
        "the environment says what a row is",
    ),
    (
        "data.tokenizer reward_model.model.input_tokenizer",
        "model.path",
        "the model's own tokenizer",
    ),
    (
        "data.val_batch_size data.dataloader_num_workers data.validation_shuffle",
        "",
        "held-out episodes are played in one seeded order; no loader",
    ),
    ("data.shuffle *.shuffle", "", "always on, seeded"),
    # ----------------------------------------------------------------- reward
    (
        "custom_reward_function.path custom_reward_function.name",
        f"{_P}.rewards",
        '{"package.module:function": 1.0}; gets whole trajectories of an iteration, gives as many numbers',
    ),
    (
        "reward_model.enable reward_model.model.path",
        f"{_P}.rewards",
        "stage reward_model and rewards: {learned: 1.0}: trained in the pipeline; in Python reward_model= takes a folder",
    ),
    (
        "reward_model.sandbox_fusion.*",
        "environment",
        "the environment runs code in child processes",
    ),
    (
        "reward_model.reward_manager reward_model.launch_reward_fn_async",
        f"{_P}.reward_options",
        "user functions run in a thread with a time limit",
    ),
    ("reward_model.max_length", "", "a sequence beyond the reward model's context is refused"),
    # ---------------------------------------------------------------- trainer
    ("trainer.project_name", "=tracking.experiment", "MLflow's experiment"),
    ("trainer.experiment_name", "name", "of the pipeline: letters, digits, '.', '_' and '-'"),
    (
        "trainer.logger",
        "tracking.sinks",
        "places beside MLflow, which has every run; in Python tracker=",
    ),
    ("trainer.default_local_dir", "output", "folder of all pipelines; each has its own in it"),
    ("trainer.nnodes", f"={_P}.launch.nodes", "same; with kind: torchrun"),
    (
        "trainer.n_gpus_per_node",
        f"={_P}.launch.processes",
        "one process per GPU; with kind: torchrun",
    ),
    ("trainer.save_freq", f"{_P}.checkpoint_every", "in iterations; -1 there is 0 here"),
    ("trainer.test_freq", f"{_P}.eval_every", "in iterations; -1 there is 0 here"),
    (
        "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
        f"{_P}.keep_checkpoints",
        "same; at least 2 here, policy and critic together",
    ),
    (
        "trainer.resume_mode trainer.resume_from_path",
        "",
        "the same command resumes; refused if settings or data changed",
    ),
    (
        "trainer.val_before_train",
        "",
        "the stage evaluate plays the starting model beside the policy",
    ),
    ("trainer.val_only", "stages", "leave out all stages but evaluate, or call posttrain evaluate"),
    ("trainer.device", "model.device", "auto, cpu or cuda"),
    (
        "trainer.esi_redundant_time trainer.ray_wait_register_center_timeout trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.use_legacy_worker_impl actor_rollout_ref.nccl_timeout ray_kwargs.* ray_init.*",
        "",
        "no HDFS; rollouts on Ray: stages.policy.rollouts",
    ),
    ("*.checkpoint.*", "", "checkpoints always hold all that a resume needs"),
    ("*.profiler.* global_profiler.*", "", "posttrain profile CONFIG"),
    (
        "*.strategy *.fsdp_config.* *.ulysses_sequence_parallel_size",
        f"{_P}.launch",
        "kind: torchrun shards by FSDP2; " + _OFFLOAD,
    ),
)


_MAX_SHOWN_LEAVES = 4  # leaves of an unknown block that a message names
_CONVERT_HINT = "`posttrain convert FILE` translates a whole file"


@dataclass(frozen=True, slots=True)
class FrameworkAlias:
    """A setting of a peer: what it is here, and the difference in meaning."""

    framework: Literal["TRL", "verl"]
    names: tuple[str, ...]  # as the peer writes them; verl's are dotted, `*` = any part
    settings_paths: tuple[
        str, ...
    ]  # dotted from the root of a configuration; STAGE = the trainer's stage; () = no equal
    difference: str  # difference in meaning, or why there is no equal
    trainers: tuple[str, ...] = ()  # of TRL's trainers, without "Config"; () = all
    is_copied: bool = False  # True = the value stays as it is

    def resolve_paths(self, stage: str | None) -> tuple[str, ...]:
        """Our settings, with the stage filled in; None leaves its name open."""
        return tuple(
            path.replace("STAGE", f"stages.{stage or '<stage>'}") for path in self.settings_paths
        )


def _parse_rows(
    peer: Literal["TRL", "verl"], rows: Iterable[tuple[str, ...]]
) -> tuple[FrameworkAlias, ...]:
    made = []
    for names, here, note, *trainers in rows:
        paths = tuple(path for path in here.removeprefix("=").split(", ") if path)
        made.append(
            FrameworkAlias(
                peer,
                tuple(names.split()),
                paths,
                note,
                tuple(" ".join(trainers).split()),
                here.startswith("="),
            )
        )
    return tuple(made)


_TRL_ROWS = _parse_rows("TRL", TRL_ALIASES)
_VERL_ROWS = _parse_rows("verl", VERL_ALIASES)
_PATTERNS = [
    (re.compile(re.escape(name).replace(r"\*\.", r"(?:.+\.)?").replace(r"\*", ".+")), row)
    for row in _VERL_ROWS
    for name in row.names
]


def list_trl_aliases() -> tuple[FrameworkAlias, ...]:
    """All rows of TRL's names, in the order of the documents."""
    return _TRL_ROWS


def list_verl_aliases() -> tuple[FrameworkAlias, ...]:
    """All rows of verl's names, in the order of the documents."""
    return _VERL_ROWS


def find_trl_alias(name: str, trainer: str) -> FrameworkAlias | None:
    """Row of a name of TRL's class `trainer` + "Config"."""
    rows = [row for row in _TRL_ROWS if name in row.names]
    return next(
        (row for row in rows if trainer in row.trainers),
        next((r for r in rows if not r.trainers), None),
    )


def find_verl_alias(name: str) -> FrameworkAlias | None:
    """Row of a dotted name of verl's configuration."""
    return next((row for pattern, row in _PATTERNS if pattern.fullmatch(name)), None)


def explain_framework_name(name: str, stage: str | None = None, *, omitted_prefix: str = "") -> str:
    """Sentence on a key that TRL or verl has, for a message about an unknown key; "" = neither has it.

    Args:
        name: the key, a last part or dotted.
        stage: the stage that it was written in, where it was.
        inside: prefix that the message leaves out of our names, as "stages.policy.".
    """
    found = _match_trl_rows(name, stage) or _match_verl_rows(name)
    sentences = []
    for row, own in found:
        where = " and ".join(path.removeprefix(omitted_prefix) for path in row.resolve_paths(own))
        who = f"{row.framework}'s {name}"
        if row.trainers and len(found) > 1:
            who += f" ({', '.join(row.trainers)})"
        sentences.append(
            f"{who} is {where} here ({row.difference})"
            if where
            else f"{who} has no equal here: {row.difference}"
        )
    return "; ".join(sentences)


def explain_framework_block(name: str, value: Any) -> str:
    """Sentences on a block of a peer, such as verl's `actor_rollout_ref`; "" = no peer has such a block."""
    leaves = [leaf for leaf in _list_leaves(name, value) if find_verl_alias(leaf) is not None]
    if not leaves:
        return ""
    hints = [explain_framework_name(leaf) for leaf in leaves[:_MAX_SHOWN_LEAVES]]
    more = (
        [f"and {len(leaves) - _MAX_SHOWN_LEAVES} more"] if len(leaves) > _MAX_SHOWN_LEAVES else []
    )
    return "; ".join([*hints, *more, _CONVERT_HINT])


def _list_leaves(name: str, value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [name]
    return [leaf for key, item in value.items() for leaf in _list_leaves(f"{name}.{key}", item)]


def _match_trl_rows(name: str, stage: str | None) -> list[tuple[FrameworkAlias, str | None]]:
    """Rows of a name, each with the stage here: that of `stage` alone, if a trainer of it has the name."""
    rows = [row for row in _TRL_ROWS if name in row.names]
    for row in rows:
        if stage in TRAINER_STAGES.values() and any(
            TRAINER_STAGES.get(t) == stage for t in row.trainers
        ):
            return [(row, stage)]
    return [(row, _resolve_stage(row.trainers, stage)) for row in rows]


def _resolve_stage(trainers: Sequence[str], stage: str | None) -> str | None:
    """Stage of the first trainer; of a row for all trainers the one that it was written in."""
    return TRAINER_STAGES.get(trainers[0], "preference") if trainers else stage


def _match_verl_rows(name: str) -> list[tuple[FrameworkAlias, str | None]]:
    """Row of a dotted name, or the first one with this last part."""
    row = find_verl_alias(name) if "." in name else None
    if row is None:
        row = next(
            (row for row in _VERL_ROWS for known in row.names if known.rpartition(".")[2] == name),
            None,
        )
    return [] if row is None else [(row, None)]
