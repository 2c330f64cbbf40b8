"""What is done with logits: the host's processors along a draft tree, random numbers, acceptance rules."""
