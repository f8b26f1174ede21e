"""Whether a rollout goes on while tools take their time: conversations whose tool takes 0.2 to 2 s, by a real engine.

For each ratio the turns get so many tokens that generating them with an instant tool takes about the third part, or
three times, of what the longest conversation waits for its tool. The whole is compared with the longer of the two.

    python -m benchmarks.agent_waits
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from benchmarks.table import remark, report
from paceline.agents import AgentLoop, AgentRequest, Conversation, Generate
from paceline.agents.link import EngineLink
from paceline.agents.loops import AgentContext
from paceline.agents.runner import Job, Runner, make_context
from paceline.agents.template import ChatTemplate
from paceline.agents.wire import Engines
from paceline.cli.quickstart.model import build_tokenizer
from paceline.config import AgentConfig, MultiTurnConfig
from paceline.rollout.native import NativeRollout
from paceline.workers.agent_sessions import AgentSessions
from paceline.workers.mailbox import Mailbox

SHORTEST, LONGEST = 0.2, 2.0
"""Seconds of a call of the tool."""
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
PROMPT, OBSERVATION = 64, 32
"""Tokens, at most."""
RATIOS = {"1:3": 3.0, "3:1": 1 / 3}
"""Of waits to generation: seconds of generation for each second of waits."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def waits_of(conversation: int, turns: int) -> list[float]:
    """Seconds of each call of a conversation's tool."""
    generator = random.Random(conversation)
    return [generator.uniform(SHORTEST, LONGEST) for _ in range(turns - 1)]


class WaitingLoop(AgentLoop):
    """A tool after each turn but the last."""

    def __init__(self, context: AgentContext, turns: int, is_instant: bool) -> None:
        super().__init__(context)
        self.turns, self.is_instant = turns, is_instant

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        conversation = request.begin()
        await generate(conversation)
        for seconds in waits_of(request.seed, self.turns):
            await asyncio.sleep(0 if self.is_instant else seconds)
            if not conversation.observe([{"role": "tool", "content": "12"}]):
                raise RuntimeError(f"a conversation ended early: {conversation.ended_by}")
            await generate(conversation)
        return conversation


class Machine:
    """A model, and agents in a process with it, which is harder than apart: they share the interpreter."""

    def __init__(self, conversations: int, turns: int, hidden: int, layers: int, folder: str) -> None:
        self.conversations, self.turns, self.folder = conversations, turns, Path(folder)
        self.tokenizer: PreTrainedTokenizerBase = build_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
        )
        self.model = Qwen2ForCausalLM(config).eval()

    @property
    def longest_waits(self) -> float:
        """Seconds that one conversation waits for its tool, the one that waits longest."""
        return max(sum(waits_of(number, self.turns)) for number in range(self.conversations))

    def seconds(self, tokens: int, *, is_instant: bool) -> float:
        """All conversations, with turns of so many tokens."""
        loop = {"name": "waiting", "_target_": f"{__file__}:WaitingLoop", "turns": self.turns, "is_instant": is_instant}
        (self.folder / "loops.yaml").write_text(json.dumps([loop]))
        agent = AgentConfig(
            default_agent_loop="waiting",
            agent_loop_config_path=str(self.folder / "loops.yaml"),
            timeout_seconds=3600,
        )
        template = ChatTemplate(self.tokenizer, {})
        context = make_context(
            template,
            MultiTurnConfig(max_tokens_per_turn=tokens),
            prompt_tokens=PROMPT,
            response_tokens=self.turns * (tokens + OBSERVATION),
        )
        chat = [{"role": "user", "content": "1+1="}]
        prompt_ids = template.encode(template.render(chat))
        jobs = [Job(number, 0, {"raw_prompt": chat}, prompt_ids, number) for number in range(self.conversations)]
        mailbox = Mailbox("127.0.0.1", "a key")
        rollout = NativeRollout(self.model, set(), 0, max_num_seqs=self.conversations)
        sessions = AgentSessions(mailbox, rollout)
        sampling = threading.Thread(target=sessions.serve, args=(SAMPLING, 1, 1), daemon=True)

        async def have() -> list[str]:
            link = EngineLink(1, 0)
            await link.connect(Engines((mailbox.address,), mailbox.key))
            return [ended.problem for ended in await Runner(agent, context).run(jobs, link)]

        started = time.perf_counter()
        sampling.start()
        problems = asyncio.run(have())
        sampling.join()
        seconds = time.perf_counter() - started
        mailbox.close()
        if any(problems):
            raise RuntimeError(f"conversations failed: {problems[:3]}")
        return seconds

    def tokens_for(self, seconds: float) -> int:
        """Tokens of a turn with which generation takes about so long."""
        few, many = 8, 32
        self.seconds(few, is_instant=True)  # for warming up
        slope = (self.seconds(many, is_instant=True) - self.seconds(few, is_instant=True)) / (many - few)
        return max(1, round(seconds / max(slope, 1e-9)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64, help="at the same time (64)")
    parser.add_argument("--turns", type=int, default=4, help="of each (4)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (256)")
    parser.add_argument("--layers", type=int, default=4, help="its layers (4)")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is measured (3)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(args.conversations, args.turns, args.hidden, args.layers, folder)
        waits = machine.longest_waits
        for ratio, factor in RATIOS.items():
            tokens = machine.tokens_for(waits * factor)
            whole, instant = [], []
            for _ in range(args.repeats):
                instant.append(machine.seconds(tokens, is_instant=True))
                whole.append(machine.seconds(tokens, is_instant=False))
            longer = max(waits, statistics.median(instant))
            work = f"{args.conversations} conversations, waits to generation {ratio}"
            measured = {"tool of 0.2 to 2 s": whole, "longest waits": [waits], "instant tool": instant}
            report(work, measured, "s", of="tool of 0.2 to 2 s")
            remark(
                f"At waits to generation {ratio} (turns of {tokens} tokens), conversations with a slow tool take "
                f"{statistics.median(whole) / longer:.2f} of the longer of the two."
            )


if __name__ == "__main__":
    main()
