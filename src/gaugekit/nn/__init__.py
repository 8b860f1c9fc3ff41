"""Layers built on the geometry of states: norms, relational attention, attention in invariants. Torch only."""
