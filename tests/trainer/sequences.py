"""Samples for tests of packing and training: siblings that share prompts, of several lengths, some trained in parts."""

from __future__ import annotations

import numpy as np

from sample_bus.sample import Sample
from tests.fakes.samples import make_sample


def siblings(
    *,
    num_groups: int = 3,
    group_size: int = 4,
    seed: int = 0,
    temperature: float = 1.0,
    vocab_size: int = 300,
    max_reply: int = 6,
) -> list[Sample]:
    """Groups with a common preamble and a prompt of their own; replies drawn from few tokens, so that prefixes repeat."""
    draw = np.random.default_rng(seed)
    preamble = draw.integers(3, vocab_size, 5).tolist()
    samples = []
    for group in range(num_groups):
        prompt = preamble + draw.integers(3, vocab_size, int(draw.integers(1, 5))).tolist()
        for seat in range(group_size):
            reply = draw.integers(3, 6, int(draw.integers(1, max_reply + 1))).tolist()
            samples.append(
                make_sample(
                    prompt=prompt,
                    reply=reply,
                    logprobs=(-draw.random(len(reply)) * 3).tolist(),
                    reward=float(draw.integers(0, 2)),
                    group_id=f"task-{group}/0",
                    seat=seat,
                    group_size=group_size,
                    temperature=temperature,
                )
            )
    return samples


def of_lengths(*lengths: int, vocab_size: int = 300, seed: int = 0) -> list[Sample]:
    """One sample per length, of unlike tokens, all but the first token trained."""
    draw = np.random.default_rng(seed)
    return [
        make_sample(
            prompt=[int(draw.integers(3, vocab_size))],
            reply=draw.integers(3, vocab_size, length).tolist(),
            logprobs=(-draw.random(length)).tolist(),
            group_id=f"length-{length}",
        )
        for length in lengths
    ]
