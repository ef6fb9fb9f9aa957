"""Long matrices of cases, of which `make test` runs every Nth and `make test-all` all.

The numbers have no factor in common with the lengths of a matrix's axes, so the cases that remain cover every value of
each axis. A new matrix of more than about ten seconds of processor time belongs here.
"""

from collections import Counter

MATRICES = {  # test function, from the folder of tests -> N
    "rl_core/cpu/test_fused_decode.py::test_drafts_change_no_token": 5,
    "rl_core/inference/test_engine.py::test_greedy_tokens_equal_generate": 5,
    "rl_core/inference/test_engine.py::test_multi_turn_episodes_equal_the_transformers_backend": 5,
    "rl_core/inference/test_engine.py::test_sampler_and_trainer_agree": 5,
    "rl_core/inference/test_restricted_sampling.py::test_restricted_sampling_in_both_backends": 5,
    "rl_core/models/test_hidden_states.py::test_autocast_rounds_no_more_than_transformers": 5,
    "rl_core/models/test_hidden_states.py::test_bfloat16_weights_round_no_more_than_transformers": 5,
    "rl_core/models/test_prefix_training.py::test_trees_equal_rows_alone_in_float64": 7,
    "rl_core/models/test_lora_options.py::test_rollouts_agree_and_a_resume_is_exact": 3,
    "rl_core/thoughts/test_thoughts_options.py::test_it_resumes_bit_for_bit": 3,
    "rl_core/trainers/policy_gradient/test_cross_vocabulary.py::test_a_run_resumes_with_equal_bits": 2,
    "rl_core/trainers/policy_gradient/test_dppo_maxrl_gdpo.py::test_they_resume_bit_for_bit_with_adapters_too": 3,
    "rl_core/trainers/policy_gradient/test_policy_algorithms.py::test_learns": 4,
    "rl_core/trainers/policy_gradient/test_policy_algorithms.py::test_resumes_bit_for_bit": 3,
    "rl_core/trainers/policy_gradient/test_policy_gradient.py::test_every_saved_item_matters": 3,
    "rl_core/trainers/policy_gradient/test_policy_rollback.py::test_resumes_bit_for_bit_across_rollbacks": 3,
    "rl_core/trainers/policy_gradient/test_self_distillation.py::test_it_resumes_bit_for_bit": 5,
    "rl_core/trainers/test_dropout.py::test_masks_of_the_base_are_the_same_with_and_without_adapters": 3,
    "rl_core/trainers/test_sft.py::test_killed_at_any_iteration_the_numbers_are_the_same": 5,
    "rl_core/trainers/test_temperature.py::test_kl_and_entropy_of_every_algorithm_are_of_the_policy_that_acted": 3,
    "rl_core/training/test_device_reads.py::test_a_policy_step_reads_once": 3,
    "rl_core/training/test_device_reads.py::test_a_supervised_step_reads_once": 5,
    "rl_core/training/test_device_reads.py::test_numbers_read_together_equal_numbers_read_one_by_one": 3,
    "rl_core/training/test_loop.py::test_a_run_that_dies_anywhere_gives_the_same_numbers": 5,
    "posttrain/training_service/test_recorded_sequences.py::test_a_worker_that_dies_changes_nothing": 5,
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
