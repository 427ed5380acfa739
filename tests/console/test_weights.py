"""What `headrace weights check` prints."""

from __future__ import annotations

from console.weights import as_text
from sample_bus.weight_checks import EngineVerdict, TensorDifference, Verdict, WeightCheck


def test_equal_engines_take_a_line_each() -> None:
    engines = tuple(
        EngineVerdict(engine=f"engine-{i}", verdict=Verdict.EQUAL, policy_version=7 - i, num_tensors=3, num_effective=3)
        for i in range(2)
    )
    assert as_text(WeightCheck(policy_version=7, num_tensors=3, engines=engines)).splitlines() == [
        "trainer: policy version 7, 3 tensors",
        "engine-0: equal, policy version 7, 3 checksums compared, 3 read back from the model and equal",
        "engine-1: equal, policy version 6, not 7 yet, 3 checksums compared, 3 read back from the model and equal",
    ]


def test_differences_are_a_table_that_says_how_many_it_leaves_out() -> None:
    differences = (
        TensorDifference(name="a.weight", expected="01", got="02"),
        TensorDifference(name="lm_head.weight", expected="03", got="03", worker=1, is_effective=True),
        TensorDifference(name="c", expected="", got="05"),
    )
    engine = EngineVerdict(
        engine="engine-0",
        verdict=Verdict.DIFFERENT,
        policy_version=7,
        num_tensors=9,
        num_differences=5,
        differences=differences,
    )
    assert as_text(WeightCheck(policy_version=7, num_tensors=3, engines=(engine,))).splitlines()[1:] == [
        "engine-0: different, policy version 7, 9 checksums compared, 5 differ",
        "engine      tensor          trainer         engine's",
        "engine-0    a.weight        01              02",
        "engine-0/1  lm_head.weight  03              computes with others",
        "engine-0    c               no such tensor  05",
        "and 2 more",
    ]


def test_an_engine_that_cannot_be_asked_says_why() -> None:
    engine = EngineVerdict(engine="engine-0", verdict=Verdict.UNKNOWN, message="it is dead")
    assert "engine-0: no answer, it is dead" in as_text(WeightCheck(policy_version=7, num_tensors=3, engines=(engine,)))
