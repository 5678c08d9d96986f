"""Targets and tokenizers from files: where they end up, and one clear line for what is wrong."""

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
    PLAIN,
    batch,
    prompt,
    reference,
    small_tree,
    tiny_target,
    tokenizer,
    untrained_head,
)
from safetensors.torch import load_file, save_file

from eagle_fsd import EagleFSD
from eagle_fsd.model.loading import LoadError, load_target, load_tokenizer

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not a folder is looked up in the local cache only."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target, stored in bfloat16, and a tokenizer with an end token and no padding token."""
    found = tmp_path / "target"
    tiny_target(dtype=torch.bfloat16).save_pretrained(found)
    characters = copy.deepcopy(tokenizer())
    characters.eos_token = characters.convert_ids_to_tokens(5)
    characters.save_pretrained(found)
    return found


def refused(call: Callable[[], Any], message: str, kind: type[Exception] = LoadError) -> None:
    """``call`` raises, in one line."""
    with pytest.raises(kind, match=message) as error:
        call()
    assert str(error.value).isprintable()


def test_missing_weights_are_named(folder: Path) -> None:
    """Hugging Face fills them with noise and a warning."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = "lacks 2 tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight"
    refused(lambda: load_target(folder), message)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_json_null_is_one_clear_line(folder: Path, file: str) -> None:
    (folder / file).write_text("null")
    load = load_target if file == "config.json" else load_tokenizer
    refused(lambda: load(folder), "cannot be loaded")


def test_the_meta_device_is_refused(folder: Path) -> None:
    refused(lambda: load_target(folder, device_map="meta"), "meta device", ValueError)


# -- damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0.99, 0.5, 0.01, 0.0])
def test_truncated_weights_are_one_clear_line(folder: Path, left: float) -> None:
    """A download that broke off: in the weights, in the header, before the first byte."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * left)])
    refused(lambda: load_target(folder), f"the target {folder} cannot be loaded: .*header")


