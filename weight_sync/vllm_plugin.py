"""vLLM's side: a weight-transfer backend named `headrace` and the worker methods that stage weights for it.

Start the server with `--worker-extension-cls weight_sync.vllm_plugin.WorkerExtension` and
`--weight-transfer-config '{"backend": "headrace"}'`; importing this module, which the first option makes every worker do,
registers the backend. A sync of one engine is then

    POST /collective_rpc {"method": "headrace_stage", "kwargs": {...}}     at once; a thread pulls the weights meanwhile
    POST /start_weight_update                                             generation paused by the caller
    POST /update_weights {"update_info": {"policy_version": v, "manifest_digest": d}}
    POST /finish_weight_update {"weight_version": "v"}

Invariant: the model holds all of one version. `update_weights` does the whole load in one call, between two forward passes;
weights that are not exactly the named version and digest are refused before the model is touched, and a load that fails half
way puts the weights before back.

On a CPU, vLLM 0.32 and 0.33 leave two kinds of layers with old weights after a reload: heads tied to the embedding keep
their packed copy, and expert layers skip their packing. `_before_reload` and `_after_reload` mend that; see there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from weight_sync.adapters import AdapterLoader
from weight_sync.allocator import keep_freed_memory
from weight_sync.check import checksums_of
from weight_sync.checkpoint import check_against_checkpoint, checkpoint_shapes
from weight_sync.effective import Comparison, Sample, compare_effective
from weight_sync.errors import ManifestMismatch, WeightLoadError
from weight_sync.manifest import Manifest, dtype_name
from weight_sync.staging import StagedWeights, StagingArea, Verify

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

log = structlog.get_logger()

BACKEND = "headrace"
_SAMPLED_MATRICES = 8
_SAMPLED_COLUMNS = 4
SUPPORTED_VLLM = ("0.32", "0.33")
"""Release lines whose reload code was read for what `_before_reload` and `_after_reload` rely on."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Nothing has to be agreed on beforehand: each staging names its address."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which staged weights to load."""

    policy_version: int
    manifest_digest: str
    verify: bool = False
    """Read a sample of what was loaded back from the model; adapters are always read back whole."""


class HeadraceWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads staged weights into one worker's model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        if not vllm.__version__.startswith(SUPPORTED_VLLM):
            log.warning("vLLM release was not checked", got=vllm.__version__, expected=SUPPORTED_VLLM)
        if device.type == "cpu":
            keep_freed_memory()
        parallel = vllm_config.parallel_config
        self.staging = StagingArea(
            check_manifest=self._check_manifest,
            rank=parallel.rank,
            num_ranks=parallel.world_size,
            dtype=dtype_name(self.model_config.dtype),
        )
        self._expected = checkpoint_shapes(Path(self.model_config.model))
        self._update_done = False
        self._adapters = AdapterLoader.of(model, vllm_config)

    @property
    def lora_scale(self) -> float | None:
        return None if self._adapters is None else self._adapters.scale

    @property
    def is_tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _tied_heads(self) -> frozenset[str]:
        if not self.is_tied:
            return frozenset()
        heads = (path for path, module in self.model.named_modules() if isinstance(module, ParallelLMHead))
        return frozenset(f"{path}.weight" for path in heads) | {"lm_head.weight"}

    def _check_manifest(self, manifest: Manifest) -> None:
        if self._adapters is not None:
            self._adapters.check(manifest)
            return
        if self.model_config.quantization is not None:
            raise ManifestMismatch(
                f"the engine serves {self.model_config.quantization} weights; only unquantized weights can be sent"
            )
        check_against_checkpoint(manifest, self._expected, dtype=self.model_config.dtype, tied_heads=self._tied_heads())

    def compare(self, tensors: Mapping[str, torch.Tensor], *, sample: Sample | None = None) -> Comparison:
        """What the model computes with beside `tensors`; without `sample`, in full, which takes a forward pass or more."""
        if self._adapters is not None:
            return self._adapters.compare(tensors)
        if self.vllm_config.parallel_config.world_size > 1:
            return Comparison(num_equal=0, different=(), unread=tuple(sorted(tensors)))
        return compare_effective(self.model, tensors, tied=self.is_tied, sample=sample)

    # ── vLLM's weight-transfer interface ─────────────────────────────────────────────────────────────────────────────

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Open an update; the model is not touched before `update_weights` has the right weights."""
        self._update_done = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the staged weights, all or none; a repeated commit of what is held changes nothing.

        Raises:
            NotStaged: they are not staged; nothing was changed.
            WeightLoadError: the model did not take them; the weights before are back.
        """
        if self.staging.holds(update_info.policy_version, update_info.manifest_digest):
            self._update_done = True
            return
        staged = self.staging.get(update_info.policy_version, update_info.manifest_digest)
        try:
            self._load(staged.tensors)
            if update_info.verify and self._adapters is None:  # adapters were read back when they were loaded
                self._verify(staged)
        except Exception as error:
            self._put_back(error)
            raise WeightLoadError(
                f"version {staged.policy_version} could not be loaded, the weights before serve on: {error!r}"
            ) from error
        self.staging.mark_loaded(staged)
        self._update_done = True

    def finish_weight_update(self) -> None:
        if not self._update_done:
            raise RuntimeError("finish_weight_update without update_weights: the weights did not change")
        self._update_done = False

    def shutdown(self) -> None:
        self.staging.close()

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._adapters is not None:
            self._adapters.load(tensors)
        else:
            self._reload(tensors.items())

    def _verify(self, staged: StagedWeights) -> None:
        """Raises WeightLoadError where the model computes with other weights than it was given. Of a shard nothing is said."""
        sample = Sample(seed=staged.policy_version, num_matrices=_SAMPLED_MATRICES, num_columns=_SAMPLED_COLUMNS)
        found = self.compare(staged.tensors, sample=sample)
        if found.different:
            raise WeightLoadError(
                f"the model computes with other weights than it was given: {', '.join(found.different[:10])}"
                f" ({len(found.different)} of those that were read back)"
            )

    def keep_adapters(self, model_runner: Any) -> None:
        """Where adapters are what an update brings, its end must not drop them: vLLM does that because the weights below would
        be others, and here they are not."""
        if self._adapters is not None:
            model_runner.reset_lora_state = _do_nothing

    def _reload(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        _before_reload(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(named_tensors))
        unfilled = list(_unfilled_layers(self.model, self._tied_heads()))
        finalize_layerwise_reload(self.model, self.model_config)
        if unfilled:
            raise WeightLoadError(f"{len(unfilled)} layers did not get all of their weights: {', '.join(unfilled[:10])}")
        _after_reload(self.model)

    def _put_back(self, error: Exception) -> None:
        """Load the version before again, from memory or, before the first one, from the checkpoint."""
        log.error("weights did not load, the ones before are put back", error=repr(error))
        loaded = self.staging.loaded
        try:
            if self._adapters is not None:
                self._adapters.clear() if loaded is None else self._adapters.load(loaded.tensors)
                return
            finalize_layerwise_reload(self.model, self.model_config)
            self._reload(loaded.tensors.items() if loaded is not None else self._checkpoint_weights())
        except BaseException as second:  # noqa: BLE001  (whatever it is, the process must not serve on)
            log.critical("the weights before did not load either, the engine ends", error=repr(second))
            os._exit(70)  # it would serve a mix of two versions; whoever supervises it starts a clean one

    def _checkpoint_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        loader: Any = get_model_loader(self.vllm_config.load_config)
        weights: Iterator[tuple[str, torch.Tensor]] = iter(loader.get_all_weights(self.model_config, self.model))
        return weights


class WorkerExtension:
    """Methods that vLLM mixes into its worker; called through `/collective_rpc`, arguments as JSON values."""

    def headrace_stage(
        self,
        address: str,
        policy_version: int,
        engine: str,
        nonce: str,
        timeout_s: float,
        verify: Verify = "always",
        cohort: int = 1,
    ) -> dict[str, object]:
        """Begin to pull `policy_version` from the weight server at `address`; returns at once.

        `verify` is `weight_sync.verify`; `cohort` says how many workers of all engines stage this version together.
        The server reports under `engine` and `nonce` when it is staged, or why not. A staging begins a round: an update that
        a lost client left open is closed, and weights staged before but not committed are forgotten.
        """
        worker: Any = self
        weight_engine = _weight_engine(self)
        if worker._weight_update_active:  # noqa: SLF001  (vLLM offers no other way to close an update)
            log.warning("an update that was left open is closed", nonce=nonce)
            worker._weight_update_active = False  # noqa: SLF001
        weight_engine.keep_adapters(worker.model_runner)
        weight_engine.staging.stage(
            address,
            int(policy_version),
            engine=engine,
            nonce=nonce,
            timeout_s=float(timeout_s),
            cohort=int(cohort),
            verify=verify,
        )
        return weight_engine.staging.status()

    def headrace_status(self) -> dict[str, object]:
        """State of the staging: `state`, `staged` and `loaded` versions, `loaded_digest`, `error`; and `lora_scale`, by which
        adapters count here, or None where whole weights are taken."""
        weight_engine = _weight_engine(self)
        return {**weight_engine.staging.status(), "lora_scale": weight_engine.lora_scale}

    def headrace_checksums(self) -> dict[str, object]:
        """What the model was loaded with: `policy_version`, `manifest_digest` and name to xxh3_64 (hex).

        The checksums are computed now, over the bytes that this side holds. Before the first load all are empty.
        """
        loaded = _weight_engine(self).staging.loaded
        if loaded is None:
            return {"policy_version": None, "manifest_digest": "", "checksums": {}}
        return {
            "policy_version": loaded.policy_version,
            "manifest_digest": loaded.digest,
            "checksums": checksums_of(loaded.tensors),
        }

    def headrace_verify(self) -> dict[str, object]:
        """Read back the weights that the model computes with and compare them with those it was loaded with.

        Takes a forward pass or more (it multiplies every layer by an identity matrix). A worker that holds a shard reads
        nothing back.
        """
        weight_engine = _weight_engine(self)
        loaded = weight_engine.staging.loaded
        if loaded is None:
            return {"policy_version": None, "num_equal": 0, "different": [], "unread": []}
        found = weight_engine.compare(loaded.tensors)
        return {
            "policy_version": loaded.policy_version,
            "num_equal": found.num_equal,
            "different": list(found.different),
            "unread": list(found.unread),
        }


def _do_nothing() -> None:
    pass


def _weight_engine(worker: Any) -> HeadraceWeightEngine:
    engine = worker.weight_transfer_engine
    if not isinstance(engine, HeadraceWeightEngine):
        raise RuntimeError(
            f"the worker's weight-transfer engine is {type(engine).__name__}; start the server with "
            f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
        )
    return engine


# ── what vLLM's reload leaves undone ─────────────────────────────────────────────────────────────────────────────────


def _before_reload(model: torch.nn.Module) -> None:
    """Make expert layers on a CPU pack their new weights.

    Their method packs only when it builds its kernel, which it does once; without a kernel it builds and packs again.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and _is_on_cpu(module):
            method.moe_kernel = None


def _after_reload(model: torch.nn.Module) -> None:
    """Make heads on a CPU pack their weight again.

    A tied head gets no weight of its own in a reload, so its packed copy of the embedding stays the old one.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _is_on_cpu(module: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))


def _unfilled_layers(model: torch.nn.Module, tied_heads: frozenset[str]) -> Iterator[str]:
    """Layers that were given only some of their weights, or none, before the reload is finalized."""
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        parameters = dict(module.named_parameters(recurse=False))
        if not info.can_load() or not parameters or f"{path}.weight" in tied_heads:
            continue
        if is_deferred_attention_layer(module):
            continue
        if isinstance(module, VocabParallelEmbedding):
            expected = module.shard_indices.num_org_elements * module.embedding_dim
        else:
            expected = sum(get_tensor_load_numel(parameter) for parameter in parameters.values())
        if info.load_numel < expected:
            yield f"{path} ({info.load_numel} of {expected} elements)"


if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001  (a second registration would raise)
    WeightTransferEngineFactory.register_engine(BACKEND, HeadraceWeightEngine)
