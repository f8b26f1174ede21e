"""The sections of conversations: how many turns they have, and who has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.field_rules import Count, LocalPath, Positive, WholeNumber


@dataclass(frozen=True)
class MultiTurnConfig:
    """Conversations of several turns: docs/agents.md."""

    enable: bool = False
    """Let agent processes have the conversations. Set it where a column agent_name says which loop a row has; another
    default_agent_loop than single_turn_agent, or an agent_loop_config_path, does the same."""
    max_assistant_turns: WholeNumber | None = None
    """Turns of the model in a conversation, >= 0. null or 0: as many as fit into data.max_response_length."""
    max_user_turns: WholeNumber | None = None
    """Answers of tools, or of an environment, in a conversation, >= 0. null or 0: no limit."""
    max_tokens_per_turn: Count | None = None
    """Tokens of one turn of the model, >= 1. null: data.max_response_length, which holds all turns together."""
    tool_config_path: LocalPath | None = None
    """A YAML file of tools, which tool_agent offers to the model. null: none."""
    max_parallel_calls: Count = 1
    """Tool calls of one turn that are executed, >= 1. Further ones are dropped and counted."""
    max_tool_response_length: Count = 256
    """Characters of a tool's answer that the model reads, >= 1."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Where a longer answer is cut."""
    format: str = "hermes"
    """How the model writes tool calls: hermes (<tool_call> blocks), json (the turn is one call, or a list of calls), or
    a registered parser."""


@dataclass(frozen=True)
class AgentConfig:
    """The processes that have conversations."""

    num_workers: Count = 1
    """Agent processes, >= 1. Each has many conversations at the same time. Their number changes no conversation."""
    default_agent_loop: str = "single_turn_agent"
    """The loop of rows without a column agent_name: single_turn_agent, tool_agent, or one of your own."""
    agent_loop_config_path: LocalPath | None = None
    """A YAML list of loops of your own, each with name, _target_ (a class) and arguments of its constructor."""
    rewards: Literal["end", "turns", "both"] = "end"
    """end: the reward function scores the whole conversation, at its last token. turns: what tools and environments
    gave, at the last token of each turn; no reward function is called. both: the two added up."""
    timeout_seconds: Positive = 600.0
    """Of one conversation, > 0. One that takes longer is left out of the update and counted."""
