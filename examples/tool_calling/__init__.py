"""A model that learns to use a calculator. See run.yaml beside this file."""
