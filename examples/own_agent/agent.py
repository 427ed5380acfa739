"""An agent as people have them: the `openai` client, a tool, a loop. It multiplies two numbers with a calculator.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python -m examples.own_agent.agent '12*34'
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

from openai import AsyncOpenAI

MODEL = "policy"
MAX_TURNS = 3
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiplies whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "such as `12*34`."}},
                "required": ["expression"],
            },
        },
    }
]


def calculator(expression: str) -> str:
    """The product, or what is wrong."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
    return str(int(match[1]) * int(match[2])) if match else f"Error: got {expression}"


async def answer(client: AsyncOpenAI, question: str) -> str:
    """What the agent says in the end."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            asked = json.loads(call.function.arguments) if call.type == "function" else {}
            shown = calculator(str(asked.get("expression", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
    return ""


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(answer(AsyncOpenAI(), sys.argv[1])) + "\n")
