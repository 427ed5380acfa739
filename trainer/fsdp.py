"""A Hugging Face causal model under training, whole on one device or sharded over ranks with FSDP2.

Invariant: the float32 masters are the model. Compute weights are their rounding to the compute type, renewed after each step;
the gradient is accumulated in float32 and is the same, up to rounding, for every cut into micro-batches and ranks. With
`lora_rank` only adapters are trained and saved (`trainer.lora`); the weights below them stay as they were loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch

from configs.schema import TrainerSettings
from sample_bus.sample import Sample
from trainer import snapshot
from trainer.errors import CheckpointError, NonFiniteError
from trainer.export import named_weights, published_weights
from trainer.forward import ModelShape, Predictions, predict
from trainer.lora import (
    Adapted,
    adapted_layers,
    add_adapters,
    base_digest,
    check_adapters,
    peft_name,
    without_adapters,
    write_adapter,
)
from trainer.losses import token_losses
from trainer.metrics import TokenSums
from trainer.models import load_causal_model
from trainer.optimizer import AdamW
from trainer.packing import PackedBatch, pack
from trainer.policy import LossOptions
from trainer.ranks import Ranks, local, shard, whole

log = structlog.get_logger()


class FsdpPolicy:
    """Implements `trainer.policy.Policy`.

    model_dir: a Hugging Face directory. dtype: float32 or bfloat16, the type of compute and of exported weights. With an
    initialized torch.distributed process group the model is sharded over all its ranks. share_prefixes=False computes every
    sequence for itself, which only comparisons want. With lora_rank, `export_weights` yields merged weights, or the adapters
    alone where exports_adapters; `seed` gives the first adapters.
    """

    def __init__(
        self,
        model_dir: Path,
        settings: TrainerSettings,
        *,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        share_prefixes: bool = True,
        exports_adapters: bool = False,
        seed: int = 0,
    ) -> None:
        assert settings.lora_rank or not exports_adapters, "a model without adapters has none to export"
        self._settings = settings
        self._model_dir = model_dir
        self._dtype = dtype
        self._share_prefixes = share_prefixes
        self._ranks = Ranks.current()
        self._device = self._ranks.device
        self._model = load_causal_model(model_dir, trust_remote_code=trust_remote_code)
        if settings.lora_rank:
            add_adapters(self._model, settings, seed=seed)
        self._model = self._model.to(self._device)
        self._shape = ModelShape.of(self._model.config)
        if self._ranks.num_ranks > 1:
            shard(self._model, self._ranks, dtype=dtype)
        self._exports_adapters = exports_adapters
        self._adapted = adapted_layers(self._model)
        self._facts = self._facts_of_adapters() if self._adapted else {}
        parameters = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._has_copies = self._ranks.num_ranks == 1 and dtype != torch.float32
        masters = [local(parameter) for parameter in self._parameters]
        if self._has_copies:
            for parameter in self._model.parameters():
                parameter.data = parameter.data.to(dtype)
        self._optimizer = AdamW(
            masters,
            num_dimensions=[parameter.ndim for parameter in self._parameters],
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
        )
        self._sums = [torch.zeros_like(master) for master in masters] if self._has_copies else []
        self._num_accumulated = 0
        log.info(
            "model loaded",
            path=str(model_dir),
            parameters=self.num_parameters,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self._device),
            ranks=self._ranks.num_ranks,
        )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken since the initial weights."""
        return self._optimizer.steps_taken

    @property
    def num_parameters(self) -> int:
        """Trained numbers, tied ones counted once."""
        return sum(parameter.numel() for parameter in self._parameters)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._shape.vocab_size

    def logprobs(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """See `Policy.logprobs`."""
        scored = [np.zeros(sample.num_tokens, dtype=np.float32) for sample in samples]
        with torch.no_grad():
            for batch in self._batches(samples):
                values = self._predict(batch).logprobs.cpu().numpy()
                for index in np.unique(batch.token_samples):
                    mine = batch.token_samples == index
                    scored[index][batch.token_positions[mine]] = values[mine]
        return self._ranks.sum_arrays(scored)

    def accumulate(
        self,
        samples: Sequence[Sample],
        advantages: npt.NDArray[np.float32],
        *,
        denominator: float,
        options: LossOptions,
        weights: Sequence[npt.NDArray[np.float32]] | None = None,
        dense: Sequence[npt.NDArray[np.float32]] | None = None,
    ) -> TokenSums:
        """See `Policy.accumulate`."""
        sums = TokenSums()
        has_signal = advantages != 0
        if dense is not None:
            has_signal |= np.array([bool(one.any()) for one in dense], np.bool_)
        for with_signal in (True, False):
            chosen = np.flatnonzero(has_signal == with_signal)
            part = [samples[index] for index in chosen]
            factors = None if weights is None else [weights[index] for index in chosen]
            for batch in self._batches(part):
                values = advantages[chosen][batch.token_samples]
                if dense is not None:
                    values = values + batch.of_tokens([dense[index] for index in chosen])
                of_tokens = torch.from_numpy(values).to(self._device)
                with torch.set_grad_enabled(with_signal):
                    sums += self._run(batch, of_tokens, factors, scale=self._ranks.num_ranks / denominator, options=options)
        sums = self._ranks.merge(sums)
        if not np.isfinite(sums.loss):
            self._clear()
            raise NonFiniteError(f"loss: got {sums.loss} over {sums.num_tokens} tokens, expected a finite number")
        return sums

    def step(self, *, learning_rate: float, max_grad_norm: float | None = None) -> float:
        """See `Policy.step`."""
        gradients = self._gradients()
        squares = torch.nn.utils.get_total_norm(gradients).square()
        norm = float(self._ranks.sum_tensor(squares).sqrt())
        if not np.isfinite(norm):
            self._clear()
            raise NonFiniteError(
                f"gradient norm: got {norm} after {self.optimizer_steps} optimizer steps, expected a finite number"
            )
        divisor = max(1.0, norm / (max_grad_norm or self._settings.max_grad_norm))
        self._optimizer.apply(gradients, learning_rate=learning_rate, divisor=divisor)
        self._clear()
        self._renew_copies()
        return norm

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (the model's own name, whole accumulated gradient in float32), unclipped. Collective."""
        for name, parameter, gradient in zip(self._names, self._parameters, self._gradients(), strict=True):
            yield name, whole(gradient, like=parameter)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Policy.export_weights`."""

        if self._exports_adapters:
            return self._adapters()
        weights = named_weights(self._model)
        if not self._adapted:
            return published_weights(self._model, weights, gather=self._gather)
        adapted = {id(layer.base): layer for layer in self._adapted}

        def merge(tensor: torch.Tensor) -> torch.Tensor:
            layer = adapted.get(id(tensor))
            base = self._gather(tensor)
            return base if layer is None else self._merged(layer, base)

        return published_weights(self._model, without_adapters(weights), gather=merge)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        full = whole(tensor, like=tensor).detach()
        return full.to(self._dtype) if full.is_floating_point() else full

    def _merged(self, layer: Adapted, base: torch.Tensor) -> torch.Tensor:
        return layer.merged(base, self._gather(layer.a), self._gather(layer.b)).to(self._dtype)

    def _adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for layer in self._adapted:
            yield peft_name(layer.path, "lora_A"), self._gather(layer.a)
            yield peft_name(layer.path, "lora_B"), self._gather(layer.b)

    def _facts_of_adapters(self) -> dict[str, object]:
        """What adapters belong to, beside their shapes."""
        return {"lora_alpha": self._settings.lora_alpha, "base": base_digest(self._model)}

    def write_first_adapter(self, directory: Path) -> None:
        """Have `directory` hold adapters as they are now, whole or not at all, for engines that start with them; collective."""
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        if self._ranks.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        self.save_adapter(unfinished)
        if self._ranks.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
        self._ranks.barrier()

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters alone, as PEFT and engines read them, into an existing directory; collective."""
        tensors = {name: tensor.float() for name, tensor in self._adapters()}
        if self._ranks.rank == 0:
            write_adapter(directory, tensors, self._settings, base_dir=self._model_dir)
        self._ranks.barrier()

    def save(self, directory: Path) -> None:
        """See `Policy.save`."""
        snapshot.write(directory, self._names, self._parameters, self._optimizer, self._ranks, facts=self._facts)
        if self._adapted:
            self.save_adapter(directory)

    def load(self, directory: Path) -> None:
        """See `Policy.load`."""
        shapes = snapshot.shapes_in(directory)
        try:
            check_adapters(shapes, self._settings, expected=self._names)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from None
        snapshot.read(directory, self._names, self._parameters, self._optimizer, self._ranks, facts=self._facts)
        self._clear()
        self._renew_copies()

    def _batches(self, samples: Sequence[Sample]) -> list[PackedBatch]:
        """This rank's micro-batches; every rank gets as many."""
        batches = pack(
            samples,
            max_tokens=self._settings.max_tokens_per_microbatch,
            max_rows=self._shape.max_rows,
            share_prefixes=self._share_prefixes,
            min_microbatches=self._ranks.num_ranks,
        )
        return batches[self._ranks.rank :: self._ranks.num_ranks]

    def _predict(self, batch: PackedBatch) -> Predictions:
        return predict(self._model, batch, self._shape, device=self._device, dtype=self._dtype)

    def _run(
        self,
        batch: PackedBatch,
        advantages: torch.Tensor,
        factors: Sequence[npt.NDArray[np.float32]] | None,
        *,
        scale: float,
        options: LossOptions,
    ) -> TokenSums:
        """Forward, and backward where gradients are on. FSDP averages over ranks, hence their number in `scale`."""
        predictions = self._predict(batch)
        behavior = torch.from_numpy(batch.behavior_logprobs).to(self._device)
        weights = None if factors is None else torch.from_numpy(batch.of_tokens(factors)).to(self._device)
        result = token_losses(predictions.logprobs, behavior, advantages, options=options, weights=weights)
        total = result.losses.sum()
        if torch.is_grad_enabled():
            torch.autograd.backward(total * scale if predictions.anchor is None else predictions.anchor)
            self._fold()
        return TokenSums.of(
            losses=result.losses.detach(),
            policy=predictions.logprobs.detach(),
            behavior=behavior,
            entropies=predictions.entropies,
            clipped=result.clipped,
            capped=result.capped,
            num_computed_tokens=batch.num_nodes,
        )

    def _fold(self) -> None:
        """Add the compute type's gradients to the float32 sums."""
        self._num_accumulated += 1
        if not self._has_copies:
            return
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if self._num_accumulated > 1:
                if parameter.grad is not None:
                    total.add_(parameter.grad)
            elif parameter.grad is not None:
                total.copy_(parameter.grad)
            else:
                total.zero_()
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's part of each accumulated gradient; zeros where nothing came."""
        if self._has_copies:
            if not self._num_accumulated:
                for total in self._sums:
                    total.zero_()
            return self._sums
        return [
            torch.zeros_like(master) if parameter.grad is None else local(parameter.grad)
            for parameter, master in zip(self._parameters, self._optimizer.weights, strict=True)
        ]

    def _clear(self) -> None:
        self._num_accumulated = 0
        for parameter in self._parameters:
            parameter.grad = None

    def _renew_copies(self) -> None:
        if self._has_copies:
            for parameter, master in zip(self._parameters, self._optimizer.weights, strict=True):
                parameter.data.copy_(master)
