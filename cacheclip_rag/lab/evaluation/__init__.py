"""Evaluation: measuring what the methods cost, and what they are worth."""
