"""Head checkpoints: the variants of the published layout, and errors for damaged files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    ARCHITECTURES,
    MODEL_SIZES,
    VOCAB_SIZE,
    aligned_pair,
    prompt,
    random_pair,
    tiny_target,
    untrained_head,
)
from safetensors.torch import load_file, save_file
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
from eagle_fsd.model import checkpoint
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.identity import identify
from eagle_fsd.model.target import Target

FORMATS = ["model.safetensors", "pytorch_model.bin"]
LAYER = "layers.0."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up names that are not folders in the local cache only."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


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
    folder.mkdir(parents=True, exist_ok=True)
    values = {**model.config.to_dict(), "num_hidden_layers": 1, "bias": bias}
    for name, value in (config or {}).items():
        values.pop(name)
        if value is not None:
            values[name] = value
    (folder / "config.json").write_text(json.dumps(values))
    state = dict(untrained_head(model, seed=3, bias=bias).state_dict())
    kept = dict(state)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    state = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file)
    return kept


def same_state(head: EagleHead, expected: dict[str, Tensor]) -> bool:
    found = head.state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the message after checking that it is a single printable line."""
    message = str(error.value)
    assert message
    assert message.isprintable()
    return message


# -- valid checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("make", "threshold"), [(random_pair, ACCEPT_ALL), (aligned_pair, 0.0)])
def test_saved_head_decodes_as_before(
    make: Callable[[str], EagleFSD], threshold: float, architecture: str, tmp_path: Path
) -> None:
    """With everything accepted the output is the head's, including the effect of its RoPE."""
    pair = make(architecture)
    save_head(pair.drafter, tmp_path / "head")
    loaded = EagleFSD(pair.model, load_head(tmp_path / "head", pair.target), pair.tree)
    assert same_state(loaded.drafter, pair.drafter.state_dict())
    options = {"max_new_tokens": 30, "threshold": threshold}
    before, after = (item.generate(prompt(8), **options) for item in (pair, loaded))
    assert torch.equal(before.sequences, after.sequences)
    assert before.stats.accepted == after.stats.accepted
    assert before.stats.tau > 1.5


