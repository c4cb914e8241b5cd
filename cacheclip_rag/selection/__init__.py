"""Selection of the chunk tokens to recompute: scores, their mapping between tokenizers, budgets and groupings."""
