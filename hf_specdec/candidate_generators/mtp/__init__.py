"""Drafts of multi-token prediction layers."""
