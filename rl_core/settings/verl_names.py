# ruff: noqa: E501 (rows of a table)
"""Names of verl's `ppo_trainer` configuration with what they are here; rows as in `trl_names.py`.

Names are dotted as in verl's file; `*` stands for any part (also none or several). The first row that fits counts.
"""

from __future__ import annotations

__all__ = ["VERL", "VERL_VERSION"]

VERL_VERSION = "035682e (verl/trainer/config/_generated_ppo_trainer.yaml)"

_P = "stages.policy"
_A = "actor_rollout_ref.actor"
_R = "actor_rollout_ref.rollout"
_MEMORY = "one memory bound, in padded tokens, which changes no result"
_OFFLOAD = "no offloading and no options of FSDP beside the number of processes"

VERL: tuple[tuple[str, str, str], ...] = (
    # --------------------------------------------------------------- counting
    (f"{_R}.n critic.rollout_n", f"={_P}.group_size", "same: rollouts of one prompt"),
    ("data.train_batch_size", f"={_P}.prompts_per_iteration", "same: prompts of one round"),
    (f"{_A}.ppo_mini_batch_size critic.ppo_mini_batch_size", f"{_P}.minibatches", "a size in prompts there, a number of parts here: minibatches = train_batch_size / ppo_mini_batch_size"),
    (f"{_A}.ppo_epochs critic.ppo_epochs", f"={_P}.epochs", "same: passes over the rollouts of one round, for policy and critic"),
    (f"{_A}.ppo_max_token_len_per_gpu", f"={_P}.micro_batch_tokens", "tokens of one forward pass; padded ones here"),
    ("*.ppo_micro_batch_size *.ppo_micro_batch_size_per_gpu *.log_prob_micro_batch_size *.log_prob_micro_batch_size_per_gpu *.forward_micro_batch_size *.forward_micro_batch_size_per_gpu *.micro_batch_size *.micro_batch_size_per_gpu *.ppo_max_token_len_per_gpu *.forward_max_token_len_per_gpu *.log_prob_max_token_len_per_gpu", f"{_P}.micro_batch_tokens", "rows or tokens of one forward pass there; here " + _MEMORY),
    ("*.use_dynamic_bsz *.log_prob_use_dynamic_bsz *.use_remove_padding trainer.balance_batch", f"{_P}.micro_batch_tokens", "always: micro-batches are sorted by length under " + _MEMORY),
    ("trainer.total_epochs", f"{_P}.iterations", "rounds of sampling here, not passes over a data set"),
    ("trainer.total_training_steps", f"={_P}.iterations", "same: rounds of sampling and updating"),
    ("*.optim.total_training_steps", f"{_P}.iterations", "the schedule's length follows from it"),
    # -------------------------------------------------------------- algorithm
    ("algorithm.adv_estimator", f"{_P}.algorithm", "gae is ppo, grpo and rloo are the same (groups with a std below 1e-3 get 0 here), reinforce_plus_plus is nearest to reinforce (normalised over rollouts and without a ratio here)"),
    ("algorithm.norm_adv_by_std_in_grpo", f"{_P}.algorithm", "false is algorithm: dr_grpo"),
    ("algorithm.gamma", f"={_P}.gamma", "same"),
    ("algorithm.lam", f"={_P}.gae_lambda", "same; 0.95 by default here, 1.0 there"),
    (f"{_A}.clip_ratio {_A}.clip_ratio_low", f"={_P}.clip_eps", "same"),
    (f"{_A}.clip_ratio_high", f"={_P}.clip_eps_high", "same"),
    (f"{_A}.clip_ratio_c", f"={_P}.dual_clip", "same; off by default here, 3.0 there"),
    (f"{_A}.loss_agg_mode", f"{_P}.loss_aggregation", "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum-norm constant; here over the whole optimizer step: all micro-batches, all processes"),
    ("critic.loss_agg_mode", "", "the value loss is a token mean over the optimizer step"),
    (f"{_A}.policy_loss.loss_mode", f"{_P}.algorithm", "vanilla is the algorithm's own loss, gspo is algorithm: gspo; clip_cov and kl_cov have no equal"),
    (f"{_A}.policy_loss.*", "", "no loss by covariance (clip_cov, kl_cov)"),
    (f"{_A}.entropy_coeff", f"={_P}.entropy_coef", "same"),
    (f"{_A}.use_kl_loss", f"{_P}.kl_in", "true is kl_in: loss; kl_coef above 0 switches it on"),
    (f"{_A}.kl_loss_coef", f"{_P}.kl_coef", "with kl_in: loss; only where use_kl_loss is true"),
    (f"{_A}.kl_loss_type", f"{_P}.kl_estimator", "kl is k1, mse k2, low_var_kl k3"),
    ("algorithm.use_kl_in_reward", f"{_P}.kl_in", "true is kl_in: reward"),
    ("algorithm.kl_penalty", f"{_P}.kl_estimator", "in the reward it is k1 alone"),
    ("algorithm.kl_ctrl.type", f"{_P}.kl_controller", "fixed or adaptive; banded besides"),
    ("algorithm.kl_ctrl.kl_coef", f"{_P}.kl_coef", "with kl_in: reward; only where use_kl_in_reward is true"),
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
    (f"{_A}.optim.warmup_style", f"{_P}.schedule", "of the time after the warm-up: constant, cosine or linear"),
    (f"{_A}.grad_clip", f"={_P}.max_grad_norm", "same"),
    ("critic.grad_clip", f"{_P}.max_grad_norm", "one bound for policy and critic"),
    # ----------------------------------------------------------------- critic
    ("critic.cliprange_value", f"{_P}.critic.value_clip_eps", "same; off by default here"),
    ("critic.enable", f"{_P}.critic", "`critic: {}` = its defaults; ppo has one anyway"),
    ("trainer.critic_warmup", f"={_P}.critic.warmup_iterations", "same"),
    ("critic.model.*", f"{_P}.critic.kind", "the critic starts as a copy of the policy, or is a head on it"),
    # --------------------------------------------------------------- sampling
    (f"{_R}.temperature", f"={_P}.sampling.temperature", "same"),
    (f"{_R}.val_kwargs.temperature {_R}.val_kwargs.top_k {_R}.val_kwargs.top_p", "stages.evaluate.sampling", "sampling of the evaluation"),
    (f"{_R}.val_kwargs.n", "=stages.evaluate.samples", "same"),
    (f"{_R}.val_kwargs.do_sample", "stages.evaluate.greedy", "greedy decoding is reported beside samples"),
    (f"{_R}.top_k", f"{_P}.sampling.top_k", "-1 there is 0 here; refused where rollouts train a policy, whose log-probs are of the full distribution"),
    (f"{_R}.top_p", f"={_P}.sampling.top_p", "refused below 1 where rollouts train a policy"),
    (f"{_R}.do_sample", f"{_P}.sampling.temperature", "rollouts are always sampled"),
    (f"data.max_response_length {_R}.response_length", f"={_P}.sampling.max_completion_tokens", "includes observations here"),
    (f"data.max_prompt_length {_R}.prompt_length data.filter_overlong_prompts data.filter_overlong_prompts_workers data.truncation", "", "a prompt that leaves no room in the context is refused, never cut"),
    (f"{_R}.multi_turn.max_assistant_turns {_R}.multi_turn.max_turns", f"={_P}.sampling.max_turns", "same: actions of an episode"),
    (f"{_R}.multi_turn.*", "environment", "the environment holds tools and turns"),
    (f"{_R}.agent.*", "environment", "the environment is the agent's loop"),
    (f"{_R}.over_sample_rate", f"{_P}.dynamic_sampling_tries", "resampling of groups with equal rewards"),
    (f"{_R}.calculate_log_probs", "", "always: a rollout carries the sampler's log-probs"),
    (f"{_R}.ignore_eos", "", "the end of turn always ends an action"),
    (f"{_R}.max_num_seqs", f"={_P}.sampling.slots", "episodes decoded at the same time"),
    (f"{_R}.max_model_len", "model.context", "the model's own context; the setting is for presets"),
    (f"{_R}.dtype", "model.dtype", "one dtype for sampler and trainer, so that they agree"),
    (f"{_R}.name {_R}.mode {_R}.gpu_memory_utilization {_R}.enforce_eager {_R}.cudagraph_capture_sizes {_R}.chat_scheduler {_R}.use_fire_sampling {_R}.free_cache_engine {_R}.tensor_model_parallel_size {_R}.max_num_batched_tokens {_R}.disable_log_stats {_R}.multi_stage_wake_up {_R}.engine_kwargs.* {_R}.update_weights_bucket_megabytes {_R}.enable_chunked_prefill {_R}.load_format {_R}.layered_summon actor_rollout_ref.hybrid_engine", "", "the built-in engine samples, in the trainer's process, with the trainer's weights; a vLLM server of its own may: stages.policy.rollouts, workers: server"),
    (f"{_R}.trace.* {_R}.skip_rollout {_R}.skip_dump_dir trainer.rollout_data_dir trainer.validation_data_dir trainer.log_val_generations", "", "every rollout and evaluated episode is kept with the stage's results"),
    # ------------------------------------------------------------------ model
    ("actor_rollout_ref.model.path", "=model.path", "same"),
    ("actor_rollout_ref.model.custom_chat_template", "model.chat_template", "the path of a Jinja file here, the template's text there"),
    ("data.apply_chat_template_kwargs", "=model.chat_template_kwargs", "same"),
    ("actor_rollout_ref.model.lora_rank", "model.lora.rank", "same; 0 there is lora: null"),
    ("actor_rollout_ref.model.lora_alpha", "model.lora.alpha", "same"),
    ("actor_rollout_ref.model.target_modules", "model.lora.target_modules", "a list of names of layers, or all-linear"),
    ("actor_rollout_ref.model.exclude_modules", "", "name the layers in model.lora.target_modules"),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", f"={_P}.activation_checkpointing", "same; off by default here"),
    ("actor_rollout_ref.model.trust_remote_code data.trust_remote_code", "=model.trust_remote_code", "same"),
    ("*.trust_remote_code", "model.trust_remote_code", "of all models of a pipeline"),
    ("actor_rollout_ref.ref.model", "", "the reference is the stage's starting model"),
    ("*.override_config *.external_lib *.use_shm *.enable_activation_offload *.use_liger *.use_fused_loss *.return_last_hidden_state *.use_fused_kernels *.fused_kernel_options.* *.use_torch_compile *.entropy_from_logits_with_chunking *.entropy_checkpointing", "", "no such switch: what a model takes is decided by its architecture (posttrain doctor --model), logits are computed in chunks"),
    # ------------------------------------------------------------------- data
    ("data.train_files", "environment", "environment: {name: prompts, options: {path: FILE}}, a JSONL, JSON, CSV or Parquet file or a folder; in Python prompts=FILE"),
    ("data.val_files", "stages.prepare_data.heldout_fraction", "held-out questions come from the same environment"),
    ("data.prompt_key data.reward_fn_key data.image_key data.video_key data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.return_multi_modal_inputs data.custom_cls.* data.sampler.* data.datagen.*", "environment", "the environment says what a row is"),
    ("data.tokenizer reward_model.model.input_tokenizer", "model.path", "the model's own tokenizer"),
    ("data.val_batch_size data.dataloader_num_workers data.validation_shuffle", "", "held-out episodes are played in one seeded order; no loader"),
    ("data.shuffle *.shuffle", "", "always on, seeded"),
    # ----------------------------------------------------------------- reward
    ("custom_reward_function.path custom_reward_function.name", f"{_P}.rewards", '{"package.module:function": 1.0}; gets whole trajectories of an iteration, gives as many numbers'),
    ("reward_model.enable reward_model.model.path", f"{_P}.rewards", "stage reward_model and rewards: {learned: 1.0}: trained in the pipeline; in Python reward_model= takes a folder"),
    ("reward_model.sandbox_fusion.*", "environment", "the environment runs code in child processes"),
    ("reward_model.reward_manager reward_model.launch_reward_fn_async", f"{_P}.reward_options", "user functions run in a thread with a time limit"),
    ("reward_model.max_length", "", "a sequence beyond the reward model's context is refused"),
    # ---------------------------------------------------------------- trainer
    ("trainer.project_name", "=tracking.experiment", "MLflow's experiment"),
    ("trainer.experiment_name", "name", "of the pipeline: letters, digits, '.', '_' and '-'"),
    ("trainer.logger", "tracking.sinks", "places beside MLflow, which has every run; in Python tracker="),
    ("trainer.default_local_dir", "output", "folder of all pipelines; each has its own in it"),
    ("trainer.nnodes", f"={_P}.launch.nodes", "same; with kind: torchrun"),
    ("trainer.n_gpus_per_node", f"={_P}.launch.processes", "one process per GPU; with kind: torchrun"),
    ("trainer.save_freq", f"{_P}.checkpoint_every", "in iterations; -1 there is 0 here"),
    ("trainer.test_freq", f"{_P}.eval_every", "in iterations; -1 there is 0 here"),
    ("trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep", f"{_P}.keep_checkpoints", "same; at least 2 here, policy and critic together"),
    ("trainer.resume_mode trainer.resume_from_path", "", "the same command resumes; refused if settings or data changed"),
    ("trainer.val_before_train", "", "the stage evaluate plays the starting model beside the policy"),
    ("trainer.val_only", "stages", "leave out all stages but evaluate, or call posttrain evaluate"),
    ("trainer.device", "model.device", "auto, cpu or cuda"),
    ("trainer.esi_redundant_time trainer.ray_wait_register_center_timeout trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.use_legacy_worker_impl actor_rollout_ref.nccl_timeout ray_kwargs.* ray_init.*", "", "no HDFS; rollouts on Ray: stages.policy.rollouts"),
    ("*.checkpoint.*", "", "checkpoints always hold all that a resume needs"),
    ("*.profiler.* global_profiler.*", "", "posttrain profile CONFIG"),
    ("*.strategy *.fsdp_config.* *.ulysses_sequence_parallel_size", f"{_P}.launch", "kind: torchrun shards by FSDP2; " + _OFFLOAD),
)  # fmt: skip