def test_saved_head_has_two_files_without_the_target_tensors(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    head = EagleFSD(model, untrained_head(model)).drafter
    save_head(head, tmp_path / "head", dtype=torch.float16)
    assert sorted(item.name for item in (tmp_path / "head").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors.keys() == head.state_dict().keys()
    assert {item.dtype for item in tensors.values()} == {torch.float16}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["bias"], config["num_hidden_layers"]) == (True, 1)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_head_loads_from_both_formats_with_and_without_bias(
    file: str, bias: bool, model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, file=file, bias=bias)
    head = load_head(tmp_path, Target(model))
    assert same_state(head, expected)
    assert ("fc.bias" in expected) == bias == (head.fc.bias is not None)
    assert not head.training
    assert not any(item.requires_grad for item in head.parameters())


@pytest.mark.parametrize("file", FORMATS)
def test_bias_defaults_to_true(file: str, model: PreTrainedModel, tmp_path: Path) -> None:
    expected = published(tmp_path, model, file=file, config={"bias": None})
    assert "bias" not in json.loads((tmp_path / "config.json").read_text())
    assert same_state(load_head(tmp_path, Target(model)), expected)


def test_bias_in_the_weights_needs_none_in_the_configuration(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """As in heads for SGLang."""
    bias = torch.randn(32)
    expected = published(tmp_path, model, bias=False, fc__bias=bias)
    assert same_state(load_head(tmp_path, Target(model)), {**expected, "fc.bias": bias})


@pytest.mark.parametrize("file", FORMATS)
def test_copy_of_the_target_embedding_is_not_kept(
    file: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Most published heads hold such a copy."""
    table = model.get_input_embeddings().weight
    expected = published(tmp_path, model, file=file, embed_tokens__weight=table)
    head = load_head(tmp_path, Target(model))
    assert same_state(head, expected)
    with torch.no_grad():
        table[4] += 1.0
    assert torch.equal(head.embed(torch.tensor([[4]]))[0, 0], table[4])


@pytest.mark.parametrize("file", FORMATS)
def test_embedding_of_the_head_is_kept_and_saved(
    file: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    table = model.get_input_embeddings().weight.detach().flip(0)
    published(tmp_path / "a", model, file=file, embed_tokens__weight=table)
    head = load_head(tmp_path / "a", Target(model))
    tokens = torch.tensor([[4, 9]])
    assert torch.equal(head.embed(tokens)[0], table[[4, 9]])
    save_head(head, tmp_path / "b")
    again = load_head(tmp_path / "b", Target(model))
    assert same_state(again, head.state_dict())
    assert torch.equal(again.embed(tokens), head.embed(tokens))


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"])
def test_computed_buffer_of_older_checkpoints_is_ignored(
    name: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, **{name.replace(".", "__"): torch.ones(4)})
    assert name in load_file(tmp_path / "model.safetensors")
    assert same_state(load_head(tmp_path, Target(model)), expected)


def test_weights_get_the_dtype_of_the_target_by_default(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model)
    half = tiny_target(dtype=torch.bfloat16)
    assert load_head(tmp_path, Target(half)).dtype == torch.bfloat16
    assert load_head(tmp_path, Target(model)).dtype == torch.float32
    assert load_head(tmp_path, Target(model), dtype=torch.float16).dtype == torch.float16


OLD_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("old", "rope"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.5}},
            {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
        ),
        ({"rope_scaling": LLAMA3, "rope_theta": 5e5}, {**LLAMA3, "rope_theta": 5e5}),
    ],
    ids=["nothing", "null", "theta", "linear", "llama3"],
)
@pytest.mark.parametrize("without", [(), ("model_type",), ("num_key_value_heads",)])
def test_configurations_of_published_heads_are_understood(
    old: dict[str, Any],
    rope: dict[str, Any],
    without: tuple[str, ...],
    model: PreTrainedModel,
    tmp_path: Path,
) -> None:
    """Keys of transformers 4 give the same head as the current ones."""
    values = {name: value for name, value in {**OLD_CONFIG, **old}.items() if name not in without}
    sizes = {name: values[name] for name in values if name.endswith(("size", "heads", "layers"))}
    built = EagleHead(LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope))
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(dict(built.state_dict()), tmp_path / "model.safetensors")

    target = Target(model)
    built.attach(target)
    loaded = load_head(tmp_path, target)
    assert same_state(loaded, built.state_dict())
    inputs = (
        torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)),
        prompt(5),
        torch.tensor([[0, 3, 40, 41, 100]]),
    )
    with torch.no_grad():
        assert torch.equal(loaded(*inputs), built(*inputs))


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ROPE_NAMES)
def test_rope_is_saved_by_the_names_of_transformers_4_too(
    kind: str, family: str, tmp_path: Path
) -> None:
    rope, old = ROPE_NAMES[kind]
    head = head_with_rope(family, rope)
    save_head(head, tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == head.config.rope_parameters
    expected = {"torch_dtype": "bfloat16", "dtype": "bfloat16", **old}
    if family == "glm":
        expected["partial_rotary_factor"] = 0.5
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize("names", ["old", "new", "both"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ROPE_NAMES)
def test_rope_is_read_by_either_names(kind: str, family: str, names: str, tmp_path: Path) -> None:
    rope, old = ROPE_NAMES[kind]
    head = head_with_rope(family, rope)
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if names == "old":
        del config["rope_parameters"], config["dtype"]
        if family == "gemma3_text":
            config["rope_local_base_freq"] = SLIDING_ROPE["rope_theta"]
    elif names == "new":
        for name in ("torch_dtype", "partial_rotary_factor", *old):
            config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_head(tmp_path, head.target)
    inputs = torch.randn(1, 4, 32), prompt(4), torch.tensor([[0, 3, 40, 200]])
    with torch.no_grad():
        assert torch.equal(loaded(*inputs), head(*inputs))


def test_quantization_of_the_target_is_not_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    """The head's weights are plain tensors."""
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    save_head(untrained_head(model).attach(Target(model)), tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("bias", [True, False])
def test_tensor_names_and_shapes_match_a_published_7b_head(bias: bool) -> None:
    """EAGLE's head for Llama-2-Chat 7B, on the meta device. (Its ``embed_tokens.weight`` is a copy
    of the target's.)"""
    hidden, inner = 4096, 11008
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        LAYER + "self_attn.q_proj.weight": (hidden, hidden),
        LAYER + "self_attn.k_proj.weight": (hidden, hidden),
        LAYER + "self_attn.v_proj.weight": (hidden, hidden),
        LAYER + "self_attn.o_proj.weight": (hidden, hidden),
        LAYER + "mlp.gate_proj.weight": (inner, hidden),
        LAYER + "mlp.up_proj.weight": (inner, hidden),
        LAYER + "mlp.down_proj.weight": (hidden, inner),
        LAYER + "post_attention_layernorm.weight": (hidden,),
    }
    if bias:
        shapes["fc.bias"] = (hidden,)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=32,
        num_key_value_heads=32,
        num_hidden_layers=1,
    )
    with torch.device("meta"):
        head = EagleHead(config, bias=bias, dtype=torch.float16)
    assert {name: tuple(item.shape) for name, item in head.state_dict().items()} == shapes


# -- heads without a target ------------------------------------------------------------------------


def test_head_that_fits_the_bundled_target_needs_no_other(tmp_path: Path) -> None:
    """Given as files, or loaded; its own ``fsd.json`` counts, not the bundled head's."""
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


def test_head_that_does_not_fit_the_bundled_target_needs_its_own(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model)
    with pytest.raises(ValueError, match=r"belongs to another target: .*--target") as error:
        EagleFSD.from_pretrained(drafter=tmp_path)
    assert not isinstance(error.value, CheckpointError)
    one_line(error)
    with pytest.raises(ValueError, match="belongs to another target"):
        EagleFSD.from_pretrained(drafter=untrained_head(model))


def test_target_needs_a_head(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"pass both a target and a drafter .*eagle-fsd train"):
        EagleFSD.from_pretrained(model)


# -- fsd.json -------------------------------------------------------------------------------------


@pytest.fixture
def folders(model: PreTrainedModel, tmp_path: Path) -> tuple[Path, Path]:
    """Return folders with a target and a head."""
    model.save_pretrained(tmp_path / "target")
    published(tmp_path / "head", model)
    return tmp_path / "target", tmp_path / "head"


def test_decoding_is_lossless_without_a_settings_file(folders: tuple[Path, Path]) -> None:
    pair = EagleFSD.from_pretrained(*folders, device_map="cpu")
    assert pair.tree == TreeConfig.for_device("cpu")
    assert pair.acceptance == AcceptanceConfig()
    out = pair.generate(prompt(6), max_new_tokens=12)
    assert out.stats.as_dict()["origins"]["fuzzy"] == 0


def test_settings_file_sets_defaults_that_arguments_override(folders: tuple[Path, Path]) -> None:
    values = {"threshold": 10.0, "divergence": "kl", "min_ratio": 0.0, "total_tokens": 9}
    (folders[1] / "fsd.json").write_text(json.dumps(values))
    pair = EagleFSD.from_pretrained(*folders, device_map="cpu", depth=2, top_k=3)
    assert pair.tree == TreeConfig(total_tokens=9, depth=2, top_k=3)
    assert pair.acceptance == AcceptanceConfig(threshold=10.0, divergence="kl")
    assert pair.generate(prompt(6), max_new_tokens=12).stats.as_dict()["origins"]["fuzzy"] > 0
    exact = pair.generate(prompt(6), max_new_tokens=12, threshold=0.0)
    assert exact.stats.as_dict()["origins"]["fuzzy"] == 0


def test_settings_argument_replaces_the_settings_file(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Another file, or config objects, which also override that file."""
    (folders[1] / "fsd.json").write_text('{"threshold": 0.5, "depth": 4}')
    other = tmp_path / "other.json"
    other.write_text('{"threshold": 0.25, "divergence": "tv"}')
    load = partial(EagleFSD.from_pretrained, *folders, device_map="cpu")
    pair = load(settings=other)
    assert pair.acceptance == AcceptanceConfig(threshold=0.25, divergence="tv")
    assert pair.tree == TreeConfig.for_device("cpu")
    acceptance, tree = AcceptanceConfig(threshold=0.125), TreeConfig(depth=3)
    for settings in (None, other):
        pair = load(settings=settings, acceptance=acceptance, tree=tree)
        assert (pair.acceptance, pair.tree) == (acceptance, tree)
    with pytest.raises(ValueError, match=r"^pass either tree or depth, not both$"):
        load(tree=tree, depth=2)


def test_lossless_calls_use_their_own_tree(folders: tuple[Path, Path]) -> None:
    """That of the file, unless the tree is set by an argument or an assignment."""
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
def test_settings_of_another_pair_are_warned_of(
    kind: str, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """They are used nevertheless. Weights of another data type cannot be compared."""
    pair = EagleFSD.from_pretrained(*folders, device_map="cpu")
    models = {"target": pair.model, "drafter": pair.drafter}
    own = identify("mine", models[kind], torch.float32)
    load = partial(EagleFSD.from_pretrained, *folders, device_map="cpu")
    for identity, warnings in (
        (own, 0),
        (own.updated(fingerprint="0" * 16), 1),
        (own.updated(fingerprint="0" * 16, dtype="float16"), 0),
    ):
        caplog.clear()
        values = {"threshold": 0.5, kind: identity.model_dump()}
        (folders[1] / "fsd.json").write_text(json.dumps(values))
        assert load().acceptance.threshold == 0.5
        assert caplog.text.count(f"calibrated for another {kind} (mine)") == warnings


@pytest.mark.parametrize(
    ("recorded", "threshold", "warnings"),
    [("float32", 0.5, 0), ("bfloat16", 0.5, 1), ("bfloat16", 0.0, 0)],
)
def test_settings_of_another_data_type_are_warned_of(
    recorded: str,
    threshold: float,
    warnings: int,
    folders: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lossless settings hold in any data type."""
    pair = EagleFSD.from_pretrained(*folders, device_map="cpu")
    own = identify("mine", pair.model, torch.float32).updated(dtype=recorded)
    values = {"threshold": threshold, "target": own.model_dump()}
    (folders[1] / "fsd.json").write_text(json.dumps(values))
    EagleFSD.from_pretrained(*folders, device_map="cpu")
    words = f"calibrated in {recorded}, but the target is in float32: no bound"
    assert caplog.text.count(words) == warnings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"threshold": -1}', "threshold must be a number of at least 0; got -1"),
        ('{"treshold": 0.1}', "unknown option treshold"),
        ("{", "Expecting"),
    ],
)
def test_invalid_settings_file_raises_one_line_with_its_name(
    text: str, message: str, folders: tuple[Path, Path]
) -> None:
    (folders[1] / "fsd.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        EagleFSD.from_pretrained(*folders, device_map="cpu")
    assert "fsd.json" in one_line(error)


# -- damaged checkpoints ---------------------------------------------------------------------------


def rejected(path: Path | str, model: PreTrainedModel) -> str:
    """Return the one-line message of the error that loading ``path`` raises."""
    with pytest.raises(CheckpointError) as error:
        load_head(path, Target(model))
    return one_line(error)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("name", ["fc.weight", "fc.bias", LAYER + "mlp.up_proj.weight"])
def test_missing_tensor_is_named(
    name: str, file: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, file=file, **{name.replace(".", "__"): None})
    assert f"missing {name}" in rejected(tmp_path, model)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "d2t", "fc2.weight"])
