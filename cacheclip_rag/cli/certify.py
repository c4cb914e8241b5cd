"""``cacheclip certify``: measures exactness and fidelity of a pair of models, and saves a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..methods import DEFAULT_METHOD
from .common import (
    AuxiliaryDeviceOption,
    AuxiliaryOption,
    BackendOption,
    ChunkContextOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    PrimaryOption,
    RatioOption,
    VariantsOption,
    VLLMOption,
    output,
    print_json,
    vllm_options,
)

if TYPE_CHECKING:
    from ..guards.certificate import Certificate


def certify(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    method: Annotated[str, typer.Option(help="Preset or variant to certify.")] = DEFAULT_METHOD,
    variants: VariantsOption = None,
    ratio: RatioOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="4 prompts instead of 20: a first look.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    chunk_context: ChunkContextOption = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the primary's chunk caches.")] = None,
    backend: BackendOption = "transformers",
    vllm: VLLMOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that reuse is exact on these models, measure how close answers are to full prefill, save a certificate.

    Exit code 1 if the verdict is "not faithful".
    """
    options = vllm_options(vllm, backend)

    from ..lab.variants import method_named, read_variants
    from .settings import config_of_models

    config = config_of_models(
        primary,
        auxiliary,
        dtype,
        chunk_context,
        method=method_named(method, read_variants(variants)),
        recompute_ratio=ratio,
        device=device,
        auxiliary_device=auxiliary_device,
        codec=codec,
    )
    if backend == "vllm":
        from ..lab.evaluation.served import certify_vllm

        certificate = certify_vllm(config, quick=quick, vllm=options)
    else:
        from ..lab.evaluation.certify import certify as run

        certificate = run(config, quick=quick)
    path = certificate.save()
    if as_json:
        print_json({**certificate.to_dict(), "path": str(path)})
    else:
        _print(certificate, path)
    if certificate.verdict == "not faithful":
        raise typer.Exit(1)


def _print(certificate: Certificate, path: Path) -> None:
    from rich.table import Table

    out = output()
    exactness = certificate.exactness
    checks = Table(title=f"Exactness of {certificate.primary}, {exactness['prompt_tokens']} tokens")
    for column in ("check", "figure", "limit", "", "what it is"):
        checks.add_column(column, justify="right" if column in ("figure", "limit") else "left")
    for name, check in exactness["checks"].items():
        verdict = "passed" if check["passed"] else "FAILED"
        checks.add_row(name, f"{check['figure']:.3g}", f"{check['limit']:.3g}", verdict, check["says"])
    out.print(checks)
    floor = exactness["noise_floor"]
    backend = certificate.identity.backend or "plain transformers"
    out.print(f"Noise floor of {backend} here: logits {floor['logits']:.2g}, KL {floor['kl']:.2g} nats.")
    fidelity = Table(
        title=f"Fidelity of {certificate.identity.method} ({certificate.auxiliary}) to full prefill, "
        f"{certificate.prompts} prompts"
    )
    ratios = ("nominal", "effective", "charged")
    for column in (*ratios, "first KL mean", "median", "answer KL mean", "median", "max", "agree", "needles"):
        fidelity.add_column(column, justify="right")
    fidelity.add_column("verdict")
    for row in certificate.ratios:
        figures = [row.first_token_kl["mean"], row.first_token_kl["median"]]
        figures += [row.answer_kl[key] for key in ("mean", "median", "max")]
        fidelity.add_row(
            f"{row.ratio:g}",
            f"{row.effective_ratio:.3f}",
            "-" if row.charged_ratio is None else f"{row.charged_ratio:.3f}",
            *(f"{figure:.4f}" for figure in figures),
            f"{row.agreement:.1%}",
            f"{row.needle_accuracy:.0%}",
            row.verdict,
        )
    out.print(fidelity)
    limits = certificate.thresholds
    out.print(
        f"Full prefill finds {certificate.needle_accuracy_of_full:.0%} of the needles. 'faithful' needs a mean KL of "
        f"at most {limits['first_token_kl']:g} nats at the first token and {limits['answer_kl']:g} along the answer, "
        f"{limits['agreement']:.0%} equal greedy tokens, and {limits['needle_accuracy_of_full']:.0%} of the needles "
        "that full prefill finds."
    )
    if not_measured := exactness.get("not_measured"):
        out.print(f"Not measured with {backend}: {'; '.join(not_measured)}.")
    _print_gate(certificate)
    out.print(
        f"Verdict at ratio {certificate.ratio:g}: [bold]{certificate.verdict}[/bold] ({certificate.seconds:.0f} s)"
    )
    out.print(f"Certificate: {path}", soft_wrap=True)


def _print_gate(certificate: Certificate) -> None:
    from rich.table import Table

    from ..guards.certificate import confidence_at

    rows = next(row.gate for row in certificate.ratios if row.ratio == certificate.ratio)
    if not rows:
        return
    gate = Table(title=f"A confidence gate from ratio {certificate.ratio:g} on (setting min_confidence)")
    for column in ("min_confidence", "equal first tokens", "charged ratio", "full prefills", "verdict"):
        gate.add_column(column, justify="right")
    for each in rows:
        shares = (f"{each.first_token_agreement:.0%}", f"{each.charged_ratio:.2f}", f"{each.full_prefills:.0%}")
        gate.add_row(f"{each.min_confidence:g}", *shares, each.verdict)
    out = output()
    out.print(gate)
    least = confidence_at(certificate, certificate.ratio)
    if certificate.quick:
        return
    if least is None:
        out.print("min_confidence 'auto' is refused here: no gate keeps all first tokens for less than full prefill.")
    else:
        out.print(f"min_confidence 'auto' is {least:g} here: the least with which all first tokens are equal.")
