"""A prompt as segments, and where every token of it stands."""
