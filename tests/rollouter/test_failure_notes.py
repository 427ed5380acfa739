"""What is said of attempts that fail."""

from __future__ import annotations

from rollouter.failure_notes import MAX_WORDS, FailureNotes
from rollouter.failures import FailureReason


def test_each_reason_is_counted_and_keeps_its_first_words() -> None:
    changes = []
    notes = FailureNotes(lambda: changes.append(1))
    notes.add(FailureReason.REWARD_FAILED, "RewardError: raised\nKeyError: 'a'", is_evaluation=False)
    notes.add(FailureReason.REWARD_FAILED, "RewardError: another", is_evaluation=False)
    notes.add(FailureReason.REWARD_FAILED, "RewardError: of an evaluation", is_evaluation=True)
    notes.add(FailureReason.TIMEOUT, "x" * 10_000 + "the end", is_evaluation=False)
    seen = [(note.reason, note.is_evaluation, note.count, note.first) for note in notes.all()[:2]]
    assert seen == [
        ("reward failed", False, 2, "RewardError: raised KeyError: 'a'"),
        ("reward failed", True, 1, "RewardError: of an evaluation"),
    ]
    assert len(notes.all()[2].first) <= MAX_WORDS
    assert notes.all()[2].first.endswith("the end")
    assert len(changes) == 4


def test_what_is_nobodys_fault_is_not_said() -> None:
    notes = FailureNotes()
    notes.add(FailureReason.STALE, "too old", is_evaluation=False)
    notes.add(FailureReason.INTERRUPTED, "killed", is_evaluation=False)
    assert notes.all() == ()
