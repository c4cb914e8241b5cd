"""What a laboratory asks of vLLM: answers with the log-probabilities of the whole vocabulary at every token, along
other answers or at shifted positions, from chunks that this vLLM computed itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.methods import Method
from cacheclip_rag.models import concrete
from cacheclip_rag.planning import PlannedPrompt

from .encoding import encoding_options, encoding_primary, start_vllm
from .forcing import FORCED
from .offline import worker_of
from .parameters import PARAMETER, request_parameters
from .planner import Planner
from .served import Served

_PROCESSOR = "cacheclip_vllm.forcing:ForcedTokens"


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """An answer of vLLM."""

    ids: list[int]
    rows: torch.Tensor
    """Log-probabilities at each token, ``(num_tokens, vocab_size)``; empty if they were not asked for."""
    planned: PlannedPrompt
    not_reused: str | None = None
    """Why some chunk was not reused although the method reuses chunks; None if all were. A prompt of which this is
    known before it is asked has no answer."""


@dataclass(frozen=True)
class MeasuredVLLM:
    """A vLLM engine, what plans for it, and what stores chunks for it."""

    llm: Any
    planner: Planner
    engine: CacheClipEngine
    replays: bool
    """Whether vLLM follows given tokens by itself."""

    @cached_property
    def vocab_size(self) -> int:
        return int(self.llm.llm_engine.vllm_config.model_config.get_vocab_size())

    def ask(
        self,
        prompt: str,
        method: Method,
        tokens: int,
        *,
        question: str | None = None,
        along: Sequence[int] = (),
        ends: bool = True,
        rows: bool = True,
    ) -> MeasuredAnswer:
        """Have vLLM answer greedily.

        Args:
            tokens: most tokens of the answer.
            question: text that scores the chunks.
            along: token ids that the answer follows instead.
            ends: False goes on after an end of turn.
            rows: whether log-probabilities are wanted.
        """
        planned = self.planner.plan(prompt, method=method, question=question)
        if method.reuses_chunks and (planned.fusion is None or planned.plan.missing_texts):
            reason = planned.reason or "some chunks were not found in the store"
            return MeasuredAnswer([], self._rows(None, False), planned, reason)
        (output,) = self._generate([planned.token_ids], tokens, planned, along, ends=ends, rows=rows)
        told = (output.kv_transfer_params or {}).get(PARAMETER, {})
        is_reused = planned.fusion is None or told.get("outcome") in ("fused", "cached")
        why = None if is_reused else str(told.get("reason") or "vLLM has no connector of this package")
        return MeasuredAnswer(list(output.outputs[0].token_ids), self._rows(output, rows), planned, why)

    def first_rows(self, *prompts: Sequence[int], forget: bool = True) -> torch.Tensor:
        """Log-probabilities of the first token after the first of the prompts, which vLLM prefills in one batch.

        Args:
            forget: whether vLLM forgets the prompts that it has seen before.
        """
        if forget:
            self.llm.reset_prefix_cache()
        return self._rows(self._generate(prompts, 1)[0], True)[0]

    def shifted_rows(self, ids: Sequence[int], by: int) -> torch.Tensor:
        """Log-probabilities of the first token after a prompt whose first token has position ``by``."""
        self.llm.collective_rpc("shift_positions", args=(by,))
        try:
            return self.first_rows(ids)
        finally:
            self.llm.collective_rpc("shift_positions", args=(0,))
            self.llm.reset_prefix_cache()

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        planned: PlannedPrompt | None = None,
        along: Sequence[int] = (),
        *,
        ends: bool = True,
        rows: bool = True,
    ) -> list[Any]:
        from vllm import SamplingParams

        extra: dict[str, Any] = {}
        if planned is not None and planned.fusion is not None:
            extra["kv_transfer_params"] = request_parameters(planned.fusion)
        given: dict[str, Any] = {"logprobs": -1, "flat_logprobs": True} if rows else {}
        if along and self.replays:
            given["trace_decode_token_ids"] = list(along)
        elif along:
            extra[FORCED] = list(along)
        params = SamplingParams(
            temperature=0,
            max_tokens=len(along) or tokens,
            ignore_eos=not ends,
            detokenize=False,
            extra_args=extra or None,
            **given,
        )
        asked: list[dict[str, Any]] = [{"prompt_token_ids": list(ids)} for ids in prompts]
        if planned is not None and planned.fusion is not None:  # neither exact KV nor that of another plan is found
            asked = [{**each, "cache_salt": planned.fusion.digest} for each in asked]
        found: list[Any] = self.llm.generate(asked, params, use_tqdm=False)
        return found

    def _rows(self, output: Any, wanted: bool) -> torch.Tensor:
        if not wanted:
            return torch.empty(0, self.vocab_size)
        flat = output.outputs[0].logprobs
        found = torch.full((len(flat.start_indices), self.vocab_size), float("-inf"))
        for row, start, stop in zip(found, flat.start_indices, flat.end_indices, strict=True):
            row[torch.tensor(flat.token_ids[start:stop])] = torch.tensor(flat.logprobs[start:stop])
        return found


@contextmanager
def measured_vllm(config: EngineConfig, options: Mapping[str, Any]) -> Iterator[MeasuredVLLM]:
    """A vLLM with a store of its own; both end with the block.

    Args:
        options: arguments of ``vllm.LLM`` besides model, dtype and connector.

    Raises:
        ConfigurationError, MissingExtraError, ModelError: as for :func:`~cacheclip_vllm.encoding.start_vllm`.
    """
    config = concrete(config)
    device = worker_of(config.device)
    replays = device == "gpu"  # of vLLM's two model runners, the one for accelerators
    following = {"enable_trace_replay": True} if replays else {"logits_processors": [_PROCESSOR]}
    with TemporaryDirectory(prefix="cacheclip-") as folder:
        exchange, store = Path(folder, "exchange"), Path(folder, "store")
        exchange.mkdir()
        ours = encoding_options(exchange, store, namespace=config.namespace, device=device)
        # whole vocabularies are wanted, and forced tokens need the answer so far
        ours |= {"max_logprobs": -1, "async_scheduling": False, **following}
        llm = start_vllm(config.primary, config.dtype, ours, options)
        try:
            model = llm.llm_engine.vllm_config.model_config
            load = encoding_primary(
                llm, exchange, quantization=options.get("quantization"), max_tokens=model.max_model_len
            )
            config = replace(config, store=str(store))
            planner = Planner(config, served=Served.of(llm.llm_engine.vllm_config))
            engine = CacheClipEngine(config, load_primary=load)
            for observers in (planner.observers, engine.observers):
                observers.clear()  # they would warn that there is no certificate
            yield MeasuredVLLM(llm, planner, engine, replays)
            planner.close()
            engine.close()
        finally:
            llm.llm_engine.engine_core.shutdown()
