"""Profiles of a machine, and recompute ratios by predicted time."""
