"""Drafts (`tree`), what follows from the parents of their nodes (`topology`), and shapes decided before (`static`)."""

from .static import PUBLISHED_TREES, TokenTree, parse_token_tree
from .topology import TreeTopology, chain_topology, node_depths, renumbered, static_topology
from .tree import DraftTree


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
