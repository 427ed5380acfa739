"""A step's row tells the parts of its rewards."""

from __future__ import annotations

from tests.fakes.samples import make_sample
from trainer.step_row import reward_parts


def test_each_part_is_averaged_over_the_samples_that_have_it() -> None:
    samples = [
        make_sample(reward_parts={"correct": 1.0, "format": 0.5}),
        make_sample(reward_parts={"correct": 0.0}),
        make_sample(),
    ]
    assert reward_parts(samples) == {"reward/correct": 0.5, "reward/format": 0.5}
