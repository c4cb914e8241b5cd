"""vLLM as an engine, unmodified: offline in this process, or by its own server with OpenAI's API.

``cacheclip serve --backend vllm``: ``launch.py`` checks the options (``options.py``) and replaces this process by
vLLM's server, with our connector and the middleware. A request passes ``middleware.py`` (keys, paths; ``exchange.py``
has the messages), ``requests.py`` (what a plan can follow, and what goes to vLLM as it is), ``planners.py`` (a planner
for each tenant, in a thread), then vLLM, then ``replies.py`` (our statistics), and some of them ``shadow_checks.py``
(asked again for plain prefill, and compared). ``settings.py`` takes the options from one process to the other.

Inside vLLM: ``connector.py`` and ``worker.py`` load what a plan names (``parameters.py``, ``scheduling.py``,
``loading.py``, ``layers_ahead.py``, ``rows.py``, ``passes.py``). ``offline.py`` and ``encoding.py`` drive vLLM from a
program, ``measuring.py`` for a laboratory. Only ``connector``, ``capturing`` and ``rows`` import vLLM at once.
:mod:`cacheclip_rag.planning` plans prompts, and brings stored KV to its positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .encoding import vllm_engine as vllm_engine
    from .launch import launch_server as launch_server
    from .measuring import (
        MeasuredAnswer as MeasuredAnswer,
        MeasuredVLLM as MeasuredVLLM,
        measured_vllm as measured_vllm,
    )
    from .offline import FusedLLM as FusedLLM, engine_options as engine_options
    from .options import check_settings as check_settings
    from .planner import Planner as Planner


__getattr__, __all__ = late_names(
    __name__,
    {
        "encoding": "vllm_engine",
        "launch": "launch_server",
        "measuring": "MeasuredAnswer MeasuredVLLM measured_vllm",
        "offline": "FusedLLM engine_options",
        "options": "check_settings",
        "planner": "Planner",
    },
)
