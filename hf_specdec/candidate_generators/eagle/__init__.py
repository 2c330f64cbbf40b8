"""Drafts of EAGLE and EAGLE-3 heads."""
