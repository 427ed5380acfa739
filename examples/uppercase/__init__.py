"""A task and a reward of one's own: write a word in capital letters. See run.yaml beside this file."""
