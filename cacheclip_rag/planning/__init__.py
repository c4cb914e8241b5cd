"""Reuse in another process, which has the primary's weights: an engine that plans prompts without them, and what the
other process makes KV of a plan with.

>>> planned = PlanningEngine(primary="my-model", store="my-store", method="epic").plan(prompt)
>>> carried = planned.fusion.to_dict()                       # to the process that has the weights, and there:
>>> plan = FusionPlan.from_dict(carried)
>>> reader = StoreReader("my-store", plan.namespace, plan.codec)
>>> entries = {piece.key: reader.get(piece.key, codec=plan.codec) for piece in plan.used_pieces}
>>> check_fits(plan, entries, runtime)
>>> stored = StoredInterval.of(plan, entries, 0, plan.end, runtime, device)
>>> keys, values = stored.layer(0, heads)                    # at positions stored.places; plan.computed are computed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..answering.turns import CallerLeft, Waiter
    from ..fusion.wire import FusionPlan, Interval
    from ..models.load import load_planning
    from ..plan.plan import is_plain_better
    from ..prompt.messages import Documents, Prompt
    from ..runtime.transformers.planning import PlanningRuntime
    from .engine import PlanningEngine
    from .prompts import PlannedPrompt
    from .stored import StoredInterval, check_fits, copy_stream
    from .weights import model_files

__all__ = [
    "CallerLeft",
    "Documents",
    "FusionPlan",
    "Interval",
    "PlannedPrompt",
    "PlanningEngine",
    "PlanningRuntime",
    "Prompt",
    "StoredInterval",
    "Waiter",
    "check_fits",
    "copy_stream",
    "is_plain_better",
    "load_planning",
    "model_files",
]

_HOMES = {
    "CallerLeft": "..answering.turns",
    "Documents": "..prompt.messages",
    "FusionPlan": "..fusion.wire",
    "Interval": "..fusion.wire",
    "PlannedPrompt": "prompts",
    "PlanningEngine": "engine",
    "PlanningRuntime": "..runtime.transformers.planning",
    "Prompt": "..prompt.messages",
    "StoredInterval": "stored",
    "Waiter": "..answering.turns",
    "check_fits": "stored",
    "copy_stream": "stored",
    "is_plain_better": "..plan.plan",
    "load_planning": "..models.load",
    "model_files": "weights",
}
__getattr__ = late_names(__name__, _HOMES)
