"""How long prefills and readings take on this machine: profiles for ``recompute_ratio=\"auto\"``."""
