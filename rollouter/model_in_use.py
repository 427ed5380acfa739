"""The model that this rollouter serves: its tokenizer made the prompts, and its directory started the engines.

Invariant: for as long as the rollouter lives it is the trainer's; tokens of one model are never trained into another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.model_files import model_files, other_files
from rollouter.errors import AnotherModel
from sample_bus.messages import TrainerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInUse:
    directory: str
    dtype: str
    files: Mapping[str, str]
    """Name to digest, as the trainer reads them; empty where it says nothing of them."""

    @classmethod
    def of(cls, status: TrainerStatus) -> ModelInUse | None:
        """None: the trainer has not prepared it yet."""
        if status.model_dir is None or status.model_dtype is None:
            return None
        return cls(directory=status.model_dir, dtype=status.model_dtype, files=status.model_files)

    def check(self, status: TrainerStatus) -> None:
        """Raise AnotherModel if the trainer has prepared another one. The same files may lie in another directory."""
        now = ModelInUse.of(status)
        if now is None:
            return
        others = other_files(now.files, self.files)
        if others or (not now.files and now.directory != self.directory):
            which = f" (not the same: {', '.join(others)})" if others else ""
            raise AnotherModel(
                f"the trainer (incarnation {status.incarnation}) came with the model in {now.directory}, expected the one in "
                f"{self.directory}, which is served here{which}; start this rollouter again"
            )
        if now.dtype != self.dtype:
            raise AnotherModel(
                f"the trainer (incarnation {status.incarnation}) computes in {now.dtype}, expected {self.dtype}, in which the "
                "engines were started (model.dtype); start this rollouter again"
            )

    def check_here(self) -> None:
        """Raise AnotherModel if the directory holds another model on this host than on the trainer's. Blocking."""
        directory = Path(self.directory)
        if self.files and directory.is_dir() and (others := other_files(model_files(directory), self.files)):
            raise AnotherModel(
                f"{directory}: on this host it is another model than on the trainer's (not the same: {', '.join(others)})"
            )
