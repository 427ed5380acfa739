"""A step's row tells the parts of its rewards."""

from __future__ import annotations

from tests.fakes.samples import end_to_end, make_sample
from trainer.step_row import loop_counts, reward_parts


def test_each_part_is_averaged_over_the_samples_that_have_it_and_their_share_is_told() -> None:
    samples = [
        make_sample(reward_parts={"correct": 1.0, "format": 0.5}),
        make_sample(reward_parts={"correct": 0.0}),
        make_sample(),
        make_sample(),
    ]
    assert reward_parts(samples) == {
        "reward/correct": 0.5,
        "reward_share/correct": 0.5,
        "reward/format": 0.5,
        "reward_share/format": 0.25,
    }


def test_what_agent_loops_counted_is_averaged_over_all_samples() -> None:
    """B117, B158, B165: members of unlike numbers of turns; the share of calls that could not be made."""
    samples = [
        make_sample(counts={"tool_calls": 3, "tool_parse_errors": 1}, num_turns=5),
        make_sample(counts={"tool_calls": 1}, num_turns=2),
        make_sample(num_turns=1),
        end_to_end([make_sample(), make_sample()]),
    ]
    assert loop_counts(samples) == {
        "rollout/tool_calls": 1.0,
        "rollout/tool_parse_errors": 0.25,
        "num_turns_mean": 2.25,
        "num_segments_mean": 1.25,
        "tool_parse_error_rate": 0.25,
    }
    assert "tool_parse_error_rate" not in loop_counts([make_sample()])
