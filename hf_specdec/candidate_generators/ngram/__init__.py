"""Drafts that continue an n-gram as it went on before."""
