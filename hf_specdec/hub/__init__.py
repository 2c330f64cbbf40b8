"""Checkpoints: what they are and how they are loaded."""
