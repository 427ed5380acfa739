"""Plays rollouts with the agent beside this file, over the interface that the framework takes by default (`/v1/responses`).

.venv/bin/python -m examples.agent_framework.serve runs/agent_framework/run/gateway.json
"""

from __future__ import annotations

import asyncio
import sys

from agents import AgentsException, OpenAIProvider, RunConfig, Runner, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAioHttpClient

from agent_loop.gateway.client import Rollout, serve_rollouts
from examples.agent_framework.agent import MATHS

MAX_TURNS = 3


async def main(address_file: str | None) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(api_key="of each rollout", http_client=DefaultAioHttpClient()) as shared:

        async def play(rollout: Rollout) -> float:
            client = shared.with_options(base_url=rollout.base_url, api_key=rollout.api_key)
            config = RunConfig(model="policy", model_provider=OpenAIProvider(openai_client=client))
            question = rollout.task["messages"][0]["content"]
            try:
                run = await Runner.run(MATHS, question, run_config=config, max_turns=MAX_TURNS)
            except AgentsException:  # too many turns, a tool that is not there: the policy's own doing
                return 0.0
            return float(run.final_output == rollout.task["ground_truth"])

        await serve_rollouts(play, concurrency=128, address_file=address_file)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
