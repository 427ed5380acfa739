"""What the trainer process settles before torch is loaded, and how it leaves. Imports no torch.

Invariant: thread counts and visible GPUs are in the environment before the first library reads them.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from configs.cpu import core_shares, pin
from configs.gpu import VISIBLE, gpu_shares, visible_gpus
from configs.schema import Settings
from trainer.memory import keep_freed_memory

TRAINING_THREAD = "train"


def set_up_process(settings: Settings) -> None:
    """Choose the trainer's GPU, or on a CPU machine its cores, threads and allocator.

    Raises ConfigError when the GPUs do not go round.
    """
    if "torch" in sys.modules:
        raise AssertionError("torch is loaded already: it would not see the number of threads")
    shares = gpu_shares(visible_gpus(), num_engines=settings.engine.num_engines)
    if shares is not None:
        os.environ[VISIBLE] = shares.trainer
        return
    cores = core_shares().trainer
    pin(cores)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(settings.trainer.num_threads or len(cores))
    keep_freed_memory()


def leave(code: int) -> NoReturn:
    """End the process now: everything is closed, and a step that may still run in the training thread is of no use any more.

    Skips the interpreter's teardown, which takes seconds with torch loaded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
