"""Agent loops: one task in, one trajectory of tokens out; the engine's seam, sessions and rewards.

Invariant: the tokens trained on are the tokens sampled. Text is never turned back into tokens that an engine produced.
"""
