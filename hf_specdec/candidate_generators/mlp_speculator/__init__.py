"""Drafts of the MLP speculator."""
