"""The list of all settings by dotted key: what `--help`, the loader and live changes look names up in."""

from __future__ import annotations

import functools
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from configs.schema import Section, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One setting."""

    key: str
    type_text: str
    """Type as a person writes it, such as `float` or `keep | recompute | finish`."""
    default: Any
    scope: str | None
    """From when a live change holds; None: fixed for the run."""
    description: str
    bounds: str
    is_text: bool
    is_optional: bool


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Every setting in declaration order."""
    found: dict[str, Leaf] = {}
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for inner, inner_field in field.annotation.model_fields.items():
                found[f"{name}.{inner}"] = _leaf(f"{name}.{inner}", inner_field)
        else:
            found[name] = _leaf(name, field)
    return types.MappingProxyType(found)


def live_keys() -> list[str]:
    """Keys that may change on a running job."""
    return [key for key, leaf in leaves().items() if leaf.scope is not None]


def listing(width: int = 110) -> str:
    """All settings with type, default and meaning, as text for `--help`."""
    lines = []
    for leaf in leaves().values():
        default = "null" if leaf.default is None else str(leaf.default)
        live = f" [live: {leaf.scope}]" if leaf.scope else " [fixed for the run]"
        lines.append(f"  {leaf.key} ({leaf.type_text}{leaf.bounds}, default {default}){live}")
        lines += textwrap.wrap(leaf.description, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _leaf(key: str, field: FieldInfo) -> Leaf:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    scope = extra.get("live")
    names = _names(field.annotation)
    return Leaf(
        key=key,
        type_text=" | ".join(names),
        default=field.default,
        scope=str(scope) if scope else None,
        description=(field.description or "").strip(),
        bounds=_bounds(field),
        is_text=set(names) <= {"str", "path", "null"} or typing.get_origin(field.annotation) is typing.Literal,
        is_optional="null" in names,
    )


def _names(annotation: Any) -> list[str]:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    if origin in (typing.Union, types.UnionType):
        return [name for argument in typing.get_args(annotation) for name in _names(argument)]
    if origin is tuple:
        return [f"list of {' | '.join(_names(typing.get_args(annotation)[0]))}"]
    if annotation is type(None):
        return ["null"]
    return [str(getattr(annotation, "__name__", annotation)).lower()]


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in field.metadata
        for name, sign in signs.items()
        if getattr(constraint, name, None) is not None
    ]
    return f" {', '.join(parts)}" if parts else ""
