from __future__ import annotations

import pytest

from paceline import cli
from paceline.config.keys import walk_keys


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(["config", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_without_words_every_key_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys)
    for key in walk_keys():
        if not key.is_section:
            assert f"\n{key.name} (" in f"\n{text}"


def test_words_are_looked_for_in_names_and_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "clip")
    assert "actor_rollout_ref.actor.clip_ratio (float) = 0.2\n    Clip range of the probability ratio" in text
    assert "trainer.nnodes" not in text
    both = out(capsys, "KL", "loss")
    assert "actor_rollout_ref.actor.kl_loss_coef" in both
    assert "algorithm.kl_ctrl.horizon" not in both


def test_a_key_is_explained_with_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "trainer.placement.name")
    assert "type     choice" in text
    assert "default  colocated" in text
    assert "split: actor, rollout and reference" in text
    neighbours = ("critic_devices", "rollout_devices", "rollout_on")
    listed = "".join(f"  trainer.placement.{name}\n" for name in neighbours)
    assert text.endswith(f"Neighbours in trainer.placement:\n{listed}")


def test_a_section_lists_what_is_directly_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "trainer")
    assert "trainer.nnodes (int) = 1" in text
    assert "trainer.placement.*" in text
    assert "trainer.placement.name" not in text


def test_an_unknown_key_gives_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "actor_rollout_ref.actor.clip_ration", code=1)
    assert "The nearest:\n  actor_rollout_ref.actor.clip_ratio\n" in text
    assert "  actor_rollout_ref.actor.clip_ratio\n" in out(capsys, "clpi", code=1)
    assert out(capsys, "zzqqxx", code=1) == "No key has 'zzqqxx' in its name or meaning.\n"


def test_a_key_of_verls_says_what_becomes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-> actor_rollout_ref.model.trust_remote_code" in out(capsys, "data.trust_remote_code", code=1)
    assert "-> reward_model.sandbox." in out(capsys, "reward_model.sandbox_fusion.url", code=1)
    assert "has no effect here" in out(capsys, "data.dataloader_num_workers", code=1)
    assert out(capsys, "mlflow", code=1).startswith("trainer.logger=mlflow is not supported yet; use tensorboard")
    assert "global_profiler.** Has no part while no profiler is on" in out(capsys, "profiler", code=1)


def test_keys_of_verls_are_found_by_a_word_beside_the_keys_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    ulysses = "actor_rollout_ref.ref.ulysses_sequence_parallel_size The role's own"
    text = out(capsys, "parallel", "size")
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size (int) = 1" in text
    assert ulysses in text.partition("Keys of verl's:")[2]
