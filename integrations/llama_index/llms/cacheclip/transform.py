"""The ingestion step: precompute the KV of nodes, so that the first question about them is already fast."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent

from .base import EngineFields

if TYPE_CHECKING:
    from typing import Self

    from .base import CacheClipLLM

__all__ = ["CacheClipTransform"]


class CacheClipTransform(EngineFields, TransformComponent):
    """Precomputes each node's text as an LLM will read it (metadata included) and returns the nodes unchanged.

    Put it last in an ingestion pipeline: a later change of text or metadata makes another chunk. All its fields are
    public, since the pipeline's cache tells transforms apart by them. That cache skips nodes it has seen: after
    deleting a store, clear the cache too, or call the transform on the nodes. With several pipeline workers give a
    ``store`` folder: a memory-only store stays in the worker.

    Raises:
        PromptTooLongError: a node longer than the model's context.
    """

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipTransform"

    @classmethod
    def from_llm(cls, llm: CacheClipLLM) -> Self:
        """A transform that fills the store this LLM reads."""
        fields = {name: getattr(llm, name) for name in EngineFields.model_fields}
        transform = cls(**{**fields, "system_prompt": llm._prefix_system_prompt()})
        transform._engine = llm._engine
        return transform

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute the nodes; blank ones are passed over. ``kwargs`` are the pipeline's and unused."""
        for node in nodes:
            text = node.get_content(metadata_mode=MetadataMode.LLM)
            if text.strip():
                self.engine.precompute([text], source=node.node_id, document=node.ref_doc_id)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a worker thread."""
        return await asyncio.to_thread(self, nodes, **kwargs)
