"""Drafts from a suffix tree of earlier text (SuffixDecoding)."""
