"""Rows of a source in memory: the names by which the rest of the rollouter knows them."""

from rollouter.data.plain import plain
from rollouter.data.rows import Message, Row
from rollouter.data.sources import load_rows

__all__ = ["Message", "Row", "load_rows", "plain"]
