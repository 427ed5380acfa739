"""What a sample of a model's weights reads."""

from __future__ import annotations

import torch

from weight_sync.effective import Sample, compare_effective


def make_model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4, bias=False))


def loaded_by(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_sample_of_everything_finds_each_difference() -> None:
    """B140: a tensor that was not loaded is found by what the model holds."""
    model = make_model()
    everything = Sample(seed=1, num_matrices=9, num_columns=99)
    for name, tensor in loaded_by(model).items():
        other = loaded_by(model) | {name: tensor + 1}
        assert compare_effective(model, other, tied=False, sample=everything).different == (name,)
        assert compare_effective(model, other, tied=False).different == (name,)


def test_a_sample_reads_as_many_columns_of_as_many_matrices_as_it_says() -> None:
    model = make_model()
    wrong = {name: tensor + 1 for name, tensor in loaded_by(model).items()}
    one = [
        compare_effective(model, wrong, tied=False, sample=Sample(seed=seed, num_matrices=1, num_columns=1))
        for seed in range(20)
    ]
    vectors = {"0.bias", "1.weight", "1.bias"}
    read = {name for found in one for name in set(found.different) - vectors}
    assert all(len(set(found.different) - vectors) == 1 for found in one)
    assert read == {"0.weight", "2.weight"}


def test_one_column_that_is_wrong_is_found_when_it_is_read() -> None:
    model = make_model()
    loaded = loaded_by(model)
    loaded["0.weight"][:, 2] += 1
    found = [
        bool(compare_effective(model, loaded, tied=False, sample=Sample(seed=seed, num_matrices=2, num_columns=2)).different)
        for seed in range(30)
    ]
    assert any(found)
    assert not all(found)


def test_of_what_a_sample_does_not_read_nothing_is_said() -> None:
    model = make_model()
    found = compare_effective(
        model, loaded_by(model) | {"other": torch.zeros(1)}, tied=False, sample=Sample(seed=0, num_matrices=0, num_columns=1)
    )
    assert found.unread == ()
    assert found.num_equal == 3
