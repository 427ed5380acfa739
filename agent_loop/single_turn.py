"""The simplest agent loop: one prompt, one reply."""

from __future__ import annotations

from agent_loop.session import Session
from agent_loop.task import Task


class SingleTurn:
    """Appends the task's prompt and takes one turn."""

    resumable = True

    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        await session.generate()
