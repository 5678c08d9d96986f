"""Loading targets and tokenizers: dtype, device, and one-line errors for damaged files."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    MODEL_SIZES,
    prompt,
    raises_one_line,
    tiny_target,
    tokenizer,
    untrained_head,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTJConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from eagle_fsd import EagleFSD, NGramDrafter
from eagle_fsd.model.loading import LoadError, load_embeddings, load_target, load_tokenizer
from eagle_fsd.model.target import Target

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a bfloat16 target and a tokenizer with an end token and no padding token."""
    found = tmp_path / "target"
    tiny_target(dtype=torch.bfloat16).save_pretrained(found)
    characters = copy.deepcopy(tokenizer())
    characters.eos_token = characters.convert_ids_to_tokens(5)
    characters.save_pretrained(found)
    return found


def assert_raises(call: Callable[[], Any], message: str, kind: type[Exception] = LoadError) -> None:
    """``call`` raises an error whose message is one line."""
    with raises_one_line(message, kind):
        call()


def test_missing_tensors_are_named(folder: Path) -> None:
    """Hugging Face initializes them at random and warns."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = "lacks 2 tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight"
    assert_raises(lambda: load_target(folder), message)


def test_damaged_files_raise_one_line(folder: Path) -> None:
    """Configurations, weights of another shape or gone, and tokenizers."""
    target, words = f"cannot load the target {folder}: ", f"cannot load the tokenizer of {folder}: "
    config, tokens = folder / "config.json", folder / "tokenizer.json"
    other_shape = config.read_text().replace('"hidden_size": 32', '"hidden_size": 64')
    for text in ("", "{", "{}", "null", '{"model_type": "none such"}', other_shape):
        config.write_text(text)
        assert_raises(lambda: load_target(folder), target)
    config.write_text(other_shape.replace("64", "32"))
    for content in (b"", b"{", b"{}", b"[]", b"null", b"\xff\xfe\x00"):
        tokens.write_bytes(content)
        assert_raises(lambda: load_tokenizer(folder), words)
    tokens.unlink()
    (folder / "tokenizer_config.json").write_text("null")
    assert_raises(lambda: load_tokenizer(folder), words)
    (folder / "tokenizer_config.json").unlink()
    assert_raises(lambda: load_tokenizer(folder), words)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for left in (0.99, 0.01, 0.0):  # an interrupted download
        file.write_bytes(whole[: int(len(whole) * left)])
        assert_raises(lambda: load_target(folder), target + ".*header")
    file.unlink()
    assert_raises(lambda: load_target(folder), target + r".*model\.safetensors")


def test_unknown_dtype_or_device_raises_one_line(folder: Path) -> None:
    for dtype in ("foo", "int8", "torch.float32", ""):
        message = f"dtype must be one of float32, bfloat16, float16, auto; got '{dtype}'"
        assert_raises(partial(load_target, folder, dtype=dtype), message, ValueError)
    for device_map, message in (
        ("cuda:99", "cuda:99 does not exist: this machine has [0-9]+ CUDA devices"),
        (torch.device("cuda:99"), "cuda:99 does not exist"),
        ({"": "cuda:99"}, "cuda:99 does not exist"),
        ({"model": "cpu", "lm_head": "cuda:99"}, "cuda:99 does not exist"),
        ("toaster", "'toaster' is not a device"),
        ({"": "toaster"}, "'toaster' is not a device"),
        ("meta", "meta device"),
    ):
        assert_raises(partial(load_target, folder, device_map=device_map), message, ValueError)


def test_quantization_that_is_not_available_raises_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_fsd.model.loading.find_spec", lambda name: None)
    for kind, message in (
        ("int8", "^quantize=int8 requires torchao; install it"),
        ("int4", "^quantize=int4 requires torchao; install it"),
        ("fp8", "^quantize=fp8 requires torchao; install it"),
        ("nf4", "^quantize=nf4 requires bitsandbytes; install it"),
        ("int3", "must be one of int8, int4, fp8, nf4; got 'int3'"),
    ):
        assert_raises(partial(load_target, folder, quantize=kind), message, ValueError)


def test_weights_that_need_a_missing_package_raise_one_line(folder: Path) -> None:
    config = folder / "config.json"
    values = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "aqlm"}}
    config.write_text(json.dumps(values))
    assert_raises(lambda: load_target(folder), f"cannot load the target {folder}: .*aqlm")


@without_gpu
def test_dtype_on_a_cpu_defaults_to_float32(folder: Path) -> None:
    """Models are in float32 also when ``"auto"`` finds no GPU, unless ``dtype`` is given."""
    for device_map in (None, "auto", "cpu", torch.device("cpu"), {"": "cpu"}):
        model = load_target(folder, device_map=device_map)
        assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    for dtype, device_map, expected in (
        ("bfloat16", None, torch.bfloat16),
        (torch.bfloat16, "auto", torch.bfloat16),
        ("auto", {"": "cpu"}, torch.bfloat16),
        ("float16", None, torch.float16),
        ("float32", "auto", torch.float32),
    ):
        assert load_target(folder, dtype, device_map).dtype == expected


#: Two matrices, tied ones, a scale in a buffer, a bias and other names of the parameters.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**MODEL_SIZES),
    "qwen2-tied": lambda: Qwen2Config(**MODEL_SIZES, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(**MODEL_SIZES, head_dim=8),
    "gptj": lambda: GPTJConfig(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
    ),
}


def save_family(family: str, folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.to(torch.bfloat16).save_pretrained(folder, **options)
    return folder


def remove_layers(folder: Path) -> int:
    """Delete the shards without the embedding and the output projection; return their number."""
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    words = ("embed_tokens.", "wte.", "lm_head.")
    kept = {file for key, file in files.items() if any(word in key for word in words)}
    removed = set(files.values()) - kept
    for file in removed:
        (folder / file).unlink()
    return len(removed)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same_embeddings(part: PreTrainedModel, whole: PreTrainedModel) -> None:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        found, expected = getattr(part, name)(), getattr(whole, name)()
        assert type(found) is type(expected)
        torch.testing.assert_close(state(found), state(expected), rtol=0, atol=0)
    ids, features = prompt(5), torch.randn(1, 5, 32)
    assert torch.equal(Target(part).embed(ids), Target(whole).embed(ids))
    assert torch.equal(Target(part).project(features), Target(whole).project(features))
    tied = [
        m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (part, whole)
    ]
    assert tied[0] == tied[1]
    assert part.config.to_dict() == whole.config.to_dict()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", None), ("qwen2-tied", "auto"), ("gemma3", "float16"), ("gptj", None)],
)
def test_embeddings_equal_those_of_the_whole_target(
    family: str, dtype: str | None, tmp_path: Path
) -> None:
    """Embeddings loaded without the layers' files equal the whole target's bit for bit."""
    folder = save_family(family, tmp_path, max_shard_size="5KB")
    whole = load_target(folder, dtype)
    assert remove_layers(folder) > 2
    part = load_embeddings(folder, dtype)
    assert_same_embeddings(part, whole)
    loaded = {id(item) for item in Target(part).embed.parameters()}
    loaded |= {id(item) for item in Target(part).lm_head.parameters()}
    assert all(item.is_meta or id(item) in loaded for item in part.parameters())
    assert sum(item.is_meta for item in part.parameters()) > 10


def test_embeddings_are_read_from_pickles(tmp_path: Path) -> None:
    """``pytorch_model.bin``, also in the format before torch 1.6, and in shards."""
    folder = save_family("qwen2-tied", tmp_path)
    whole = load_target(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for zipped in (True, False):
        file = folder / "pytorch_model.bin"
        torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
        assert_same_embeddings(load_embeddings(folder), whole)
        file.unlink()
        # The second shard, that of the layers, does not exist: it must not be opened.
        shards = {True: "pytorch_model-2.bin", False: "pytorch_model-1.bin"}
        files = {key: shards["layers" in key] for key in tensors}
        part = {key: tensor for key, tensor in tensors.items() if "layers" not in key}
        torch.save(part, folder / "pytorch_model-1.bin", _use_new_zipfile_serialization=zipped)
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
        assert_same_embeddings(load_embeddings(folder), whole)
        torch.save({}, folder / "pytorch_model-1.bin")
        assert_raises(partial(load_embeddings, folder), r"pytorch_model-1\.bin has no model\.embed")
        index.unlink()


DAMAGE: dict[str, Callable[[Path, dict[str, Tensor]], object]] = {
    r"lm_head\.weight is quantized or in torch\.int8": lambda _folder, tensors: tensors.update(
        {"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}
    ),
    "there is no weight of Linear": lambda _folder, tensors: tensors.pop("lm_head.weight"),
    "it has an adapter": lambda folder, _tensors: (folder / "adapter_config.json").write_text("{}"),
    r"there is none of model\.safetensors, ": lambda _folder, tensors: tensors.clear(),
}


def test_embeddings_that_cannot_be_loaded_alone_raise_one_line(tmp_path: Path) -> None:
    start = "cannot load the embedding and the output projection of {}: "
    for number, (message, damage) in enumerate(DAMAGE.items()):
        folder = save_family("llama", tmp_path / str(number))
        file = folder / "model.safetensors"
        tensors = load_file(file)
        damage(folder, tensors)
        if tensors:
            save_file(tensors, file, metadata={"format": "pt"})
        else:
            file.unlink()
        words = start.format(folder) + ".*" + message
        assert_raises(partial(load_embeddings, folder, "auto"), words)
    folder = save_family("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert_raises(partial(load_embeddings, folder), start.format(folder) + ".*header")


def test_loading_option_for_a_loaded_target_raises(folder: Path) -> None:
    """Loading options for a loaded target and misspelled options raise a TypeError."""
    model = tiny_target()
    head = untrained_head(model)
    for options, names in (
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"dtype": "float32", "device_map": "auto"}, "dtype, device_map"),
        ({"attn_implementation": "eager"}, "attn_implementation"),
        ({"treshold": 0.1}, "treshold"),
    ):
        message = f"^{names} cannot be set on a target that is already loaded$"
        load = partial(EagleFSD.from_pretrained, model, head, **options)
        assert_raises(load, message, TypeError)
    misspelled = partial(EagleFSD.from_pretrained, folder, head, treshold=0.1)
    assert_raises(misspelled, "treshold", TypeError)


def test_tokenizer_is_of_the_same_revision_and_cache_as_its_target(
    folder: Path, tmp_path: Path
) -> None:
    repository, commit = tmp_path / "cache" / "models--some--target", "0" * 40
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    options = {"cache_dir": tmp_path / "cache", "revision": "v1", "local_files_only": True}
    pair = EagleFSD.from_pretrained("some/target", NGramDrafter(), **options)
    assert pair.tokenizer.eos_token_id == 5


def test_tokenizer_without_a_padding_token_pads_with_its_end_token(folder: Path) -> None:
    """Padding is on the left, and the attention mask tells it from real end tokens."""
    pair = EagleFSD.from_pretrained(folder, untrained_head(tiny_target()))
    found = pair.tokenizer
    assert found.pad_token_id == found.eos_token_id == 5
    texts = found(["abc", "a"], padding=True, return_tensors="pt")
    assert texts.input_ids[1, :2].tolist() == [5, 5]
    assert texts.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    out = pair.generate(**texts, max_new_tokens=6)
    alone = pair.generate(texts.input_ids[1:, 2:], max_new_tokens=6)
    assert torch.equal(out.sequences[1, 2:], alone.sequences[0])
