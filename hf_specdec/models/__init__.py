"""The draft networks and how their checkpoints are loaded."""
