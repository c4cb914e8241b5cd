"""What watches answers: certificates, comparison with full prefill in the background, metrics."""
