"""Evaluation: measures cost and quality of methods."""
