"""Tasks that failed so often that they are not issued: a file each in RUN_DIR/quarantine/tasks, for an operator to look at.

Invariant: a task is held exactly while its file is there, so removing the file on a live run releases it; while the directory
cannot be written the task is held all the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog
import xxhash

from agent_loop.task import Task
from rollouter.books import TaskFailures

log = structlog.get_logger()

MAX_PROMPT_CHARS = 4000
"""Of the prompt's text that is kept."""


class TaskQuarantine:
    def __init__(self, directory: Path) -> None:
        """`directory` is made when the first task comes."""
        self._directory = directory
        self._unwritten: dict[str, str] = {}

    @property
    def directory(self) -> Path:
        return self._directory

    def holds(self, task_id: str) -> bool:
        """Whether the task must not be issued now."""
        content = self._unwritten.get(task_id)
        if content is not None:
            self._write(task_id, content)
            return True
        return self.path_of(task_id).exists()

    def put(self, task: Task, failures: TaskFailures, at: float) -> None:
        """Hold the task from now on. `at` in Unix seconds."""
        facts = {
            "task_id": task.task_id,
            "failures": failures.count,
            "reasons": failures.reasons,
            "messages": failures.messages,
            "prompt_text": task.prompt_text[:MAX_PROMPT_CHARS],
            "at": at,
        }
        log.warning("task quarantined", task_id=task.task_id, failures=failures.count, reasons=sorted(set(failures.reasons)))
        self._write(task.task_id, json.dumps(facts, ensure_ascii=False, indent=1))

    def path_of(self, task_id: str) -> Path:
        return self._directory / f"{xxhash.xxh3_64_hexdigest(task_id.encode())}.json"

    def _write(self, task_id: str, content: str) -> None:
        path = self.path_of(task_id)
        part = path.with_suffix(".part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            part.write_text(content, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            if task_id not in self._unwritten:
                log.warning("quarantined task has no file yet", path=str(path), problem=error.strerror or str(error))
            self._unwritten[task_id] = content
        else:
            self._unwritten.pop(task_id, None)
