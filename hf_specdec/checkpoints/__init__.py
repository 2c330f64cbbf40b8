"""Reading of draft checkpoints."""
