"""A rollouter serves the trainer's model and no other, however often the trainer comes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.model_files import model_files
from rollouter.errors import AnotherModel
from rollouter.model_in_use import ModelInUse
from sample_bus.messages import Failed, TrainerState, TrainerStatus
from tests.fakes.fake_engine import FakeEngine
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer

FILES = {"config.json": "01", "tokenizer.json": "02", "weights": "03"}


def status(**changes: Any) -> TrainerStatus:
    values = {"model_dir": "/models/one", "model_dtype": "float32", "model_files": FILES} | changes
    return TrainerStatus(state=TrainerState.WAITING, incarnation="second", **values)


def in_use() -> ModelInUse:
    model = ModelInUse.of(status())
    assert model is not None
    return model


@pytest.mark.parametrize(
    "same",
    [{}, {"model_dir": "/elsewhere"}, {"model_dir": None, "model_dtype": None, "model_files": {}}],
)
def test_the_same_files_are_the_same_model_wherever_they_lie(same: dict[str, Any]) -> None:
    in_use().check(status(**same))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model_files": FILES | {"tokenizer.json": "04"}}, "not the same: tokenizer.json"),
        ({"model_files": FILES | {"weights": "04", "chat_template.jinja": "05"}}, "not the same: chat_template.jinja, weights"),
        ({"model_dtype": "bfloat16"}, "computes in bfloat16, expected float32"),
    ],
)
def test_another_model_is_refused_by_the_name_of_what_is_not_the_same(other: dict[str, Any], words: str) -> None:
    with pytest.raises(AnotherModel, match=words):
        in_use().check(status(**other))


def test_without_digests_another_directory_is_another_model() -> None:
    model = ModelInUse.of(status(model_files={}))
    assert model is not None
    with pytest.raises(AnotherModel, match=r"with the model in /models/two, expected the one in /models/one"):
        model.check(status(model_files={}, model_dir="/models/two"))


def test_a_directory_that_holds_another_model_on_this_host_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ModelInUse(directory=str(tmp_path), dtype="float32", files=model_files(tmp_path)).check_here()
    ModelInUse(directory=str(tmp_path / "none"), dtype="float32", files=FILES).check_here()
    with pytest.raises(AnotherModel, match=r"on this host it is another model .*config\.json"):
        ModelInUse(directory=str(tmp_path), dtype="float32", files=FILES).check_here()


async def test_a_trainer_that_comes_back_with_another_model_ends_the_rollouter_and_not_the_trainer(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, bus__on_lost="wait")
    engine = FakeEngine()
    async with running_rollouter(settings, engine) as rollouter:
        async with stand_in_trainer(settings) as trainer:
            engine.on_stage = trainer.staged
            trainer.model = {"model_files": FILES}
            await trainer.begin()
            await trainer.publish(0)
            await trainer.train(8)
        async with stand_in_trainer(settings, incarnation="second") as trainer:
            engine.on_stage = trainer.staged
            trainer.model = {"model_files": FILES | {"tokenizer.json": "04"}}
            await trainer.begin()
            with pytest.raises(AnotherModel, match=r"incarnation second.*not the same: tokenizer\.json"):
                await rollouter.ended()
            assert not [report for report in trainer.reports if isinstance(report, Failed)]


async def test_a_trainer_that_comes_back_with_other_arithmetic_is_refused_as_at_the_start(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, bus__on_lost="wait")
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)) as rollouter:
        await trainer.begin()
        await trainer.publish(0)
        await trainer.train(8)
        trainer.model = {"agreed": {"group_size": 2}}
        await trainer.say()
        with pytest.raises(ConfigError, match="group_size: got 4 here and 2 in the trainer"):
            await rollouter.ended()
        assert "group_size: got 4 here" in (await trainer.wait_report(Failed))[0].message
