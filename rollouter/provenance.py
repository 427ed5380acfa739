"""Whose weights computed the KV cache that a generation stands on. Pure.

Invariant: a run is marked `kept_cache=0` only if the run's own version computed every key and value before its tokens.

A request that an engine froze over a commit goes on with its cache: all its runs but the first are marked by the decoder. The
first is clean when it bears the version for which the request was made, since each version has a cache salt of its own. A
request that was on its way when the engine paused bears the salt of the version before, under which siblings' prompts may lie
cached; unless the commit emptied the prefix cache, its first run is marked too. Across a change of trainers nothing is called
clean: the engine labels runs by numbers, which two trainers may both have given.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent_loop.engine import Generation
from rollouter.engine_member import Held


def with_provenance(generation: Generation, *, asked: Held, held: Held, fresh: Held | None) -> Generation:
    """`generation` of a request with the cache salt of `asked`.

    The engine holds `held` now, and emptied its prefix cache last when it took `fresh`.
    """
    if not generation.versions.size:
        return generation
    first = int(generation.versions[0])
    if held.incarnation == asked.incarnation and (
        first == asked.policy_version or replace(asked, policy_version=first) == fresh
    ):
        return generation
    return replace(generation, kept_cache=np.ones(generation.versions.size, np.uint8))
