"""The books are a function of the journal: whoever replays it stands where its writer stood."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollouter.books import MAX_RECENT_GROUPS, Books
from rollouter.failures import FailureReason
from rollouter.seat_policy import Move
from sample_bus.issued import Issued
from sample_bus.journal import (
    LATE_RESULT,
    AttemptFailed,
    GroupAdmitted,
    Offering,
    RollouterBegan,
    RollouterEnded,
    RollouterRecord,
    SampleOffered,
    SeatClosed,
    decode_record,
    encode_record,
)
from sample_bus.sample import SampleId

SIZE = 3


def began(at: float = 0.0, epoch: int = 1) -> RollouterBegan:
    return RollouterBegan(at=at, process="p", epoch=epoch, data_fingerprint="f")


def admitted(issue: int = 0, at: float = 0.0, size: int = SIZE) -> GroupAdmitted:
    return GroupAdmitted(
        at=at,
        group_id=f"g{issue}",
        task_id=f"t{issue}",
        issue=issue,
        group_size=size,
        policy_version=0,
        incarnation="first",
        settings_revision=0,
        temperature=1.0,
        max_tokens=8,
    )


def failed(seat: int, attempt: int, reason: FailureReason, then: Move, *, at: float = 0.0, group: str = "g0") -> AttemptFailed:
    return AttemptFailed(
        at=at, group_id=group, seat=seat, attempt=attempt, reason=reason.value, message="words", then=then.value
    )


def offered(seat: int, seq: int, *, attempt: int = 0, group: str = "g0", epoch: int = 1, at: float = 0.0) -> SampleOffered:
    return SampleOffered(
        at=at,
        group_id=group,
        seat=seat,
        attempt=attempt,
        id=["rollouter", epoch, seq],
        num_tokens=5,
        reward=1.0,
        oldest_version=0,
    )


def closed(seat: int, seq: int, reason: str, *, group: str = "g0", epoch: int = 1, at: float = 0.0) -> SeatClosed:
    return SeatClosed(at=at, group_id=group, seat=seat, attempt=0, reason=reason, id=["rollouter", epoch, seq])


def books_of(*records: RollouterRecord) -> Books:
    books = Books()
    for record in records:
        books.apply(record)
    return books


def test_group_is_open_until_every_seat_has_its_record() -> None:
    books = books_of(began(), admitted(), offered(0, 0), closed(2, 1, "timeout"))
    assert (list(books.open_groups), books.in_flight) == (["g0"], 1)
    books.apply(offered(1, 2))
    assert not books.open_groups
    counts = books.counts()
    assert (counts.admitted, counts.offered, counts.failed, counts.in_flight) == (3, 2, {"timeout": 1}, 0)


def test_attempts_are_counted_over_restarts() -> None:
    """B13"""
    books = books_of(
        began(),
        admitted(),
        failed(1, 0, FailureReason.TIMEOUT, Move.RETRY),
        began(),
        failed(1, 1, FailureReason.INTERRUPTED, Move.RETRY),
        failed(1, 2, FailureReason.TIMEOUT, Move.RETRY),
    )
    seat = books.open_groups["g0"].seats[1]
    assert (seat.attempt, seat.num_failed, seat.num_interrupted) == (3, 2, 1)
    books.apply(failed(1, 3, FailureReason.TIMEOUT, Move.REFILL))
    assert (seat.attempt, seat.num_failed, seat.num_refills) == (4, 0, 1)
    assert books.counts().retried == 4
    assert books.failures["t0"].count == 1


def test_given_up_rollout_waits_for_its_closed_seat() -> None:
    books = books_of(began(), admitted(), failed(0, 0, FailureReason.NO_ROOM, Move.CLOSE))
    closing = books.open_groups["g0"].seats[0].closing
    assert closing is not None
    assert (closing.attempt, closing.reason, closing.message) == (0, FailureReason.NO_ROOM, "words")
    assert (books.in_flight, books.open_groups["g0"].num_closed) == (3, 1)
    books.apply(closed(0, 0, "no room"))
    assert books.open_groups["g0"].seats[0].closing is None
    assert (books.in_flight, books.open_groups["g0"].num_closed) == (2, 1)


def test_what_was_no_fault_of_the_task_does_not_count_towards_its_quarantine() -> None:
    books = books_of(
        began(),
        admitted(),
        failed(0, 0, FailureReason.STALE, Move.CLOSE),
        failed(1, 0, FailureReason.ENGINE_UNAVAILABLE, Move.CLOSE),
        failed(2, 0, FailureReason.SIBLINGS_FAILED, Move.CLOSE),
    )
    assert books.failures == {}


def test_time_between_two_processes_does_not_count_towards_a_groups_deadline() -> None:
    books = books_of(began(at=100.0), admitted(at=100.0), offered(0, 0, at=130.0), began(at=5000.0))
    group = books.open_groups["g0"]
    assert group.open_for_s(5010.0) == 40.0
    books.apply(failed(1, 0, FailureReason.GROUP_DEADLINE, Move.REFILL, at=5020.0))
    assert group.open_for_s(5021.0) == 1.0


def test_refused_record_opens_its_seat_again_to_be_closed() -> None:
    """B55"""
    books = books_of(began(), admitted(), offered(0, 0), offered(1, 1), offered(2, 2, attempt=4))
    assert books.place_of(SampleId("rollouter", 1, 2)) == ("g0", 2)
    books.apply(failed(2, 4, FailureReason.BAD_SAMPLE, Move.CLOSE))
    assert books.in_flight == 1
    assert books.place_of(SampleId("rollouter", 1, 2)) is None
    books.apply(closed(2, 3, "bad sample"))
    assert books.counts().failed == {"bad sample": 1}
    assert books.counts().offered == 2
    assert books.place_of(SampleId("rollouter", 1, 3)) == ("g0", 2)


def test_group_that_lost_records_with_its_stream_is_closed_seat_by_seat() -> None:
    """A group without any record is played on."""
    books = books_of(began(), admitted(0), admitted(1), offered(0, 0), closed(1, 1, "timeout"), began(epoch=2))
    lost, whole = books.open_groups["g0"], books.open_groups["g1"]
    assert [seat.closing and seat.closing.reason for seat in lost.seats] == [FailureReason.SIBLINGS_LOST] * 3
    assert [seat.closing for seat in whole.seats] == [None] * 3
    assert books.in_flight == 6
    for seat in range(3):
        books.apply(closed(seat, seat, "siblings lost", epoch=2))
    assert books.counts().failed == {"siblings lost": 3}
    assert books.in_flight == 3


def test_record_told_twice_counts_once() -> None:
    books = books_of(began(), admitted(), offered(0, 0), offered(0, 0))
    assert (books.counts().offered, books.num_recorded, books.first_unknown) == (1, 1, 1)


def test_what_the_journal_does_not_know_of_the_stream() -> None:
    books = books_of(began(), admitted(), offered(0, 0), offered(2, 2))
    assert (books.first_unknown, books.num_recorded) == (1, 2)
    assert [books.num_recorded_from(seq) for seq in range(4)] == [2, 1, 1, 0]
    assert books.knows(SampleId("rollouter", 1, 2))
    assert not books.knows(SampleId("rollouter", 1, 1))
    assert not books.knows(SampleId("rollouter", 2, 0))


def test_late_results_are_counted_and_change_nothing_else() -> None:
    """B40"""
    books = books_of(began(), admitted(), failed(0, 0, FailureReason.TIMEOUT, Move.RETRY))
    before = books.open_groups["g0"].seats[0]
    books.apply(replace(failed(0, 0, FailureReason.TIMEOUT, Move.RETRY), reason=LATE_RESULT))
    assert books.open_groups["g0"].seats[0] == before
    assert (books.counts().late_results, books.counts().retried) == (1, 1)


def test_process_that_said_nothing_of_its_end_was_cut_off() -> None:
    books = books_of(began())
    assert books.was_cut_off
    books.apply(RollouterEnded(at=1.0, reason="drained", counts={}))
    assert not books.was_cut_off


def test_memory_of_whole_groups_is_bounded() -> None:
    books = books_of(began())
    for issue in range(MAX_RECENT_GROUPS + 10):
        books.apply(admitted(issue, size=1))
        books.apply(offered(0, issue, group=f"g{issue}"))
    assert books.group("g9") is None
    assert books.group("g10") is not None
    assert books.place_of(SampleId("rollouter", 1, 9)) is None
    assert books.place_of(SampleId("rollouter", 1, 10)) == ("g10", 0)
    assert books.next_issue == MAX_RECENT_GROUPS + 10


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "offer", "retry", "refill", "close", "refuse", "late", "restart", "end", "new stream"]),
        st.integers(0, 10**6),
        st.sampled_from(sorted(FailureReason)),
    ),
    max_size=150,
)


@given(events=EVENTS)
def test_books_stay_consistent_and_are_the_same_when_replayed(events: list[tuple[str, int, FailureReason]]) -> None:
    """B38: whatever happened in which order; and the operator's books say the same."""
    records: list[RollouterRecord] = [began()]
    books = books_of(*records)
    epoch, seq, issues = 1, 0, 0

    def note(record: RollouterRecord) -> None:
        records.append(record)
        books.apply(record)

    for event, choice, reason in events:
        open_seats = [
            (name, n) for name, group in books.open_groups.items() for n, seat in enumerate(group.seats) if seat.is_open
        ]
        group, number = open_seats[choice % len(open_seats)] if open_seats else ("", 0)
        book = books.open_groups[group].seats[number] if group else None
        match event:
            case "admit":
                note(admitted(issues))
                issues += 1
            case "offer" if book is not None and book.closing is None:
                note(offered(number, seq, attempt=book.attempt, group=group, epoch=epoch))
                seq += 1
            case "retry" | "refill" if book is not None and book.closing is None:
                note(failed(number, book.attempt, reason, Move(event), group=group))
            case "close" if book is not None:
                if book.closing is None:
                    note(failed(number, book.attempt, reason, Move.CLOSE, group=group))
                else:
                    note(closed(number, seq, book.closing.reason.value, group=group, epoch=epoch))
                    seq += 1
            case "refuse" if seq:
                place = books.place_of(SampleId("rollouter", epoch, choice % seq))
                known = None if place is None else books.group(place[0])
                if place is not None and known is not None and not known.seats[place[1]].closed:
                    attempt = known.seats[place[1]].attempt
                    note(failed(place[1], attempt, FailureReason.BAD_SAMPLE, Move.CLOSE, group=place[0]))
            case "late" if group:
                note(replace(failed(number, 0, reason, Move.RETRY, group=group), reason=LATE_RESULT))
            case "restart":
                note(began(epoch=epoch))
            case "end":
                note(RollouterEnded(at=0.0, reason="drained", counts=books.counts().model_dump()))
                note(began(epoch=epoch))
            case "new stream":
                epoch, seq = epoch + 1, 0
                note(began(epoch=epoch))
            case _:
                pass
        counts = books.counts()
        assert counts.in_flight == sum(seat.is_open for group in books.open_groups.values() for seat in group.seats)
        assert counts.admitted == SIZE * issues == counts.offered + sum(counts.failed.values()) + counts.in_flight
        assert min([counts.offered, *counts.failed.values()]) >= 0
        assert books.next_issue == issues
        assert books.num_recorded == books.first_unknown == seq
    replayed = books_of(*(decode_record(encode_record(record), "here") for record in records))  # type: ignore[arg-type]
    assert replayed == books
    told = Issued.of(records)
    assert told.problems.num == 0, told.problems.texts
    assert told.counts().model_dump(include={"admitted", "offered", "failed", "in_flight"}) == books.counts().model_dump(
        include={"admitted", "offered", "failed", "in_flight"}
    )


