"""Head checkpoints: the variants of the published layout, and errors for damaged files."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    MODEL_SIZES,
    one_line,
    prompt,
    random_pair,
    tiny_target,
    untrained_head,
    write_checkpoint,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from eagle_fsd import AcceptanceConfig, CheckpointError, EagleFSD, EagleHead, TreeConfig
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.identity import identify
from eagle_fsd.model.target import Target

FORMATS = ["model.safetensors", "pytorch_model.bin"]
LAYER = "layers.0."


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_target()


def published(
    folder: Path,
    model: PreTrainedModel,
    *,
    file: str = "model.safetensors",
    bias: bool = True,
    config: dict[str, Any] | None = None,
    **tensors: Tensor | None,
) -> dict[str, Tensor]:
    """Write a head as EAGLE's authors publish them, and return the tensors of the head.

    ``config`` overrides fields of ``config.json`` and ``tensors`` (with ``__`` for a dot) overrides
    tensors; None removes one.
    """
    values = {**model.config.to_dict(), "num_hidden_layers": 1, "bias": bias}
    state = dict(untrained_head(model, seed=3, bias=bias).state_dict())
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_checkpoint(folder, values, state, file, config, changes)
    return state


def same_state(head: EagleHead, expected: dict[str, Tensor]) -> bool:
    found = head.state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("architecture", ["llama-linear-rope-tied", "qwen3"])
def test_saved_head_decodes_as_before(architecture: str, tmp_path: Path) -> None:
    """With everything accepted the output is the head's, including the effect of its RoPE."""
    pair = random_pair(architecture)
    save_head(pair.drafter, tmp_path / "head")
    loaded = EagleFSD(pair.model, load_head(tmp_path / "head", pair.target), pair.tree)
    assert same_state(loaded.drafter, pair.drafter.state_dict())
    options = {"max_new_tokens": 12, "threshold": ACCEPT_ALL}
    before, after = (item.generate(prompt(8), **options) for item in (pair, loaded))
    assert torch.equal(before.sequences, after.sequences)
    assert before.stats.accepted == after.stats.accepted
    assert before.stats.tau > 1.5


def test_saved_head_has_two_files_without_the_target_tensors(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """The head's weights are plain tensors, also if the target is quantized."""
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    head = untrained_head(model).attach(Target(model))
    save_head(head, tmp_path / "head", dtype=torch.float16)
    files = sorted(item.name for item in (tmp_path / "head").iterdir())
    assert files == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors.keys() == head.state_dict().keys()
    assert {item.dtype for item in tensors.values()} == {torch.float16}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["bias"], config["num_hidden_layers"]) == (True, 1)
    assert "quantization_config" not in config


