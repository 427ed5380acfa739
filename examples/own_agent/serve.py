"""Plays rollouts with the agent beside this file: all that it takes to train it.

The rollouter starts this program (`gateway.command`); started by hand it takes rollouts of a run on this host:

    .venv/bin/python -m examples.own_agent.serve runs/own_agent/run/gateway.json
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI, DefaultAioHttpClient

from agent_loop.gateway.client import Rollout, serve_rollouts
from examples.own_agent.agent import answer


async def main(address_file: str | None) -> None:
    async with AsyncOpenAI(api_key="of each rollout", http_client=DefaultAioHttpClient()) as shared:

        async def play(rollout: Rollout) -> float:
            client = shared.with_options(base_url=rollout.base_url, api_key=rollout.api_key)
            return float(await answer(client, rollout.task["messages"][0]["content"]) == rollout.task["ground_truth"])

        await serve_rollouts(play, concurrency=128, address_file=address_file)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
