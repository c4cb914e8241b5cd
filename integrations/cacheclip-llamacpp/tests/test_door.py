"""The loader costs nothing to ask, and the distribution takes only what is public."""

import subprocess
import sys
from pathlib import Path

import cacheclip_llamacpp
import pytest
from cacheclip_llamacpp.loader import GgufLoader
from cacheclip_testing import names_outside_the_door

from cacheclip_rag.models import loader_of


def test_names_from_public_modules_only() -> None:
    assert not names_outside_the_door(Path(cacheclip_llamacpp.__file__).parent)


def test_the_loader_imports_no_engine() -> None:
    heavy = "{'torch', 'transformers', 'llama_cpp'} & sys.modules.keys()"
    code = f"import sys, cacheclip_llamacpp.loader as it; it.GgufLoader('m.gguf').is_here; sys.exit(str({heavy} or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""


@pytest.mark.parametrize("name", ["model.gguf", "a/b.Q4_K_M.GGUF", "C:/model.gguf", "fake:model.gguf", "owner/model"])
def test_whose_a_name_is(name: str) -> None:
    is_own = name not in ("fake:model.gguf", "owner/model")
    assert GgufLoader.matches(name) is is_own and isinstance(loader_of(name), GgufLoader) is is_own
