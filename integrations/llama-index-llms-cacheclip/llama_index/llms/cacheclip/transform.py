"""The ingestion step: precomputes the KV of nodes, so that the first question about them is fast."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.utils import get_tqdm_iterable

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import EngineFields, iterate_in_thread
from cacheclip_rag.plugins import shown_url

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag.adapters import PrecomputeCost

    from .base import CacheClipLLM


class CacheClipTransform(EngineFields, TransformComponent):
    """Precomputes each node's text as the LLM will read it (including metadata) and returns the nodes unchanged.

    Put it last in an ingestion pipeline, because a later change of text or metadata makes a different chunk. All fields
    are public, because the pipeline's cache compares transforms by their fields. This cache skips known nodes, unless
    one of them is not stored any more. With ``num_workers`` each worker process
    loads the weights; give a ``store`` folder then, because a store in memory stays in its process.

    Short nodes are computed together. A killed run loses at most one batch of them, or one long node. In the next run,
    stored chunks cost a look-up only. A node that cannot be stored, because it is longer than the model's context or
    holds half a character, is skipped with a warning that has its id.
    """

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipTransform"

    @classmethod
    def from_llm(cls, llm: CacheClipLLM) -> Self:
        """A transform for the store and the chunk context of this LLM."""
        if llm.base_url is not None:
            raise ConfigurationError(
                f"the LLM runs in the server at {shown_url(llm.base_url)}. Make a CacheClipTransform with the "
                "server's models and store on its machine, or use cacheclip ingest there."
            )
        fields = {name: getattr(llm, name) for name in EngineFields.model_fields}
        transform = cls(**{**fields, "system_prompt": llm._shared_system_prompt()})
        transform._engine = llm._engine
        return transform

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute the nodes, except blank nodes.

        Args:
            kwargs: ``show_progress=True`` shows a bar of nodes. A pipeline or an index with ``show_progress=True`` does
                not pass it on, but its own bar is noticed, and ours is shown inside it. Other arguments are ignored.
        """
        for _ in self._precompute(nodes, **kwargs):
            pass
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Like a direct call, in a separate thread. A cancelled task stops before the next batch of nodes."""
        async with aclosing(iterate_in_thread(lambda: self._precompute(nodes, **kwargs))) as done:
            async for _ in done:
                pass
        return nodes

    def _precompute(self, nodes: Sequence[BaseNode], show_progress: bool = False, **_: Any) -> Iterator[None]:
        from cacheclip_rag.adapters import precompute_in_batches  # it loads torch

        shown = get_tqdm_iterable(list(_read(nodes)), show_progress or _bar_is_shown(), "Precomputing chunks")
        texts = ((text, (node.node_id, node.ref_doc_id or "")) for node, text in shown)
        yield from precompute_in_batches(self.engine, texts, method=self.method)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The fields. For LlamaIndex's cache of ingestions, which asks for them to see whether it knows the result for
        its nodes, they are others if the KV of one of these is not stored any more: what is cached are the nodes, and
        no KV."""
        found = super().to_dict(**kwargs)
        nodes = _asking_about()
        if nodes is not None and not self._has_all(nodes):
            found["lost"] = uuid4().hex
        return found

    def _has_all(self, nodes: Iterable[BaseNode]) -> bool:
        from cacheclip_rag.adapters import all_stored  # it loads torch

        return all_stored(self.engine, (text for _, text in _read(nodes)), method=self.method)

    def plan(self, nodes: Sequence[BaseNode]) -> PrecomputeCost:
        """Estimate the cost of precomputing nodes: ``chunks``, ``computed`` (chunks that are not stored), their
        ``tokens``, ``bytes`` in the store, and ``seconds`` on this machine. Computes a few nodes for timing and stores
        nothing. Raises the same errors as precomputing.

        >>> CacheClipTransform.from_llm(llm).plan(SentenceSplitter()(documents)).seconds
        """
        from cacheclip_rag.adapters import precompute_cost  # it loads torch

        return precompute_cost(self.engine, [text for _, text in _read(nodes)], method=self.method)


def _asking_about() -> Sequence[BaseNode] | None:
    """The nodes about which LlamaIndex's cache asks. It gives a transform no chance to say that their results are gone,
    so that they are read where they stand: in the function that makes the cache's key. None: somebody else asks."""
    frame = sys._getframe(2)
    if frame.f_code is not get_transformation_hash.__code__:
        return None
    nodes = frame.f_locals.get("nodes")
    return nodes if isinstance(nodes, Sequence) else None


def _read(nodes: Iterable[BaseNode]) -> Iterator[tuple[BaseNode, str]]:
    """Nodes that are not blank, each with the text that the LLM reads."""
    for node in nodes:
        text = node.get_content(metadata_mode=MetadataMode.LLM)
        if text.strip():
            yield node, text


def _bar_is_shown() -> bool:
    """Whether LlamaIndex shows its bar of transformations in this process, so that it was asked for progress."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return False
    shown = [str(getattr(bar, "desc", "")) for bar in getattr(tqdm, "_instances", ())]
    return any(title.startswith("Applying transformations") for title in shown)
