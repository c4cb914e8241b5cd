"""Suites that third parties inherit to prove their own parts, and tiny models to run them on. They need pytest."""
