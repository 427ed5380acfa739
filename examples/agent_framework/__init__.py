"""An agent of a framework, trained as it is. See run.yaml beside this file."""
