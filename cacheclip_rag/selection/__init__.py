"""Selection: which chunk tokens to recompute. Scores, their mapping between tokenizers, and grouping."""
