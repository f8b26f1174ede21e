from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.agents.conversation import ConversationRow, Turn
from paceline.agents.runner import Ended
from paceline.protocol import DataProto
from paceline.trainer.ppo.computed_columns import compute_advantage
from paceline.trainer.ppo.conversations import (
    conversation_metrics,
    group_advantages,
    join_labels,
    last_rows,
    num_conversations,
    scored_by_turns,
    spread_scores,
    whole_conversations,
)
from paceline.workers.agent_rows import rows_to_batch
from paceline.workers.reward_worker import EXTRA_INFO


def row(mask: list[int], rewards: list[float] | None = None) -> ConversationRow:
    ids = list(range(5, 5 + len(mask)))
    return ConversationRow([3, 4], ids, mask, [-0.5 * own for own in mask], rewards or [0.0] * len(mask))


def four_conversations() -> DataProto:
    """Two groups of two; the first conversation has two rows, the last one broke."""
    ended = [
        Ended(
            0,
            [row([1, 1], [0, 0.5]), row([1, 0, 1], [0, 0, 2.0])],
            "answer",
            [Turn("a", 2, True, 0.5), Turn("b", 2, True, 2.0)],
            {"splits": 1.0, "tool_calls": 2.0},
        ),
        Ended(1, [row([1, 0, 1], [1.0, 0, 0])], "answer", [Turn("a", 1, True, 1.0), Turn("b", 1, True)]),
        Ended(2, [row([1, 1, 1])], "response_length", [Turn("a", 3, False)]),
        Ended(3, [row([])], "error", problem="broken"),
    ]
    responses = rows_to_batch(ended, 3, 4, 0)
    uids = np.array(["a", "a", "b", "b"], dtype=object)
    return join_labels(DataProto.from_dict(non_tensors={"uid": uids}), responses)


def scored(batch: DataProto, scores: list[float], by_turns: bool) -> DataProto:
    last = batch[last_rows(batch)]
    places = last.batch["response_mask"].sum(dim=-1)
    columns = torch.zeros(len(last), 4)
    for place, (score, own) in enumerate(zip(scores, places.tolist(), strict=True)):
        columns[place, 0] = score if own else 0.0
    info = np.empty(len(last), dtype=object)
    info[:] = [{"score": score} for score in scores]
    graded = DataProto.from_dict(tensors={"token_level_scores": columns}, non_tensors={EXTRA_INFO: info})
    answer = spread_scores(batch, graded, with_turns=by_turns)
    rewards = DataProto.from_dict({"token_level_rewards": answer.batch["token_level_scores"]})
    return batch.union(answer).union(rewards)


def test_rows_have_their_tokens_masks_and_conversations() -> None:
    batch = four_conversations()
    assert batch.batch["conversation"].tolist() == [0, 0, 1, 2, 3]
    assert batch.batch["prompts"][0].tolist() == [0, 3, 4]
    assert batch.batch["attention_mask"][1].tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert batch.batch["response_mask"][1].tolist() == [1, 0, 1, 0]
    assert batch.batch["position_ids"][1].tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert batch.batch["rollout_log_probs"][1].tolist() == [-0.5, 0, -0.5, 0]
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "a", "b", "b"]
    assert batch.non_tensor_batch["extra_info"][0] == {
        "num_turns": 2,
        "turn_rewards": [0.5, 2.0],
        "ended_by": "answer",
    }
    assert (num_conversations(batch), last_rows(batch).tolist()) == (4, [1, 2, 3, 4])


@pytest.mark.parametrize("by_turns", [False, True])
def test_each_row_has_the_score_of_its_conversation_at_its_last_token(by_turns: bool) -> None:
    batch = scored(four_conversations(), [3.0, 4.0, 5.0, 9.0], by_turns)
    turn = 1.0 if by_turns else 0.0
    assert batch.batch["token_level_scores"].tolist() == [
        [0, 3 + 0.5 * turn, 0, 0],
        [0, 0, 3 + 2 * turn, 0],
        [turn, 0, 4, 0],
        [0, 0, 5, 0],
        [0, 0, 0, 0],
    ]
    assert batch.non_tensor_batch[EXTRA_INFO][0] == {"score": 3.0}
    whole = whole_conversations(batch, "token_level_scores", by_turns=by_turns)
    assert whole.batch["token_level_scores"].sum(dim=-1).tolist() == [3 + 2.5 * turn, 4 + turn, 5, 0]


def test_scores_by_turns_are_those_of_the_turns() -> None:
    answer = scored_by_turns(four_conversations())
    assert answer.batch["token_level_scores"].sum(dim=-1).tolist() == [0.5, 2.0, 1.0, 0.0, 0.0]
    assert [info["score"] for info in answer.non_tensor_batch[EXTRA_INFO]] == [2.5, 2.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("by_turns", [False, True])
def test_a_group_compares_conversations_and_not_their_rows(estimator: str, by_turns: bool) -> None:
    """Against a batch in which each conversation has one row, with all that it earned."""
    batch = scored(four_conversations(), [3.0, 4.0, 5.0, 9.0], by_turns)
    found = group_advantages(batch, lambda rows: compute_advantage(rows, estimator), by_turns=by_turns)
    alone = batch[last_rows(batch)]
    if by_turns:
        alone.batch["token_level_rewards"] = alone.batch["token_level_rewards"].clone()
        alone.batch["token_level_rewards"][0, 2] += 0.5
    expected = compute_advantage(alone, estimator).batch["advantages"]
    last = found.batch["advantages"][last_rows(batch)]
    assert torch.equal(last, expected)
    first_row = found.batch["advantages"][0]
    assert first_row.tolist() == [expected[0, 0].item()] * 2 + [0, 0]


def test_gae_passes_over_observations_as_if_they_were_not_there() -> None:
    """Against the same rows without their observations, token by token."""
    batch = scored(four_conversations(), [3.0, 4.0, 5.0, 9.0], by_turns=True)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5, 4, generator=generator)
    data = batch.union(DataProto.from_dict({"values": values}))
    found = compute_advantage(data, "gae", gamma=0.9, lam=0.8).batch["returns"]
    for place in range(5):
        own = batch.batch["response_mask"][place].bool()
        value = values[place][own].tolist()
        reward = batch.batch["token_level_rewards"][place][own].tolist()
        advantage, expected = 0.0, []
        for t in reversed(range(len(value))):
            following = value[t + 1] if t + 1 < len(value) else 0.0
            advantage = reward[t] + 0.9 * following - value[t] + 0.9 * 0.8 * advantage
            expected.insert(0, advantage + value[t])
        assert found[place][own].tolist() == pytest.approx(expected, abs=1e-6)
        assert (found[place][~own] == 0).all()


def test_metrics_count_each_conversation_once() -> None:
    metrics = conversation_metrics(four_conversations())
    assert metrics["agent/num_turns/mean"] == (2 + 2 + 1 + 0) / 4
    assert metrics["agent/ended_by/answer"] == 0.5
    assert (metrics["agent/failed"], metrics["agent/splits"], metrics["agent/tool_calls"]) == (1, 1, 2)
    assert metrics["agent/rows"] == 5
    assert metrics["agent/share_of_observations"] == pytest.approx(2 / 11)
