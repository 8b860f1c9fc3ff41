"""Find, measure and remove the redundancy of transformers."""
