"""What a person should know of the first steps, since a run that is set up wrong looks as busy as one that learns. Pure.

Invariant: each word is said once in a process.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import Settings
from sample_bus.sample import Sample, StopReason

LENGTH_SHARE = 0.9
"""Share of a step's rollouts from which on it is said that they end for want of tokens."""
FIRST_STEPS = 3
"""Steps after which rewards that were all one number are called so."""


class Advisor:
    def __init__(self) -> None:
        self._num_steps = 0
        self._num_samples = 0
        self._rewards: set[float] = set()
        self._has_turn_rewards = False
        self._has_told_length = False

    def look(self, samples: Sequence[Sample], settings: Settings, *, step: int) -> list[str]:
        """What the samples of a step give reason to say, for the first time."""
        said = [self._of_length(samples, settings, step), self._of_rewards(samples, step)]
        return [words for words in said if words]

    def _of_length(self, samples: Sequence[Sample], settings: Settings, step: int) -> str:
        cut = sum(sample.stop_reason is StopReason.LENGTH for sample in samples)
        if self._has_told_length or cut < LENGTH_SHARE * len(samples):
            return ""
        self._has_told_length = True
        return (
            f"{cut} of {len(samples)} rollouts of step {step} ended for want of tokens, not because the model was done: raise "
            f"sampling.max_tokens ({settings.sampling.max_tokens}) or engine.max_model_len ({settings.engine.max_model_len}), "
            "unless that is meant"
        )

    def _of_rewards(self, samples: Sequence[Sample], step: int) -> str:
        if self._num_steps >= FIRST_STEPS:
            return ""
        self._num_steps += 1
        self._num_samples += len(samples)
        self._rewards |= {sample.reward for sample in samples}
        self._has_turn_rewards |= any(sample.token_rewards.any() for sample in samples)
        if self._num_steps < FIRST_STEPS or len(self._rewards) > 1 or self._has_turn_rewards:
            return ""
        return (
            f"all {self._num_samples} rewards up to step {step} were {self._rewards.pop():g}: nothing is learned from rewards "
            "that are alike; look at what the model wrote and at what the reward makes of it"
        )
