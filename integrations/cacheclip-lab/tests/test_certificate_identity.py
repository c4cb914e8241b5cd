"""What a certificate is about: whatever could change an answer changes the digest, and the ratio alone does not."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import cacheclip_lab.certificates.identity as identities
import pytest
import torch
from cacheclip_lab.certificates.identity import CHANGES_NO_ANSWER, TOLD_OTHERWISE, Identity, differences, make_identity

from cacheclip_rag import CacheClipEngine, CallOptions, EngineConfig
from cacheclip_rag.methods import Method
from cacheclip_rag.models import weights_digest
from cacheclip_rag.selection import HeadSet
from tests.conftest import TINY_MODELS, Make, Models, Patch, build_model


@pytest.fixture
def make(tiny_models: Models) -> Make:
    def build(**options: Any) -> CacheClipEngine:
        models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
        return CacheClipEngine(**{**models, "method": "cacheclip", **options})

    return build


def identity(engine: CacheClipEngine, method: Method | None = None) -> Identity:
    return engine.parts.certificates.identity(method or engine.make_method())


def changed(one: Identity, other: Identity) -> set[str]:
    """Fields that differ; the digest differs exactly if one does."""
    found = {name for name, value in asdict(one).items() if asdict(other)[name] != value}
    assert bool(found) == (one.digest() != other.digest())
    return found


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_every_field_is_part_of_the_digest(make: Make, name: str) -> None:
    found = identity(make())
    assert dataclasses.replace(found, **{name: "another"}).digest() != found.digest()


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            # the weights' digest covers the dtype that they compute in, and chunk caches follow it
            ({"dtype": "bfloat16"}, {"primary_sha256", "auxiliary_sha256", "dtype", "codec"}),
            ({"codec": "bfloat16"}, {"codec"}),
            ({"codec": "float32"}, {"auxiliary_codec"}),
            ({"system_prompt": "Answer as a pirate."}, {"settings"}),
            ({"system_prompt": ""}, set()),  # the chat template's, as without one
            ({"prefix_cache_bytes": 1 << 20}, {"settings"}),
        ],
    )
    def test_of_the_engine(self, make: Make, options: dict[str, Any], expected: set[str]) -> None:
        assert changed(identity(make()), identity(make(**options))) == expected

    def test_what_ends_an_answer(self, make: Make, tmp_path: Path) -> None:
        """It is neither in the config nor in the tokenizer."""
        found = []
        for ends in ([1], [5, 6]):
            folder = Path(shutil.copytree(make().config.primary, tmp_path / f"{ends}"))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
            found.append(identity(make(primary=str(folder))))
        assert changed(*found) == {"primary_eos_ids"}

    def test_every_setting_and_every_option_of_a_call_is_told_of(self) -> None:
        """A new setting is part of the identity, unless it is named with a reason. An option is a setting,
        or part of the prompt, or changes no answer. Figures are of the prompt as asked, greedily; what else can change
        an answer must be a setting or one of the method's."""
        settings, options = ({field.name for field in fields(kind)} for kind in (EngineConfig, CallOptions))
        assert not TOLD_OTHERWISE & {*CHANGES_NO_ANSWER} and {*TOLD_OTHERWISE, *CHANGES_NO_ANSWER} < settings
        assert all(CHANGES_NO_ANSWER.values())
        of_the_prompt, only_record = "params question documents tools chat_template_kwargs", "logprobs trace"
        assert options - settings == {*of_the_prompt.split(), *only_record.split()}, "a setting, or changes no answer?"

    def test_a_setting_that_is_added_is_part_of_it(self, make: Make) -> None:
        @dataclass(frozen=True, slots=True)
        class More(EngineConfig):
            added: int = 1

        engine, method = make(), make().make_method()
        parts = engine.parts.kv_sources(method)

        def found(added: int) -> Identity:
            own = {field.name: getattr(engine.config, field.name) for field in fields(EngineConfig)}
            config = More(**own, added=added)
            return make_identity(config, method, parts)

        assert changed(found(1), found(2)) == {"settings"}
        assert differences(found(1).of_engine, found(2).of_engine) == {"added": "1"}
        assert differences(identity(engine).of_engine, found(2).of_engine) == {"added": "not recorded"}

    @pytest.mark.parametrize("role", ["primary", "auxiliary"])
    def test_kind_of_device(self, make: Make, monkeypatch: Patch, role: str) -> None:
        """Told by where the models are, not by what the settings say: ``auto`` may mean any."""
        engine = make()
        before = identity(engine)
        monkeypatch.setattr(getattr(engine, role), "device", torch.device("meta"))
        after = identity(engine)
        assert changed(before, after) == {"device" if role == "primary" else "auxiliary_device"}
        assert {after.device, after.auxiliary_device} == {"meta", "cpu"} != {before.device, before.auxiliary_device}

    @pytest.mark.parametrize(
        ("owner", "field"),
        [(identities.transformers, "transformers"), (identities.torch, "torch"), (identities, "cacheclip_rag")],
    )
    def test_versions(self, make: Make, monkeypatch: Patch, owner: Any, field: str) -> None:
        before = identity(make())
        monkeypatch.setattr(owner, "__version__", "99.0")
        assert changed(before, identity(make())) == {field}


