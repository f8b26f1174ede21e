"""The prompts of a run: datasets from the files of the configuration, checked for what will score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.agents.tools import read_tools
from paceline.config import DataConfig, PPOConfig
from paceline.config.derived import learns_from_rewards, uses_agents
from paceline.data.custom_data import make_dataset, make_sampler
from paceline.data.loader import PromptLoader, make_dataloader
from paceline.data.prompt_images import PromptImages
from paceline.data.rl_dataset import Batch, Item
from paceline.errors import ConfigError
from paceline.rewards import RewardManager
from paceline.trainer.ppo.memory import validation_batch_size
from paceline.trainer.ppo.placement import uses_reward_model
from paceline.trainer.ppo.scoring import check_scorable
from paceline.workers.reward_worker import RewardFn


def make_train_loader(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: RewardFn | None,
    dataset: Any = None,
    sampler: Iterable[int] | None = None,
    *,
    processor: object = None,
    collate: Callable[[Sequence[Item]], Batch] | None = None,
) -> PromptLoader:
    """Batches of training prompts, of `dataset` or of data.train_files, in the order of `sampler` or data.sampler."""
    data = prompt_config(config)
    if sampler is not None and config.trainer.schedule.name != "sync":
        raise ConfigError(
            "train_sampler wants trainer.schedule.name=sync: prompts drawn ahead could not be drawn again."
        )
    if dataset is None:
        assert data.train_files is not None  # the configuration was checked
        images, most = image_reader(config), data.train_max_samples
        dataset = make_dataset(data.train_files, tokenizer, data, max_samples=most, processor=processor, images=images)
    if not learns_from_rewards(config):
        if isinstance(reward_fn, RewardManager):
            reward_fn.expect_teacher()
    elif reads_rewards(config):
        check_scorable(reward_fn, dataset, data.reward_fn_key, has_model=uses_reward_model(config))
    return make_dataloader(
        dataset,
        batch_size=data.train_batch_size,
        shuffle=data.shuffle,
        seed=config.trainer.seed if data.seed is None else data.seed,
        drop_last=data.drop_last,
        sampler=make_sampler(dataset, data) if sampler is None else sampler,
        collate=collate,
    )


def make_val_loader(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: RewardFn | None,
    dataset: Any = None,
    *,
    processor: object = None,
    collate: Callable[[Sequence[Item]], Batch] | None = None,
) -> PromptLoader | None:
    """Batches of held-out prompts, of `dataset` or of data.val_files; None where there are none."""
    data = prompt_config(config)
    if dataset is None and data.val_files:
        images, most = image_reader(config), data.val_max_samples
        dataset = make_dataset(data.val_files, tokenizer, data, max_samples=most, processor=processor, images=images)
    if dataset is None:
        return None
    by_model = uses_reward_model(config) and config.reward_model.validate
    if reads_rewards(config):
        check_scorable(reward_fn, dataset, data.reward_fn_key, has_model=by_model, validation=True)
    batch_size = data.val_batch_size or validation_batch_size(config)
    return make_dataloader(dataset, batch_size=batch_size, shuffle=False, seed=config.trainer.seed, collate=collate)


def prompt_config(config: PPOConfig) -> DataConfig:
    """The section of the data, with what the run wants of it besides.

    A reward model may have to read the chat in a template of its own, and agents go on with it. Tools stand in the
    prompts.
    """
    data = config.data
    if uses_reward_model(config) or uses_agents(config):
        data = replace(data, return_raw_chat=True)
    if uses_agents(config) and (tools := read_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path)):
        schemas = [dict(tool.schema) for tool in tools]
        data = replace(data, apply_chat_template_kwargs={**data.apply_chat_template_kwargs, "tools": schemas})
    return data


def image_reader(config: PPOConfig) -> PromptImages | None:
    """What reads the images of prompts as the policy wants them; None where prompts are text."""
    model = config.actor_rollout_ref.model
    if config.data.image_key is None:
        return None
    return PromptImages(str(model.path), trust_remote_code=model.trust_remote_code)


def reads_rewards(config: PPOConfig) -> bool:
    """Whether a reward function scores, and not turns alone."""
    return not (uses_agents(config) and config.actor_rollout_ref.rollout.agent.rewards == "turns")
