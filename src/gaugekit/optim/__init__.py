"""Training whose path does not depend on the choice of coordinates: steps without motion along symmetry orbits."""
