"""Every column of a training batch: what it holds, who writes it, who reads it.

Shapes use B responses, P prompt width (left-padded), R response width (right-padded), K tokens of a teacher at each
place of the response. Everything of width R is zero outside `response_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column of the batch.

    >>> COLUMNS["values"].shape, COLUMNS["values"].producer
    (('B', 'R'), 'compute_values')
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    producer: str
    consumers: tuple[str, ...]
    meaning: str


_ROLLOUT = "generate_sequences"
_MODELS = ("compute_log_prob", "compute_ref_log_prob", "compute_teacher_log_prob", "compute_values", "compute_rm_score")
_UPDATES = ("update_actor", "update_critic")
_DATASET = "RLHFDataset"

COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("seeds", ("B",), "int64", "make_requests", (_ROLLOUT,), "seed of each response"),
        Column("prompts", ("B", "P"), "int64", _ROLLOUT, ("compute_reward",), "token ids of the prompt"),
        Column("responses", ("B", "R"), "int64", _ROLLOUT, (*_MODELS, "compute_reward", *_UPDATES), "token ids"),
        Column("input_ids", ("B", "P+R"), "int64", _ROLLOUT, (*_MODELS, *_UPDATES), "prompt and response"),
        Column(
            "attention_mask", ("B", "P+R"), "int64", _ROLLOUT, (*_MODELS, "compute_reward", *_UPDATES), "1 on tokens"
        ),
        Column("position_ids", ("B", "P+R"), "int64", _ROLLOUT, (*_MODELS, *_UPDATES), "place in the text"),
        Column(
            "response_mask",
            ("B", "R"),
            "int64",
            _ROLLOUT,
            (*_MODELS, "compute_reward", "compute_advantages", *_UPDATES),
            "1 on tokens that the model sampled, the end-of-sequence token included; 0 on what it read between",
        ),
        Column(
            "rollout_log_probs",
            ("B", "R"),
            "float32",
            _ROLLOUT,
            ("compute_advantages",),
            "log-probs seen while sampling",
        ),
        Column(
            "turn_scores",
            ("B", "R"),
            "float32",
            "rows_to_batch",
            ("score", "compute_advantages"),
            "what the turn of a conversation earned, at its last token",
        ),
        Column(
            "conversation",
            ("B",),
            "int64",
            "rows_to_batch",
            ("join_labels", "score", "compute_advantages"),
            "place in the step of the conversation that a row is a part of",
        ),
        Column(
            "policy_versions",
            ("B", "R"),
            "int64",
            "take_responses",
            ("take_responses",),
            "version of the weights that sampled the token: steps whose actor update they contain",
        ),
        Column(
            "old_log_probs",
            ("B", "R"),
            "float32",
            "compute_log_prob",
            ("compute_advantages", "update_actor"),
            "log-probs under the policy before the update",
        ),
        Column(
            "sum_pi_squared",
            ("B", "R"),
            "float32",
            "compute_log_prob",
            ("compute_advantages",),
            "squared probabilities of all tokens, summed, under the policy before the update; where it is asked for",
        ),
        Column(
            "ref_log_prob",
            ("B", "R"),
            "float32",
            "compute_ref_log_prob",
            ("compute_advantages", "update_actor"),
            "log-probs under the reference",
        ),
        Column(
            "teacher_log_probs",
            ("B", "R"),
            "float32",
            "compute_teacher_log_prob",
            ("update_actor",),
            "log-probs under the row's teacher",
        ),
        Column(
            "top_tokens",
            ("B", "R", "K"),
            "int32",
            "compute_teacher_log_prob",
            ("update_actor",),
            "the likeliest tokens at each place under the row's teacher, where the distillation compares them",
        ),
        Column(
            "top_log_probs",
            ("B", "R", "K"),
            "float32",
            "compute_teacher_log_prob",
            ("update_actor",),
            "their log-probs under the teacher",
        ),
        Column(
            "values", ("B", "R"), "float32", "compute_values", ("compute_advantages", "update_critic"), "state values"
        ),
        Column("rm_scores", ("B", "R"), "float32", "compute_rm_score", ("score",), "reward model, at the last token"),
        Column(
            "token_level_scores",
            ("B", "R"),
            "float32",
            "compute_reward",
            ("score", "compute_advantages"),
            "at the last token: from rules, and after `score` with the reward model's",
        ),
        Column(
            "reward_baselines",
            ("B",),
            "float32",
            "score_baselines",
            ("compute_advantages",),
            "score of the greedy response to the same prompt",
        ),
        Column(
            "token_level_rewards",
            ("B", "R"),
            "float32",
            "compute_advantages",
            ("compute_advantages",),
            "scores less the KL penalty",
        ),
        Column("advantages", ("B", "R"), "float32", "compute_advantages", ("update_actor",), "better than expected by"),
        Column("returns", ("B", "R"), "float32", "compute_advantages", ("update_critic",), "targets of the values"),
        Column(
            "rollout_is_weights",
            ("B", "R"),
            "float32",
            "compute_advantages",
            ("update_actor",),
            "importance weights of rollout correction",
        ),
        Column(
            "loss_mask",
            ("B", "R"),
            "int64",
            "compute_advantages",
            _UPDATES,
            "response_mask, less what rollout correction rejected",
        ),
        Column(
            "high_covariance",
            ("B", "R"),
            "bool",
            "deal_mini_batches",
            ("update_actor",),
            "tokens of the mini-batch that clip_cov or kl_cov holds back",
        ),
        Column(
            "is_finished", ("B",), "bool", "collect_finished", ("StreamedRollouts",), "false: aborted before its end"
        ),
        Column("request_id", ("B",), "object", "RequestPool", ("submit_requests",), "names a request under way"),
        Column("data_source", ("B",), "object", _DATASET, ("compute_reward", "score"), "names the scorer"),
        Column("reward_model", ("B",), "object", _DATASET, ("compute_reward", "score"), "dict with `ground_truth`"),
        Column("extra_info", ("B",), "object", _DATASET, ("compute_reward",), "what else a scorer may want to know"),
        Column("raw_prompt", ("B",), "object", _DATASET, ("compute_reward", "compute_rm_score"), "the chat"),
        Column("index", ("B",), "object", _DATASET, ("compute_reward",), "number of the row in the files"),
        Column("agent_name", ("B",), "object", _DATASET, ("start_conversations",), "names the loop, where it is given"),
        Column(
            "conversation_info",
            ("B",),
            "object",
            "rows_to_batch",
            ("join_labels", "conversation_metrics"),
            "dict: ended_by, num_turns, turn_rewards, and what loops and tools counted",
        ),
        Column("uid", ("B",), "object", "make_requests", ("compute_reward", "compute_advantages"), "names the group"),
        Column(
            "reward_extra_info",
            ("B",),
            "object",
            "compute_reward",
            ("score", "compute_advantages"),
            "what the scorer says of each response",
        ),
    )
}
"""Further columns of the data files travel along and reach `compute_reward`."""

MODEL_INPUTS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
"""What a forward pass over prompt and response needs."""

REQUEST_COLUMNS = ["input_ids", "attention_mask", "position_ids"]
"""What a dataset row gives to the rollout (of prompt width), beside `seeds`."""
