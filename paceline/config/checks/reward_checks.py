"""Reward functions, weights, the sandbox and the penalty of long responses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.path_checks import reward_file_problems
from paceline.config.reward import read_weights
from paceline.errors import ConfigError


def check_rewards(cfg: PPOConfig) -> Iterator[str]:
    rewards, sandbox = cfg.reward_model, cfg.reward_model.sandbox
    custom = cfg.custom_reward_function
    if not custom.name.isidentifier():
        yield f"custom_reward_function.name={custom.name!r} is no name of a function; set it to one, as compute_score."
    elif custom.path is not None:
        yield from reward_file_problems(custom.path, custom.name)
    if custom.reward_kwargs and custom.path is None:
        yield "custom_reward_function.reward_kwargs has no function to go to; set custom_reward_function.path."
    try:
        read_weights(rewards.weights)
    except ConfigError as error:
        yield from error.problems
    if rewards.weights and not rewards.enable:
        yield (
            "reward_model.weights has no part without a reward model; set reward_model.enable=True and "
            "reward_model.model.path, or leave it empty."
        )
    if sandbox.url is not None and not re.match(r"https?://[^/]", sandbox.url):
        yield f"reward_model.sandbox.url={sandbox.url!r} is no address of a service; set one such as http://sandbox:8080."
    if sandbox.url is not None and sandbox.timeout_seconds < sandbox.wall_seconds:
        yield (
            f"reward_model.sandbox.timeout_seconds={sandbox.timeout_seconds:g} is shorter than a program may run "
            f"(reward_model.sandbox.wall_seconds={sandbox.wall_seconds:g}); raise it or lower that."
        )
    buffer = rewards.reward_kwargs.overlong_buffer_cfg
    max_len = rewards.reward_kwargs.max_resp_len or cfg.data.max_response_length
    if buffer.enable and buffer.len > max_len:
        yield (
            f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len} is more than a response may have: "
            f"{max_len} tokens (reward_model.reward_kwargs.max_resp_len, or else data.max_response_length). Lower it."
        )
