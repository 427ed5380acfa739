"""Ways to move samples from one process to another, measured alike by `benchmarks.bus`."""
