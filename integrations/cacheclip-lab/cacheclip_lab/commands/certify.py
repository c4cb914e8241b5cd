"""``cacheclip certify``: measures exactness and fidelity of a pair of models, and saves a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheclip_rag import ConfigurationError
from cacheclip_rag.methods import DEFAULT_METHOD
from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, expanded, print_json

from .common import BackendOption, Rows, VariantsOption, measured, print_tables
from .tables import CertifyTable

if TYPE_CHECKING:
    from ..certificates import Guarantee
    from ..evaluation.certificate import Certificate, HistoryFigures


@engine_options("primary", "auxiliary", "method", "recompute_ratio", "dtype", "device")
def certify(
    settings: CommandSettings,
    variants: VariantsOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="4 prompts instead of 20: a first look.")] = False,
    max_differ: Annotated[
        float | None,
        typer.Option(help="Find the cheapest gate with which at most this share of answers differs from full's."),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(
            "--turns", min=1, help="Also measure conversations of so many turns, such as 5, and edited prompts."
        ),
    ] = 1,
    backend: BackendOption = "transformers",
    as_json: JsonOption = False,
) -> None:
    """Check that reuse is exact on these models, measure how close answers are to full prefill, save a certificate.

    Exit code 1 if the verdict is "not faithful"; with --max-differ, if no gate promises it.
    """
    from ..variants import method_named, read_variants

    method = method_named(settings.engine.get("method", DEFAULT_METHOD), read_variants(variants))
    config, answers = measured(settings, method=method), settings.table(CertifyTable).answers
    if max_differ is not None and (quick or backend == "vllm"):
        raise ConfigurationError(
            "--max-differ needs many prompts and a confidence gate, which --quick and vLLM do not have. Leave out "
            f"{'--quick' if quick else '--backend vllm'}."
        )
    if answers is not None and max_differ is None:
        raise ConfigurationError(f"[certify] answers = {answers!r} is for --max-differ, which is missing. Give it.")
    if backend == "vllm":
        from ..evaluation.served import certify_vllm

        if turns > 1:
            raise ConfigurationError("--turns measures the transformers backend only: leave out --turns or --backend.")
        certificate = certify_vllm(config, quick=quick, vllm=dict(settings.vllm))
    else:
        from ..evaluation.certify import certify as run

        promised: dict[str, Any] = {} if max_differ is None else {"max_differ": max_differ}
        if answers is not None:
            promised["answers"] = expanded(answers)
        certificate = run(config, quick=quick, turns=turns, **promised)
    path = certificate.save()
    if as_json:
        print_json({**certificate.to_dict(), "path": str(path)})
    else:
        _print(certificate, path)
    if certificate.verdict == "not faithful" if max_differ is None else not _promises(certificate):
        raise typer.Exit(1)


def _promises(certificate: Certificate) -> bool:
    return certificate.guarantee is not None and bool(certificate.guarantee.gates)


def _print(certificate: Certificate, path: Path) -> None:
    exactness, limits = certificate.exactness, certificate.thresholds
    backend = certificate.identity.backend or "plain transformers"
    floor = exactness["noise_floor"]
    tables = {
        f"Exactness of {certificate.primary}, {exactness['prompt_tokens']} tokens": _checks(exactness),
        f"Fidelity of {certificate.identity.method} ({certificate.auxiliary}) to full prefill, "
        f"{certificate.prompts} prompts": _fidelity(certificate),
    }
    lines = [
        f"Noise floor of {backend} here: logits {floor['logits']:.2g}, KL {floor['kl']:.2g} nats.",
        f"Full prefill finds {certificate.needle_accuracy_of_full:.0%} of the needles. 'faithful' needs a mean KL of "
        f"at most {limits['first_token_kl']:g} nats at the first token and {limits['answer_kl']:g} along the answer, "
        f"{limits['agreement']:.0%} equal greedy tokens, and {limits['needle_accuracy_of_full']:.0%} of the needles "
        "that full prefill finds.",
    ]
    if not_measured := exactness.get("not_measured"):
        lines.append(f"Not measured with {backend}: {'; '.join(not_measured)}.")
    if next(row.gate for row in certificate.ratios if row.ratio == certificate.ratio):
        tables[f"A confidence gate from ratio {certificate.ratio:g} on (setting min_confidence)"] = _gate(certificate)
    if guarantee := certificate.guarantee:
        title = f"At most {guarantee.most:.0%} of answers differ from full's ({guarantee.confidence:.0%} confidence)"
        tables[title] = _guaranteed(guarantee)
        lines.append(f"Shown by {guarantee.n} prompts, and holds for such: {kind_of_prompts(guarantee)}.")
        lines.append(
            "min_confidence 'auto' takes the first row."
            if guarantee.gates
            else "No gate that costs less than full prefill keeps it: give a larger --max-differ, or use full."
        )
    if certificate.edits:
        tables["KV of an earlier prompt with an edit, moved, to full prefill"] = _edits(certificate)
    if certificate.turns:
        tables[f"Turns of conversations at ratio {certificate.ratio:g}, to full prefill of the same history"] = _turns(
            certificate
        )
    verdict = f"Verdict at ratio {certificate.ratio:g}: {certificate.verdict} ({certificate.seconds:.0f} s)"
    print_tables(tables, *lines, verdict, f"Certificate: {path}")


def _checks(exactness: Mapping[str, Any]) -> Rows:
    return ("check", "figure", "must be", "", "what is measured"), [
        (
            name,
            f"{check['figure']:.3g}",
            _allowed(check),
            "passed" if check["passed"] else "FAILED",
            check["says"],
        )
        for name, check in exactness["checks"].items()
    ]


def _allowed(check: Mapping[str, Any]) -> str:
    direction = check.get("direction", "at most")  # certificates of earlier versions have none
    return "anything" if direction == "at least" and not check["limit"] else f"{direction} {check['limit']:.3g}"


def _fidelity(certificate: Certificate) -> Rows:
    titles = ("nominal", "effective", "charged", "first KL mean", "median", "answer KL mean", "median", "max")
    rows = []
    for row in certificate.ratios:
        figures = [row.first_token_kl["mean"], row.first_token_kl["median"]]
        figures += [row.answer_kl[key] for key in ("mean", "median", "max")]
        charged = "-" if row.charged_ratio is None else f"{row.charged_ratio:.3f}"
        shares = (f"{row.agreement:.1%}", f"{row.needle_accuracy:.0%}", row.verdict)
        rows.append(
            (f"{row.ratio:g}", f"{row.effective_ratio:.3f}", charged, *(f"{each:.4f}" for each in figures), *shares)
        )
    return (*titles, "agree", "needles", "verdict"), rows


def _turns(certificate: Certificate) -> Rows:
    titles = _history_titles("turn", "continued")
    return (*titles, "needles", "of full", "verdict"), [
        (
            str(each.turn),
            *_of_history(each, each.continued_tokens),
            *(f"{share:.0%}" for share in (each.needle_accuracy, each.needle_accuracy_of_full)),
            each.verdict,
        )
        for each in certificate.turns
    ]


def _edits(certificate: Certificate) -> Rows:
    rows = [(each.edit, *_of_history(each, each.moved_tokens), each.verdict) for each in certificate.edits]
    return (*_history_titles("edit", "moved"), "verdict"), rows


def _history_titles(first: str, taken: str) -> tuple[str, ...]:
    return (first, "prompt tokens", taken, "computed", "first KL mean", "answer KL mean", "max", "agree")


def _of_history(figures: HistoryFigures, taken: float) -> tuple[str, ...]:
    """``taken``: tokens whose KV is an earlier prompt's."""
    kl = (figures.first_token_kl["mean"], figures.answer_kl["mean"], figures.answer_kl["max"])
    tokens = (figures.prompt_tokens, taken, figures.computed_tokens)
    return (*(f"{each:,.0f}" for each in tokens), *(f"{each:.4f}" for each in kl), f"{figures.agreement:.0%}")