class TestModels:
    @pytest.mark.parametrize("role", ["primary", "auxiliary"])
    def test_other_weights(self, make: Make, tmp_path: Path, role: str) -> None:
        folders = [str(build_model(tmp_path / str(seed), TINY_MODELS["llama"], seed=seed)) for seed in (7, 8)]
        one, other = (identity(make(**{role: folder})) for folder in folders)
        assert changed(one, other) == {f"{role}_sha256"}

    @pytest.mark.parametrize("role", ["primary", "auxiliary"])
    @pytest.mark.parametrize("part", ["chat template", "merges"])
    def test_other_tokenizers(self, make: Make, tiny_models: Models, tmp_path: Path, role: str, part: str) -> None:
        """Of the very same weights: what is read differs, and so do the answers."""
        folder = shutil.copytree(tiny_models["llama" if role == "primary" else "auxiliary"], tmp_path / "other")
        path = folder / ("chat_template.jinja" if part == "chat template" else "tokenizer.json")
        text = path.read_text()
        if part == "chat template":
            path.write_text(text.replace("<|im_end|>\n", "<|im_end|>\n\n"))
        else:
            (tokenizer := json.loads(text))["model"]["merges"].pop()
            path.write_text(json.dumps(tokenizer))
        assert changed(identity(make()), identity(make(**{role: str(folder)}))) == {f"{role}_tokenizer_sha256"}

    def test_of_a_method_without_an_auxiliary(self, make: Make, tiny_models: Models) -> None:
        """Its models do not count there."""
        one = identity(make(method="epic"))
        other = identity(make(method="epic", auxiliary=tiny_models["qwen2"]))
        assert one.auxiliary_sha256 is one.auxiliary_tokenizer_sha256 is None
        assert changed(one, other) == set()

    def test_head_sets(self, make: Make) -> None:
        engine = make()
        seen, sha256 = [identity(engine)], weights_digest(engine.parts.models.auxiliary_caches.runtime.fingerprint)
        for head in (0, 1):
            engine.parts.use_heads(HeadSet(sha256, ((0, head), (1, 1)), torch.tensor([0.5, 0.5])))
            seen.append(identity(engine))
        assert changed(*seen[:2]) == changed(*seen[1:]) == {"auxiliary_heads_sha256"}
        engine.parts.use_heads(None)
        assert identity(engine).auxiliary_heads_sha256 == "none"


RATIOS = {"recompute_ratio", "ratio", "min_confidence"}
"""Settings that a certificate has figures for, one by one."""
NAMES = ("cacheclip", "epic", "direct")


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting of a method, those of its parts included."""
    for field in fields(value):
        own = getattr(value, field.name)
        if dataclasses.is_dataclass(own):
            yield from leaves(own, (*path, field.name))
        else:
            yield (*path, field.name), own


def with_leaf(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """A copy with one setting changed, whether the method would have it so or not."""
    made = copy.copy(value)
    inner = new if len(path) == 1 else with_leaf(getattr(value, path[0]), path[1:], new)
    object.__setattr__(made, path[0], inner)
    return made


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value / 2 or 0.25
    return f"not {value}"


class TestMethods:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_setting_but_the_ratio(self, make: Make, name: str) -> None:
        engine = make()
        method = engine.make_method(name)
        before = identity(engine, method)
        seen = 0
        for path, value in leaves(method):
            if path[-1] in {"chunk_context", "heads", "name"}:
                continue  # names of texts, files and classes: what these hold is asked for below
            after = identity(engine, with_leaf(method, path, another(value)))
            expected = set() if path[-1] in RATIOS else {"method_settings"}
            assert changed(before, after) == expected, f"{'.'.join(path)} of {name}"
            seen += 1
        assert seen or name == "direct"

    def test_another_name_or_a_class_derived_from_a_method(self, make: Make) -> None:
        """It may do anything under the name and with the settings of the one it comes from."""
        engine = make()
        method, other = (engine.make_method(name) for name in ("epic", "cacheclip"))
        assert "method" in changed(identity(engine, method), identity(engine, other))

        @dataclass(frozen=True, slots=True)
        class Mine(type(method)):  # type: ignore[misc]
            pass

        mine = Mine(**{field.name: getattr(method, field.name) for field in fields(method)})
        assert changed(identity(engine, method), identity(engine, mine)) <= {"method", "method_settings"}
        assert identity(engine, method).digest() != identity(engine, mine).digest()
