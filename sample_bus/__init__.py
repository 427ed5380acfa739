"""Samples, their wire format, staleness arithmetic, the bus, the control channel and the ledger."""
