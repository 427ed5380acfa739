"""Tasks of reasoning-gym: `reasoning_gym:NAME` or `reasoning_gym:NAME?size=2000&seed=7&min_numbers=3`, with
`episode.attempts=3` and the like for the environment that plays them.

Invariant: a row follows from the name, the configuration and its number alone, so it is made when it is asked for and is the
same in every process. What its scorer needs stands in `extra_info`: `reasoning_gym` (name, config, index) and `metadata`; what
its environment needs in `episode`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from agent_loop.errors import LoopError
from agent_loop.gym_environment import Episode
from agent_loop.rewards.gym import import_reasoning_gym
from rollouter.data.plain import plain
from rollouter.data.tables import GeneratedTable
from rollouter.errors import DataError

PREFIX = "reasoning_gym:"
_EPISODE = "episode."


def open_reasoning_gym(source: str) -> GeneratedTable:
    """Raises DataError naming the nearest family, or the parameter that it does not take."""
    name, _, query = source.removeprefix(PREFIX).partition("?")
    told = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    config = {key: value for key, value in told.items() if not key.startswith(_EPISODE)}
    episode = {key.removeprefix(_EPISODE): value for key, value in told.items() if key.startswith(_EPISODE)}
    try:
        Episode.of(episode)
    except LoopError as error:
        raise DataError(f"data.source: {source}: {error}") from error
    dataset = make_dataset(name, config)
    recipe = json.dumps({"name": name, "config": told, "size": len(dataset)}, sort_keys=True)

    def make(index: int) -> dict[str, Any]:
        try:
            entry = dataset[index]
        except Exception as error:  # a generator is somebody's program
            raise DataError(f"{source} row {index + 1}: {type(error).__name__}: {error}") from error
        return {
            "prompt": entry["question"],
            "ground_truth": entry["answer"],
            "data_source": f"reasoning_gym/{name}",
            "task_id": f"{name}/{index}",
            "extra_info": {
                "reasoning_gym": {"name": name, "config": config, "index": index},
                "metadata": _plain_parts(entry.get("metadata", {})),
                **({"episode": episode} if episode else {}),
            },
        }

    return GeneratedTable(make, size=len(dataset), name=source, default_source=f"reasoning_gym/{name}", recipe=recipe)


def make_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """The family's data set under this configuration. Raises DataError."""
    try:
        gym = import_reasoning_gym()
    except ImportError as error:
        raise DataError(f"data.source: reasoning_gym does not import: {error}") from error
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise DataError(f"data.source: reasoning_gym has no family {name!r}{hint} ({len(known)} in all)")
    _check_parameters(name, config)
    try:
        return gym.create_dataset(name, **{"seed": 0, **config})
    except ImportError as error:
        raise DataError(f"data.source: reasoning_gym:{name} needs a package that is not installed: {error}") from error
    except Exception as error:  # configurations assert, and raise whatever their authors chose
        raise DataError(f"data.source: reasoning_gym:{name}: {type(error).__name__}: {error}") from error


def _check_parameters(name: str, config: Mapping[str, Any]) -> None:
    """Raises DataError for one that the family does not take, with the nearest and all that it takes."""
    _, kind = importlib.import_module("reasoning_gym.factory").DATASETS[name]
    if not dataclasses.is_dataclass(kind):
        return
    taken = sorted({field.name for field in dataclasses.fields(kind) if field.init} | {"seed", "size"})
    for key in config:
        if key not in taken:
            near = difflib.get_close_matches(key, taken, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            known = ", ".join(taken)
            raise DataError(f"data.source: reasoning_gym:{name} takes no parameter {key!r}{hint}; it takes {known}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _plain_parts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of it that have a plain form; the scorer makes the entry anew and needs none of them."""
    parts: dict[str, Any] = {}
    for key, value in metadata.items():
        try:
            parts[str(key)] = plain(value)
        except TypeError:
            continue
    return parts
