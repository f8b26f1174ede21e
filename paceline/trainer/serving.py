"""`paceline serve`: a saved policy behind OpenAI's protocol, sampled by the engine and the server of training.

The engine runs in the thread that calls `serve_policy`, HTTP in one beside it; between them is the mailbox that agents
have in a run.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from collections.abc import Callable

from paceline.agents.link import EngineLink
from paceline.agents.openai_server import LOOPBACK, OpenAIServer
from paceline.agents.parsers import ToolFormat
from paceline.agents.served_model import ServedModel, ServingLimits
from paceline.agents.template import ChatTemplate
from paceline.agents.wire import Engines
from paceline.errors import ConfigError
from paceline.rollout.model_rollout import ModelRollout
from paceline.trainer.saved_policy import SavedPolicy
from paceline.workers.agent_sessions import AgentSessions
from paceline.workers.mailbox import Mailbox

SESSION = 1
START_SECONDS = 60.0
END_SECONDS = 10.0


def serve_policy(
    policy: SavedPolicy, *, port: int, key: str, answers: int, tool_format: str, seed: int, ready: Callable[[str], None]
) -> None:
    """Answer until KeyboardInterrupt; `ready` is told the base URL. At most so many `answers` are sampled or wait."""
    sampling = policy.sampling
    engine = policy.start_engine(policy.longest_prompt)
    assert isinstance(engine, ModelRollout)  # the native one
    known = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
    limits = ServingLimits(
        context_tokens=min(policy.longest_prompt, known or policy.longest_prompt),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature if sampling.do_sample else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        answers=answers,
    )
    template = ChatTemplate(policy.tokenizer, policy.origin.config.data.apply_chat_template_kwargs)
    link = EngineLink(SESSION, agent=0)
    model = ServedModel(link, template, ToolFormat.named(tool_format), limits, seed)

    def of_key(asked: str) -> ServedModel | None:
        return model if hmac.compare_digest(asked.encode(), key.encode()) else None

    server = OpenAIServer(of_key, policy.origin.model)
    mailbox = Mailbox(LOOPBACK, secrets.token_hex(32))
    loop = asyncio.new_event_loop()

    async def start() -> str:
        try:
            url = await server.start(port)
        except OSError as error:
            raise ConfigError(f"--port {port} can't be served on: {error}. Leave it out, or choose another.") from error
        await link.connect(Engines((mailbox.address,), mailbox.key))
        link.begin()
        return url

    async def end() -> None:
        await link.close()
        await server.close()

    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    try:
        ready(asyncio.run_coroutine_threadsafe(start(), loop).result(START_SECONDS))
        with engine.decoding():
            AgentSessions(mailbox, engine).serve({}, SESSION, num_agents=1)
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        mailbox.close()
