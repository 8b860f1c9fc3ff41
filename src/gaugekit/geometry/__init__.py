"""States: what normalization does to a vector, what a frame is, and which keys attention can pick. Torch only."""
