"""What the first steps give reason to say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from configs.schema import Settings
from sample_bus.sample import Sample, StopReason
from tests.fakes.samples import make_sample
from trainer.advice import Advisor

SETTINGS = Settings(run_dir=Path("/run"))


def _cut(count: int, of: int) -> list[Sample]:
    reasons = [StopReason.LENGTH] * count + [StopReason.STOP] * (of - count)
    return [make_sample(stop_reason=reason, reward=float(seat % 2)) for seat, reason in enumerate(reasons)]


def test_a_step_whose_rollouts_nearly_all_end_for_want_of_tokens_is_named_once() -> None:
    advisor = Advisor()
    assert advisor.look(_cut(17, 20), SETTINGS, step=1) == []
    (words,) = advisor.look(_cut(18, 20), SETTINGS, step=2)
    assert "18 of 20 rollouts of step 2 ended for want of tokens" in words
    assert f"sampling.max_tokens ({SETTINGS.sampling.max_tokens})" in words
    assert advisor.look(_cut(20, 20), SETTINGS, step=3) == []


def test_rewards_that_were_one_number_for_three_steps_are_named_once() -> None:
    advisor = Advisor()
    zeros = [make_sample(reward=0.0)] * 4
    said = [words for step in range(1, 7) for words in advisor.look(zeros, SETTINGS, step=step)]
    assert [words.partition(":")[0] for words in said] == ["all 12 rewards up to step 3 were 0"]


def test_rewards_that_differ_once_or_of_turns_give_no_reason_to_speak() -> None:
    zeros, one = [make_sample(reward=0.0)] * 4, [make_sample(reward=1.0)]
    dense = [make_sample(reward=0.0, token_rewards=np.array([0, 0, 1, 0, 0], np.float32))]
    for second in (one, dense):
        advisor = Advisor()
        assert not [words for samples in (zeros, second, zeros, zeros) for words in advisor.look(samples, SETTINGS, step=1)]
