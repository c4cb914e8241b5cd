"""Certify models and method, then serve with an engine that requires the certificate and compares a share of its
answers with full prefill."""

from __future__ import annotations

from cacheclip_lab.evaluation.certify import certify
from common import AUXILIARY, PRIMARY, STORE

from cacheclip_rag import CacheClipEngine, CertificateError, EngineConfig, SamplingParams

config = EngineConfig(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE)
CHUNKS = [
    "The lighthouse of Brindle Point was built in 1847 by the engineer Ada Marsh, of granite from the island.",
    "Its lamp burned whale oil until 1871, when Marsh's nephew had it changed to paraffin, against her will.",
]


def main() -> None:
    certificate = certify(config, quick=True)  # without quick: 20 prompts instead of 4
    print(f"verdict at ratio {certificate.ratio}: {certificate.verdict}; kept in {certificate.save()}")
    ratio = next((row.ratio for row in certificate.ratios if row.verdict in ("exact", "faithful")), 1.0)
    engine = CacheClipEngine(config, recompute_ratio=ratio, require_certificate=True, shadow_rate=1.0)
    engine.precompute(CHUNKS)
    prompt = "\n\n".join([*CHUNKS, "Until when did the lamp burn whale oil?"])
    try:
        answer = engine.generate(prompt, SamplingParams(max_tokens=20))
        print(f"at ratio {ratio}: {answer.text!r} by {answer.stats.method}, {answer.stats.hits} hits")
    except CertificateError as error:  # a quick certificate suffices only for the verdict 'exact'
        print(f"refused: {error}")
    engine.wait_for_observers()
    print({name: value for name, value in engine.metrics.snapshot().items() if "shadow" in name})


if __name__ == "__main__":
    main()
