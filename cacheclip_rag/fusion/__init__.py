"""Fusion: lay the prompt out, assemble stored KV at true positions, recompute the chosen rows exactly."""
