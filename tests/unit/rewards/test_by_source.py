"""Which scorer grades which source, and how the user adds one."""

from __future__ import annotations

from functools import partial

import pytest

from paceline.errors import ConfigError, UnknownDataSourceError
from paceline.rewards import RewardManager, _select_rm_score_fn, by_source, known_sources, register_scorer
from paceline.rewards.score import gsm8k, math
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch


@pytest.fixture
def _own_registry(monkeypatch):
    monkeypatch.setattr(by_source._SCORERS, "_entries", dict(by_source._SCORERS._entries))


def test_sources_have_their_scorers_under_every_name():
    for name in ("openai/gsm8k", "gsm8k"):
        assert _select_rm_score_fn(name) is gsm8k.compute_score
    for name in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        assert _select_rm_score_fn(name) is math.compute_score


def test_an_unknown_source_is_an_error_that_lists_the_known_ones_and_the_nearest():
    with pytest.raises(NotImplementedError) as error:
        _select_rm_score_fn("openai/gsm8")
    assert isinstance(error.value, UnknownDataSourceError)
    assert "Did you mean openai/gsm8k?" in str(error.value)
    assert all(name in str(error.value) for name in known_sources())
    with pytest.raises(UnknownDataSourceError, match="1 of 1 rows"):
        RewardManager(TOKENIZER, 0)(make_batch(["x"], ["1"], "who/knows"))


@pytest.mark.usefixtures("_own_registry")
def test_a_registered_scorer_grades_its_source_one_by_one_or_as_a_batch():
    register_scorer("my/one", lambda solution_str, ground_truth, extra_info=None: 0.25)
    register_scorer(
        "my/batch",
        lambda solution_str, ground_truth, extra_info=None: 0.0,
        batch=lambda solutions, truths, infos: [len(solutions)] * len(solutions),
    )
    rewards = RewardManager(TOKENIZER, 0)(make_batch(["a", "b", "c"], ["", "", ""], ["my/batch", "my/one", "my/batch"]))
    assert rewards.sum(-1).tolist() == [2.0, 0.25, 2.0]


@pytest.mark.usefixtures("_own_registry")
def test_a_batch_scorer_that_fails_or_loses_rows_is_a_grader_error_of_its_rows():
    register_scorer("my/short", gsm8k.compute_score, batch=lambda solutions, truths, infos: [1.0])
    register_scorer("my/broken", gsm8k.compute_score, batch=lambda solutions, truths, infos: 1 / 0)
    batch = make_batch(["a", "b", "c", "#### 1"], ["1"] * 4, ["my/short", "my/short", "my/broken", "gsm8k"])
    info = RewardManager(TOKENIZER, 0)(batch, return_dict=True)["reward_extra_info"]
    assert info["grader_error"].tolist() == [True, True, True, False]
    assert info["score"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("source", "response"),
    [
        ("math_dapo", "Answer: 1/2"),
        ("math_dapo", r"\boxed{\frac12}"),
        ("aime2024", "Answer: 1/2"),
        ("aime_2025", r"\boxed{0.5}"),
        ("numina_aops_forum", r"\boxed{0.5}"),
        ("numina_cn_k12", r"\boxed{0.5}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{0.5}"),
    ],
)
def test_sources_of_mathematics_are_graded_by_their_own_convention(source, response):
    batch = make_batch([response, "0.5"], [r"\frac{1}{2}"] * 2, source)
    assert RewardManager(TOKENIZER, 0)(batch).sum(-1).tolist() == [1.0, 0.0]


def score_twice(solution_str, ground_truth, extra_info=None):
    return 2.0


@pytest.mark.usefixtures("_own_registry")
def test_a_scorer_of_the_users_is_replaced_only_where_override_says_so():
    one, two = partial(gsm8k.compute_score, method="flexible"), partial(gsm8k.compute_score, method="strict")
    name = "my/data"
    register_scorer(name, one)
    register_scorer(name, partial(gsm8k.compute_score, method="flexible"))  # the same again
    for other in (two, score_twice):
        with pytest.raises(ConfigError, match=f"data_source={name} is already registered"):
            register_scorer(name, other)
    register_scorer(name, score_twice, override=True)
    assert _select_rm_score_fn(name) is score_twice


@pytest.mark.usefixtures("_own_registry")
def test_a_shipped_scorer_may_be_replaced_once():
    register_scorer("openai/gsm8k", score_twice)
    register_scorer("openai/gsm8k", score_twice)
    assert _select_rm_score_fn("openai/gsm8k") is score_twice
    with pytest.raises(ConfigError, match="already registered"):
        register_scorer("openai/gsm8k", lambda solution_str, ground_truth, extra_info=None: 1.0)