def test_unexpected_tensor_is_named(
    name: str, file: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, file=file, **{name.replace(".", "__"): torch.ones(2)})
    assert f"unexpected {name}" in rejected(tmp_path, model)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("fc.weight", [32, 32], [32, 64]),  # of another kind of head
        (LAYER + "mlp.up_proj.weight", [40, 32], [48, 32]),
        ("embed_tokens.weight", [90, 32], [96, 32]),
    ],
)
def test_tensor_of_another_shape_is_named_with_both_shapes(
    name: str,
    found: list[int],
    expected: list[int],
    file: str,
    model: PreTrainedModel,
    tmp_path: Path,
) -> None:
    published(tmp_path, model, file=file, **{name.replace(".", "__"): torch.ones(found)})
    message = rejected(tmp_path, model)
    assert name in message
    assert str(found) in message
    assert str(expected) in message


def test_all_problems_are_named_at_once(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model, fc__bias=None, d2t=torch.ones(2), fc__weight=torch.ones(2, 2))
    message = rejected(tmp_path, model)
    assert all(part in message for part in ("missing fc.bias", "unexpected d2t", "fc.weight is"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64}, ("hidden size", "64", "32")),
        ({"vocab_size": 128}, ("vocabulary", "128", "96")),
    ],
)
def test_head_of_another_target_is_rejected_with_both_sizes(
    change: dict[str, int], words: tuple[str, ...], model: PreTrainedModel, tmp_path: Path
) -> None:
    """When it is loaded from files, and when it is attached."""
    other = tiny_target(**change)
    published(tmp_path, other)
    with pytest.raises(ValueError, match=words[0]) as from_files:
        load_head(tmp_path, Target(model))
    with pytest.raises(ValueError, match=words[0]) as from_memory:
        EagleFSD(model, untrained_head(other))
    for error in (from_files, from_memory):
        assert all(word in one_line(error) for word in words)


