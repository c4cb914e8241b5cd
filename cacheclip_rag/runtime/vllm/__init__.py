"""Selective recompute inside vLLM, which is not changed: a KV connector and a worker class, named by module path.

``connector`` and ``worker`` import vLLM; the other modules do not.
"""
