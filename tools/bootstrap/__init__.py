"""Makes a checkout runnable: the dependencies in a cached environment, and a thin `.venv` that points at it.

Standard library only, for it runs before anything is installed. Invariant: an environment is used only when its
completion marker exists, and the marker is written last, under the environment's file lock.
"""
