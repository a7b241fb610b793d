"""Faults that users of other libraries reported, and the tests that hold them off here.

Owns plain data for `docs/generate.py`; `tests/unit/test_docs.py` looks that every test exists.
Refuses to own anything that computes.
"""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    reports: str
    fault: str
    """In our words."""
    tests: tuple[str, ...] = ()
    """`file::function` under tests/."""
    owed: str = ""
    """The features that will hold the rest of it off, or all of it."""


_MISSING = "laws/test_law_05_missing.py"
_SPLIT = "laws/test_law_02_split.py"
_MASKED = "laws/test_law_01_masked.py"
_KL = "laws/test_law_12_kl.py"
_STOPS = "laws/test_law_09_stops.py"
_TRUNCATED = "laws/test_law_09_truncated.py"
_SILENT = "laws/test_law_14_no_silent.py"
_LOGPS = "laws/test_law_08_logps.py"
_START = "laws/test_law_07_start_at_one.py"
_BUGS = "unit/test_field_bugs.py"
_LAYOUTS = "unit/test_layouts.py"
_STREAM = "unit/test_data_stream.py"
_GROUP = "unit/test_objective_group.py"
_LOAD = "unit/test_models_load.py"
_KILL = "faults/test_kill_resume.py"
_ANYWHERE = "faults/test_kill_anywhere.py"
_TURNS = "unit/test_models_turns.py"
_EXAMPLES = "unit/test_data_examples.py"
_CRITIC = "unit/test_critic_gradient.py"
_REWARDS = "faults/test_reward_faults.py"

_ANY_SPLIT = (
    f"{_SPLIT}::test_any_split_and_layout_gives_the_same_gradient",
    f"{_SPLIT}::test_every_one_of_several_steps_is_split_alike",
)
_RANKS = "several ranks"
_VLLM = "vLLM"
_DETECTORS = "detectors"
_COST = "step cost"
_TOOLS = "tools and multi-turn"

