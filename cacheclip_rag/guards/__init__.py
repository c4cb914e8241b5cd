"""Observers of answers: certificates, comparison with full prefill, metrics."""
