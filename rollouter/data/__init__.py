"""The data of a run: sources, rows, the order of issues, what is left out and why."""
