"""Two methods in one: a retrieval method, and one with weights where it finds nothing."""
