"""Treatment of logits: the host's processors along a draft tree, random numbers, acceptance rules."""
