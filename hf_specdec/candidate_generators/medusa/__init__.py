"""Drafts of Medusa heads."""
