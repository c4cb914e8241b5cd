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

from ..base.names import late_names

if TYPE_CHECKING:
    from ..answering.turns import CallerLeft as CallerLeft, Waiter as Waiter
    from ..fusion.wire import FusionPlan as FusionPlan, Interval as Interval
    from ..models.load import load_planning as load_planning, model_files as model_files
    from ..plan.plan import is_plain_better as is_plain_better
    from ..prompt.messages import Documents as Documents, Prompt as Prompt
    from ..runtime.transformers.planning import PlanningRuntime as PlanningRuntime
    from .engine import PlanningEngine as PlanningEngine
    from .kept import BLOCK_TOKENS as BLOCK_TOKENS, kept_keys as kept_keys
    from .prompts import PlannedPrompt as PlannedPrompt
    from .stored import StoredInterval as StoredInterval, check_fits as check_fits


__getattr__, __all__ = late_names(
    __name__,
    {
        "..answering.turns": "CallerLeft Waiter",
        "..fusion.wire": "FusionPlan Interval",
        "..models.load": "load_planning model_files",
        "..plan.plan": "is_plain_better",
        "..prompt.messages": "Documents Prompt",
        "..runtime.transformers.planning": "PlanningRuntime",
        "engine": "PlanningEngine",
        "kept": "BLOCK_TOKENS kept_keys",
        "prompts": "PlannedPrompt",
        "stored": "StoredInterval check_fits",
    },
)
