"""How long a prompt takes: profiles, and the controller that chooses a recompute ratio by them."""