def test_missing_weights_are_one_clear_line(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(lambda: load_target(folder), r"cannot be loaded: .*model\.safetensors")


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model_type": "none such"}'])
def test_a_damaged_configuration_is_one_clear_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(lambda: load_target(folder), f"the target {folder} cannot be loaded: ")


def test_weights_of_another_shape_are_one_clear_line(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    refused(lambda: load_target(folder), f"the target {folder} cannot be loaded: ")


def test_a_truncated_tokenizer_is_one_clear_line(folder: Path) -> None:
    """It is loaded when first asked for, so the pair itself still decodes ids."""
    file = folder / "tokenizer.json"
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    pair = EagleFSD.from_pretrained(folder, untrained_head(tiny_target()))
    assert pair.generate(prompt(4), max_new_tokens=2).stats.tokens == 2
    refused(lambda: pair.tokenizer, f"the tokenizer of {folder} cannot be loaded: .*line")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe\x00"])
def test_a_corrupt_tokenizer_is_one_clear_line(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refused(lambda: load_tokenizer(folder), f"the tokenizer of {folder} cannot be loaded: ")


def test_no_tokenizer_beside_the_target_is_one_clear_line(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(lambda: load_tokenizer(folder), f"the tokenizer of {folder} cannot be loaded: ")


def test_a_missing_folder_is_not_taken_for_a_name_on_the_hub(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    refused(lambda: load_target(missing), f"there is no folder {missing}")
    file = tmp_path / "model.safetensors"
    file.touch()
    refused(lambda: load_target(file), f"there is no folder {file}")
    refused(lambda: load_target("no/such"), "the target no/such cannot be loaded: ")
    refused(lambda: load_tokenizer(missing), f"the tokenizer of {missing} cannot be loaded: ")


# -- number format and device ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["foo", "int8", "torch.float32", ""])
def test_an_unknown_dtype_is_one_clear_line(folder: Path, dtype: str) -> None:
    message = f"dtype must be one of float32, bfloat16, float16, auto; got '{dtype}'"
    refused(lambda: load_target(folder, dtype=dtype), message, ValueError)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ("cuda:99", "cuda:99 is not there: this machine has [0-9]+ CUDA devices"),
        (torch.device("cuda:99"), "cuda:99 is not there"),
        ({"": "cuda:99"}, "cuda:99 is not there"),
        ({"model": "cpu", "lm_head": "cuda:99"}, "cuda:99 is not there"),
        ("toaster", "'toaster' is no device"),
        ({"": "toaster"}, "'toaster' is no device"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_line(
    folder: Path, device_map: Any, message: str
) -> None:
    refused(lambda: load_target(folder, device_map=device_map), message, ValueError)


@without_gpu
@pytest.mark.parametrize("device_map", [None, "auto", "cpu", torch.device("cpu"), {"": "cpu"}])
def test_a_cpu_gets_float32_whatever_the_checkpoint_says(folder: Path, device_map: Any) -> None:
    """Also when ``"auto"`` finds no GPU: bfloat16 is slow on a CPU and rounds."""
    model = load_target(folder, device_map=device_map)
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"


@without_gpu
@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}])
def test_a_dtype_that_is_named_is_kept(folder: Path, device_map: Any) -> None:
    for dtype in ("bfloat16", torch.bfloat16, "auto"):
        assert load_target(folder, dtype, device_map).dtype == torch.bfloat16
    assert load_target(folder, "float16", device_map).dtype == torch.float16
    assert load_target(folder, "float32", device_map).dtype == torch.float32


@without_gpu
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_target_placed_by_hugging_face_decodes_as_one_that_was_not(
    tmp_path: Path, device_map: Any
) -> None:
    model = tiny_target()
    model.save_pretrained(tmp_path)
    pair = EagleFSD.from_pretrained(tmp_path, untrained_head(model), device_map=device_map)
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=24)
    assert torch.equal(out.sequences, reference(PLAIN))


def test_layers_offloaded_to_disk_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    parts = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    pair = EagleFSD.from_pretrained(
        folder,
        untrained_head(tiny_target()),
        device_map=device_map,
        offload_folder=str(tmp_path / "offload"),
    )
    refused(lambda: pair.generate(prompt(4), max_new_tokens=2), "offloaded", ValueError)


# -- targets that are loaded already --------------------------------------------------------------


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
def test_a_loaded_target_takes_no_loading_options(options: dict[str, Any], names: str) -> None:
    """They would be ignored in silence, a misspelt setting among them."""
    model = tiny_target()
    head = untrained_head(model)
    message = f"a loaded target takes no {names}: load it that way"
    refused(lambda: EagleFSD.from_pretrained(model, head, **options), message, TypeError)


def test_an_option_that_hugging_face_does_not_know_is_a_type_error(folder: Path) -> None:
    head = untrained_head(tiny_target())
    refused(partial(EagleFSD.from_pretrained, folder, head, treshold=0.1), "treshold", TypeError)


def test_a_loaded_target_takes_the_options_of_the_pair() -> None:
    model = tiny_target()
    pair = EagleFSD.from_pretrained(
        model, untrained_head(model), settings=small_tree(), depth=2, token="unused"
    )
    assert pair.model is model
    assert pair.settings == small_tree(depth=2)


# -- tokenizers -----------------------------------------------------------------------------------


def test_a_tokenizer_without_padding_token_pads_with_its_end_on_the_left(folder: Path) -> None:
    """As most base models' do; the mask, not the id, then says what is padding."""
    pair = EagleFSD.from_pretrained(folder, untrained_head(tiny_target()))
    found = pair.tokenizer
    assert found.pad_token_id == found.eos_token_id == 5
    texts = found(["abc", "a"], padding=True, return_tensors="pt")
    assert texts.input_ids[1, :2].tolist() == [5, 5]
    assert texts.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    out = pair.generate(**texts, max_new_tokens=6)
    alone = pair.generate(texts.input_ids[1:, 2:], max_new_tokens=6)
    assert torch.equal(out.sequences[1, 2:], alone.sequences[0])


def test_a_padding_token_of_its_own_is_kept(folder: Path) -> None:
    own = load_tokenizer(folder)
    own.pad_token = own.convert_ids_to_tokens(7)
    own.save_pretrained(folder)
    found = load_tokenizer(folder)
    assert (found.pad_token_id, found.eos_token_id, found.padding_side) == (7, 5, "left")
