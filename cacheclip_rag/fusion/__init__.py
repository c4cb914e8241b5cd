"""Fusion: assemble stored KV at true positions, recompute the chosen rows exactly."""
