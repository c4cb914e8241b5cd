"""Selective recompute inside vLLM, which is not changed: a KV connector and a worker class, named by module path.

``connector``, ``capturing``, ``worker``, ``loading``, ``rows`` and ``forcing`` import vLLM; the other modules do not.
"""
