"""``cacheclip ask "QUESTION" --store DIR``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, existing_folder, print_json

from .tables import AskTable

if TYPE_CHECKING:
    from cacheclip_rag import Answer, Event, Trace

    from ..library import Passage

INSTRUCTION = "Answer the question in a few words, using only the text above."


def rag_prompt(passages: list[str], question: str) -> str:
    """The prompt: passages, then the question. The first passage comes right after the shared prefix."""
    body = "\n\n".join(passages)
    return f"{body}\n\n{INSTRUCTION}\nQuestion: {question}" if passages else question


@engine_options("store", "method", "recompute_ratio", "primary", "auxiliary", "device", "finish")
def ask(
    question: Annotated[str, typer.Argument(help="What to ask of the documents.")],
    settings: CommandSettings,
    top_k: Annotated[int, typer.Option(help="Passages to retrieve.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    trace: Annotated[bool, typer.Option(help="With --json: say what the prompt's KV was made of.")] = False,
    inspect: Annotated[
        Path | None, typer.Option(help="Write a page that shows how the answer came about; needs cacheclip-serve.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Retrieve, fuse and stream the answer; then the sources and where the time went."""
    from cacheclip_rag import ConfigurationError

    if not question.strip():
        raise ConfigurationError("the question is empty.")
    store = existing_folder(settings.store)

    from cacheclip_rag import CacheClipEngine, MissingExtraError, SamplingParams

    from ..embedding import Embedder
    from ..library import Library
    from .settings import config_of

    library = Library.open(store)
    documents = library.settings
    assert documents is not None, "a library without settings has no documents"
    # 'none' holds for this question only: the store's settings stay unchanged
    own = {"auxiliary": None} if settings.engine.get("auxiliary", "") is None else {}
    config = config_of(library, settings.engine, **own)
    if inspect is not None:
        try:
            from cacheclip_serve import page_writer
        except ModuleNotFoundError as error:
            raise MissingExtraError("cacheclip-serve", "serve") from error
        write = page_writer(inspect, model=config.primary)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine = CacheClipEngine(config)
    passages = library.search(Embedder(documents.embedding, config.device).embed([question]), top_k)
    gc.collect()  # free the embedding model's memory before the large models load
    texts = [passage.text for passage in passages]
    variables = settings.table(AskTable).chat_template_kwargs
    prompt, traced = rag_prompt(texts, question), trace or inspect is not None
    events = engine.stream(
        prompt, params, question=question, documents=texts, chat_template_kwargs=variables, trace=traced
    )
    answer = _streamed(events, is_shown=not as_json)
    if answer.trace is not None:
        answer = replace(answer, trace=_with_documents(answer.trace, passages))
    if as_json:
        print_json(_in_json(question, answer, passages, with_trace=trace))
    else:
        _print_details(answer, passages)
    if inspect is not None:  # at last: an error of it takes no answer away
        write(question, answer)


def _streamed(events: Iterator[Event], *, is_shown: bool) -> Answer:
    """The answer of a stream, whose text is printed as it comes."""
    answer, shown = None, ""
    for event in events:
        shown = shown[: event.revised_from] + event.text
        if is_shown:  # what is printed cannot be withdrawn
            sys.stdout.write(event.text if event.revised_from is None else f"\n\nrevised answer:\n{shown}")
            sys.stdout.flush()
        answer = event.answer
    assert answer is not None
    return answer


def _in_json(question: str, answer: Answer, passages: list[Passage], *, with_trace: bool) -> dict[str, Any]:
    return {
        "question": question,
        "answer": answer.text,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
        "sources": _sources(passages),
        "stats": answer.stats.to_dict(),
        **({"trace": answer.trace.to_dict()} if with_trace and answer.trace is not None else {}),
    }


def _sources(passages: list[Passage]) -> list[dict[str, Any]]:
    return [{"path": p.path, "ordinal": p.ordinal, "score": round(p.score, 4)} for p in passages]


def _with_documents(trace: Trace, passages: list[Passage]) -> Trace:
    """The trace with the documents of its texts, which the library knows."""
    names = {passage.text.strip(): (f"{passage.path} #{passage.ordinal}", passage.path) for passage in passages}
    own = (
        replace(text, sources=(*text.sources, names[text.text])) if text.text in names else text for text in trace.texts
    )
    return replace(trace, texts=tuple(own))


def _print_details(answer: Answer, passages: list[Passage]) -> None:
    stats = answer.stats
    typer.echo("\n")
    for passage in passages:
        typer.echo(f"  source  {passage.path} #{passage.ordinal}  ({passage.score:.2f})")
    if answer.reasoning and not answer.text:
        typer.echo(
            "  note    the model reasoned, and came to no answer: raise --max-tokens, or write chat_template_kwargs = "
            "{ enable_thinking = false } under [ask] in the file of --settings."
        )
    if stats.fallback:
        typer.echo(f"  note    answered by plain prefill: {stats.fallback}")
    phases = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in stats.phases_s.items())
    predicted = "" if stats.predicted_ttft_s is None else f", predicted {stats.predicted_ttft_s:.2f} s"
    typer.echo(f"  first token after {stats.ttft_s:.2f} s{predicted} ({phases})")
    typer.echo(
        f"  {stats.prompt_tokens} prompt tokens: {stats.reused_tokens} reused, {stats.recomputed_tokens} recomputed "
        f"(ratio: nominal {stats.nominal_ratio:.3f}, effective {stats.effective_ratio:.3f}, charged "
        f"{stats.charged_ratio:.3f}), {stats.fresh_tokens} fresh; {stats.generated_tokens} generated"
    )
    if stats.verified_tokens is not None:
        first = "" if stats.diverged_at is None else f"; token {stats.diverged_at} of the first answer differs"
        typer.echo(
            f"  {stats.verified_tokens} of {stats.generated_tokens} tokens are full prefill's own{first} "
            f"(verified in {stats.verify_s:.2f} s)"
        )
