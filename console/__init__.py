"""The operator's side: start a run, watch it, change it. Reads and asks through the control channel, like any client."""
