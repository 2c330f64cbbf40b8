"""Layers that draft networks are made of."""
