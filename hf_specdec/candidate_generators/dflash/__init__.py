"""Drafts of DFlash and its kin: a block of tokens in one pass."""
