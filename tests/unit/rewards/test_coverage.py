"""Who scores which row, found out before a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline.errors import ConfigError, DataError, SandboxUnavailableError, UnknownDataSourceError
from paceline.rewards import RewardManager, Scorer, known_sources
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch

RULE = {"style": "rule", "ground_truth": "1"}
NO_TRUTH = {"style": "rule", "ground_truth": None}
BY_MODEL = {"style": "model", "ground_truth": "1"}
CHATS = "Dahoas/full-hh-rlhf"


def make_manager(weights: dict[str, Any] | None = None, **kwargs: Any) -> RewardManager:
    return RewardManager(TOKENIZER, 0, weights=weights, **kwargs)


def test_rows_with_a_rule_pass():
    make_manager().check(["openai/gsm8k", "MATH"], [RULE, RULE])
    make_manager(compute_score=lambda **kwargs: 0.0).check([None, "who/knows"], [None, NO_TRUTH])


def test_all_unknown_sources_are_listed_with_their_counts():
    sources = ["openai/gsm8k", "openai/gsm8", "who/knows", "openai/gsm8"]
    for has_model in (False, True):
        with pytest.raises(UnknownDataSourceError) as error:
            make_manager().check(sources, [RULE] * 4, has_model=has_model)
        assert "'openai/gsm8' (2 of 4 rows), 'who/knows' (1 of 4 rows)" in str(error.value)
        assert "Did you mean openai/gsm8k?" in str(error.value)
        assert all(name in str(error.value) for name in known_sources())
        assert ("name it in reward_model.weights" in str(error.value)) is has_model


def test_rows_without_ground_truth_are_refused_where_there_is_no_model():
    with pytest.raises(DataError, match=r"1 of 2 rows have no reward_model\.ground_truth, the first is row 1"):
        make_manager().check(["gsm8k", "gsm8k"], [RULE, NO_TRUTH])
    with pytest.raises(
        UnknownDataSourceError, match=r"'Dahoas/full-hh-rlhf' \(1 of 1 rows\).*reward_model\.enable=True"
    ):
        make_manager().check([CHATS], [NO_TRUTH])
    with pytest.raises(DataError, match=r"2 of 2 rows have no 'data_source'"):
        make_manager().check([None, None], [RULE, RULE])


@pytest.mark.parametrize(
    ("source", "reward_model", "weights"),
    [
        (CHATS, NO_TRUTH, {}),
        ("gsm8k", NO_TRUTH, {}),
        ("gsm8k", None, {}),
        ("gsm8k", BY_MODEL, {}),
        ("who/knows", BY_MODEL, {}),
        ("who/knows", RULE, {"who/knows": {"model": 1.0}}),
        (None, RULE, {}),
        (None, None, {}),
        ("gsm8k", RULE, {"gsm8k": {"model": 0.1}}),
        ("gsm8k", RULE, {"default": {"model": 0.1}}),
    ],
)
def test_rows_that_a_model_scores_pass(source, reward_model, weights):
    make_manager(weights).check([source], [reward_model], has_model=True)


@pytest.mark.parametrize(
    ("source", "reward_model", "weights"),
    [
        ("who/knows", RULE, {}),
        ("who/knows", NO_TRUTH, {}),  # it may be a typo
        ("who/knows", RULE, {"default": {"model": 1.0}}),  # default is for sources with a rule
        ("gsm8k", NO_TRUTH, {"gsm8k": {"rule": 1.0}}),
    ],
)
def test_rows_that_nobody_scores_are_refused_with_a_model_too(source, reward_model, weights):
    with pytest.raises(DataError):
        make_manager(weights).check([source, CHATS], [reward_model, NO_TRUTH], has_model=True)


def test_a_source_that_weights_leave_without_a_score_is_refused():
    with pytest.raises(ConfigError, match=r"weights gives the model no part in 'who/knows' \(1 of 2 rows\)"):
        make_manager({"who/knows": {"rule": 1.0}}).check(["who/knows", CHATS], [RULE, NO_TRUTH], has_model=True)


def test_a_model_that_no_row_uses_is_refused_for_training_only():
    for manager in (make_manager({}), make_manager({}, compute_score=lambda **kwargs: 0.0)):
        with pytest.raises(ConfigError, match=r"none of the 2 rows.*weights=\{gsm8k: \{rule: 1\.0, model: 0\.2\}\}'"):
            manager.check(["gsm8k", "gsm8k"], [RULE, RULE], has_model=True)
        manager.check(["gsm8k", "gsm8k"], [RULE, RULE], has_model=True, validation=True)


def test_weights_of_a_source_that_the_data_does_not_have_are_told(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        make_manager({"gsm8": {"model": 1.0}}).check(["gsm8k", CHATS], [RULE, NO_TRUTH], has_model=True)
    assert "reward_model.weights names gsm8, but no row has this data_source; the data has" in caplog.text


@pytest.mark.parametrize(
    ("source", "reward_model", "has_rule"),
    [
        ("openai/gsm8k", RULE, True),
        ("openai/gsm8k", NO_TRUTH, False),
        ("openai/gsm8k", None, False),
        ("who/knows", RULE, False),
        (None, None, False),
    ],
)
def test_has_rule(source, reward_model, has_rule):
    assert make_manager().has_rule(source, reward_model) is has_rule
    assert make_manager(compute_score=lambda **kwargs: 0.0).has_rule(source, reward_model) is True


def test_rows_of_style_model_are_the_model_s_where_there_is_one():
    assert make_manager().has_rule("gsm8k", BY_MODEL)
    assert not make_manager({}).has_rule("gsm8k", BY_MODEL)


def test_a_manager_is_told_that_there_is_a_model_and_a_check_does_not_change_it():
    manager, batch = make_manager(), make_batch(["hello"], [None], CHATS)
    before = dict(vars(manager))
    manager.check([CHATS, "gsm8k"], [NO_TRUTH, BY_MODEL], has_model=True)
    assert vars(manager) == before
    assert manager.has_rule("gsm8k", BY_MODEL)
    with pytest.raises(UnknownDataSourceError):
        manager(batch)
    manager.expect_model()
    assert not manager.has_rule("gsm8k", BY_MODEL)
    assert manager(batch).sum() == 0


def test_a_batch_without_sources_works_with_a_model():
    batch = make_batch(["hello"], [None], sources=None)
    with pytest.raises(DataError, match="no 'data_source'"):
        make_manager()(batch)
    result = make_manager({})(batch, return_dict=True)
    assert result["reward_extra_info"]["has_rule"].tolist() == [False]


def test_scorers_are_checked_once_and_only_if_the_data_has_their_source():
    calls: list[str] = []

    def zero(solution_str, ground_truth, extra_info=None):
        return 0.0

    def scorer(name: str) -> Scorer:
        return Scorer(zero, check=lambda: calls.append(name))

    shared = scorer("shared")
    scorers = {"a": shared, "b": shared, "c": scorer("c"), "gsm8k": scorer("gsm8k")}
    manager = make_manager({}, scorers=scorers)
    manager.check(["a", "b", "a", "gsm8k"], [RULE, RULE, RULE, NO_TRUTH], has_model=True)
    assert calls == ["shared"]


def test_a_scorer_that_can_not_work_stops_the_run_before_it_starts():
    def no_jail() -> None:
        raise SandboxUnavailableError("no user namespaces")

    manager = make_manager(scorers={"apps": Scorer(lambda **kwargs: 0.0, check=no_jail)})
    manager.check(["gsm8k"], [RULE])
    with pytest.raises(SandboxUnavailableError, match="no user namespaces"):
        manager.check(["gsm8k", "apps"], [RULE, RULE])
    # A function of the user's grades all rows, so that the scorer has no part.
    RewardManager(TOKENIZER, 0, lambda **kwargs: 0.0, scorers=manager.scorers).check(["apps"], [RULE])