def _gate(certificate: Certificate) -> Rows:
    rows = next(row.gate for row in certificate.ratios if row.ratio == certificate.ratio)
    return ("min_confidence", "equal first tokens", "charged ratio", "full prefills", "verdict"), [
        (
            f"{each.min_confidence:g}",
            f"{each.first_token_agreement:.0%}",
            f"{each.charged_ratio:.2f}",
            f"{each.full_prefills:.0%}",
            each.verdict,
        )
        for each in rows
    ]


def kind_of_prompts(guarantee: Guarantee) -> str:
    """What a guarantee was shown for."""
    ranges = {"prompts of {} tokens": guarantee.prompt_tokens, "{} chunks": guarantee.chunks}
    ranges["answers of {} tokens"] = guarantee.answer_tokens
    return ", ".join(
        text.format("-".join(f"{each:,}" for each in dict.fromkeys(limits)) if limits else "?")
        for text, limits in ranges.items()
    )


def _guaranteed(guarantee: Guarantee) -> Rows:
    return ("ratio", "min_confidence", "differ", "at most", "cost / full's"), [
        (
            f"{gate.ratio:g}",
            f"{gate.min_confidence:g}",
            f"{gate.differing} of {guarantee.n}",
            f"{gate.bound:.1%}",
            f"{gate.cost:.2f}",
        )
        for gate in guarantee.gates
    ]
