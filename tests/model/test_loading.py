"""Loading targets and tokenizers: dtype, device, and one-line errors for damaged files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from pairs import (
    batch,
    prompt,
    reference,
    tiny_target,
    tokenizer,
    untrained_head,
)
from safetensors.torch import load_file, save_file

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.model.loading import LoadError, load_target, load_tokenizer

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up names that are not folders in the local cache only."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


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
    with pytest.raises(kind, match=message) as error:
        call()
    assert str(error.value).isprintable()


def test_missing_tensors_are_named(folder: Path) -> None:
    """Hugging Face initializes them at random and warns."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = "lacks 2 tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight"
    assert_raises(lambda: load_target(folder), message)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_json_null_raises_one_line(folder: Path, file: str) -> None:
    (folder / file).write_text("null")
    load = load_target if file == "config.json" else load_tokenizer
    assert_raises(lambda: load(folder), "cannot load the (target|tokenizer)")


def test_meta_device_is_rejected(folder: Path) -> None:
    assert_raises(lambda: load_target(folder, device_map="meta"), "meta device", ValueError)


# -- damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0.99, 0.5, 0.01, 0.0])
def test_truncated_weights_raise_one_line(folder: Path, left: float) -> None:
    """An interrupted download: in the weights, in the header, before the first byte."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * left)])
    assert_raises(lambda: load_target(folder), f"cannot load the target {folder}: .*header")


def test_missing_weights_file_raises_one_line(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_raises(lambda: load_target(folder), r"cannot load the target .*: .*model\.safetensors")


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model_type": "none such"}'])
def test_damaged_configuration_raises_one_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert_raises(lambda: load_target(folder), f"cannot load the target {folder}: ")


def test_weights_of_another_shape_raise_one_line(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    assert_raises(lambda: load_target(folder), f"cannot load the target {folder}: ")


def test_truncated_tokenizer_raises_one_line_on_first_use(folder: Path) -> None:
    """Decoding ids does not need it."""
    file = folder / "tokenizer.json"
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    pair = EagleFSD.from_pretrained(folder, untrained_head(tiny_target()))
    assert pair.generate(prompt(4), max_new_tokens=2).stats.tokens == 2
    assert_raises(lambda: pair.tokenizer, f"cannot load the tokenizer of {folder}: .*line")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe\x00"])
def test_corrupt_tokenizer_raises_one_line(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    assert_raises(lambda: load_tokenizer(folder), f"cannot load the tokenizer of {folder}: ")


def test_missing_tokenizer_raises_one_line(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert_raises(lambda: load_tokenizer(folder), f"cannot load the tokenizer of {folder}: ")


def test_missing_folder_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert_raises(lambda: load_target(missing), f"{missing} is not a folder")
    file = tmp_path / "model.safetensors"
    file.touch()
    assert_raises(lambda: load_target(file), f"{file} is not a folder")
    assert_raises(lambda: load_target("no/such"), "cannot load the target no/such: ")
    assert_raises(lambda: load_tokenizer(missing), f"cannot load the tokenizer of {missing}: ")


# -- dtype and device ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["foo", "int8", "torch.float32", ""])
def test_unknown_dtype_raises_one_line(folder: Path, dtype: str) -> None:
    message = f"dtype must be one of float32, bfloat16, float16, auto; got '{dtype}'"
    assert_raises(lambda: load_target(folder, dtype=dtype), message, ValueError)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ("cuda:99", "cuda:99 does not exist: this machine has [0-9]+ CUDA devices"),
        (torch.device("cuda:99"), "cuda:99 does not exist"),
        ({"": "cuda:99"}, "cuda:99 does not exist"),
        ({"model": "cpu", "lm_head": "cuda:99"}, "cuda:99 does not exist"),
        ("toaster", "'toaster' is not a device"),
        ({"": "toaster"}, "'toaster' is not a device"),
    ],
)
def test_missing_device_raises_one_line(folder: Path, device_map: Any, message: str) -> None:
    assert_raises(lambda: load_target(folder, device_map=device_map), message, ValueError)


@without_gpu
@pytest.mark.parametrize("device_map", [None, "auto", "cpu", torch.device("cpu"), {"": "cpu"}])
def test_dtype_on_a_cpu_defaults_to_float32(folder: Path, device_map: Any) -> None:
    """Also when ``"auto"`` finds no GPU."""
    model = load_target(folder, device_map=device_map)
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"


@without_gpu
@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}])
def test_dtype_argument_overrides_the_default(folder: Path, device_map: Any) -> None:
    for dtype in ("bfloat16", torch.bfloat16, "auto"):
        assert load_target(folder, dtype, device_map).dtype == torch.bfloat16
    assert load_target(folder, "float16", device_map).dtype == torch.float16
    assert load_target(folder, "float32", device_map).dtype == torch.float32


@without_gpu
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_target_placed_by_a_device_map_decodes_the_same(tmp_path: Path, device_map: Any) -> None:
    model = tiny_target()
    model.save_pretrained(tmp_path)
    pair = EagleFSD.from_pretrained(tmp_path, untrained_head(model), device_map=device_map)
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=24)
    assert torch.equal(out.sequences, reference())


def test_layers_offloaded_to_disk_raise_one_line(folder: Path, tmp_path: Path) -> None:
    parts = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    pair = EagleFSD.from_pretrained(
        folder,
        untrained_head(tiny_target()),
        device_map=device_map,
        offload_folder=str(tmp_path / "offload"),
    )
    assert_raises(lambda: pair.generate(prompt(4), max_new_tokens=2), "offloaded", ValueError)


# -- loaded targets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"device_map": "cpu"}, "device_map"),
        ({"dtype": "float32", "device_map": "auto"}, "dtype, device_map"),
        ({"attn_implementation": "eager"}, "attn_implementation"),
        ({"treshold": 0.1}, "treshold"),
    ],
)
def test_loading_option_for_a_loaded_target_raises(options: dict[str, Any], names: str) -> None:
    """Including misspelled names, which would otherwise be ignored."""
    model = tiny_target()
    head = untrained_head(model)
    message = f"^{names} cannot be set on a target that is already loaded$"
    assert_raises(lambda: EagleFSD.from_pretrained(model, head, **options), message, TypeError)


def test_unknown_loading_option_raises_type_error(folder: Path) -> None:
    head = untrained_head(tiny_target())
    assert_raises(
        partial(EagleFSD.from_pretrained, folder, head, treshold=0.1), "treshold", TypeError
    )


def test_loaded_target_and_head_accept_the_other_options(tmp_path: Path) -> None:
    model = tiny_target()
    settings = tmp_path / "fsd.json"
    settings.write_text('{"threshold": 0.1, "total_tokens": 9}')
    pair = EagleFSD.from_pretrained(
        model, untrained_head(model), settings=settings, depth=2, token="unused"
    )
    assert pair.model is model
    assert (pair.tree.total_tokens, pair.tree.depth) == (9, 2)
    assert pair.acceptance == AcceptanceConfig(threshold=0.1)


# -- tokenizers -----------------------------------------------------------------------------------


def test_tokenizer_without_a_padding_token_pads_with_its_end_token(folder: Path) -> None:
    """On the left. The attention mask then tells padding from end tokens."""
    pair = EagleFSD.from_pretrained(folder, untrained_head(tiny_target()))
    found = pair.tokenizer
    assert found.pad_token_id == found.eos_token_id == 5
    texts = found(["abc", "a"], padding=True, return_tensors="pt")
    assert texts.input_ids[1, :2].tolist() == [5, 5]
    assert texts.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    out = pair.generate(**texts, max_new_tokens=6)
    alone = pair.generate(texts.input_ids[1:, 2:], max_new_tokens=6)
    assert torch.equal(out.sequences[1, 2:], alone.sequences[0])


def test_padding_token_of_the_tokenizer_is_kept(folder: Path) -> None:
    own = load_tokenizer(folder)
    own.pad_token = own.convert_ids_to_tokens(7)
    own.save_pretrained(folder)
    found = load_tokenizer(folder)
    assert (found.pad_token_id, found.eos_token_id, found.padding_side) == (7, 5, "left")
