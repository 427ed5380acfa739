"""Maintainers' programs; nothing here is imported by the product."""
