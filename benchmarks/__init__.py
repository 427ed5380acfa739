"""Measurements of the whole, each a module to run: `python -m benchmarks.NAME`."""
