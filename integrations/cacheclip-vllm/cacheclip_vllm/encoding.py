"""Chunk KV of the primary computed by vLLM: batched by its scheduler, with its numerics and its weights.

>>> with vllm_engine(primary="my-model", store="my-store", dtype="bfloat16") as engine:
...     engine.precompute(texts)

The auxiliary model's KV is computed in this process, as ever. A chunk is encoded as the engine does it: after the KV
of the shared prefix and the passages, if there are any. vLLM computed or read that KV before, and gets it back for
every chunk in a file.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cacheclip_rag import (
    CacheClipEngine,
    CacheClipError,
    ConfigurationError,
    EncodingError,
    EngineConfig,
    MissingExtraError,
    ModelError,
)
from cacheclip_rag.models import concrete, resolve
from cacheclip_rag.planning import PlanningRuntime, load_planning

from .captures import CAPTURE, Capture, read_capture, remove_capture, remove_context, write_context
from .internals import check_vllm, differs, is_tried, probe_ids
from .offline import engine_options, worker_of
from .served import Served

BATCH_CHARACTERS = 32_000
"""Characters of chunks that vLLM gets at once: several of its steps. The KV of twice so many is in memory
meanwhile: of these, and of those that are written."""
_SHARED_MEMORY = Path("/dev/shm")
_MOST_DIFFERENCE = 0.1
"""Of KV behind KV that was given back, by other rounding: a share of what tells tokens apart. Without what comes
before, it would be all of it."""
_SAME_KV = "tokens to have the same KV behind computed KV as behind KV that is given back"
_LEAST_MEMORY = 4 << 30
"""Bytes that must be free in shared memory for KV to go through it; containers often have little."""


def encoding_options(
    folder: str | PathLike[str],
    store: str | PathLike[str] | None = None,
    *,
    namespace: str = "default",
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that make it compute chunks; with a store it also answers fused prompts, as with
    :func:`~cacheclip_vllm.offline.engine_options`.

    Args:
        folder: where KV goes between vLLM and this process; memory (``/dev/shm``) is best.
        device: ``cpu`` or ``gpu``.
    """
    options = engine_options(store, namespace=namespace, device=device)
    options["kv_transfer_config"]["kv_connector_extra_config"]["exchange"] = str(Path(folder).absolute())
    options["kv_transfer_config"] |= {
        "kv_connector": "CapturingConnector",
        "kv_connector_module_path": "cacheclip_vllm.capturing",
    }
    return options


