"""Head sets that come with the package: readable, bound to their models, and in the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from cacheclip_rag.selection.heads import _SHIPPED, HeadSet

ROOT = Path(__file__).parents[2]
SETS = sorted(_SHIPPED.glob("*.safetensors"))


def test_there_is_one_for_the_default_auxiliary() -> None:
    assert SETS


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_a_set_says_what_it_is_for_and_where_it_comes_from(path: Path) -> None:
    heads = HeadSet.load(path)
    assert path.stem == heads.auxiliary_sha256[:16], "engines look for it under the digest of the auxiliary"
    assert heads.about["command"] == "finetune" and "Apache-2.0" in heads.about["data"]
    assert {"auxiliary", "primary", "seed", "samples", "settings"} <= set(heads.about)
    assert path.stat().st_size < 64 * 1024
    assert "/" not in "".join(map(str, heads.about["given_from"])), "no path of a machine"


def test_the_wheel_holds_them(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    assert {f"cacheclip_rag/selection/shipped/{path.name}" for path in SETS} <= set(names)
