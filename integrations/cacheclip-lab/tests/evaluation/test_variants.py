"""Variants files: methods by name, read from TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.comparators import FixedStarts
from cacheclip_lab.variants import read_variants
from typer.testing import CliRunner

from cacheclip_rag import ConfigurationError
from cacheclip_rag.cli import app
from cacheclip_rag.methods import preset
from cacheclip_rag.selection import AlignedWindows, AuxiliaryAttention, Budget, ChunkStart

FILE = """
[bare]
preset = "cacheclip"
correction = 0.0
chunk_context = "prefix"

[bare.budget]
ratio = 0.1
grouping = {type = "AlignedWindows", threshold = 3}

[own-attention]
preset = "cacheclip"
scorer = {type = "ChunkStart"}

[four]
preset = "epic"
budget = {type = "cacheclip_lab.comparators.FixedStarts", first = 4}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "variants.toml"
    path.write_text(FILE)
    return path


def test_a_preset_and_what_differs(file: Path) -> None:
    found: Any = read_variants(file)
    assert list(found) == ["bare", "own-attention", "four"] and all(m.name == name for name, m in found.items())
    bare = found["bare"]
    assert (bare.correction, bare.chunk_context, bare.scorer) == (0.0, "prefix", AuxiliaryAttention())
    assert bare.budget == Budget(0.1, AlignedWindows(8, 3), chunk_starts=0.5)
    assert found["own-attention"].scorer == ChunkStart()
    assert found["own-attention"].budget == preset("cacheclip").budget  # type: ignore[attr-defined]
    assert found["four"].budget == FixedStarts(first=4) and read_variants(None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x", "cannot read the variants file .*variants.toml"),
        ("x = 3", "expected tables in .*, each a variant, got x = 3"),
        ("[x]\ncorrection = 0.1", r"\[x\] of .*expected preset = \"NAME\", one of full"),
        ("[x]\npreset = 'cacheclp'", r"\[x\] of .*Did you mean 'cacheclip'"),
        ("[x]\npreset = 'epic'\n[x.budget]\nration = 0.1", r"\[x\] of .*budget has no field .*Did you mean 'ratio'"),
        ("[x]\npreset = 'epic'\n[x.budget]\nratio = 2", r"\[x\] of .*recompute_ratio must be between"),
        ("[epic]\npreset = 'epic'", "none of full, .*auto, full-again, full-reordered, all. Choose another"),
        ("['a,b']\npreset = 'epic'", "a variant's name is of letters"),
    ],
)
def test_what_is_wrong_is_told_with_its_table(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_variants(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the variants file .*nothing.toml"):
        read_variants(tmp_path / "nothing.toml")


def test_a_ratio_for_variants_that_name_none(file: Path) -> None:
    found = {name: method.nominal_ratio for name, method in read_variants(file, 0.6).items()}
    assert found == {"bare": 0.1, "own-attention": 0.6, "four": 0.0}
    assert read_variants(file)["own-attention"].nominal_ratio == 0.2
    file.write_text(
        "[default]\npreset = 'cacheclip'\nbudget.ratio = 0.2\n[tokens]\npreset = 'cacheclip'\n"
        "budget = {grouping = 'Tokens'}"
    )
    found = {name: method.nominal_ratio for name, method in read_variants(file, 0.6).items()}
    assert found == {"default": 0.2, "tokens": 0.6}, "the preset's ratio may be named too"


def test_bench_measures_them(file: Path, tiny_models: dict[str, str]) -> None:
    arguments = ["bench", "--primary", tiny_models["llama"], "--auxiliary", "none"]
    arguments += ["--methods", "full,epic,own-attention,four,low"]
    file.write_text(FILE + "[low]\npreset = 'epic'\nbudget = {ratio = 0.25}\n")
    sizes = ["--context-tokens", "64", "--chunk-tokens", "32", "--runs", "1", "--ratio", "0.5", "--json"]
    result = CliRunner().invoke(app, [*arguments, *sizes, "--variants", str(file)])
    rows = json.loads(result.stdout)["methods"]
    assert list(rows) == ["full", "epic", "own-attention", "four", "low"]
    ratios = {name: row["nominal_ratio"] for name, row in rows.items() if name != "full"}
    assert ratios == {"epic": 0.5, "own-attention": 0.5, "four": 0.0, "low": 0.25}, "low names its own"
    assert rows["four"]["recomputed_tokens"] == 8