BUGS: tuple[Bug, ...] = (
    Bug(
        "TRL 7179",
        "one long completion widens the padding of every micro-batch",
        (f"{_LAYOUTS}::test_one_long_completion_does_not_widen_the_others",),
    ),
    Bug(
        "TRL 3675, 4271, 4531, 3532",
        "the sampler repeats prompts in a way that nobody can read off its settings",
        (
            f"{_STREAM}::test_each_epoch_is_a_permutation_and_epochs_differ",
            f"{_STREAM}::test_any_walk_is_a_prefix_of_the_one_order",
        ),
    ),
    Bug(
        "TRL 2858, 3061, 4342; open-r1 236, 249; verl 1524, 180",
        "a batch size counts completions, or prompts, and nothing says which",
        (
            f"{_SILENT}::test_the_batch_arithmetic_is_told_in_prompts_and_completions",
            "unit/test_recipe_checks.py::test_the_batch_arithmetic_counts_prompts_and_completions",
        ),
    ),
    Bug(
        "TRL 5902, 5775",
        "a missing reward counts as 0 and moves the group's baseline",
        (
            f"{_MISSING}::test_the_rest_of_the_group_is_as_if_it_were_not_there",
            f"{_MISSING}::test_a_missing_score_is_never_a_zero",
        ),
    ),
    Bug(
        "ms-swift 8123",
        "one missing reward makes the whole batch NaN",
        (
            "unit/test_credit_rows.py::test_a_part_that_does_not_apply_adds_nothing_and_is_in_no_mean",
            "unit/test_against_trl.py::test_a_sample_without_any_reward_leaves_the_baseline",
        ),
    ),
    Bug(
        "TRL 6369, 6439",
        "a masked truncated completion leaves the numerator and stays in the denominator",
        (f"{_TRUNCATED}::test_mask_takes_it_out_of_numerators_and_denominators",),
    ),
    Bug(
        "TRL 3021, 3231; verl 5625, 906, 7200; SkyRL 1296, 925; open-instruct 1161; NeMo-RL 212; "
        "OpenRLHF 1249",
        "the loss depends on how the step is cut into micro-batches",
        (*_ANY_SPLIT, "unit/test_trl_differences.py::test_the_numbers_of_the_page_are_computed"),
    ),
    Bug(
        "TRL 3104, 2854, 4637, 6503, 6594; NeMo-RL 2506; open-instruct 534",
        "the gradient of the KL term is not that of the divergence it is named after",
        (
            f"{_BUGS}::test_the_expected_gradient_of_each_estimator",
            f"{_BUGS}::test_the_charge_in_the_reward_has_the_gradient_of_the_whole_sequence",
        ),
    ),
    Bug(
        "TRL 5889",
        "the reported KL is negative",
        (
            "unit/test_objective_policy.py::test_kl_to_itself_is_exactly_zero_and_k3_is_never_negative",
        ),
    ),
    Bug(
        "TRL 3120",
        "the clip ratio is always 0 and nothing says why",
        (f"{_BUGS}::test_clipping_is_alive_from_the_second_optimizer_step_on",),
    ),
    Bug(
        "TRL 7039 (two reports)",
        "with several end ids a finished completion counts as truncated",
        (
            f"{_STOPS}::test_both_end_ids_end_a_completion",
            f"{_STOPS}::test_every_source_of_stop_ids_counts",
        ),
    ),
    Bug(
        "TRL 5783",
        "the model's generation defaults override the temperature that was asked for",
        (f"{_LOGPS}::test_a_models_generation_defaults_change_nothing",),
    ),
    Bug(
        "TRL 6789",
        "top-p, top-k or min-p sampling biases the ratio",
        (f"{_LOGPS}::test_truncated_sampling_is_refused_unless_allowed",),
    ),
    Bug(
        "TRL 3000, 3500",
        "dropout is on: ratios and KL are wrong before the first step",
        (
            f"{_START}::test_the_ratio_starts_at_exactly_one",
            f"{_LOAD}::test_a_directory_becomes_a_model_ready_for_training",
        ),
    ),
    Bug(
        "TRL 1340, 3194, 495",
        "with a given adapter the reference is another model: KL above 0 at the start",
        (
            f"{_START}::test_the_ratio_starts_at_exactly_one",
            "unit/test_lora_runs.py::test_a_given_adapter_starts_at_a_kl_of_zero_and_goes_on",
        ),
    ),
    Bug(
        "TRL 1623, 3091, 931, 2059, 696, 6357; transformers 48016; verl 3287, 3562",
        "padding and end share an id, the end is masked, and the model never stops",
        (
            f"{_STOPS}::test_the_end_token_has_gradient_and_nothing_follows_it",
            f"{_LOAD}::test_an_export_loads_in_plain_transformers_and_says_the_same",
            f"{_TURNS}::test_a_completion_is_its_text_and_one_end_token",
        ),
    ),
    Bug(
        "TRL 5988",
        "the end of the assistant's turn is outside what is trained",
        (
            f"{_STOPS}::test_the_end_token_has_gradient_and_nothing_follows_it",
            f"{_LOAD}::test_turn_end_is_the_control_token_after_an_answer",
            f"{_TURNS}::test_every_turn_from_the_first_asked_for_is_trained_with_its_end",
        ),
    ),
    Bug(
        "TRL 4481, 1591, 1885; axolotl 1616",
        "the end or the beginning is added twice",
        (
            f"{_TURNS}::test_a_document_has_one_end",
            f"{_TURNS}::test_there_is_one_start_token",
            f"{_EXAMPLES}::test_an_end_token_that_a_text_brings_is_not_doubled",
        ),
    ),
    Bug(
        "TRL 6668, 3927, 1053, 6320",
        "a loss of 0 while nothing is trained, because truncation took every label",
        (
            f"{_SILENT}::test_prompts_longer_than_the_context_are_refused_or_counted",
            f"{_SILENT}::test_a_step_without_coefficients_touches_no_weight_and_no_moment",
            f"{_EXAMPLES}::test_long_rows_are_left_out_whole_and_counted",
        ),
    ),
    Bug(
        "TRL 3382, 1033, 5826, 2553, 2435",
        "an empty completion makes the loss NaN",
        (
            f"{_EXAMPLES}::test_the_better_answer_says_something_and_the_worse_may_not",
            "unit/test_objective_preference.py::test_an_absent_pair_is_not_looked_at",
        ),
    ),
    Bug(
        "TRL 1962",
        "precomputed reference log-probabilities are ignored",
        (
            "unit/test_preference_loss.py::test_the_reference_is_asked_once",
            "unit/test_preference_loss.py::test_dpo_by_the_models_own_forward",
        ),
    ),
    Bug(
        "TRL 2778",
        "a reward model reads another token under left padding",
        ("unit/test_reward_model.py::test_a_decoders_score_is_that_of_the_text_alone",),
    ),
    Bug(
        "TRL 1161, 1180",
        "the KL in the log is not the KL that is trained",
        (
            f"{_BUGS}::test_the_reported_kl_term_is_the_trained_one",
            f"{_KL}::test_the_loss_term_names_estimator_and_unit",
        ),
    ),
    Bug(
        "TRL 937",
        "a reward model scores the last padding token",
        (
            "unit/test_reward_model.py::test_the_librarys_own_forward_misses_where_padding_is_the_end",
            "unit/test_preference_loss.py::test_a_reward_is_read_after_the_last_token",
        ),
    ),
    Bug(
        "TRL 3148, 3185",
        "buffers are lost on resume",
        (
            f"{_KILL}::test_kill_nine_within_given_steps",
            f"{_ANYWHERE}::test_kill_nine_at_random_moments",
        ),
    ),
    Bug(
        "TRL 5144, 4974", "a tool's tokens are trained, or the mask has another length", (), _TOOLS
    ),
    Bug(
        "TRL 3492, 3098",
        "prompts and completions are out of line in the log or in the reward",
        (
            "unit/test_reward_grader.py::test_one_result_per_completion_in_order",
            "unit/test_reward_grader.py::test_a_native_function_sees_the_sample",
        ),
        owed=_RANKS,
    ),
    Bug(
        "TRL 5697, 6263",
        "a short length limit truncates almost everything, and nothing is said",
        (f"{_SILENT}::test_a_constant_reward_stops_the_run",),
        owed=_DETECTORS,
    ),
    Bug(
        "TRL 3681",
        "log-probabilities are taken from the wrong positions of some models",
        (
            f"{_LAYOUTS}::test_every_layout_equals_row_by_row",
            "unit/test_head.py::test_values_and_gradients",
        ),
    ),
    Bug(
        "TRL 7024",
        "padding leaks into returns",
        (
            f"{_MASKED}::test_padding_is_not_looked_at",
            "unit/test_objective_credit.py::test_reward_to_go_walks_over_the_valid_tokens",
        ),
    ),
    Bug(
        "TRL 2709, 2669, 2927, 3574, 2610",
        "a step costs far more memory and time than its tokens",
        (
            f"{_LAYOUTS}::test_tokens_forwarded_by_hand",
            "unit/test_head.py::test_nothing_is_kept_without_a_backward_pass",
        ),
        owed=_COST,
    ),
    Bug(
        "TRL 5770, 5757, 5413, 3621, 2888",
        "forward passes for old and reference log-probabilities that nothing needs",
        (
            f"{_BUGS}::test_no_pass_is_made_twice",
            f"{_START}::test_one_step_alone_reads_its_old_logps_from_the_first_forward",
        ),
    ),
    Bug(
        "TRL 3708, 3973, 4764, 3758",
        "no dynamic sampling",
        (
            f"{_SILENT}::test_dynamic_sampling_asks_for_the_missing_groups_alone",
            f"{_SILENT}::test_dynamic_sampling_is_bounded_and_trains_on_what_was_found",
        ),
    ),
    Bug(
        "TRL 2820",
        "no stop strings for base models",
        (f"{_STOPS}::test_stop_strings_cut_the_text_and_keep_the_ids",),
    ),
    Bug(
        "verl 3805",
        "without an end id, padding counts as completion",
        (
            f"{_MASKED}::test_padding_is_not_looked_at",
            "unit/test_stops.py::test_a_completion_cut_by_its_cap_keeps_its_last_token",
        ),
    ),
    Bug(
        "verl 7278",
        "masked tokens in the middle cut the return of what came before",
        ("unit/test_objective_credit.py::test_reward_to_go_walks_over_the_valid_tokens",),
    ),
    Bug(
        "ROLL 447; verl 50",
        "values at padding reach the trained tokens",
        (f"{_CRITIC}::test_what_lies_under_a_mask_does_not_reach_the_loss",),
    ),
    Bug(
        "AReaL 1346",
        "advantages at masked places enter the average of their completion",
        (
            f"{_MASKED}::test_padding_is_not_looked_at",
            "unit/test_objective_policy.py::test_what_lies_under_a_mask_stays_there",
        ),
    ),
    Bug(
        "SkyRL 1305, 1782",
        "a mean over padding and a deviation without it",
        (
            f"{_BUGS}::test_whitened_advantages_have_mean_zero_and_variance_one",
            f"{_MASKED}::test_padding_is_not_looked_at",
        ),
    ),
    Bug(
        "OpenRLHF 1239; verl 6452; AReaL 1351",
        "a rejected completion still moves the mean of its group",
        (
            f"{_MISSING}::test_the_baseline_is_made_of_the_others",
            f"{_MASKED}::test_values_of_absent_completions_are_not_looked_at",
        ),
    ),
    Bug(
        "NeMo-RL 4161",
        "rounding of a sum of squares makes an advantage of 4000",
        (
            f"{_BUGS}::test_no_advantage_grows_out_of_rounding",
            f"{_GROUP}::test_no_advantage_exceeds_what_one_odd_reward_can_reach",
        ),
    ),
    Bug(
        "slime 1414, 2230",
        "groups of uneven size are silently normalised over the batch",
        (f"{_BUGS}::test_groups_that_end_up_uneven_are_still_groups",),
    ),
    Bug(
        "Search-R1 88",
        "one prompt under several ids leaves groups of one",
        (
            f"{_GROUP}::test_advantages_of_a_group_sum_to_zero",
            f"{_MASKED}::test_order_of_rows_and_groups_does_not_matter",
        ),
    ),
    Bug(
        "verl 265, 594; ToolRL 52",
        "the KL is charged twice, or with the wrong sign",
        (
            f"{_KL}::test_two_places_at_once_cannot_be_written",
            f"{_KL}::test_with_rewards_all_zero_a_step_brings_the_policy_closer",
        ),
    ),
    Bug(
        "verl 3741, 5417",
        "a constant divisor that depends on the micro-batch, or changed its meaning",
        (*_ANY_SPLIT, "unit/test_objective_reduce.py::test_weights_by_hand"),
    ),
    Bug(
        "OpenRLHF 238",
        "the last token of a truncated completion is overwritten",
        (f"{_STOPS}::test_the_trained_ids_are_the_sampled_ids",),
    ),
    Bug(
        "TRL 1536",
        "a truncated completion is valued as if it had ended",
        (
            f"{_CRITIC}::test_the_value_after_the_last_token",
            "unit/test_process_credit.py::test_a_completion_that_was_cut_off_goes_on_in_the_critics_eyes",
        ),
    ),
    Bug(
        "TRL 4159; prime-rl 697; verl 4162; vime 64",
        "engine and trainer divide by different temperatures",
        (
            f"{_LOGPS}::test_trainer_and_engine_agree",
            f"{_LOGPS}::test_raw_log_probabilities_would_not_agree",
        ),
        owed=_VLLM,
    ),
    Bug(
        "SkyRL 123; ms-swift 10012; slime 2288",
        "text is tokenised again, and other ids are trained than were sampled",
        (
            f"{_STOPS}::test_the_trained_ids_are_the_sampled_ids",
            f"{_STOPS}::test_the_gradient_of_a_step_is_that_of_the_sampled_tokens_and_their_ends",
        ),
    ),
    Bug(
        "OpenRLHF 393, 1069; reward-bench 164",
        "the beginning is there twice, or the template was changed",
        (
            f"{_BUGS}::test_a_tokenizer_that_adds_its_own_beginning_adds_none_to_a_prompt",
            f"{_LOAD}::test_an_export_loads_in_plain_transformers_and_says_the_same",
            f"{_TURNS}::test_there_is_one_start_token",
        ),
    ),
    Bug(
        "ms-swift 9925; OpenRLHF 701",
        "length normalisation is wrong with packing",
        (
            "unit/test_documents.py::test_the_loss_is_the_mean_of_separate_ones",
            "unit/test_preference_loss.py::test_the_gradient_does_not_depend_on_split_and_layout",
        ),
    ),
    Bug(
        "OpenRLHF 1310, 1312",
        "dynamic sampling throws accepted groups away at the end of the data",
        (
            f"{_SILENT}::test_dynamic_sampling_is_bounded_and_trains_on_what_was_found",
            f"{_STREAM}::test_one_take_crosses_epochs",
        ),
    ),
    Bug(
        "verl 7401, 5725",
        "a resume at the end of an epoch skips the next one",
        (
            f"{_STREAM}::test_resume_is_exact_at_every_cursor",
            f"{_ANYWHERE}::test_killed_at_the_middle_and_at_the_end_of_an_epoch",
        ),
    ),
    Bug(
        "open-instruct 1523, 1823; EasyR1 57; prime-rl 2088",
        "the state of the data is not restored",
        (
            f"{_STREAM}::test_resume_is_exact_at_every_cursor",
            f"{_ANYWHERE}::test_kill_nine_at_random_moments",
        ),
    ),
    Bug(
        "verl 6673; InternBootcamp 15; SvS 3",
        "one text hangs the reward, and with it the run",
        (
            f"{_REWARDS}::test_one_hanging_sample_costs_itself_and_at_most_a_deadline",
            f"{_REWARDS}::test_a_catastrophic_pattern_is_killed",
            f"{_REWARDS}::test_a_failing_sample_costs_only_itself",
        ),
    ),
    Bug(
        "verl 747, 2626, 1197, 2505; ms-swift 3930, 3136",
        "a gradient of NaN is applied",
        (
            "laws/test_law_15_nonfinite.py::test_the_optimizer_step_is_skipped",
            "laws/test_law_15_nonfinite.py::test_three_in_a_row_stop_resumably_and_name_the_prompts",
        ),
    ),
    Bug(
        "verl 781, 651, 2738, 6382, 5953; rllm 116",
        "the entropy collapses or explodes, and the advice contradicts itself",
        (),
        _DETECTORS,
    ),
    Bug(
        "OpenRLHF 856, 924, 830",
        "the mean advantage of REINFORCE++ is not 0",
        (f"{_BUGS}::test_whitened_advantages_have_mean_zero_and_variance_one",),
    ),
    Bug(
        "CoursIA 15256",
        "the critic is never trained",
        (
            f"{_CRITIC}::test_one_step_lowers_the_value_loss",
            "unit/test_critic.py::test_it_learns_what_the_reward_is",
        ),
    ),
    Bug(
        "NeMo 1504",
        "a setting is accepted and read by nothing",
        (
            f"{_SILENT}::test_keys_that_nothing_reads_are_refused",
            "unit/test_recipe_load.py::test_a_bad_key_is_named",
        ),
    ),
    Bug(
        "unsloth 6738",
        "a row alone, padded and packed has different log-probabilities",
        (f"{_LAYOUTS}::test_every_layout_equals_row_by_row",),
    ),
    Bug(
        "verl 2776",
        "DAPO's token mean: over the group, or over the batch?",
        ("unit/test_objective_reduce.py::test_prompt_mean_is_a_mean_of_group_means",),
    ),
    Bug(
        "TRL 6809",
        "entropy and KL are averaged over padding",
        (f"{_MASKED}::test_padding_is_not_looked_at",),
    ),
)
