"""Long matrices of cases, of which `make test` runs every Nth and `make test-all` all.

In a matrix of several axes the number has no factor in common with their lengths, so the cases that remain cover every
value of each axis. Of a plain list some values remain. A new matrix of more than about ten seconds of processor time
belongs here.
"""

from collections import Counter

MATRICES = {  # test function, from the folder of tests -> N
    "posttrain/operations/test_operations_supervisor.py::test_ctrl_c_and_closed_terminal_stop_everything": 2,
    "posttrain/serving/test_rollout_server.py::test_adapters": 2,
    "posttrain/training_service/test_evaluate.py::test_an_evaluation_survives_the_death_of_the_worker": 2,
    "posttrain/training_service/test_recorded_sequences.py::test_a_worker_that_dies_changes_nothing": 5,
    "posttrain/training_service/test_reference_scores.py::test_a_worker_that_dies_computes_them_again": 3,
    "rl_core/cpu/test_fused_decode.py::test_drafts_change_no_token": 5,
    "rl_core/cpu/test_fused_decode.py::test_neither_threads_nor_their_division_of_work_change_a_bit": 5,
    "rl_core/environments/test_openenv.py::test_more_episodes_than_sessions_are_replayed": 2,
    "rl_core/evaluators/test_run_suites.py::test_a_task_that_exits_is_not_taken_for_a_result": 2,
    "rl_core/inference/test_bf16_decoding.py::test_neither_threads_nor_their_division_of_work_change_a_bit": 5,
    "rl_core/inference/test_bf16_decoding.py::test_norms_multiply_the_activations": 5,
    "rl_core/inference/test_engine.py::test_a_weight_that_is_not_finite_is_named_before_a_token_is_sampled": 5,
    "rl_core/inference/test_engine.py::test_greedy_tokens_equal_generate": 11,
    "rl_core/inference/test_engine.py::test_multi_turn_episodes_equal_the_transformers_backend": 11,
    "rl_core/inference/test_engine.py::test_sampler_and_trainer_agree": 11,
    "rl_core/inference/test_recorded_steps.py::test_every_step_of_an_episode_reads_once": 3,
    "rl_core/inference/test_restricted_sampling.py::test_restricted_sampling_in_both_backends": 5,
    "rl_core/inference/test_server_loop.py::test_answers_equal_the_offline_engine": 3,
    "rl_core/inference/test_server_loop.py::test_ends_of_a_request_and_random_numbers_that_are_used_up": 3,
    "rl_core/inference/test_server_loop.py::test_requests_with_custom_end_tokens_share_the_slots": 3,
    "rl_core/models/test_gguf_files.py::test_a_written_model_is_read_back": 4,
    "rl_core/models/test_hidden_states.py::test_activations_are_computed_again_in_backward": 5,
    "rl_core/models/test_hidden_states.py::test_autocast_rounds_no_more_than_transformers": 5,
    "rl_core/models/test_hidden_states.py::test_bfloat16_weights_round_no_more_than_transformers": 5,
    "rl_core/models/test_hidden_states.py::test_common_beginnings_are_computed_once": 5,
    "rl_core/models/test_hidden_states.py::test_states_and_gradients_are_those_of_transformers": 5,
    "rl_core/models/test_hidden_states.py::test_whatever_differs_is_left_to_transformers": 5,
    "rl_core/models/test_image_inputs.py::test_the_sampler_has_the_trainers_logprobs": 2,
    "rl_core/models/test_lora_options.py::test_rollouts_agree_and_a_resume_is_exact": 3,
    "rl_core/models/test_prefix_training.py::test_random_trees_in_any_micro_batches": 3,
    "rl_core/models/test_prefix_training.py::test_trees_equal_rows_alone_in_float64": 7,
    "rl_core/networks/test_network_trainer.py::test_cut_anywhere_it_is_the_run_in_one_piece": 3,
    "rl_core/rewards/test_structured_judge.py::test_a_model_in_this_process_always_gives_a_verdict": 5,
    "rl_core/rollout_workers/test_async_worker_group.py::test_a_recorded_schedule_is_replayed_bit_for_bit": 2,
    "rl_core/rollout_workers/test_managed_server.py::test_a_server_ends_with_its_trainer": 2,
    "rl_core/rollout_workers/test_server_backend.py::test_a_server_that_was_started_again": 2,
    "rl_core/rollout_workers/test_server_backend.py::test_an_engine_that_dies_is_waited_for": 3,
    "rl_core/rollout_workers/test_server_backend.py::test_losses_are_bounded": 3,
    "rl_core/rollout_workers/test_worker_group.py::test_any_number_of_workers_gives_the_bits_of_one_process": 4,
    "rl_core/rollouts/test_agents.py::test_concurrent_episodes_have_their_own_answers_and_repeat_bit_for_bit": 2,
    "rl_core/rollouts/test_collect.py::test_with_a_model_the_trainer_sees_the_same_logprobs": 5,
    "rl_core/rollouts/test_contexts.py::test_sampler_and_trainer_agree_with_each_context_alone": 2,
    "rl_core/rollouts/test_contexts.py::test_slots_environments_and_penalties_keep_the_tokens": 2,
    "rl_core/rollouts/test_waiting_steps.py::test_the_order_in_which_steps_finish_changes_no_bit": 3,
    "rl_core/service/test_sampled_adapters.py::test_a_sampler_in_a_batch_is_the_sampler_alone": 5,
    "rl_core/storage/test_checkpoint.py::test_kill_9_in_the_middle_of_a_write": 5,
    "rl_core/storage/test_disk_errors.py::test_an_error_of_any_call_keeps_the_old_version_and_is_one_clear_error": 3,
    "rl_core/thoughts/test_thoughts_options.py::test_it_resumes_bit_for_bit": 3,
    "rl_core/thoughts/test_thoughts_options.py::test_the_kl_to_the_start_by_an_oracle": 5,
    "rl_core/thoughts/test_thoughts_options.py::test_warm_up_in_episodes": 3,
    "rl_core/trainers/policy_gradient/test_cross_vocabulary.py::test_a_run_resumes_with_equal_bits": 2,
    "rl_core/trainers/policy_gradient/test_cross_vocabulary.py::test_a_student_approaches_a_teacher_with_another_vocabulary": 3,  # noqa: E501
    "rl_core/trainers/policy_gradient/test_distillation.py::test_a_student_comes_nearer_to_its_teacher": 2,
    "rl_core/trainers/policy_gradient/test_dppo_maxrl_gdpo.py::test_the_trainer_measures_top_k_divergences": 3,
    "rl_core/trainers/policy_gradient/test_dppo_maxrl_gdpo.py::test_they_resume_bit_for_bit_with_adapters_too": 3,
    "rl_core/trainers/policy_gradient/test_mixture_learning.py::test_both_environments_improve": 3,
    "rl_core/trainers/policy_gradient/test_numerics.py::test_a_resumed_run_has_the_same_bits": 2,
    "rl_core/trainers/policy_gradient/test_policy_algorithms.py::test_learns": 9,
    "rl_core/trainers/policy_gradient/test_policy_algorithms.py::test_resumes_bit_for_bit": 5,
    "rl_core/trainers/policy_gradient/test_policy_gradient.py::test_every_saved_item_matters": 3,
    "rl_core/trainers/policy_gradient/test_policy_gradient.py::test_learns": 3,
    "rl_core/trainers/policy_gradient/test_policy_options.py::test_a_kl_reward_takes_the_samplers_log_probs_where_they_are_the_policys": 3,  # noqa: E501
    "rl_core/trainers/policy_gradient/test_policy_rollback.py::test_resumes_bit_for_bit_across_rollbacks": 3,
    "rl_core/trainers/policy_gradient/test_process_credit.py::test_a_resumed_run_has_the_same_bits": 3,
    "rl_core/trainers/policy_gradient/test_self_distillation.py::test_advantages_are_those_of_the_teachers_weights_after_its_prompt": 5,  # noqa: E501
    "rl_core/trainers/policy_gradient/test_self_distillation.py::test_it_resumes_bit_for_bit": 5,
    "rl_core/trainers/policy_gradient/test_self_play.py::test_snapshots_on_the_disk_change_nothing": 2,
    "rl_core/trainers/test_dropout.py::test_a_policy_that_is_its_reference_has_the_first_loss_of_the_formula": 5,
    "rl_core/trainers/test_dropout.py::test_killed_and_resumed_the_masks_are_the_same": 2,
    "rl_core/trainers/test_dropout.py::test_masks_of_adapters_and_of_attention_are_the_same_too": 2,
    "rl_core/trainers/test_dropout.py::test_masks_of_the_base_are_the_same_with_and_without_adapters": 3,
    "rl_core/trainers/test_dropout.py::test_weights_that_do_not_move_have_the_ratio_1": 5,
    "rl_core/trainers/test_more_preference_losses_trained.py::test_figures_by_hand_of_a_policy_that_has_moved": 4,
    "rl_core/trainers/test_more_preference_losses_trained.py::test_it_learns_its_pairs": 2,
    "rl_core/trainers/test_preference.py::test_figures_by_hand_of_a_policy_that_has_moved": 5,
    "rl_core/trainers/test_preference.py::test_killed_and_resumed_the_numbers_are_the_same": 3,
    "rl_core/trainers/test_reward_regression.py::test_regression_learns_scores": 2,
    "rl_core/trainers/test_sft.py::test_killed_at_any_iteration_the_numbers_are_the_same": 5,
    "rl_core/trainers/test_temperature.py::test_a_kl_in_the_reward_is_of_the_policy_that_acted": 3,
    "rl_core/trainers/test_temperature.py::test_kl_and_entropy_of_every_algorithm_are_of_the_policy_that_acted": 3,
    "rl_core/training/test_device_reads.py::test_a_policy_step_reads_once": 7,
    "rl_core/training/test_device_reads.py::test_a_supervised_step_reads_once": 5,
    "rl_core/training/test_device_reads.py::test_numbers_read_together_equal_numbers_read_one_by_one": 5,
    "rl_core/training/test_epoch_models.py::test_a_run_that_dies_between_a_model_and_its_checkpoint_leaves_the_same": 3,
    "rl_core/training/test_epoch_models.py::test_the_model_of_an_epoch_is_that_of_a_training_that_ends_there": 3,
    "rl_core/training/test_loop.py::test_a_run_that_dies_anywhere_gives_the_same_numbers": 5,
    "rl_core/training/test_optimizer_settings.py::test_a_killed_run_with_muon_grokfast_and_average_gives_the_same_numbers": 3,  # noqa: E501
    "tasks/stages/test_thoughts_stage.py::test_the_kl_refers_to_the_stage_s_model": 2,
    "test_hostile_input.py::test_hostile_input_is_refused": 4,
    "upgrade/test_outputs_of_earlier_version.py::test_a_killed_run_continues_or_says_why_it_restarts": 4,
}  # fmt: skip


def find_left_out_cases(node_ids):
    """Return the node ids of the cases that `make test` leaves out."""
    counts = Counter()
    left_out = set()
    for node_id in node_ids:
        function = node_id.partition("[")[0].removeprefix("tests/")
        if function in MATRICES:
            if counts[function] % MATRICES[function]:
                left_out.add(node_id)
            counts[function] += 1
    return left_out
