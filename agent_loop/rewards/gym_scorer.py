"""`reasoning_gym` as a reward process loads it for environments: the package is imported with this module, which takes seconds,
so that no answer's deadline pays for it."""

from __future__ import annotations

from agent_loop.rewards.gym import import_reasoning_gym, reasoning_gym

import_reasoning_gym()

score = reasoning_gym