def offering(seat: int, *, group: str = "g0", closed: str = "") -> Offering:
    return Offering(at=0.0, group_id=group, seat=seat, attempt=0, closed=closed)


def _silently(books: Books, next_seq: int) -> list[tuple[int, int]]:
    return [(one.seat, sample_id.seq) for one, sample_id in books.silently_stored(next_seq)]


def test_records_committed_before_they_were_noted_are_known_by_their_order() -> None:
    """B38: three were handed over and not noted; the stream has got two of them."""
    books = books_of(
        began(), admitted(size=5), offering(4), offered(4, 0), offering(2), offering(0), offering(3, closed="timeout")
    )
    assert _silently(books, 1) == []
    assert _silently(books, 3) == [(2, 1), (0, 2)]
    assert _silently(books, 4) == [(2, 1), (0, 2), (3, 3)]


def test_numbers_that_are_known_tell_those_between_them() -> None:
    """Seat 1's record failed to be stored: no number is left for it."""
    books = books_of(began(), admitted(size=5), offering(0), offering(1), offering(2), offering(3))
    for record in (offered(0, 0), offered(2, 1)):
        books.apply(record)
    assert _silently(books, 3) == [(3, 2)]
    books.apply(failed(1, 0, FailureReason.BAD_SAMPLE, Move.RETRY))
    books.apply(offering(1))
    assert _silently(books, 4) == [(3, 2), (1, 3)]


def test_what_was_handed_over_by_an_earlier_process_and_never_stored_is_void() -> None:
    books = books_of(began(), admitted(), offering(0), offering(1), began(), offering(2))
    assert _silently(books, 1) == [(2, 0)]
