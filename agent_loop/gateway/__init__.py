"""An OpenAI-compatible HTTP interface to sessions, for agents that are programs of their own.

Invariant: what a program sends decides what the model is shown; what is trained is what the session recorded.
"""
