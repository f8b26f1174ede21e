"""Conversations of several turns: the model, and tools or an environment between its turns.

conversation    tokens of a conversation as they came, and the observations between; limits
template        the chat template of the tokenizer
loops           what happens between turns: AgentLoop, single_turn_agent, tool_agent
environment     an environment as the other side: reset and step
tools, parsers  what a model may call, and how it says so; calculator is a tool
runner          all conversations of a process, in one event loop
link, wire      its connections to the rollout's processes
"""

from __future__ import annotations

from paceline.agents.conversation import Conversation, Limits, Sampled, Turn
from paceline.agents.environment import Environment, EnvironmentLoop
from paceline.agents.loops import AgentContext, AgentLoop, AgentRequest, Generate, register_agent_loop
from paceline.agents.parsers import ToolCall, register_tool_parser
from paceline.agents.tools import Tool, ToolAnswer

__all__ = [
    "AgentContext",
    "AgentLoop",
    "AgentRequest",
    "Conversation",
    "Environment",
    "EnvironmentLoop",
    "Generate",
    "Limits",
    "Sampled",
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "Turn",
    "register_agent_loop",
    "register_tool_parser",
]