class ChunkEncoder:
    """Computes chunks by a ``vllm.LLM`` that was made with :func:`encoding_options`."""

    def __init__(self, llm: Any, runtime: PlanningRuntime, folder: str | PathLike[str]) -> None:
        """``llm``: the LLM, or a function that starts it, called at the first chunk. ``runtime``: the primary without
        its weights. ``folder``: that of :func:`encoding_options`."""
        self._llm, self._runtime, self._folder = llm, runtime, Path(folder)
        self._is_started = False
        self._context: tuple[torch.Tensor, str] | None = None
        """The KV that the last chunks came after, and the name of its file."""

    @property
    def llm(self) -> Any:
        """The LLM; starts it."""
        if not self._is_started:
            if callable(self._llm) and not hasattr(self._llm, "generate"):
                self._llm = self._llm()
            _check_agreement(Served.of(self._llm.llm_engine.vllm_config), self._llm, self._runtime)
            if not is_tried():
                self._check_version()
            self._is_started = True
        return self._llm

    def __call__(self, chunks: Sequence[Sequence[int]], context: torch.Tensor | None = None) -> list[torch.Tensor]:
        """KV of chunks, as :meth:`~cacheclip_rag.runtime.base.Runtime.encode_many`. Raises EncodingError: some chunks
        failed."""
        from vllm import SamplingParams

        start = 0 if context is None else context.shape[3]
        before = self._written(context) if context is not None and start else None
        captures = [Capture(secrets.token_hex(16), start, before) for _ in chunks]
        prompts = [{"prompt_token_ids": [int(ids[0])] * start + list(ids)} for ids in chunks]
        given = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                extra_args={"kv_transfer_params": {CAPTURE: capture.to_dict()}},
            )
            for capture in captures
        ]
        try:
            outputs = self._answers(prompts, given)
            found = [self._found(*each) for each in zip(captures, outputs, chunks, strict=True)]
        finally:
            for capture in captures:
                remove_capture(self._folder, capture.name)
        failed = [each for each in found if isinstance(each, str)]
        if failed:
            reasons = "; ".join(dict.fromkeys(failed))
            raise EncodingError(
                f"vLLM did not compute {len(failed)} of {len(chunks)} chunks: {reasons}. Ingest again: what is stored "
                "stays.",
                [None if isinstance(each, str) else each for each in found],
            )
        return [each for each in found if not isinstance(each, str)]

    def _check_version(self) -> None:
        """Raise ConfigurationError unless tokens have the same KV behind computed KV as behind KV given back."""
        ids = probe_ids(self._runtime)
        half = len(ids) // 2
        self._is_started = True
        try:
            (whole,) = self([ids])
            (found,) = self([ids[half:]], whole[:, :, :, :half])
        except EncodingError as error:
            raise differs(_SAME_KV, str(error)) from error
        finally:
            self._is_started = False
            self.close()
        last, expected = found[-1].float(), whole[-1, :, :, half:].float()  # (2, num_kv_heads, num_tokens, head_dim)
        difference = float((last - expected).norm() / (expected - expected.mean(2, keepdim=True)).norm())
        if not difference <= _MOST_DIFFERENCE:
            raise differs(_SAME_KV, f"a difference of {difference:.0%}")

    def close(self) -> None:
        """Delete what this encoder left in its folder."""
        if self._context is not None:
            remove_context(self._folder, self._context[1])
            self._context = None

    def _answers(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        llm = self.llm
        try:
            found: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        except ValueError as error:  # of vLLM: a chunk that is too long for it
            raise EncodingError(f"vLLM refuses a chunk: {error}", [None] * len(prompts)) from error
        return found

    def _found(self, capture: Capture, output: Any, ids: Sequence[int]) -> torch.Tensor | str:
        """KV of one chunk, keys before RoPE; or why there is none."""
        outcome = (output.kv_transfer_params or {}).get("cacheclip", {})
        expected = "computed" if capture.context is None else "fused"
        if outcome.get("outcome") != expected:
            return str(outcome.get("reason") or "its request was not served by this package's connector")
        runtime = self._runtime
        try:
            kv = read_capture(self._folder, capture.name, runtime.num_kv_heads)
        except ValueError as error:
            return str(error)
        shape = (runtime.num_layers, 2, runtime.num_kv_heads, len(ids), runtime.head_dim)
        if tuple(kv.shape) != shape:
            return f"its KV has shape {tuple(kv.shape)}, expected {shape}"
        return runtime.position_free(kv, capture.start)

    def _written(self, context: torch.Tensor) -> str:
        if self._context is not None and self._context[0] is context:
            return self._context[1]
        self.close()
        name = write_context(self._folder, self._runtime.placed(context), self._runtime.fingerprint)
        self._context = (context, name)
        return name


def encoding_primary(
    llm: Any,
    folder: str | PathLike[str],
    *,
    quantization: str | None = None,
    max_tokens: int | None = None,
    keep: Callable[[ChunkEncoder], None] = lambda encoder: None,
) -> Callable[..., PlanningRuntime]:
    """What an engine takes as ``load_primary``, so that vLLM computes its primary's chunks. ``llm``, ``folder``: those
    of :class:`ChunkEncoder`; ``max_tokens``: vLLM's ``max_model_len``; ``keep``: called with the encoder when it is
    made."""

    def load(name: str, *, dtype: str) -> PlanningRuntime:
        planning = load_planning(name, dtype=dtype, quantization=quantization)
        if planning.pinned_rope:
            raise ModelError(
                f"the rotary frequencies of model {name!r} depend on the length, and vLLM's differ from ours. Ingest "
                "without --backend vllm; vLLM answers such a model by plain prefill."
            )
        encoder = ChunkEncoder(llm, planning, folder)
        keep(encoder)
        longest = (max_tokens or planning.context_tokens) - 1  # vLLM always makes a token
        return planning.encoding_by(encoder, batch_characters=BATCH_CHARACTERS, max_tokens=longest)

    return load


def start_vllm(model: str, dtype: str, ours: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """A ``vllm.LLM``.

    Args:
        ours: what this package needs, which ``options`` must not change.
        options: further arguments of ``vllm.LLM``.

    Raises:
        ConfigurationError: an option is not one of vLLM's, changes what chunks are computed with, or is set here.
        MissingExtraError: vLLM is not installed. ConfigurationError: it lacks what is used of it.
        ModelError: vLLM does not start; the message has its reason.
    """
    _check_options(options, ours)
    # before vLLM is imported: stdout is the caller's
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    check_vllm()
    from vllm import LLM

    folder = str(resolve(model))
    try:
        return LLM(folder, dtype=dtype, **{"enforce_eager": True, "disable_log_stats": True, **options, **ours})
    except TypeError as error:
        raise ConfigurationError(f"vLLM does not take these options ({error}). See vLLM's EngineArgs.") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelError(f"vLLM does not start with model {model!r}: {error}") from error


@contextmanager
def vllm_engine(
    config: EngineConfig | None = None, *, vllm: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[CacheClipEngine]:
    """An engine that stores chunks, the primary's computed by vLLM. vLLM starts at the first chunk that is not stored,
    and ends with the block. Such an engine answers nothing: give the store to a
    :class:`~cacheclip_vllm.planner.Planner`, or to an engine with the weights.

    Args:
        vllm: arguments of ``vllm.LLM`` besides model, dtype and connector, such as ``tensor_parallel_size``.

    Other arguments are those of :class:`~cacheclip_rag.engine.CacheClipEngine`.

    Raises:
        ConfigurationError, MissingExtraError, ModelError: as for :func:`start_vllm`, some of them at the first chunk.
    """
    given = dict(vllm or {})
    settings = EngineConfig.from_options(config, options)
    encoders: list[ChunkEncoder] = []
    started: list[Any] = []
    _check_options(given, {})
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vLLM", "vllm")
    settings = concrete(settings)
    longest = given.get("max_model_len")
    with TemporaryDirectory(prefix="cacheclip-", dir=_exchange()) as folder:
        ours = encoding_options(folder, device=worker_of(settings.device))

        def start() -> Any:
            started.append(
                start_vllm(settings.primary, settings.dtype, {**ours, "enable_prefix_caching": False}, given)
            )
            return started[0]

        load = encoding_primary(
            start,
            folder,
            quantization=given.get("quantization"),
            max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
            keep=encoders.append,
        )
        engine = CacheClipEngine(settings, load_primary=load)
        try:
            yield engine
        finally:
            engine.close()
            for encoder in encoders:
                encoder.close()
            for llm in started:
                llm.llm_engine.engine_core.shutdown()


def _exchange() -> Path | None:
    """Where KV goes between vLLM and this process; None: the system's folder for temporary files."""
    enough = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= _LEAST_MEMORY
    return _SHARED_MEMORY if enough else None


def _check_options(options: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    refused = {
        **dict.fromkeys((*ours, "worker_cls", "kv_transfer_config"), "this package sets it"),
        **dict.fromkeys(("model", "dtype"), "it is the engine's primary or dtype"),
        "quantization_config": "weights would be quantised in a way that the stored chunks' keys do not tell. Give "
        "quantization, a name",
        **dict.fromkeys(("hf_overrides", "hf_config_path"), "it would change the model that chunks are computed with"),
        "enable_lora": "LoRA changes the KV",
    }
    for name, why in refused.items():
        if options.get(name) is not None:
            raise ConfigurationError(f"vLLM's option {name} cannot be given: {why}.")
    dtype = options.get("kv_cache_dtype", "auto")
    if dtype != "auto":
        raise ConfigurationError(
            f"vLLM's option kv_cache_dtype cannot be {dtype!r} here: chunks would be computed from a rounded cache. "
            "Leave it out; the engine that answers may have it."
        )


def _check_agreement(served: Served, llm: Any, runtime: PlanningRuntime) -> None:
    """Raise ConfigurationError if vLLM runs other weights than the keys of stored chunks say."""
    model = llm.llm_engine.vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        found = load_planning(model.model, dtype=dtype, quantization=served.quantization).fingerprint
    except CacheClipError as error:
        raise ModelError(f"vLLM's model cannot be compared with the primary: {error}") from error
    if found != runtime.fingerprint:
        raise ConfigurationError(
            f"vLLM runs {model.model!r} as {dtype} with quantization {served.quantization}, which is not the primary "
            f"{runtime.name!r} of the settings. Give both the same model, dtype and quantization."
        )