def test_saving_replaces_a_head_whatever_its_format(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights saved last are loaded; where saving fails, the head that was there remains."""
    target, head = Target(model), untrained_head(model).attach(Target(model))
    for binary in (False, True, False):
        head.fc.weight.data.mul_(2.0)
        save_head(head, tmp_path, binary=binary)
        assert sorted(item.name for item in tmp_path.iterdir()) == ["config.json", FORMATS[binary]]
        assert torch.equal(load_head(tmp_path, target).fc.weight, head.fc.weight)
    before, head.fc.bias = load_head(tmp_path, target), None
    monkeypatch.setattr(os, "fsync", lambda _: os.stat("/no/space"))
    with pytest.raises(OSError, match="/no/space"):
        save_head(head, tmp_path)
    assert same_state(load_head(tmp_path, target), before.state_dict())


@pytest.mark.parametrize("file", FORMATS)
def test_head_loads_from_both_formats_with_and_without_bias(
    file: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    """The bias is there by default; as in heads for SGLang, its tensor alone is enough."""
    target, own = Target(model), torch.randn(32)
    for options in (
        {"bias": True, "layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)},  # ignored
        {"bias": False},
        {"config": {"bias": None}},
        {"bias": False, "fc__bias": own},
    ):
        expected = published(tmp_path, model, file=file, **options)
        if "fc__bias" in options:
            expected["fc.bias"] = own
        head = load_head(tmp_path, target)
        assert same_state(head, expected)
        assert ("fc.bias" in expected) == (options != {"bias": False})
        assert not head.training
        assert not any(item.requires_grad for item in head.parameters())


def test_embedding_is_kept_and_saved_unless_it_is_the_target_s(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """Most published heads hold a copy of the target's."""
    table, tokens = model.get_input_embeddings().weight, torch.tensor([[4, 9]])
    own = table.detach().flip(0)
    published(tmp_path / "a", model, embed_tokens__weight=own)
    head = load_head(tmp_path / "a", Target(model))
    assert torch.equal(head.embed(tokens)[0], own[[4, 9]])
    save_head(head, tmp_path / "b")
    again = load_head(tmp_path / "b", Target(model))
    assert same_state(again, head.state_dict())
    assert torch.equal(again.embed(tokens), head.embed(tokens))
    expected = published(tmp_path, model, embed_tokens__weight=table)
    head = load_head(tmp_path, Target(model))
    assert same_state(head, expected)
    with torch.no_grad():
        table[4] += 1.0
    assert torch.equal(head.embed(tokens)[0], table[[4, 9]])


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def assert_same_outputs(one: EagleHead, other: EagleHead) -> None:
    """Compare the outputs at positions that tell RoPE settings apart."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([[0, 3, 40, 41, 200]])
    inputs = torch.randn(1, 5, 32, generator=generator), prompt(5), positions
    with torch.no_grad():
        assert torch.equal(one(*inputs), other(*inputs))


#: RoPE settings of a layer, by the names of transformers 5 and of transformers 4.
ROPE_NAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": (
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
    ),
    "linear": (
        {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    "llama3": (
        {**LLAMA3, "rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
}
SLIDING_ROPE = {"rope_type": "default", "rope_theta": 300.0}
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "glm": GlmConfig,  # which rotates half of each attention head
    "gemma3_text": Gemma3TextConfig,  # with a RoPE for each layer type
}


def head_with_rope(family: str, rope: dict[str, Any]) -> EagleHead:
    """Create a head of a family, attached to a target, whose layer has these RoPE settings."""
    parameters = {"glm": {**rope, "partial_rotary_factor": 0.5}}.get(family, rope)
    if family == "gemma3_text":
        parameters = {"full_attention": rope, "sliding_attention": SLIDING_ROPE}
    sizes = {**MODEL_SIZES, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family](**sizes, rope_parameters=copy.deepcopy(parameters))
    )
    return untrained_head(model).attach(Target(model))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "default"), ("llama", "llama3"), ("glm", "linear"), ("gemma3_text", "llama3")],
)
def test_rope_is_saved_by_both_names_and_read_by_either(
    family: str, kind: str, tmp_path: Path
) -> None:
    """The names of transformers 4 and of transformers 5."""
    rope, old = ROPE_NAMES[kind]
    head = head_with_rope(family, rope)
    save_head(head, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["rope_parameters"] == head.config.rope_parameters
    expected = {"torch_dtype": "float32", "dtype": "float32", **old}
    if family == "glm":
        expected["partial_rotary_factor"] = 0.5
    assert {name: config[name] for name in expected} == expected
    assert_same_outputs(load_head(tmp_path, head.target), head)

    new_names = {name: value for name, value in config.items() if name not in old}
    for name in ("torch_dtype", "partial_rotary_factor"):
        new_names.pop(name, None)
    old_names = {**config, "rope_local_base_freq": SLIDING_ROPE["rope_theta"]}
    del old_names["rope_parameters"], old_names["dtype"]
    oldest = {name: value for name, value in old_names.items() if name != "model_type"}
    for values in (new_names, old_names, *([oldest] if family == "llama" else [])):
        file.write_text(json.dumps(values))
        assert_same_outputs(load_head(tmp_path, head.target), head)


def test_head_that_fits_the_bundled_target_needs_no_other(tmp_path: Path) -> None:
    """A path or a loaded head suffices; the bundled head's ``fsd.json`` does not apply to it."""
    bundled = EagleFSD.from_pretrained(device_map="cpu")
    save_head(bundled.drafter, tmp_path)
    (tmp_path / "fsd.json").write_text('{"threshold": 0.25}')
    from_files = EagleFSD.from_pretrained(drafter=tmp_path, device_map="cpu")
    from_memory = EagleFSD.from_pretrained(drafter=load_head(tmp_path, bundled.target))
    assert [pair.acceptance.threshold for pair in (from_files, from_memory)] == [0.25, 0.0]
    ids = prompt(8, vocab_size=1024)
    expected = bundled.generate(ids, max_new_tokens=20, threshold=0.1)
    for pair in (from_files, from_memory):
        out = pair.generate(ids, max_new_tokens=20, threshold=0.1, min_ratio=0.3)
        assert torch.equal(out.sequences, expected.sequences)


@pytest.fixture
def folders(model: PreTrainedModel, tmp_path: Path) -> tuple[Path, Path]:
    """Return folders with a target and a head."""
    model.save_pretrained(tmp_path / "target")
    published(tmp_path / "head", model)
    return tmp_path / "target", tmp_path / "head"


def test_settings_file_sets_defaults_that_arguments_override(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Options, another file, or config objects, which also override that file."""
    load = partial(EagleFSD.from_pretrained, *folders, device_map="cpu")
    pair = load()
    assert (pair.tree, pair.acceptance) == (TreeConfig.for_device("cpu"), AcceptanceConfig())
    values = {"threshold": 10.0, "divergence": "kl", "min_ratio": 0.0, "total_tokens": 9}
    (folders[1] / "fsd.json").write_text(json.dumps(values))
    pair = load(depth=2, top_k=3)
    assert pair.tree == TreeConfig(total_tokens=9, depth=2, top_k=3)
    assert pair.acceptance == AcceptanceConfig(threshold=10.0, divergence="kl")
    for options in ({}, {"threshold": 0.0}):
        origins = pair.generate(prompt(6), None, 12, **options).stats.as_dict()["origins"]
        assert (origins["fuzzy"] > 0) == (not options)
    other = tmp_path / "other.json"
    other.write_text('{"threshold": 0.25, "divergence": "tv"}')
    assert load(settings=other).acceptance == AcceptanceConfig(threshold=0.25, divergence="tv")
    acceptance, tree = AcceptanceConfig(threshold=0.125), TreeConfig(depth=3)
    pair = load(settings=other, acceptance=acceptance, tree=tree)
    assert (pair.acceptance, pair.tree) == (acceptance, tree)
    with pytest.raises(ValueError, match=r"^pass either tree or depth, not both$"):
        load(tree=tree, depth=2)


def test_lossless_calls_use_their_own_tree(folders: tuple[Path, Path]) -> None:
    """The file's lossless tree applies unless an argument or an assignment sets the tree."""
    values = {"threshold": 10.0, "total_tokens": 9, "depth": 7, "top_k": 1}
    exact = {"total_tokens": 1, "depth": 1, "top_k": 1}
    (folders[1] / "fsd.json").write_text(json.dumps({**values, "exact": exact}))
    load = partial(EagleFSD.from_pretrained, *folders, device_map="cpu")
    pair = load()
    assert (pair.tree.depth, pair.exact_tree) == (7, TreeConfig(**exact))
    lengths = [
        max(pair.generate(prompt(6), max_new_tokens=12, threshold=value).stats.accepted[0])
        for value in (10.0, 0.0)
    ]
    assert lengths == [9, 1]  # a tree of one node is plain decoding
    for other in (load(depth=3), load(tree=TreeConfig(depth=3)), load(acceptance=pair.acceptance)):
        expected = other.tree if other.tree.depth == 3 else pair.exact_tree
        assert other.exact_tree == expected
    pair.tree = TreeConfig(depth=5)
    assert pair.exact_tree == pair.tree


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_settings_of_another_pair_or_data_type_are_warned_of(
    kind: str, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """They are used nevertheless; lossless settings lose nothing with any pair."""
    pair = EagleFSD.from_pretrained(*folders, device_map="cpu")
    models = {"target": pair.model, "drafter": pair.drafter}
    own = identify("mine", models[kind], torch.float32)
    other = f"calibrated for another {kind} (mine)"
    in_half = "calibrated in bfloat16, but the target is in float32: no bound"
    for identity, threshold, warning in (
        (own, 0.5, ""),
        (own.updated(fingerprint="0" * 16), 0.5, other),
        (own.updated(fingerprint="0" * 16), 0.0, ""),
        (own.updated(fingerprint="0" * 16, dtype="float16"), 0.0, ""),
        (own.updated(dtype="bfloat16"), 0.5, in_half if kind == "target" else ""),
        (own.updated(dtype="bfloat16"), 0.0, ""),
    ):
        caplog.clear()
        values = {"threshold": threshold, kind: identity.model_dump()}
        (folders[1] / "fsd.json").write_text(json.dumps(values))
        loaded = EagleFSD.from_pretrained(*folders, device_map="cpu")
        assert loaded.acceptance.threshold == threshold
        assert bool(caplog.text) == bool(warning)
        assert warning in caplog.text


def rejected(path: Path | str, model: PreTrainedModel) -> str:
    """Return the one-line message of the error that loading ``path`` raises."""
    with pytest.raises(CheckpointError) as error:
        load_head(path, Target(model))
    return one_line(error)


def test_problems_of_tensors_are_named(model: PreTrainedModel, tmp_path: Path) -> None:
    """Missing, unexpected and of another shape; all of them at once."""
    up = LAYER + "mlp.up_proj.weight"
    for tensors, messages in (
        ({"fc.weight": None}, ["missing fc.weight"]),
        ({up: None}, [f"missing {up}"]),
        ({"layers.1.mlp.up_proj.weight": torch.ones(2)}, ["unexpected layers.1.mlp.up_proj"]),
        ({"fc.weight": torch.ones(32, 32)}, ["fc.weight is [32, 32], not [32, 64]"]),
        ({up: torch.ones(40, 32)}, [f"{up} is [40, 32], not [48, 32]"]),
        ({"embed_tokens.weight": torch.ones(90, 32)}, ["weight is [90, 32], not [96, 32]"]),
        (
            {"fc.bias": None, "d2t": torch.ones(2), "fc.weight": torch.ones(2, 2)},
            ["missing fc.bias", "unexpected d2t", "fc.weight is"],
        ),
    ):
        file = FORMATS[len(messages) % 2]
        published(
            tmp_path / file,
            model,
            file=file,
            **{name.replace(".", "__"): tensor for name, tensor in tensors.items()},
        )
        message = rejected(tmp_path / file, model)
        assert all(part in message for part in messages)


#: Contents of a file that cannot be read, given the whole one.
DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda whole: whole[: len(whole) // 2],
    lambda _whole: b"version https://git-lfs.github.com/spec/v1\n" * 2,
    lambda _whole: b"<!DOCTYPE html><html>404</html>\n" * 9,
    lambda _whole: b"PK\x03\x04" + bytes(200),
    lambda _whole: b".",  # a pickle without a value
]
CONFIGS = [
    "",
    "[]",
    '{"model_type": "no-such-family"}',
    '{"hidden_size": "32"}',
    '{"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 5}',
    '{"model_type": "gpt2", "n_embd": 32, "n_head": 4, "vocab_size": 96}',
    '{"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4, "draft_vocab_size": "all"}',
]


def test_damaged_and_missing_files_are_named(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in FORMATS:
        published(tmp_path / file, model, file=file)
        path = tmp_path / file / file
        whole = path.read_bytes()
        for damage in DAMAGE:
            path.write_bytes(damage(whole))
            assert file in rejected(tmp_path / file, model)
        path.unlink()
        assert f"{tmp_path}/{file} has neither" in rejected(tmp_path / file, model)
    for content in (
        torch.ones(2),
        {"fc.weight": 3.0},
        {"state_dict": {"fc.weight": torch.ones(2)}},
    ):
        torch.save(content, path)
        assert str(path.parent) in rejected(path.parent, model)
    folder = tmp_path / "head"
    published(folder, model)
    for text in CONFIGS:
        (folder / "config.json").write_text(text)
        assert "config.json" in rejected(folder, model)
    (folder / "config.json").unlink()
    assert f"{folder} has no config.json" in rejected(folder, model)
    assert "folder" in rejected(folder / "model.safetensors", model)
    monkeypatch.chdir(tmp_path)
    for name in ("no-such-folder", "no-such/head", "./no/such/one", "two words"):
        assert name in rejected(name, model)


class Payload:
    """Unpickling this creates the file ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickle_with_code_is_rejected_and_does_not_run(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, file="pytorch_model.bin")
    trace, file = tmp_path / "trace", tmp_path / "pytorch_model.bin"
    content = {"fc.weight": Payload(trace)}
    for save in (torch.save, lambda item, path: path.write_bytes(pickle.dumps(item, protocol=2))):
        save(content, file)
        assert "pytorch_model.bin" in rejected(tmp_path, model)
        assert not trace.exists()
