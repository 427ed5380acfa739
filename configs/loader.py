"""Loading settings: defaults < YAML file < environment < `key=value` arguments.

Invariant: whatever is unknown, of a wrong type, out of range or contradictory is refused here, before anything starts. Every
problem is one line with its key, what was got, what was expected, and for an unknown key the nearest valid one.
Environment variables are `HEADRACE__SECTION__KEY` (two underscores), such as `HEADRACE__TRAINER__LEARNING_RATE=1e-4`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.auto import ENABLED, THRESHOLD, spelled_out
from configs.errors import ConfigError
from configs.keys import Leaf, leaves
from configs.schema import Section, Settings

ENVIRONMENT_PREFIX = "HEADRACE__"


def load(config: Path | None, overrides: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from `config`, the environment and `key=value` overrides.

    Raises ConfigError with one line per problem.
    """
    origins: dict[str, str] = {}
    values: dict[str, Any] = {}
    problems: list[str] = []
    if config is not None:
        for key, value, origin in _from_yaml(config):
            problems += _take(values, origins, key, value, origin)
    for key, value, origin in _from_environment(os.environ if environment is None else environment):
        problems += _take(values, origins, key, value, origin)
    for text in overrides:
        key, separator, raw = text.partition("=")
        if not separator or not key:
            problems.append(f"argument {text!r}: expected key=value")
            continue
        problems += _take(values, origins, key, parse_value(key, raw), f"argument {text}")
    if problems:
        raise ConfigError("\n".join(problems))
    if THRESHOLD in origins:
        origins.setdefault(ENABLED, origins[THRESHOLD])
    return validate(spelled_out(values), origins)


def validate(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Settings:
    """Settings from dotted keys. Raises ConfigError, one line per problem."""
    try:
        return Settings.model_validate(_nest(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error, origins or {}))) from None


def dump(settings: Settings) -> dict[str, Any]:
    """Every leaf as dotted key → plain value (JSON types)."""
    tree = settings.model_dump(mode="json")
    return {key: _dig(tree, key) for key in leaves()}


def parse_value(key: str, raw: str) -> Any:
    """The value that `raw` spells for `key`: text fields keep it as it stands, all others read it as a YAML scalar or list."""
    leaf = leaves().get(key)
    if leaf is not None and leaf.is_text:
        return None if leaf.is_optional and raw in ("null", "none", "~", "") else raw
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        return raw


def nearest_key(key: str, valid: Sequence[str]) -> str | None:
    """The valid key that `key` most likely meant: the same leaf in another section, else the closest spelling."""
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [candidate for candidate in valid if candidate.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return same_leaf[0]
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    if close:
        return close[0]
    by_leaf = {candidate.rsplit(".", 1)[-1]: candidate for candidate in valid}
    begun = [name for name in by_leaf if leaf and name.startswith(leaf)]
    close = begun or difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.3)
    return by_leaf[close[0]] if close else None


def unknown_key(key: str, origin: str, valid: Sequence[str] | None = None) -> str:
    """One line that refuses `key` and names the nearest valid one."""
    near = nearest_key(key, list(leaves()) if valid is None else valid)
    return f"{origin}: unknown setting {key!r}" + (f"; nearest valid: {near}" if near else "")


def _take(values: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> list[str]:
    if key not in leaves():
        return [unknown_key(key, origin)]
    values[key] = value
    origins[key] = origin
    return []


def _from_yaml(path: Path) -> Iterator[tuple[str, Any, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: got no mapping, expected a mapping of settings")
    yield from _walk(root, "", path)


def _walk(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[tuple[str, Any, str]]:
    seen: set[str] = set()
    constructor = yaml.SafeLoader("")
    for key_node, value_node in node.value:
        key = prefix + str(key_node.value)
        origin = f"{path}:{key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigError(f"{origin}: {key!r} is given twice")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and not prefix:
            if key not in _sections():
                raise ConfigError(f"{origin}: unknown section {key!r}" + _nearest_section(key))
            yield from _walk(value_node, key + ".", path)
        elif key in _sections():
            if value_node.value not in ("", "null", "~"):
                raise ConfigError(f"{origin}: {key} is a section, got {value_node.value!r}, expected keys below it")
        else:
            yield key, constructor.construct_object(value_node, deep=True), origin


def _sections() -> list[str]:
    return [
        name
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]


def _nearest_section(key: str) -> str:
    close = difflib.get_close_matches(key, _sections(), n=1, cutoff=0.4)
    return f"; nearest valid: {close[0]}" if close else ""


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield key, parse_value(key, environment[name]), f"environment {name}"


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        if section:
            tree.setdefault(section, {})[leaf] = value
        else:
            tree[leaf] = value
    return tree


def _dig(tree: Mapping[str, Any], key: str) -> Any:
    section, _, leaf = key.rpartition(".")
    return tree[section][leaf] if section else tree[leaf]


def _lines(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in problem["loc"] if not isinstance(part, int))
        message = problem["msg"].removeprefix("Value error, ")
        if not key:
            yield from message.split("; ")
            continue
        leaf: Leaf | None = leaves().get(key)
        where = f"{origins[key]}: " if key in origins else ""
        expected = f" ({leaf.type_text})" if leaf else ""
        yield f"{where}{key}: got {problem.get('input')!r}: {message[0].lower()}{message[1:]}{expected}"
