"""A task: a prompt with what its reward needs.

Invariant: a task is immutable and its prompt is not empty; `task_id` is stable over epochs, restarts and shuffles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One row of the data, already encoded with the model's tokenizer."""

    task_id: str
    """For example `addition/3+4`."""
    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids, P >= 1."""
    prompt_text: str
    """What `prompt_ids` were encoded from."""
    ground_truth: Any
    """Handed to the reward as it is."""
    data_source: str
    """Handed to the reward; also the name under which samples are counted."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the reward."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages that `prompt_text` was made of; empty: the prompt is plain text."""
    agent_name: str = ""
    """The agent loop that plays it; empty: the run's own (`rollouter.agent_loop`)."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the agent loop's tools, by the tool's name."""
