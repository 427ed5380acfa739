"""TRL's GRPOTrainer on the demo's task, in an environment of its own."""
