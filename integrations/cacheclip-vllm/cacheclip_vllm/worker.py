"""vLLM's workers, which tell the connector in their process where the model runner is.

``--worker-cls cacheclip_vllm.worker.CPUWorker``, or ``….GPUWorker``. Recompute runs vLLM's own model, and a
connector is not told of it.
"""

from __future__ import annotations

import weakref
from typing import Any

from cacheclip_rag.planning import model_files

_runners: list[tuple[weakref.ref[Any], tuple[object, ...]]] = []
"""The model runners of this process, once their weights are loaded, and the states of the files that they were loaded
from. Several engines can live in one process."""


def model_runner(vllm_config: Any, files: tuple[object, ...]) -> Any:
    """The model runner of an engine in this process, by its config or a copy of it with the same ``model_config``.
    Raises ValueError if the engine was started with another worker class, or with several connectors, or if its weights
    were loaded from files in other states than ``files``."""
    for known, loaded in reversed(_runners):
        runner = known()
        if runner is None or runner.vllm_config.model_config is not vllm_config.model_config:
            continue
        if runner.vllm_config.kv_transfer_config.kv_connector != vllm_config.kv_transfer_config.kv_connector:
            raise ValueError(
                "MultiConnector is not supported: other connectors would keep approximate KV as that of its tokens, "
                "and give it to plain requests. Give vLLM cacheclip's connector alone."
            )
        if loaded != files:
            raise ValueError(
                f"the files of model {vllm_config.model_config.model} changed after vLLM loaded its weights, so stored "
                "KV may be of other weights. Start vLLM again."
            )
        return runner
    raise ValueError(
        "recompute inside vLLM needs a worker class of this package. Start vLLM with "
        "worker_cls='cacheclip_vllm.worker.CPUWorker', or GPUWorker on an accelerator."
    )


def _telling(base: type[Any]) -> type[Any]:
    class Worker(base):  # type: ignore[misc]
        _shift: Any = None
        """The hook of :meth:`shift_positions`."""

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            with model_files(self.vllm_config.model_config.model) as files:
                result = super().load_model(*args, **kwargs)
            _runners.append((weakref.ref(self.model_runner), files))
            return result

        def shift_positions(self, by: int) -> None:
            """Let the model compute as if prompts began at position ``by``, until it is called again. Answers change
            by rounding only, because RoPE sees distances. Called through ``LLM.collective_rpc``."""

            def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                return args, {**kwargs, "positions": kwargs["positions"] + by}

            if self._shift is not None:
                self._shift.remove()
            model = self.model_runner.get_model()
            self._shift = model.register_forward_pre_hook(shifted, with_kwargs=True) if by else None

    Worker.__name__ = Worker.__qualname__ = base.__name__
    return Worker


def __getattr__(name: str) -> Any:
    # importing the worker of a device that this build of vLLM lacks may fail
    if name == "CPUWorker":
        from vllm.v1.worker.cpu_worker import CPUWorker

        return _telling(CPUWorker)
    if name == "GPUWorker":
        from vllm.v1.worker.gpu_worker import Worker

        return _telling(Worker)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
