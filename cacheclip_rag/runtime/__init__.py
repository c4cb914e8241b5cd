"""Running a model: the protocol, and its implementations."""
