"""Models: finding weights, checking that their KV can be reused, and running them.

``catalog`` and ``pull`` need no torch; ``runtime`` is the one module that touches transformers' internals.
"""
