from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sample_bus.ledger import Ledger
from sample_bus.messages import Counts, RolloutCounts

NUMBER = st.integers(0, 1000)
REASONS = st.dictionaries(st.sampled_from(["timeout", "stale", "reward failed"]), NUMBER)


@st.composite
def balanced(draw: st.DrawFn) -> Ledger:
    trained, queued, in_flight = draw(NUMBER), draw(NUMBER), draw(NUMBER)
    dropped, failed = draw(REASONS), draw(REASONS)
    received = trained + queued + sum(dropped.values())
    return Ledger(
        rollouts=RolloutCounts(
            admitted=received + sum(failed.values()) + in_flight, offered=received, failed=failed, in_flight=in_flight
        ),
        samples=Counts(received=received, trained=trained, dropped=dropped, queued=queued),
    )


@given(balanced())
def test_books_of_a_run_at_rest_close(ledger: Ledger) -> None:
    assert ledger.closes
    assert ledger.gap == 0
    assert "BALANCE" not in ledger.line()


@given(
    balanced(),
    st.sampled_from([("rollouts", "admitted"), ("rollouts", "in_flight"), ("samples", "trained"), ("samples", "queued")]),
    st.integers(1, 5),
)
def test_one_lost_or_doubled_sample_is_named(ledger: Ledger, field: tuple[str, str], by: int) -> None:
    side, name = field
    counts = getattr(ledger, side)
    wrong = counts.model_copy(update={name: getattr(counts, name) + by})
    broken = Ledger(**{"rollouts": ledger.rollouts, "samples": ledger.samples, side: wrong})
    assert not broken.closes
    assert broken.gap == (by if name == "admitted" else -by)
    assert "DOES NOT BALANCE" in broken.line()


def test_line_says_the_identity_in_numbers() -> None:
    ledger = Ledger(
        rollouts=RolloutCounts(admitted=960, offered=952, failed={"timeout": 4}, in_flight=4),
        samples=Counts(received=952, trained=896, dropped={"stale": 8, "timeout": 1}, queued=47),
    )
    assert ledger.line() == (
        "960 issued = 896 trained + 9 dropped (stale 8, timeout 1) + 4 failed (timeout 4) + 47 queued + 4 in flight"
    )


def test_samples_on_their_way_are_told_from_samples_that_are_lost() -> None:
    rollouts = RolloutCounts(admitted=10, offered=10)
    ledger = Ledger(rollouts=rollouts, samples=Counts(received=7, trained=7))
    assert not ledger.closes
    assert ledger.line() == "10 issued = 7 trained + 0 dropped + 0 queued + 3 on the way + 0 in flight"
