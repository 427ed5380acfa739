"""The chaos test's model: a digest over everything that was trained, with which option and in which order."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sample_bus.sample import Sample
from tests.integration.chaos import rollouts


class Trained(NamedTuple):
    """One sample's part in a step."""

    issue: int
    seat: int
    attempt: int
    rate: float
    """Learning rate of its step."""


class Weights:
    def __init__(self) -> None:
        self.digest = ""
        self.trained: list[Trained] = []

    def train(self, samples: Sequence[Sample], rate: float) -> float:
        """One step; returns its loss."""
        for sample in samples:
            text = f"{self.digest} {rate} {sample.rollout_id} {sample.attempt} {sample.reward} {sample.tokens.tobytes().hex()}"
            self.digest = hashlib.sha256(text.encode()).hexdigest()
            self.trained.append(Trained(rollouts.issue_of(sample.group_id), sample.seat, sample.attempt, rate))
        return int(self.digest[:8], 16) / 2**32

    def save(self, directory: Path) -> None:
        with (directory / "weights.json").open("w") as file:
            json.dump({"digest": self.digest, "trained": self.trained}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, directory: Path) -> None:
        plain = json.loads((directory / "weights.json").read_text())
        self.digest = plain["digest"]
        self.trained = [Trained(*one) for one in plain["trained"]]

    @classmethod
    def made_anew(cls, trained: Sequence[Trained]) -> Weights:
        """What these samples make, taken one by one from where they are made."""
        weights = cls()
        for one in trained:
            weights.train([rollouts.sample_of(one.issue, one.seat, one.attempt, incarnation="")], one.rate)
        return weights
