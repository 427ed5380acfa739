"""An agent that knows nothing of Headrace, trained as it is. See run.yaml beside this file."""
