"""The steps in effect are those that led to the newest weights, whatever was killed and rolled back on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.journal import Record, Saved, StepBegan, StepTrained, TrainerBegan, VersionPublished
from sample_bus.sample import SampleId
from trainer.errors import ReplayError
from trainer.recording import Recording, origin_of, recording_of


def began(step: int, seq: int) -> StepBegan:
    return StepBegan(
        at=0.0, step=step, policy_version=step - 1, samples=[["r", 1, seq]], closures=[], options={"trainer.learning_rate": seq}
    )


def trained(step: int, seq: int) -> StepTrained:
    return StepTrained(at=0.0, step=step, policy_version=step - 1, loss=float(seq), grad_norm=0.0, replayed=False)


def restart(step: int) -> TrainerBegan:
    return TrainerBegan(at=0.0, incarnation="i", step=step, policy_version=step, position=[], counts={})


def published(step: int, seq: int) -> VersionPublished:
    return VersionPublished(at=0.0, policy_version=step, step=step, digest=f"{seq}")


@dataclass
class Run:
    """A trainer that is killed: what it writes, and what is in its weights."""

    records: list[Record] = field(default_factory=lambda: [restart(0)])
    weights: list[int] = field(default_factory=list)
    """Sequence number of the sample of each step."""
    saved: list[list[int]] = field(default_factory=lambda: [[]])
    next_seq: int = 0

    def step(self, *, dies: bool, publishes: bool) -> None:
        seq, number = self.next_seq, len(self.weights) + 1
        self.next_seq += 1
        self.records.append(began(number, seq))
        if dies:
            self.die()
            return
        self.weights.append(seq)
        self.records.append(trained(number, seq))
        if publishes:
            self.records.append(published(number, seq))

    def save(self) -> None:
        if self.weights:
            self.saved.append(list(self.weights))
            self.records.append(Saved(at=0.0, step=len(self.weights), policy_version=0, position=[]))

    def die(self) -> None:
        self.weights = list(self.saved[-1])
        self.records.append(restart(len(self.weights)))


@given(acts=st.lists(st.sampled_from(["step", "step", "step", "publish", "die in step", "die", "save"]), max_size=40))
def test_the_steps_in_effect_are_those_of_the_newest_weights(acts: list[str]) -> None:
    run = Run()
    for act in acts:
        match act:
            case "save":
                run.save()
            case "die":
                run.die()
            case _:
                run.step(dies=act == "die in step", publishes=act == "publish")
    recording = recording_of(run.records)
    assert [step.samples for step in recording.steps] == [(SampleId("r", 1, seq),) for seq in run.weights]
    assert [step.loss for step in recording.steps] == run.weights
    assert [step.step for step in recording.steps] == list(range(1, len(run.weights) + 1))
    assert all(one.digest == f"{run.weights[step - 1]}" for step, one in recording.published.items())
    assert all(step <= len(run.weights) for step in recording.saved)


def recorded(first: int, last: int, *, saved: tuple[int, ...] = ()) -> Recording:
    records: list[Record] = [restart(first - 1)]
    for step in range(first, last + 1):
        records += [began(step, step), trained(step, step)]
        if step in saved:
            records.append(Saved(at=0.0, step=step, policy_version=0, position=[]))
    return recording_of(records)


def kept(*seqs: int) -> set[SampleId]:
    return {SampleId("r", 1, seq) for seq in seqs}


@pytest.mark.parametrize(
    ("seqs", "checkpoints", "origin"),
    [
        (range(1, 7), {2, 4}, 0),
        (range(2, 7), {2, 4}, 2),
        (range(4, 7), {2, 4}, 4),
        ([1, 2, 4, 5, 6], {2, 4}, 4),
        ([1, 2, 3, 4, 6], {5}, 5),
    ],
)
def test_a_replay_begins_at_the_earliest_state_behind_all_missing_samples(
    seqs: list[int], checkpoints: set[int], origin: int
) -> None:
    recording = recorded(1, 6, saved=(2, 4, 5))
    assert origin_of(recording, kept=kept(*seqs), checkpoints=checkpoints) == origin


def test_a_checkpoint_that_this_run_did_not_write_does_not_count() -> None:
    with pytest.raises(ReplayError, match=r"1 of 6 samples of steps 1 to 6 were not kept, the first is r/1/1 of step 1"):
        origin_of(recorded(1, 6, saved=(4,)), kept=kept(*range(2, 7)), checkpoints={3})


def test_a_run_that_began_from_an_earlier_ones_checkpoint_begins_there_again() -> None:
    recording = recorded(8, 12)
    assert origin_of(recording, kept=kept(*range(8, 13)), checkpoints={7}) == 7
    with pytest.raises(ReplayError, match="steps 8 to 12 are recorded; expected step 1, or a checkpoint of step 7 or later"):
        origin_of(recording, kept=kept(*range(8, 13)), checkpoints=set())


def test_samples_missing_from_the_last_step_cannot_be_got_around() -> None:
    with pytest.raises(ReplayError, match="r/1/6 of step 6"):
        origin_of(recorded(1, 6, saved=(5, 6)), kept=kept(1, 2, 3, 4, 5), checkpoints={5, 6})
