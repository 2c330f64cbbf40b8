"""The decoding loop and what it stands on: the target model, its slot cache, the returned output."""

from .contract import check_transformers


# Here, because all ways to a call lead through this room, and none before there is one.
check_transformers()
