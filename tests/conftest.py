"""What all tests share: one thread per process, no time limit inside property tests (machines are noisy)."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

settings.register_profile("headrace", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("headrace")
