"""The books of random lives of both daemons: killed at any record, rolled back, replayed, their disk lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_bus.books import Books, Copies, balance
from sample_bus.issued import Issued
from sample_bus.journal import (
    RecordsDropped,
    RollouterEnded,
    SampleOffered,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
    TrainerRecord,
    encode_record,
    read_journal,
)
from sample_bus.record_log import RecordLog
from sample_bus.sample import SampleId
from sample_bus.settlements import Settlements
from tests.sample_bus.lives import GROUP_SIZE, Lives

MOVES = st.lists(st.integers(0, 11), min_size=20, max_size=160)


def _books(lives: Lives) -> Books:
    return balance(Issued.of(lives.rollouter_log), Settlements(lives.trainer_log), copies=[lives.copies()])


def _live(moves: list[int], *, every_steps: int = 2, repeats_began: bool = False, loses_disk: bool = False) -> Lives:
    lives = Lives(every_steps=every_steps, repeats_began=repeats_began)
    for number in moves:
        if loses_disk and number == 11 and lives.trainer is None and not lives.rollouter_runs and every_steps:
            lives.lose_spool()
        else:
            possible = lives.moves()
            possible[number % len(possible)]()
    return lives


@settings(max_examples=300, deadline=None)
@given(MOVES, st.sampled_from([0, 2]), st.booleans(), st.booleans())
def test_the_books_close_whatever_was_killed_and_when(
    moves: list[int], every_steps: int, repeats_began: bool, loses_disk: bool
) -> None:
    """B37, B38, B40: nothing lost, nothing in effect twice, over kills of both daemons at any record."""
    lives = _live(moves, every_steps=every_steps, repeats_began=repeats_began, loses_disk=loses_disk)
    books = _books(lives)
    assert books.issued == GROUP_SIZE * lives.num_groups == books.accounted + books.lost
    assert books.lost <= len(lives.lost)
    assert books.num_problems == (1 if books.lost else 0), books.problems
    assert ("CLOSE" in books.line()) == bool(books.lost)


@settings(max_examples=200, deadline=None)
@given(MOVES, st.sampled_from([0, 2]), st.booleans())
def test_what_the_books_call_trained_is_what_stands_in_the_weights(
    moves: list[int], every_steps: int, repeats_began: bool
) -> None:
    """While the trainer runs; when it was killed, its newest steps stand until the next one says from where it goes on."""
    lives = _live(moves, every_steps=every_steps, repeats_began=repeats_began)
    if lives.trainer is None:
        lives.start_trainer()
    books = _books(lives)
    assert books.trained == len(lives.in_effect)
    assert books.rolled_back == lives.num_rolled_back
    assert books.step == lives.trainer.step if lives.trainer is not None else False


@settings(max_examples=200, deadline=None)
@given(MOVES, st.tuples(*[st.lists(st.integers(0, 11), max_size=6)] * 3))
def test_the_books_close_while_both_daemons_go_on_between_the_readings(
    moves: list[int], between: tuple[list[int], ...]
) -> None:
    lives = _live(moves)

    def go_on(numbers: list[int]) -> None:
        for number in numbers:
            possible = lives.moves()
            possible[number % len(possible)]()

    before = lives.copies()
    go_on(between[0])
    trainer = list(lives.trainer_log)
    go_on(between[1])
    rollouter = list(lives.rollouter_log)
    go_on(between[2])
    copies = replace(lives.copies(), first=before.first)
    books = balance(Issued.of(rollouter), Settlements(trainer), copies=[copies])
    assert books.problems == ()
    assert books.issued == books.accounted


@settings(max_examples=100, deadline=None)
@given(MOVES)
def test_what_the_daemons_counted_themselves_agrees_at_their_ends(moves: list[int]) -> None:
    lives = _live(moves)
    if lives.trainer is None:
        lives.start_trainer()
    if not lives.rollouter_runs:
        lives.start_rollouter()
    if lives.unnoted is not None:
        lives.note_offer()
    lives.end_trainer()
    lives.end_rollouter()
    books = _books(lives)
    assert books.problems == ()
    assert books.end == "finished"


def _busy() -> Lives:
    """A quiet run of three steps of a group each, and one group more in the stream."""
    lives = Lives(every_steps=2, repeats_began=False)
    lives.start_rollouter()
    lives.start_trainer()
    for _ in range(4):
        lives.admit()
        for _ in range(GROUP_SIZE):
            lives.offer()
            lives.note_offer()
    for number in range(3):
        for _ in range(GROUP_SIZE):
            lives.receive()
        lives.begin_step()
        lives.finish_step()
        if number == 1:
            lives.save()
    return lives


def _trained_twice(lives: Lives) -> None:
    began = next(record for record in lives.trainer_log if isinstance(record, StepBegan))
    lives.trainer_log.append(replace(began, step=9))


def _dropped_after_training(lives: Lives) -> None:
    ids = next(record.samples for record in lives.trainer_log if isinstance(record, StepBegan))
    lives.trainer_log.append(RecordsDropped(at=0.0, reason="stale", samples=ids[:1], closures=[]))


def _offered_and_vanished(lives: Lives) -> None:
    lives.kept.pop()


def _freed_too_early(lives: Lives) -> None:
    lives.first, lives.kept = lives.next_seq, []


def _trained_from_nowhere(lives: Lives) -> None:
    lives.trainer_log.append(
        StepBegan(at=0.0, step=9, policy_version=0, samples=[["rollouter", 1, 777]], closures=[], options={})
    )


def _checkpoint_of_other_weights(lives: Lives) -> None:
    """The position of step 2 was stored with the weights of step 1."""
    lives.kill_trainer()
    lives.start_trainer()
    began = lives.trainer_log.pop()
    assert isinstance(began, TrainerBegan)
    lives.trainer_log.append(replace(began, step=1))


def _position_of_another_checkpoint(lives: Lives) -> None:
    """The weights of step 2 were stored with the position of the beginning."""
    lives.kill_trainer()
    lives.start_trainer()
    began = lives.trainer_log.pop()
    assert isinstance(began, TrainerBegan)
    lives.trainer_log.append(replace(began, position=[]))


def _never_admitted(lives: Lives) -> None:
    del lives.rollouter_log[1]


def _admitted_twice(lives: Lives) -> None:
    lives.rollouter_log.append(lives.rollouter_log[1])


def _trained_under_two_records(lives: Lives) -> None:
    """B40: a timed-out attempt's late result is trained beside its successor's."""
    first = next(record for record in lives.rollouter_log if isinstance(record, SampleOffered))
    last = [record for record in lives.rollouter_log if isinstance(record, SampleOffered)][-1]
    lives.rollouter_log.append(replace(first, id=["rollouter", 1, 8], attempt=1))
    lives.kept.append(replace(lives.records[SampleId(*last.id)], id=SampleId("rollouter", 1, 8), group_id="g0", seat=0))
    for _ in range(3):
        lives.receive()
    lives.trainer_log += [
        StepBegan(at=0.0, step=9, policy_version=0, samples=[["rollouter", 1, 8]], closures=[], options={}),
        StepTrained(at=0.0, step=9, policy_version=0, loss=0.0, grad_norm=0.0, replayed=False),
    ]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_trained_twice, "after it had been trained by step 1"),
        (_dropped_after_training, "dropped (stale) after it had been trained by step 1"),
        (_offered_and_vanished, "keeps no copy (none from 7 on)"),
        (_freed_too_early, "freed its copy"),
        (_trained_from_nowhere, "rollouter/1/777 was taken by step 9, and nobody received it"),
        (_checkpoint_of_other_weights, "the checkpoint of step 1 covers it and does not hold its effect"),
        (_position_of_another_checkpoint, "the checkpoint of step 2 holds its effect and does not cover it"),
        (_never_admitted, "never admitted"),
        (_admitted_twice, "admitted twice"),
        (_trained_under_two_records, "rollout g0/0 was trained twice: records rollouter/1/0, rollouter/1/8"),
    ],
)
def test_harm_is_named(harm: Callable[[Lives], None], words: str) -> None:
    lives = _busy()
    assert _books(lives).closes
    harm(lives)
    books = _books(lives)
    assert not books.closes
    assert any(words in problem for problem in books.problems), books.problems
    assert "DOES NOT CLOSE" in books.line()


@settings(max_examples=100, deadline=None)
@given(MOVES, st.randoms(use_true_random=False))
def test_a_forgotten_sample_never_goes_unnoticed(moves: list[int], random: object) -> None:
    """A producer that loses the records that the trainer has not seen is told, whatever happened before."""
    lives = _live(moves)
    offered = [record for record in lives.rollouter_log if isinstance(record, SampleOffered)]
    received = Settlements(lives.trainer_log).outcomes
    unseen = [record for record in offered if SampleId(*record.id) not in received and record.id[1] == lives.epoch]
    unseen = [record for record in unseen if record.id[2] >= lives.first]
    books = balance(
        Issued.of(lives.rollouter_log),
        Settlements(lives.trainer_log),
        copies=[Copies(producer="rollouter", epoch=lives.epoch, first=lives.next_seq, next_seq=lives.next_seq)],
    )
    assert books.lost >= len({(record.group_id, record.seat) for record in unseen})
    assert books.closes == (not books.lost and not books.problems)


def test_without_a_look_at_the_copies_what_is_missing_may_be_on_its_way() -> None:
    lives = _busy()
    lives.kept.pop()
    books = balance(Issued.of(lives.rollouter_log), Settlements(lives.trainer_log), copies=None)
    assert books.closes
    assert books.line() == "8 issued = 6 trained + 0 dropped + 0 queued + 2 on the way + 0 in flight"
    lives.end_trainer()
    over = balance(Issued.of(lives.rollouter_log), Settlements(lives.trainer_log), copies=None)
    assert "2 on the way or lost" in over.line()


def test_a_rejected_sample_is_dropped_until_its_seat_is_closed() -> None:
    lives = _busy()
    last = SampleId("rollouter", 1, 7)
    freed = Copies(producer="rollouter", epoch=1, first=8, next_seq=8)
    logs = Issued.of(lives.rollouter_log), Settlements(lives.trainer_log)
    assert balance(*logs, copies=[freed]).lost == 2
    books = balance(*logs, copies=[freed], rejected={last, SampleId("rollouter", 1, 6)})
    assert books.closes
    assert books.dropped == {"rejected": 2}
    lives.in_flight.append(("g3", 1))
    lives.close_seat()
    lives.note_offer()
    closed = balance(Issued.of(lives.rollouter_log), logs[1], copies=[replace(freed, next_seq=9)], rejected={last})
    assert closed.failed == {"timeout": 1}


def test_wrong_counters_are_told_with_both_numbers() -> None:
    lives = _busy()
    lives.end_trainer()
    wrong: list[TrainerRecord] = lives.trainer_log
    ended = wrong[-1]
    assert isinstance(ended, TrainerEnded)
    wrong[-1] = replace(ended, counts={"trained": 5})
    books = balance(Issued.of(lives.rollouter_log), Settlements(wrong), copies=[lives.copies()])
    assert books.problems == ("the trainer counted 5 samples as trained at its end, its journal says 6 (process 1)",)
    lives.end_rollouter()
    last = lives.rollouter_log.pop()
    assert isinstance(last, RollouterEnded)
    told = Issued.of([*lives.rollouter_log, replace(last, counts={"admitted": 7, "offered": 8, "in_flight": 0})]).problems.texts
    assert told == ["the rollouter counted 7 rollouts as admitted at its end, its journal says 8 (process 1)"]


@settings(max_examples=60, deadline=None)
@given(MOVES, st.binary(max_size=40), st.integers(0, 200))
def test_a_record_that_was_being_written_at_a_kill_changes_nothing(moves: list[int], garbage: bytes, cut: int) -> None:
    """A torn tail, whatever it looks like, is no record; its effect was seen by nobody."""
    lives = _live(moves)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trainer.log"
        journal = RecordLog(path)
        for record in lives.trainer_log:
            journal.append(encode_record(record))
        end = journal.num_bytes
        journal.append(encode_record(lives.trainer_log[-1] if lives.trainer_log else lives.rollouter_log[-1]))
        size = journal.num_bytes
        journal.close()
        os.truncate(path, min(end + cut, size - 1))
        if garbage and cut % 2:
            os.truncate(path, end)
            path.write_bytes(path.read_bytes() + garbage)
        read = list(read_journal(path))
    assert read == lives.trainer_log


def test_a_late_result_beside_the_closed_seat_is_counted_apart() -> None:
    """B40: the seat was given up and closed; the sample that came all the same is dropped, the rollout stays failed."""
    lives = _busy()
    lives.admit()
    lives.close_seat()
    lives.note_offer()
    lives.in_flight.insert(0, ("g4", 0))
    lives.offer()
    lives.note_offer()
    for _ in range(4):
        lives.receive()
    late = lives.kept[-1].id
    lives.trainer_log.append(RecordsDropped(at=0.0, reason="late result", samples=[list(late)], closures=[]))
    books = _books(lives)
    assert books.closes
    assert books.spare_records == 1
    assert books.line() == ("10 issued = 6 trained + 0 dropped + 1 failed (timeout 1) + 2 queued + 1 in flight")
