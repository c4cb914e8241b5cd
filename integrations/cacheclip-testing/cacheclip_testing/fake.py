"""A runtime without a model, for tests. Words are tokens, and the KV of a token holds its id.

The fake fulfils everything that planner, store, adapters and observers rely on. It refuses KV of another chunk. Its
answer is a function of all token ids of the prompt, so that answers with and without reuse are equal. Recomputed tokens
are counted, not computed.

>>> engine = CacheClipEngine(**fake_models())
>>> fake_of(engine).says = ["Twelve metres."]
>>> engine.generate("How tall is it?").text
'Twelve metres.'
>>> messages_of(fake_of(engine).prompts[0])
[{'role': 'user', 'content': 'How tall is it?'}]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import Fused
from cacheclip_rag.runtime import Runtime, TokenizedText, check_encodable

if TYPE_CHECKING:
    from cacheclip_rag import CacheClipEngine, Plan
    from cacheclip_rag.measuring import KVSources
    from cacheclip_rag.plugins import Span
    from cacheclip_rag.runtime import Message, PhaseClock, Slices

_numbers = itertools.count()
_TOKEN = re.compile(r" ?\w+|[^\w\s]|\s")
_VOCABULARY = 2**16
"""Large enough that two words hardly ever want the same id: which of them gets it depends on which came first."""
_END = 0
"""Token id of the end of an answer."""
_ANSWER = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
"""Words of answers."""
_BASE = 256
"""A token id is spelled with two digits, each exact in every dtype."""


@dataclass(slots=True)
class FakeState:
    """Token ids of the prompt and of the answer so far."""

    ids: list[int]
    prompt_tokens: int
    answer: tuple[int, ...]
    """Token ids of the answer, without its end."""

    def get_seq_length(self) -> int:
        return len(self.ids)


class Latch:
    """Holds whoever comes until it is opened; afterwards nobody."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        """Whether anybody has come."""
        if is_open:
            self.open()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(10.0), "nobody opened it"

    def open(self) -> None:
        self._opened.set()


class FakeRuntime(Runtime):
    """A fake model. Its fingerprint depends on ``name`` and ``dtype`` alone. What it says, raises and waits for may be
    changed at any time, and holds for the next call."""

    keeps_prefixes = False
    can_score = False
    tokenizer = None
    opening = ""
    num_layers, num_kv_heads, head_dim = 2, 1, 2

    def __init__(
        self, name: str = "fake", *, dtype: str = "float32", device: str = "cpu", context_tokens: int = 4096
    ) -> None:
        self.name = name
        self.fingerprint = f"{hashlib.sha256(name.encode()).hexdigest()}:fake:{dtype}"
        self.tokenizer_sha256 = hashlib.sha256(b"words").hexdigest()
        self.rope_pin = "none"
        self.context_tokens = self.reuse_tokens = context_tokens
        self.eos_ids = frozenset([_END])
        self.dtype, self.device = getattr(torch, dtype), torch.device("cpu")
        self._words: dict[int, str] = {}
        """Words by token id, for decoding."""
        self.encoded: list[tuple[int, ...]] = []
        """Token ids passed to :meth:`encode` so far, one tuple a call."""
        self.prompts: list[str] = []
        """Text of every prompt that was answered, in order, without the white space at its ends."""
        self.says: list[str] = []
        """Answers to the next prompts; without one, the answer follows from the prompt's ids."""
        self.error: Exception | None = None
        """Raised by every prefill."""
        self.steps = 0
        """Tokens decoded after the first of each answer."""
        self.decoding, self.encoding = Latch(is_open=True), Latch(is_open=True)
        """Before every such token, and before every chunk."""
        self.threads: dict[str, list[threading.Thread]] = {"encode": [], "prefill": []}
        """Threads of the calls of these methods, in order."""

    # -- text ---------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        check_encodable(text)
        matches = list(_TOKEN.finditer(text))
        ids = tuple(self._id_of(match[0]) for match in matches)
        return TokenizedText(ids, tuple(match.span() for match in matches))

    def decode_ids(self, ids: Sequence[int]) -> str:
        return "".join(self._words[token] for token in ids if token != _END).strip()

    @property
    def has_chat_template(self) -> bool:
        return True

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        date: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        turns = f"[variables] {json.dumps(dict(variables), ensure_ascii=False)} [end]\n" if variables else ""
        turns += f"[tools] {json.dumps(list(tools), ensure_ascii=False)} [end]\n" if tools else ""
        for message in messages:
            calls = message.get("tool_calls")
            called = f" [calls] {json.dumps(calls, ensure_ascii=False)}" if calls else ""
            turns += f"[{message['role']}] {message['content']}{called} [end]\n"
        return turns + "[assistant]"

    def _id_of(self, word: str) -> int:
        token = 1 + int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little") % (_VOCABULARY - 1)
        while self._words.setdefault(token, word) != word:  # another word's: the next free one
            token = 1 + token % (_VOCABULARY - 1)
        return token

    # -- KV -----------------------------------------------------------------------------------------------------

    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        self.threads["encode"].append(threading.current_thread())
        self.encoding.wait()
        self.encoded.append(tuple(ids))
        return self._kv(ids)

    def _kv(self, ids: Sequence[int]) -> torch.Tensor:
        spelled = torch.tensor([[token // _BASE, token % _BASE] for token in ids], dtype=self.dtype)
        return spelled.view(len(ids), 2).expand(self.num_layers, 2, 1, len(ids), 2).contiguous()

    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[FakeState, torch.Tensor]:
        self.threads["prefill"].append(threading.current_thread())
        self.prompts.append("".join(self._words.get(token, "") for token in ids.tolist()).strip())
        if self.error is not None:
            raise self.error
        answer = self.says.pop(0) if self.says else self.answer_to(ids.tolist())
        state = FakeState(ids.tolist(), len(ids), self.tokenize(answer).ids)
        return state, self._logits(state)

    def answer_to(self, ids: Sequence[int]) -> str:
        """The answer to a prompt: four to ten words that follow from all its ids. Override it to say something else."""
        digest = hashlib.sha256(array("q", ids).tobytes()).digest()
        return " ".join(_ANSWER[byte % len(_ANSWER)] for byte in digest[1 : 5 + digest[0] % 7])

    def fuse(
        self, plan: Plan, kv_sources: KVSources, *, capacity: int, clock: PhaseClock, slices: Slices | None = None
    ) -> Fused | None:
        with clock.phase("read"):
            reused = tuple(span for span in plan.reused if self._is_whole(span, kv_sources))
        if not reused:
            return None
        plan = plan.reusing(reused)
        with clock.phase("recompute"):
            state, logits = self.prefill(plan.layout.ids, capacity)
        stale = plan.chunk_tokens - sum(len(span.tokens) for span in plan.exact)
        recomputed = [slot for span in reused for slot in range(span.start, span.stop)][
            : min(plan.budget_tokens, stale)
        ]
        return Fused(state, logits, plan, recomputed, None)

    def _is_whole(self, span: Span, kv_sources: KVSources) -> bool:
        """Whether the chunk's stored KV can be read.

        Raises:
            ConfigurationError: the KV belongs to another text.
        """
        kv = kv_sources.primary.read(span.whole)
        if kv is None:
            return False
        own = slice(span.first, span.first + len(span.tokens))
        if not torch.equal(kv.tensor()[:, :, :, own].to(self.dtype), self._kv(span.tokens.ids)):
            raise ConfigurationError(f"the stored KV does not belong to the chunk {span.whole[:40]!r}.")
        return True

    def decode_step(self, state: Any, token_id: int) -> torch.Tensor:
        self.steps += 1
        self.decoding.wait()
        state.ids.append(token_id)
        return self._logits(state)

    def _logits(self, state: FakeState) -> torch.Tensor:
        """One-hot: the answer's next token, then the end."""
        number = len(state.ids) - state.prompt_tokens
        logits = torch.zeros(_VOCABULARY)
        logits[state.answer[number] if number < len(state.answer) else _END] = 100.0
        return logits


def fake_models() -> dict[str, Any]:
    """Settings ``primary`` and ``auxiliary`` of two fake models that nobody else has."""
    from cacheclip_rag.models import register_runtime

    register_runtime("fake", FakeRuntime)
    number = next(_numbers)
    return {"primary": f"fake:model{number}", "auxiliary": f"fake:small{number}"}


def fake_of(engine: CacheClipEngine) -> FakeRuntime:
    """The primary of an engine on fake models."""
    assert isinstance(engine.primary, FakeRuntime)
    return engine.primary


def messages_of(prompt: str) -> list[Message]:
    """The messages of a prompt, as the fake's chat template wrote them."""
    return [{"role": role, "content": text} for role, text in re.findall(r"\[(\w+)\] (.*?) \[end\]", prompt, re.DOTALL)]
