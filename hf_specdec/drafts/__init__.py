"""Drafts: the tokens proposed in one cycle, and the shape of the tree that they form.

`tree` has the drafts of a batch, `topology` what follows from the parents of their nodes, `static` the shapes that are
decided before anything is generated.
"""

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
