"""A program of its own, which imports nothing of this package: loads a GGUF file in llama.cpp, computes two tokens, and
moves their KV.

At some wrong numbers in a file's header, llama.cpp returns no error: it ends its process, or computes without end. Here
that is this process (:func:`.weights.check_header`). Errors that it returns are left to the process that uses the file.
"""

from __future__ import annotations

import ctypes
import os
import sys


def load_and_compute(path: str) -> bool:
    """Whether llama.cpp did it. May not return."""
    import llama_cpp.llama_cpp as api

    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False  # weights are read where the file has them; none is copied
    model = api.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        return False
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 2, 2
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = api.llama_init_from_model(model, params)
    if not context:
        return False
    tokens, memory = (ctypes.c_int32 * 2)(), api.llama_get_memory(context)
    if api.llama_decode(context, api.llama_batch_get_one(tokens, 2)):
        return False
    if not api.llama_memory_can_shift(memory):
        return True
    api.llama_memory_seq_add(memory, 0, -1, -1, 1)  # done at the next call
    return not api.llama_decode(context, api.llama_batch_get_one(tokens, 2))


if __name__ == "__main__":
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        seconds, (_, most) = int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_CPU)
        if most != resource.RLIM_INFINITY:
            seconds = min(seconds, most - 1)  # at the second limit, the system kills
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os._exit(0 if load_and_compute(sys.argv[1]) else 1)  # llama.cpp's memory is the system's to free
