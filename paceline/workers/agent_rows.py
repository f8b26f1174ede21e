"""From conversations to the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.agents.runner import Ended
from paceline.protocol import DataProto

CHAT = "conversation_chat"


def rows_to_batch(
    ended: Sequence[Ended],
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    *,
    with_chats: bool = False,
    with_versions: bool = False,
) -> DataProto:
    """The rows of conversations, those of one after another.

    The columns are those of `paceline.rollout.postprocess.to_batch`, with a response mask that is 1 on the model's
    tokens alone while the attention mask covers observations too. Besides there are `turn_scores` (batch, response),
    what turns earned; `conversation` (batch,), the place of the row's conversation in the step; and
    `conversation_info`, a dict: ended_by, num_turns, turn_rewards, problem, and what loops and tools counted; and
    `with_chats` the messages, as `CHAT`. `with_versions`: `policy_versions` (batch, response), and
    `request_id`, the names of conversations in a stream.
    """
    rows = [(one, row) for one in ended for row in one.rows]
    prompts = torch.full((len(rows), prompt_length), pad_token_id, dtype=torch.long)
    prompt_mask = torch.zeros(len(rows), prompt_length, dtype=torch.long)
    responses = torch.full((len(rows), response_length), pad_token_id, dtype=torch.long)
    attended, mask, versions = (torch.zeros_like(responses) for _ in range(3))
    log_probs, scores = (torch.zeros(len(rows), response_length) for _ in range(2))
    for place, (_, row) in enumerate(rows):
        start, length = prompt_length - len(row.prompt_ids), len(row.response_ids)
        prompts[place, start:] = torch.tensor(row.prompt_ids, dtype=torch.long)
        prompt_mask[place, start:] = 1
        attended[place, :length] = 1
        columns = [
            (responses, row.response_ids),
            (mask, row.mask),
            (log_probs, row.log_probs),
            (scores, row.rewards),
        ]
        if with_versions:
            columns.append((versions, row.versions))
        for column, values in columns:
            column[place, :length] = torch.tensor(values, dtype=column.dtype)
    attention_mask = torch.cat([prompt_mask, attended], dim=1)
    info = np.empty(len(rows), dtype=object)
    info[:] = [_info(one) for one, _ in rows]
    chats = np.empty(len(rows), dtype=object)
    chats[:] = [one.messages for one, _ in rows]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": mask,
            "rollout_log_probs": log_probs,
            "turn_scores": scores,
            "conversation": torch.tensor([one.order for one, _ in rows], dtype=torch.long),
            **({"policy_versions": versions} if with_versions else {}),
        },
        non_tensors={
            "conversation_info": info,
            **({CHAT: chats} if with_chats else {}),
            **({"request_id": np.array([one.name for one, _ in rows], dtype=object)} if with_versions else {}),
        },
    )


def _info(ended: Ended) -> dict[str, object]:
    return {
        "ended_by": ended.ended_by,
        "num_turns": len(ended.turns),
        "num_rows": len(ended.rows),
        "turn_rewards": [turn.reward for turn in ended.turns],
        "problem": ended.problem,
        "counts": ended.counts,
    }
