"""Drafts, what follows from the parents of their nodes (`tree`), and shapes decided before (`static`)."""

from .static import PUBLISHED_TREES, TokenTree, parse_token_tree
from .tree import DraftTree, TreeTopology, chain_topology, node_depths, renumbered, static_topology


__all__ = [
    "PUBLISHED_TREES",
    "DraftTree",
    "TokenTree",
    "TreeTopology",
    "chain_topology",
    "node_depths",
    "parse_token_tree",
    "renumbered",
    "static_topology",
]
