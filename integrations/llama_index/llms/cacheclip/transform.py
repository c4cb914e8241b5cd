"""The ingestion step: precompute the KV of nodes, so that the first question about them is already fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from cacheclip_adapters import EngineFields
from cacheclip_adapters.aio import iterate_in_thread
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.utils import get_tqdm_iterable

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag.ingest.plan import IngestPlan

    from .base import CacheClipLLM

__all__ = ["CacheClipTransform"]


class CacheClipTransform(EngineFields, TransformComponent):
    """Precomputes each node's text as an LLM will read it (metadata included) and returns the nodes unchanged.

    Put it last in an ingestion pipeline: a later change of text or metadata makes another chunk. All its fields are
    public, since the pipeline's cache tells transforms apart by them. That cache skips nodes it has seen: after
    deleting a store, clear the cache too, or call the transform on the nodes. With ``num_workers`` each worker process
    loads the weights for itself; give a ``store`` folder, since a memory-only store stays in the worker.

    A killed run loses the chunk it was at: run again, and what is stored costs a look-up.

    Raises:
        PromptTooLongError: a node longer than the model's context.
    """

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipTransform"

    @classmethod
    def from_llm(cls, llm: CacheClipLLM) -> Self:
        """A transform that fills the store this LLM reads, as its method reads it."""
        fields = {name: getattr(llm, name) for name in EngineFields.model_fields}
        transform = cls(**{**fields, "system_prompt": llm._shared_system_prompt()})
        transform._engine = llm._engine
        return transform

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute the nodes; blank ones are passed over.

        Args:
            kwargs: ``show_progress=True`` shows LlamaIndex's bar; the pipeline's others are not used.
        """
        for _ in self._precompute(nodes, **kwargs):
            pass
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a thread of its own; a cancelled task stops it before the next node."""
        async with aclosing(iterate_in_thread(lambda: self._precompute(nodes, **kwargs))) as done:
            async for _ in done:
                pass
        return nodes

    def _precompute(self, nodes: Sequence[BaseNode], show_progress: bool = False, **_: Any) -> Iterator[None]:
        for node, text in get_tqdm_iterable(list(_read(nodes)), show_progress, "Precomputing chunks"):
            self.engine.precompute([text], method=self.method, source=node.node_id, document=node.ref_doc_id)
            yield

    def plan(self, nodes: Sequence[BaseNode]) -> IngestPlan:
        """What precomputing these nodes would take: ``chunks``, of these ``computed`` anew, their ``tokens``, ``bytes``
        in the store and ``seconds`` on this machine. Computes a few of them to tell the speed, and stores nothing.
        Raises what precomputing them would.

        >>> CacheClipTransform.from_llm(llm).plan(SentenceSplitter()(documents)).seconds
        """
        from cacheclip_rag.ingest.plan import IngestPlan, price

        texts = [text for _, text in _read(nodes)]
        plan = IngestPlan(chunks=len(texts))
        price(self.engine, texts, plan, method=self.method)
        return plan


def _read(nodes: Iterable[BaseNode]) -> Iterator[tuple[BaseNode, str]]:
    """Nodes that are not blank, and what an LLM reads of them."""
    for node in nodes:
        text = node.get_content(metadata_mode=MetadataMode.LLM)
        if text.strip():
            yield node, text