CORRUPT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _whole: b"",
    "truncated": lambda whole: whole[: len(whole) // 2],
    "another format": lambda _whole: b"garbage" * 100,
    "git-lfs pointer": lambda _whole: b"version https://git-lfs.github.com/spec/v1\n" * 2,
    "HTML page": lambda _whole: b"<!DOCTYPE html><html>404</html>\n" * 9,
    "empty zip": lambda _whole: b"PK\x03\x04" + bytes(200),
}


@pytest.mark.parametrize("how", CORRUPT)
@pytest.mark.parametrize("file", FORMATS)
def test_damaged_weights_file_is_named(
    file: str, how: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, file=file)
    (tmp_path / file).write_bytes(CORRUPT[how]((tmp_path / file).read_bytes()))
    assert file in rejected(tmp_path, model)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\ud800",
        '{"model_type": "no-such-family"}',
        '{"model_type": 3}',
        '{"hidden_size": "32"}',
        '{"hidden_size": -3}',
        '{"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 0}',
        '{"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 5}',
    ],
)
def test_damaged_configuration_is_named(text: str, model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "config.json" in rejected(tmp_path, model)


class Payload:
    """Unpickling this creates the file ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_pickle_with_code_is_rejected_and_does_not_run(
    save: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, file="pytorch_model.bin")
    trace = tmp_path / "trace"
    file = tmp_path / "pytorch_model.bin"
    if save == "torch":
        torch.save({"fc.weight": Payload(trace)}, file)
    else:
        file.write_bytes(pickle.dumps({"fc.weight": Payload(trace)}, protocol=2))
    assert "pytorch_model.bin" in rejected(tmp_path, model)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        torch.ones(2),
        {"fc.weight": 3.0},
        {3: torch.ones(2)},
        {"state_dict": {"fc.weight": torch.ones(2)}},
        None,
    ],
    ids=["list", "tensor", "number for a tensor", "number for a name", "nested", "none"],
)
def test_pickle_without_a_state_dict_is_rejected(
    content: object, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, file="pytorch_model.bin")
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert str(tmp_path) in rejected(tmp_path, model)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_missing_file_is_named(file: str, model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    (tmp_path / file).unlink()
    message = rejected(tmp_path, model)
    assert file in message
    assert str(tmp_path) in message


def test_head_of_an_unsupported_family_is_rejected(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    other = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "vocab_size": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert "gpt2" in rejected(tmp_path, model).lower()


def test_file_instead_of_a_folder_is_rejected(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    assert "folder" in rejected(tmp_path / "model.safetensors", model)


@pytest.mark.parametrize("name", ["no-such-folder", "no-such/head", "./no/such/one", "two words"])
def test_missing_path_raises_one_line(
    name: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert name in rejected(name, model)


def test_unreachable_hub_raises_one_line(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of transformers have several lines."""

    def unreachable(*_args: object, **_options: object) -> None:
        raise OSError("We couldn't connect to 'the hub'.\nCheck your internet connection.")

    monkeypatch.setattr(checkpoint, "find_file", unreachable)
    message = rejected("some/head", model)
    assert "some/head" in message
    assert "couldn't connect" in message
