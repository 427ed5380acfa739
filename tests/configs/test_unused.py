"""An option that does nothing under the others is marked as such, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.command import as_yaml
from configs.keys import leaves
from configs.loader import load
from configs.unused import unused


def _unused(overrides: list[str], *, on_gpu: bool = False) -> dict[str, str]:
    return unused(load(None, overrides, environment={}), on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "key", "is_unused"),
    [
        ([], False, "auto_staleness.max", True),
        (["staleness_threshold=auto"], False, "auto_staleness.max", False),
        ([], False, "engine.pressure_interval_s", True),
        (["engine.adaptive_requests=true"], False, "engine.pressure_interval_s", False),
        ([], False, "filters.max_attempts", True),
        (["filters.zero_signal=drop"], False, "filters.max_attempts", False),
        ([], False, "filters.pass_reward", True),
        (["filters.replay_share=0.1"], False, "filters.pass_reward", False),
        (["filters.max_pass_rate=0.9"], False, "filters.revisit_epochs", False),
        ([], False, "on_stale", True),
        (["max_staleness=2"], False, "on_stale", False),
        (["bus.keys_dir=/keys"], False, "bus.keys_dir", True),
        (["bus.keys_dir=/keys", "bus.address=tcp://127.0.0.1:6000"], False, "bus.keys_dir", False),
        ([], False, "bus.redis_username", True),
        (["bus.transport=redis"], False, "bus.redis_username", False),
        (["bus.transport=redis"], False, "bus.redis_ca_file", True),
        (["bus.transport=redis", "bus.address=rediss://127.0.0.1/0"], False, "bus.redis_ca_file", False),
        (["bus.transport=redis"], False, "bus.spool_sync", True),
        ([], False, "engine.gpu_memory_utilization", True),
        ([], True, "engine.gpu_memory_utilization", False),
        ([], True, "engine.kv_cache_bytes", True),
        (["engine.urls=[http://127.0.0.1:1]"], False, "engine.num_engines", True),
        ([], False, "engine.ray_address", True),
        (["engine.placement=ray"], False, "engine.ray_address", False),
        (["engine.placement=ray"], False, "engine.num_gpus_per_engine", False),
        (["engine.placement=ray", "engine.urls=[http://127.0.0.1:1]"], False, "engine.placement", True),
        (["model.source=tiny-sort"], False, "model.warm_start_steps", False),
        (["model.source=/some/model"], False, "model.warm_start_steps", True),
        (["checkpoint.every_steps=5"], False, "checkpoint.keep", False),
        ([], False, "checkpoint.keep", True),
        ([], False, "trainer.clip_low", True),
        (["trainer.proximal=behavior"], False, "trainer.clip_low", False),
        (["trainer.proximal=behavior"], False, "trainer.max_importance_weight", True),
        (["tracking.backends=[wandb]"], False, "tracking.wandb_project", False),
        (["evaluation.at_start=false", "evaluation.at_end=false"], False, "evaluation.max_tasks", True),
    ],
)
def test_option_without_effect_is_marked_under_the_options_that_disable_it(
    overrides: list[str], on_gpu: bool, key: str, is_unused: bool
) -> None:
    """B121: interactions with other options."""
    assert (key in _unused(overrides, on_gpu=on_gpu)) == is_unused


def test_every_marked_key_exists() -> None:
    for overrides in ([], ["engine.urls=[http://a]"], ["evaluation.at_start=false", "evaluation.at_end=false"]):
        for on_gpu in (False, True):
            assert set(_unused(overrides, on_gpu=on_gpu)) <= set(leaves())


def test_effective_settings_show_the_mark_and_still_load_back(tmp_path: Path) -> None:
    """B121: the printout of --dry-run."""
    settings = load(None, ['sampling.stop=["\\n"]', "tracking.backends=[jsonl]"], environment={})
    text = as_yaml(settings, notes=unused(settings, on_gpu=False))
    marked = [line for line in text.splitlines() if "# not used" in line]
    assert any(line.startswith("on_stale: drop  # not used: max_staleness is null") for line in marked)
    assert any(line.startswith("  wandb_project: headrace  # not used:") for line in marked)
    path = tmp_path / "effective.yaml"
    path.write_text(text)
    assert load(path, environment={}) == settings
