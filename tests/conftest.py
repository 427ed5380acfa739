"""What all tests share: one thread per process, enough open files, no time limit inside property tests (machines are noisy)."""

from __future__ import annotations

import os
import resource

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

NEEDED_FILES = 2048
"""Open files: clients and stand-in servers of hundreds of connections live in one process."""

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if soft != resource.RLIM_INFINITY and soft < NEEDED_FILES:
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (NEEDED_FILES if hard == resource.RLIM_INFINITY else min(NEEDED_FILES, hard), hard)
    )

settings.register_profile("headrace", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("headrace")
