"""Where models come from: a package's GGUF file, one made here, a Hugging Face directory, or the hub.

Invariant: `prepare_model` returns a directory that trainer and engine load alike. What is converted or made lies in the cache
under a name that says what it was made from; it appears there whole or not at all, however many processes ask for it at once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from configs.paths import cache_dir
from configs.schema import ModelSettings, Settings
from trainer.errors import ModelError
from trainer.model_source import SMOLLM2, TINY_SORT, check_source
from trainer.tiny_sort import make_tiny_sort, tiny_sort_name

log = structlog.get_logger()

SMOLLM2_FILE = "smollm2-135m-instruct.Q4_1.gguf"
SMOLLM2_LICENCE = "Apache-2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model that is ready to be loaded."""

    model_dir: Path
    """A Hugging Face directory with weights and tokenizer."""
    dtype: torch.dtype
    """Compute type of trainer and engine."""


def prepare_model(settings: Settings) -> PreparedModel:
    """Convert, make, fetch or find the model that `settings.model.source` names.

    Blocking; about 20 s for the first use of SmolLM2 and of tiny-sort, nothing later. Raises ModelError, ConfigError.
    """
    model = settings.model
    models = (model.cache_dir or cache_dir()) / "models"
    dtype = compute_dtype(model.dtype, small=model.source == TINY_SORT)
    match model.source:
        case "smollm2-135m-instruct":
            target = models / f"{SMOLLM2}-hf"
            log.info("model", source=model.source, licence=SMOLLM2_LICENCE, path=str(target))
            _in_cache(target, lambda directory: _convert_gguf(_find_gguf(models), directory))
        case "tiny-sort":
            target = models / tiny_sort_name(model, seed=settings.seed)
            _in_cache(target, lambda directory: make_tiny_sort(directory, model, seed=settings.seed))
        case _:
            target = _existing(model)
    log.info("model ready", path=str(target), dtype=str(dtype).removeprefix("torch."))
    return PreparedModel(model_dir=target, dtype=dtype)


def compute_dtype(name: str, *, small: bool = False) -> torch.dtype:
    """The type that `model.dtype` asks for. `auto` is bfloat16 where the processor multiplies it in hardware, else float32.

    A small model stays in float32 under `auto`: there is nothing to gain.
    """
    if name == "auto":
        return torch.bfloat16 if not small and (torch.cuda.is_available() or _cpu_has_bfloat16()) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_causal_model(model_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """The model in float32, in evaluation mode (no dropout), from a local directory. Raises ModelError."""
    _quiet()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=torch.float32, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{model_dir}: cannot be loaded as a causal language model: {_first_line(error)}") from error
    return model.eval()


def _existing(model: ModelSettings) -> Path:
    """A directory as it is, or a hub name as a snapshot of it."""
    directory = check_source(model)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    log.info("fetching model from the hub", name=model.source)
    try:
        return Path(snapshot_download(model.source, ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx", "original/*"]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"model.source={model.source}: neither a directory here nor to be had from the hub: {_first_line(error)}"
        ) from error


def _find_gguf(models: Path) -> Path:
    places = list(dict.fromkeys((models / SMOLLM2_FILE, cache_dir() / "models" / SMOLLM2_FILE)))
    for path in places:
        if path.is_file():
            return path
    raise ModelError(f"{SMOLLM2_FILE}: not in {' nor in '.join(str(p.parent) for p in places)}; `make setup` puts it there")


def _convert_gguf(source: Path, directory: Path) -> None:
    """Write the GGUF file's model and tokenizer as a Hugging Face directory, weights in float32."""
    log.info("converting model", path=str(source), megabytes=source.stat().st_size >> 20)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
        log.info("tokenizer converted")
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{source}: cannot be converted: {_first_line(error)}") from error
    log.info("weights converted", parameters=model.num_parameters())
    model.save_pretrained(directory)


def _in_cache(target: Path, make: Callable[[Path], None]) -> None:
    """Have `target` made, by this process or another one, exactly once."""
    if target.is_dir():
        log.info("model found in the cache", path=str(target))
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return
        unfinished = target.with_name(f".{target.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        started = time.monotonic()
        _quiet()
        make(unfinished)
        unfinished.rename(target)
        log.info("model kept in the cache", path=str(target), seconds=round(time.monotonic() - started, 1))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock; it falls with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that makes the same model", lock=str(path))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cpu_has_bfloat16() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _quiet() -> None:
    """Progress bars and notes of the loading library do not belong in a daemon's log."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
