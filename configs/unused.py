"""Which settings do nothing under the others: told by `--dry-run`, so that an option without effect is no riddle."""

from __future__ import annotations

from collections.abc import Iterator

from configs.keys import leaves
from configs.schema import AutoStalenessSettings, BusSettings, Settings

MADE_HERE = "tiny-sort"
CONVERTED_HERE = "smollm2-135m-instruct"
_RAY_DETAILS = ("ray_address", "num_cpus_per_engine", "num_gpus_per_engine", "placement_timeout_s")
_TLS_DETAILS = ("redis_ca_file", "redis_cert_file", "redis_key_file")
_EVALUATION_DETAILS = tuple(
    key.removeprefix("evaluation.")
    for key in leaves()
    if key.startswith("evaluation.") and key.removeprefix("evaluation.") not in ("at_start", "at_end", "every_versions")
)


def unused(settings: Settings, *, on_gpu: bool) -> dict[str, str]:
    """Dotted key to why it has no effect. `on_gpu`: whether engines and trainer would run on GPUs."""
    return dict(_unused(settings, on_gpu))


def _unused(settings: Settings, on_gpu: bool) -> Iterator[tuple[str, str]]:
    if settings.engine.urls:
        started_here = ("num_engines", "kv_cache_bytes", "gpu_memory_utilization", "max_restarts", "extra_args")
        placed_here = ("placement", *_RAY_DETAILS)
        reason = "engine.urls are given: no engine is started here"
        yield from ((f"engine.{name}", reason) for name in (*started_here, *placed_here))
    elif on_gpu:
        yield "engine.kv_cache_bytes", "a GPU engine sizes its KV cache by engine.gpu_memory_utilization"
    else:
        yield "engine.gpu_memory_utilization", "there is no GPU: the KV cache is sized by engine.kv_cache_bytes"
    if settings.engine.placement == "local" and not settings.engine.urls:
        yield from ((f"engine.{name}", "engine.placement is local: Ray is not used") for name in _RAY_DETAILS)
    if settings.reward.parts:
        yield "data.reward", "reward.parts are given: the reward is their sum"
        yield "reward.arguments", "reward.parts are given: each has arguments of its own"
    if not settings.reward.overlong_buffer_tokens:
        yield "reward.overlong_penalty", "reward.overlong_buffer_tokens is 0: there is no soft overlong punishment"
    if settings.data.curriculum is not None:
        yield "data.shuffle", "data.curriculum orders the tasks itself"
    if settings.filters.zero_signal == "keep":
        yield "filters.max_attempts", "filters.zero_signal is keep: no group is dropped for it"
    by_pass_rate = settings.filters.min_pass_rate > 0 or settings.filters.max_pass_rate < 1
    if not by_pass_rate:
        yield "filters.revisit_epochs", "no task is passed over for its pass rate"
    if not by_pass_rate and not settings.filters.replay_share:
        yield "filters.pass_reward", "nothing is decided by pass rates"
    if settings.model.source != MADE_HERE:
        yield "model.warm_start_steps", f"only {MADE_HERE} is warm-started here"
    if settings.model.source in (MADE_HERE, CONVERTED_HERE):
        yield "model.trust_remote_code", f"{settings.model.source} brings no code along"
    else:
        yield "model.cache_dir", "an existing model is used where it stands"
    if settings.trainer.proximal == "step":
        reason = "one optimizer step a batch: the ratio against the step's own start is 1 and never clipped"
        yield from ((f"trainer.{name}", reason) for name in ("clip_low", "clip_high"))
    else:
        yield "trainer.max_importance_weight", "proximal=behavior takes the ratio itself, without an importance weight"
    if settings.bus.keys_dir is not None and not settings.bus.address.startswith("tcp://"):
        yield "bus.keys_dir", "only tcp:// addresses use keys"
    if settings.bus.transport == "redis":
        yield "bus.spool_sync", "the Redis server keeps the records: there is no spool"
        if not settings.bus.address.startswith("rediss://"):
            yield from ((f"bus.{name}", "only rediss:// addresses use TLS") for name in _TLS_DETAILS)
    else:
        yield from ((f"bus.{name}", "bus.transport is zmq") for name in BusSettings.model_fields if name.startswith("redis_"))
    if not settings.auto_staleness.enabled:
        reason = "auto_staleness.enabled is false: staleness_threshold stays as it is set"
        yield from ((f"auto_staleness.{name}", reason) for name in AutoStalenessSettings.model_fields if name != "enabled")
    if not settings.engine.adaptive_requests:
        yield "engine.pressure_interval_s", "engine.adaptive_requests is false: nobody looks at the engines"
    if settings.max_staleness is None:
        yield "on_stale", "max_staleness is null: no sample is ever too old"
    if settings.max_staleness is None or settings.on_stale != "downweight":
        yield "stale_weight_base", "no token is weighted by its age (on_stale=downweight with max_staleness)"
    if settings.max_staleness is None or settings.on_stale != "retry":
        yield "rollouter.max_requeues", "no task is issued again for its age (on_stale=retry with max_staleness)"
    if not (settings.evaluation.at_start or settings.evaluation.at_end or settings.evaluation.every_versions):
        yield from ((f"evaluation.{name}", "no evaluation is ever asked for") for name in _EVALUATION_DETAILS)
        if settings.data.held_out_fraction == 0:
            yield "data.held_out_fraction", "no evaluation is ever asked for"
    if not (settings.checkpoint.every_steps or settings.checkpoint.at_end):
        yield "checkpoint.keep", "no checkpoint is ever saved"
    if "wandb" not in settings.tracking.backends:
        yield "tracking.wandb_project", "wandb is not among tracking.backends"
    if on_gpu:
        yield "trainer.num_threads", "the trainer runs on a GPU"
