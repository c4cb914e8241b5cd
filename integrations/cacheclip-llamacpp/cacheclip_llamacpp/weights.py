"""Opens GGUF files, and says which models cannot be run here."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import weakref
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from cacheclip_rag import ModelError, UnsupportedModelError
from cacheclip_rag.plugins import cache_home, python_command, python_environment

from . import trial
from .library import errors, library, library_version

_ROPE_NONE = -1
_CHUNKED_ATTENTION = ("llama4",)
"""Architectures whose windows are chunks of positions, in which moved KV would be in another chunk."""
_TRIAL_CPU_S = 300
"""Most seconds of a processor for two tokens: the largest models need less."""
_KILLED = -9
"""Exit code of a process that the system ended, as it does for want of memory."""
_ENDLESS = -24
"""That of a process that needed more of a processor than it may."""


def check_header(path: Path, name: str, digest: str) -> None:
    """Let another process load a file first (:mod:`.trial`), once for its ``digest`` and the version of llama.cpp.

    Raises:
        ModelError: llama.cpp ended that process, or never came to an end.
    """
    passed = cache_home() / "fingerprints" / f"{digest}.{library_version()}.loads"
    if os.path.exists(passed):  # False where nobody may look
        return
    command = python_command(trial.__file__, os.fspath(path), str(_TRIAL_CPU_S))
    environment = python_environment(GGML_NO_BACKTRACE="1")  # a debugger would take ten seconds
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if ended.returncode in (0, 1):  # 1: an error of llama.cpp or Python, which this process gets as well
        if not ended.returncode:
            with suppress(OSError):  # the cache may be read-only
                passed.touch()
        return
    if ended.returncode == _KILLED:
        raise ModelError(f"model {name!r}: the system ended a process that loaded {path}. Is there memory for it?")
    stated = re.findall(rb"\.\w+:\d+: (.+)", ended.stderr)  # a line of its source, and what it says
    if stated:
        why = stated[-1].decode(errors="replace")
    else:
        why = "it computes without end" if ended.returncode == _ENDLESS else f"exit code {ended.returncode}"
    raise ModelError(
        f"model {name!r}: llama.cpp would end this process over {path} ({why}). Expected a GGUF file whose header has "
        "the numbers of its weights. Fetch it again, or update llama-cpp-python."
    )


class GgufWeights:
    """The model of one GGUF file, as llama.cpp holds it."""

    def __init__(self, path: Path, name: str, *, device: str = "cpu", vocabulary_only: bool = False) -> None:
        """
        Args:
            device: ``cpu``, or another device for all layers if llama.cpp was built for it.
            vocabulary_only: loads no weights.

        Raises:
            ModelError: the file is damaged, or unknown to this version of llama.cpp.
        """
        api = library()
        params = api.llama_model_default_params()
        params.vocab_only = vocabulary_only
        # weights in a mapped file would change with it, and the process would end if the file got shorter
        params.load_mode, params.lazy_mode = api.LLAMA_LOAD_MODE_NONE, api.LLAMA_LAZY_MODE_OFF
        params.n_gpu_layers = 0 if device == "cpu" else 1 << 20
        _, _, number = device.partition(":")
        if number:  # one GPU of several
            params.split_mode, params.main_gpu = api.LLAMA_SPLIT_MODE_NONE, int(number)
        self.name, self._has_weights, self.on_gpu = name, not vocabulary_only, device != "cpu"
        errors.clear()
        self.pointer = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            why = next(iter(errors), "it gives no reason")
            raise ModelError(
                f"model {name!r}: llama.cpp cannot read {path} ({why}). Expected a whole GGUF file of an architecture "
                "that this version knows. Fetch it again, or update llama-cpp-python."
            )
        self._freed = weakref.finalize(self, api.llama_model_free, self.pointer)
        self._freed.atexit = False  # the process's end frees all; llama.cpp's threads may be gone by then
        self.vocabulary = api.llama_model_get_vocab(self.pointer)

    def meta(self, key: str) -> str | None:
        """A value of the file's header as text; None if it has none. ``{}`` in a key is the architecture."""
        api = library()
        if "{}" in key:
            key = key.format(self.meta("general.architecture"))
        buffer = ctypes.create_string_buffer(1 << 12)
        length = api.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return None if length < 0 else buffer.value.decode(errors="replace")

    @property
    def template(self) -> str | None:
        """The chat template."""
        found: bytes | None = library().llama_model_chat_template(self.pointer, None)
        return None if found is None else found.decode(errors="replace")

    @property
    def context_tokens(self) -> int:
        """Positions that the model was trained for."""
        return int(library().llama_model_n_ctx_train(self.pointer))

    @property
    def window(self) -> int:
        """Tokens of the sliding window; 0: none."""
        return max(0, int(library().llama_model_n_swa(self.pointer)))

    @property
    def rotates_pairs(self) -> bool:
        """Whether neighbouring numbers of a key are rotated together, not those half a head apart."""
        return bool(library().llama_model_rope_type(self.pointer) == library().LLAMA_ROPE_TYPE_NORM)

    def check_supported(self) -> None:
        """Raise UnsupportedModelError, with the reason, if the model's KV cannot be moved exactly."""
        why = self._obstacle()
        if why is not None:
            self.refuse(why)

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(
            f"model {self.name!r} ({self.meta('general.architecture')}) cannot be used in llama.cpp: {why}. Choose a "
            "model that attends to all earlier tokens or to a sliding window, with rotary embeddings, or this one's "
            "checkpoint for transformers, which runs more."
        )

    def _obstacle(self) -> str | None:
        api, model = library(), self.pointer
        if not api.llama_model_has_decoder(model) or api.llama_model_has_encoder(model):
            return "it is no decoder of text"
        if self.meta("{}.attention.causal") == "false":
            return "it attends to later tokens, as embedding models do"
        if api.llama_model_is_diffusion(model):
            return "it writes all tokens at once"
        if api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model):
            return "its state is recurrent, so that the part of one chunk cannot be cut out and moved"
        kind = api.llama_model_rope_type(model)
        if kind == _ROPE_NONE:
            return "its KV depends on positions in another way than by rotation, so that it cannot be moved"
        if kind not in (api.LLAMA_ROPE_TYPE_NORM, api.LLAMA_ROPE_TYPE_NEOX):
            return "its positions have several dimensions (M-RoPE), and llama.cpp cannot shift those"
        if self.meta("{}.rope.scaling.attn_factor") is not None and self.meta("{}.rope.scaling.type") != "yarn":
            return "its rotary frequencies change with the size of the context (LongRoPE)"
        if self.meta("general.architecture") in _CHUNKED_ATTENTION:
            return "it attends within chunks of positions, so that moved KV would be in another one"
        if self._has_weights and self.context_tokens <= 0:
            return f"its file says that it was trained for {self.context_tokens} positions"
        return None


@lru_cache(8)
def read_header(path: Path, name: str, state: object) -> GgufWeights:
    """Header and vocabulary of a file, without its weights; read once while the file's ``state`` stays."""
    return GgufWeights(path, name, vocabulary_only=True)
