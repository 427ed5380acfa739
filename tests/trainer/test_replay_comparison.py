"""What is said about two curves: identical, or from where on apart and why."""

from __future__ import annotations

import math

from sample_bus.sample import SampleId
from trainer.comparison import Comparison, StepPair, VersionPair, reasons_to_differ, report
from trainer.recording import PublishedVersion, RecordedStep


def recorded(step: int, *, loss: float = 0.5, grad_norm: float = 1.0, rate: float = 1e-3) -> RecordedStep:
    return RecordedStep(
        step=step,
        policy_version=step - 1,
        samples=(SampleId("r", 1, step),),
        options={"trainer.learning_rate": rate},
        loss=loss,
        grad_norm=grad_norm,
    )


def pair(step: int, *, loss: float = 0.5, grad_norm: float = 1.0, of: float = 0.5) -> StepPair:
    return StepPair(recorded=recorded(step, loss=of), loss=loss, grad_norm=grad_norm)


def version(step: int, digest: str) -> VersionPair:
    return VersionPair(step=step, recorded=PublishedVersion(policy_version=step, digest="aa"), digest=digest)


def test_one_bit_is_a_difference_and_a_loss_that_is_no_number_is_its_own_like() -> None:
    assert pair(1).is_identical
    assert pair(1, loss=math.nan, of=math.nan).is_identical
    assert not pair(1, loss=math.nextafter(0.5, 1)).is_identical
    assert not pair(1, grad_norm=math.nextafter(1.0, 2)).is_identical


def test_the_first_step_and_version_apart_are_named() -> None:
    comparison = Comparison(reasons=("trainer.clip_low: 0.1 here, 0.2 in the run",))
    comparison.steps = [pair(1), pair(2, grad_norm=2.0), pair(3, loss=0.25)]
    comparison.versions = [version(0, "aa"), version(2, "bb")]
    lines = report(comparison).splitlines()
    assert lines[0] == "losses    first apart at step 2: gradient norm 2.0 here, 1.0 in the run"
    assert lines[1] == "weights   first apart at policy version 2, after step 2: bb here, aa in the run"
    assert lines[2] == "expected  trainer.clip_low: 0.1 here, 0.2 in the run"
    assert lines[3].split() == ["step", "1", "2", "3"]
    assert lines[5].split() == ["loss,", "here", "0.5", "0.5", "0.25"]


def test_only_settings_that_bear_on_the_arithmetic_are_reasons() -> None:
    run = {"trainer.clip_low": 0.2, "trainer.learning_rate": 1e-3, "run_dir": "a", "model.dtype": "float32", "num_steps": 9}
    mine = {**run, "run_dir": "b", "num_steps": 4, "model.dtype": "bfloat16"}
    steps = [recorded(1), recorded(2)]
    assert reasons_to_differ(run, mine, overridden={"run_dir": "b"}, steps=steps) == (
        "model.dtype: 'bfloat16' here, 'float32' in the run",
    )


def test_an_overridden_setting_is_a_reason_where_another_value_was_recorded() -> None:
    """The run's file says 1e-3 and so does the argument; what counts is that it was changed live for two steps."""
    run = {"trainer.learning_rate": 1e-3}
    steps = [recorded(1), recorded(2, rate=5e-3), recorded(3, rate=5e-3), recorded(4)]
    assert reasons_to_differ(run, run, overridden={}, steps=steps) == ()
    assert reasons_to_differ(run, run, overridden=run, steps=steps) == (
        "trainer.learning_rate: 0.001 here, 0.005 in the run (steps 2 to 3)",
    )
