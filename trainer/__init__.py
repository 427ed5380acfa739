"""The trainer daemon: takes samples from the bus, trains, publishes policy versions."""
