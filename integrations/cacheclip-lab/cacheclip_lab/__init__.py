"""The laboratory: evaluation and training. It imports the core; the core never imports it."""
