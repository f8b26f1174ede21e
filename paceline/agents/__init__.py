"""Conversations of several turns: the model, and tools or an environment between its turns.

conversation       tokens of a conversation as they came, and the observations between; limits
template           the chat template of the tokenizer
loops              what happens between turns: AgentLoop, single_turn_agent, tool_agent
environment_loop   an environment as the other side: reset and step; games has some
gateway            a program with OpenAI's client as the other side
openai_server      its protocol: openai_messages; choice_reader reads answers as they come; served_model has them
                   from a trained model alone
tools, parsers     what a model may call, and how it says so; calculator, search and mcp_tools are tools
runner             all conversations of a process, in one event loop
link, wire         its connections to the rollout's processes
"""

from __future__ import annotations

from paceline.agents.conversation import Conversation, ConversationLimits, Sampled, Turn
from paceline.agents.environment_loop import Environment, EnvironmentLoop
from paceline.agents.loops import AgentContext, AgentLoop, AgentRequest, Generate, register_agent_loop
from paceline.agents.parsers import ToolCall, register_tool_parser
from paceline.agents.tools import Tool, ToolAnswer

__all__ = [
    "AgentContext",
    "AgentLoop",
    "AgentRequest",
    "Conversation",
    "ConversationLimits",
    "Environment",
    "EnvironmentLoop",
    "Generate",
    "Sampled",
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "Turn",
    "register_agent_loop",
    "register_tool_parser",
]
