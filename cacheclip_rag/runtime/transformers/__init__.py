"""The runtime over unmodified transformers models. Every touch of transformers' internals is in this folder."""
