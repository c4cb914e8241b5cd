"""Names, presets, methods as mappings, and a suite that finds broken methods."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cacheclip_testing.methods import MethodConformance, PromptCase

from cacheclip_rag import EngineConfig
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.methods import DEFAULT_METHOD, PRESET_NAMES, check_method, preset
from cacheclip_rag.methods.direct import Direct
from cacheclip_rag.methods.presets import PRESET_NOTES, PRESETS
from cacheclip_rag.methods.recompute import Recompute
from cacheclip_rag.methods.settings import describe, vary
from cacheclip_rag.selection.budget import AlignedWindows, Budget, Tokens
from cacheclip_rag.selection.scorers import AuxiliaryAttention, ChunkStart, Scorer
from tests.methods.spying import made


class TestNames:
    def test_names_are_those_of_the_presets(self) -> None:
        assert tuple(PRESETS) == PRESET_NAMES == tuple(PRESET_NOTES)
        assert all(method.name == name for name, method in PRESETS.items())
        assert all(note.summary.endswith(".") and note.source for note in PRESET_NOTES.values())
        assert len(set(PRESETS.values())) == len(PRESETS) == len({note.summary for note in PRESET_NOTES.values()})

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ConfigurationError, match="one of full, prefix.*got 'cacheclp'. Did you mean 'cacheclip'"):
            preset("cacheclp")
        with pytest.raises(ConfigurationError, match="only an engine can resolve 'auto'"):
            preset(DEFAULT_METHOD)
        with pytest.raises(ConfigurationError, match="^map_reduce is gone: use LangChain"):
            check_method("map_reduce")
        for wrong in ("cacheclip:layers=last", "", 3, None, Recompute):
            with pytest.raises(ConfigurationError, match="method must be"):
                check_method(wrong)
        check_method(Recompute(ChunkStart()))

    def test_a_method_of_ones_own_is_a_setting(self) -> None:
        mine = Recompute(ChunkStart(), Budget(ratio=0.1), name="mine")
        config = EngineConfig(method=mine)
        assert config == EngineConfig(method=replace(mine)) and hash(config) == hash(EngineConfig(method=replace(mine)))
        assert config != EngineConfig(method=mine.at(0.3))

    def test_published_forms(self) -> None:
        paper = preset("cacheclip-paper")
        assert isinstance(paper, Recompute) and paper.correction == 0.0 and paper.chunk_context == "prefix"
        assert paper.scorer == AuxiliaryAttention(layers="last")
        assert paper.budget == Budget(0.2, AlignedWindows(8, 5), chunk_starts=0.0)
        assert made("epic-paper").budget.first == 16

    def test_the_gated_one_is_cacheclip_with_a_gate(self) -> None:
        gated = preset("cacheclip-gated")
        assert gated == replace(preset("cacheclip").at(0.05), name="cacheclip-gated", min_confidence=0.2)
        assert gated.at(0.2).min_confidence == 0.2

    def test_one_default_ratio(self) -> None:
        assert EngineConfig().recompute_ratio is None
        without_gate = [method for method in PRESETS.values() if method.has_ratio and not method.min_confidence]
        assert {method.nominal_ratio for method in without_gate} == {Budget().ratio}


class TestDescribe:
    @pytest.mark.parametrize("name", PRESET_NAMES)
    def test_it_is_json_and_comes_back(self, name: str) -> None:
        method = preset(name)
        assert vary(method, json.loads(json.dumps(describe(method)))) == method

    def test_nested_parts_with_their_types(self) -> None:
        found = describe(preset("cacheclip"))
        assert found["type"] == "Recompute" and found["name"] == "cacheclip"
        assert found["scorer"] == {"type": "AuxiliaryAttention", "layers": "tuned", "heads": "auto"}
        assert found["budget"]["grouping"] == {"type": "Windows", "size": 8}
        own = describe(Recompute(Backwards()))["scorer"]  # a type from elsewhere goes by its full name
        assert own == {"type": f"{__name__}.Backwards", "until": 3}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"corection": 0.1}, "cacheclip has no field 'corection'. Did you mean 'correction'. Fields of Recompute"),
    ({"budget": {"ration": 0.1}}, "cacheclip.budget has no field 'ration'. Did you mean 'ratio'"),
    ({"budget": {"grouping": {"threshold": 2}}}, "budget.grouping has no field 'threshold'.*of Windows: size"),
    ({"budget": {"grouping": {"type": "AlignedWindows", "size": 4}}}, "below the window size, got threshold=5"),
    ({"scorer": {"type": "ChunkStat"}}, "got 'ChunkStat'. Did you mean 'ChunkStart'"),
    ({"scorer": {"type": "Windows"}}, "cacheclip.scorer must be of type AuxiliaryAttention, ChunkStart"),
    ({"scorer": {"type": f"{__name__}.Incomplete"}}, "cacheclip.scorer of type .*Incomplete is not complete"),
    ({"scorer": {"type": 3}}, "got 3"),
    ({"scorer": 3}, "scorer must be a Scorer"),
    ({"budget": 0.2}, "budget must be a TokenBudget"),
    ({"correction": {"share": 0.5}}, "cacheclip.correction must name its type"),
    ({"name": ""}, "name must be a non-empty string"),
    ({"chunk_context": "neighbours"}, "chunk_context must be one of prefix, passages"),
]


class TestVary:
    def test_nested_changes_keep_the_rest(self) -> None:
        method: Any = vary(preset("cacheclip"), {"correction": 0.0, "budget": {"ratio": 0.1}})
        assert method.correction == 0.0 and method.budget == Budget(ratio=0.1, chunk_starts=0.5)
        assert method.scorer == AuxiliaryAttention()

    def test_another_type_has_its_own_defaults(self) -> None:
        grouping = {"grouping": {"type": "AlignedWindows", "threshold": 2}}
        method: Any = vary(preset("cacheclip"), {"scorer": {"type": "ChunkStart"}, "budget": grouping})
        assert method.scorer == ChunkStart()
        assert method.budget.grouping == AlignedWindows(8, 2) and method.budget.chunk_starts == 0.5
        assert vary(preset("cacheclip"), {"type": "Direct"}) == Direct()

    def test_a_type_by_its_name_alone_or_made_or_ones_own(self) -> None:
        for grouping in ("Tokens", {"type": "Tokens"}, Tokens()):
            assert made("epic", budget={"grouping": grouping}).budget == Budget(grouping=Tokens())
        method: Any = vary(preset("epic"), {"scorer": {"type": f"{__name__}.Backwards", "until": 2}})
        assert method.scorer == Backwards(until=2) and method.budget == Budget(grouping=Tokens())

    @pytest.mark.parametrize(("changes", "message"), WRONG)
    def test_wrong_changes(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            vary(preset("cacheclip"), changes)


@pytest.mark.parametrize("hook", ["positions", "row_filter", "prepare", "reads_cache"])
def test_a_hook_that_is_gone_is_named(hook: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Mine has {hook}, which engines do not call any more"):
        type("Mine", (Direct,), {hook: lambda self, *given: None})


@dataclass(frozen=True, slots=True)
class Incomplete(Scorer):
    """A scorer with a setting that has no default."""

    wanted: int

    def score(self, view: Any) -> list[torch.Tensor]:
        return []


@dataclass(frozen=True, slots=True)
class Backwards(Scorer):
    """A scorer as third parties write them."""

    until: int = 3

    def score(self, view: Any) -> list[torch.Tensor]:
        return [torch.arange(len(span.tokens)).clamp(min=self.until).float() for span in view.spans]


@dataclass(frozen=True, slots=True)
class Overspending(Recompute):
    """One token too many."""

    def select(self, view: Any, scores: Any) -> list[torch.Tensor]:
        masks = super(Overspending, self).select(view, scores)
        free = (~masks[0]).nonzero().flatten()
        masks[0][free[:1]] = True
        return masks


class TestBackwards(MethodConformance):
    @pytest.fixture
    def method(self) -> Any:
        return Recompute(Backwards(), name="backwards")

    def test_the_suite_finds_a_broken_method(self, prompt_case: PromptCase) -> None:
        """Beside the sound one, which passes."""
        broken = Overspending(Backwards())
        with pytest.raises(AssertionError):
            self.test_the_budget_is_kept(prompt_case, broken, 0.3)
        with pytest.raises(AssertionError):
            self.test_ratio_zero_is_direct_reuse(prompt_case, broken)
