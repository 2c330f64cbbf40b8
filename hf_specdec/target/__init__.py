"""The target model as the loop sees it: it reads tokens into slots and gives logits for every node."""

from .contract import check_transformers


# Here, because all ways to a call lead through this room, and none before there is one.
check_transformers()
