"""``cacheclip ask "QUESTION" --store DIR``."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..methods import DEFAULT_METHOD, check_method
from .common import (
    AuxiliaryOption,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    ExistingStoreOption,
    FinishOption,
    JsonOption,
    MinConfidenceOption,
    PrimaryOption,
    RequireCertificateOption,
    VariantsOption,
    number_or_name,
    print_json,
)

if TYPE_CHECKING:
    from ..ingest.library import Passage
    from ..types import Answer

INSTRUCTION = "Answer the question in a few words, using only the text above."


def rag_prompt(passages: list[str], question: str) -> str:
    """The prompt: passages, then the question. The first passage comes right after the shared prefix."""
    body = "\n\n".join(passages)
    return f"{body}\n\n{INSTRUCTION}\nQuestion: {question}" if passages else question


def ask(
    question: Annotated[str, typer.Argument(help="What to ask of the documents.")],
    store: ExistingStoreOption,
    method: Annotated[
        str,
        typer.Option(
            help="Preset or variant: cacheclip, anchored, full, direct, ...; auto chooses cacheclip or anchored."
        ),
    ] = DEFAULT_METHOD,
    variants: VariantsOption = None,
    ratio: Annotated[
        str | None,
        typer.Option("--ratio", help="Share of chunk tokens to recompute, 0 to 1, or auto. [default: the method's]"),
    ] = None,
    max_ttft_s: Annotated[
        float | None,
        typer.Option(
            "--max-ttft", help="Seconds to the first token: the largest ratio that is predicted to keep to it."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Passages to retrieve.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    embedding: EmbeddingOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    require_certificate: RequireCertificateOption = False,
    finish: FinishOption = "none",
    min_confidence: MinConfidenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Retrieve, fuse and stream the answer; then the sources and where the time went."""
    from ..checks import check_choice, check_confidence, check_ratio_and_limit
    from ..errors import ConfigurationError
    from ..sampling import FINISH_MODES, SamplingParams

    # what can be refused without torch, which takes seconds to import
    if not question.strip():
        raise ConfigurationError("the question is empty.")
    chosen_ratio = number_or_name(ratio)
    check_ratio_and_limit(chosen_ratio, max_ttft_s)
    least = number_or_name(min_confidence)
    if least is not None:
        check_confidence("--min-confidence", least)
    if variants is None:
        check_method(method)
    check_choice("finish", finish, FINISH_MODES)

    from ..engine import CacheClipEngine
    from ..ingest.embedding import Embedder
    from ..ingest.library import Library
    from ..lab.variants import method_named, read_variants
    from .settings import engine_config, merge_settings

    chosen = method_named(method, read_variants(variants))
    library = Library.open(store)
    without_auxiliary = auxiliary == "none"  # for this question only: the store's settings stay unchanged
    settings = merge_settings(
        library,
        primary=primary,
        auxiliary=None if without_auxiliary else auxiliary,
        embedding=embedding,
        dtype=dtype,
    )
    if without_auxiliary:
        settings = replace(settings, auxiliary=None)
    config = engine_config(
        settings,
        store,
        device=device,
        method=chosen,
        recompute_ratio=chosen_ratio,
        max_ttft_s=max_ttft_s,
        min_confidence=least,
        require_certificate=require_certificate,
        finish=finish,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine = CacheClipEngine(config)
    passages = library.search(Embedder(settings.embedding, device).embed([question]), top_k)
    gc.collect()  # free the embedding model's memory before the large models load
    texts = [passage.text for passage in passages]
    answer, shown = None, ""
    for event in engine.stream(rag_prompt(texts, question), params, question=question, documents=texts):
        shown = shown[: event.revised_from] + event.text
        if not as_json:  # what is printed cannot be withdrawn
            sys.stdout.write(event.text if event.revised_from is None else f"\n\nrevised answer:\n{shown}")
            sys.stdout.flush()
        answer = event.answer
    assert answer is not None
    if as_json:
        print_json(
            {
                "question": question,
                "answer": answer.text,
                "sources": _sources(passages),
                "stats": answer.stats.to_dict(),
            }
        )
    else:
        _print_details(answer, passages)


def _sources(passages: list[Passage]) -> list[dict[str, Any]]:
    return [{"path": p.path, "ordinal": p.ordinal, "score": round(p.score, 4)} for p in passages]


def _print_details(answer: Answer, passages: list[Passage]) -> None:
    stats = answer.stats
    typer.echo("\n")
    for passage in passages:
        typer.echo(f"  source  {passage.path} #{passage.ordinal}  ({passage.score:.2f})")
    if stats.fallback:
        typer.echo(f"  note    answered by plain prefill: {stats.fallback}")
    phases = "  ".join(f"{name} {seconds:.3f}" for name, seconds in stats.phases_s.items())
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
