"""The benchmark of weight sync: what its models are, and that its ratios are those of the rows they name."""

from __future__ import annotations

import pytest
import torch

from benchmarks.weights import Row, cases, needed_bytes, ratios
from benchmarks.weights_model import SHAPES, Model, Shapes
from benchmarks.weights_transports import Case, Figures

TINY = Shapes(layers=2, hidden=64, intermediate=96, key_value=32, vocabulary=100)
GIGABYTE = 10**9


def row(way: str, num_receivers: int, seconds: float, figures: Figures | None = None) -> Row:
    return Row(
        way=way,
        size="1 GB",
        num_bytes=GIGABYTE,
        num_receivers=num_receivers,
        seconds=seconds,
        gb_per_s=1 / seconds,
        of_memcpy=0.1 / seconds,
        figures=figures,
    )


def figures(stage_s: float, payload_bytes: int = GIGABYTE) -> Figures:
    return Figures(
        publish_s=0.1,
        stage_s=stage_s,
        total_s=0.1 + stage_s,
        payload_bytes=payload_bytes,
        sender_peak_bytes=0,
        receiver_peak_bytes=0,
        all_bytes=3 * GIGABYTE,
        sender_cpu_s=0.0,
        receiver_cpu_s=0.0,
    )


@pytest.mark.parametrize(("name", "num_bytes"), [("0.27 GB", 0.27e9), ("1 GB", 1e9), ("4 GB", 4e9)])
def test_models_have_the_size_that_they_are_named_by(name: str, num_bytes: float) -> None:
    assert SHAPES[name].num_bytes == pytest.approx(num_bytes, rel=0.03)


def test_a_step_changes_about_the_share_that_was_asked_for() -> None:
    model = Model(TINY)
    before = {name: tensor.bfloat16() for name, tensor in model.tensors.items()}
    model.step(0.1)
    changed = sum(int((tensor.bfloat16() != before[name]).sum()) for name, tensor in model.tensors.items())
    assert 0.08 < 2 * changed / model.num_bytes < 0.13
    model.step()
    assert not torch.equal(model.tensors["model.norm.weight"].bfloat16(), before["model.norm.weight"])


def test_every_transport_is_measured_for_every_number_of_receivers() -> None:
    found = {(case.transport, case.num_receivers) for case in cases(("transports",), (1, 4))}
    assert found == {(name, num) for name in ("shared_memory", "tcp", "collective", "file") for num in (1, 4)}


def test_a_case_of_streamed_weights_needs_memory_for_each_receiver() -> None:
    model = Model(TINY)
    lent, streamed = (needed_bytes(Case(transport=name, num_receivers=4), model) for name in ("shared_memory", "tcp"))
    assert streamed - lent == 8 * model.num_bytes


def test_ratios_are_those_of_the_rows_that_they_name() -> None:
    rows = [
        row("memcpy", 0, 0.1),
        row("shared_memory", 1, 0.2, figures(0.1)),
        row("shared_memory", 4, 0.25, figures(0.15)),
        row("tcp", 1, 0.5, figures(0.4)),
        row("tcp delta 2.0%", 1, 0.3, figures(0.2, GIGABYTE // 50)),
        row("request-reply 512 MB", 1, 1.0),
        row("gloo broadcast", 1, 0.6),
    ]
    engine = {
        "ours": {"prepare_s": 0.3, "pause_ms": 100.0, "until_first_token_s": 0.5},
        "reload_weights": {"prepare_s": 0.2, "pause_ms": 200.0, "until_first_token_s": 0.4},
    }
    found = {name.partition(" (target")[0]: value for name, value in ratios(rows, engine).items()}
    assert found == {
        "1 GB: shared_memory verified, of memcpy": pytest.approx(0.5),
        "1 GB: shared_memory, over request-reply": pytest.approx(5.0),
        "1 GB: shared_memory to 4, over 4 copies": pytest.approx(1.6),
        "1 GB: staging over tcp to 1, over gloo's broadcast": pytest.approx(1.5),
        "1 GB: tcp delta 2.0% to 1, bytes of full": pytest.approx(0.02),
        "1 GB: copies in memory, trainer and 4 receivers": pytest.approx(3.0),
        "engine: pause of the whole sync": pytest.approx(0.25),
        "engine: pause of reload_weights' pause": pytest.approx(0.5),
        "engine: until the first token, of reload_weights'": pytest.approx(1.25),
    }
