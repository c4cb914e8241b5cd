"""vLLM's workers, which tell the connector in their process where the model runner is.

``--worker-cls cacheclip_rag.runtime.vllm.worker.CPUWorker``, or ``….GPUWorker``. Recompute runs vLLM's own model, and a
connector is not told of it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["model_runner"]

_runners: list[Any] = []
"""The model runner of this process, once its weights are loaded."""


def model_runner() -> Any:
    """The model runner of this process.

    Raises:
        RuntimeError: vLLM was started with another worker class.
    """
    if not _runners:
        raise RuntimeError(
            "recompute inside vLLM needs a worker class of this package. Start vLLM with "
            "worker_cls='cacheclip_rag.runtime.vllm.worker.CPUWorker', or GPUWorker on an accelerator."
        )
    return _runners[-1]


def _telling(base: type[Any]) -> type[Any]:
    class Worker(base):  # type: ignore[misc]
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            result = super().load_model(*args, **kwargs)
            _runners.append(self.model_runner)
            return result

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
