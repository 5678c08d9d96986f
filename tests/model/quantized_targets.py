"""Targets with quantized weights decode like their own ``generate``; torchao must be importable.

``test_separate_processes.py`` runs these tests in a process of their own.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    NEW_TOKENS,
    aligned_pair,
    batch,
    greedy_reference,
    raises_one_line,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from torchao.quantization import Int8WeightOnlyConfig
from transformers import PreTrainedModel, TorchAoConfig

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.cli import main
from eagle_fsd.model import packed_weights
from eagle_fsd.model.identity import fingerprint
from eagle_fsd.model.loading import LoadError, load_embeddings, load_target, quantization_config
from eagle_fsd.model.target import Target
from eagle_fsd.model.weights import plain_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a float32 target, for which the head of :func:`aligned_pair` was made."""
    model = copy.deepcopy(aligned_pair().model)
    with torch.no_grad():  # torchao divides by the largest weight of a row
        model.model.layers[1].mlp.down_proj.weight.fill_(1e-6)
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def check_decoding(model: PreTrainedModel) -> None:
    """Compare plain and lossless decoding with Hugging Face's, and accept more with a threshold."""
    head = copy.deepcopy(aligned_pair().drafter).to(model.dtype)
    pair = EagleFSD(model, head, small_tree())
    ids, mask = batch()
    expected = greedy_reference(model, ids, mask, new=NEW_TOKENS)
    for method in ("fsd", "ar"):
        out = pair.generate(ids, mask, NEW_TOKENS, method=method)
        assert torch.equal(out.sequences, expected)
        assert (out.stats.tau > 2) == (method == "fsd")
    assert pair.generate(ids, mask, NEW_TOKENS, threshold=ACCEPT_ALL).stats.tau > out.stats.tau + 2


def weight(model: Any, name: str = "up_proj") -> Tensor:
    return getattr(model.model.layers[0].mlp, name).weight


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [("int8", "Int8Tensor", "bfloat16"), ("fp8", "Float8Tensor", "float32")],
)
def test_weights_quantized_when_loaded(
    kind: Any, name: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not packed, however large."""
    minima = dict.fromkeys(packed_weights.MINIMA, packed_weights.Minimum(1, 1))
    monkeypatch.setattr(packed_weights, "MINIMA", minima)
    model = load_target(folder, dtype, quantize=kind)
    assert type(weight(model)).__name__ == name
    data, scale, *_ = plain_tensors(weight(model))
    assert (data.itemsize, scale.is_floating_point()) == (1, True)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert plain_tensors(part.weight)[0] is part.weight
    assert Target(model).dtype == getattr(torch, dtype)
    check_decoding(model)


def test_checkpoint_with_its_own_configuration_needs_no_option(folder: Path) -> None:
    """Embedding and output projection, which are not quantized, can be loaded alone."""
    model = load_target(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    model.save_pretrained(folder.parent / "saved")
    again, part = load_target(folder.parent / "saved"), load_embeddings(folder.parent / "saved")
    for one, other in zip(plain_tensors(weight(model)), plain_tensors(weight(again)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(part.lm_head.weight, model.lm_head.weight)
    assert weight(part).is_meta
    check_decoding(again)


def test_head_on_disk_is_loaded_for_a_quantized_target(folder: Path, tmp_path: Path) -> None:
    """``from_pretrained`` passes the option on."""
    head = untrained_head(tiny_target())
    pair = EagleFSD.from_pretrained(folder, head, quantize="int8")
    assert type(weight(pair.model)).__name__ == "Int8Tensor"
    with pytest.raises(TypeError, match="quantize cannot be set on a target that is already"):
        EagleFSD.from_pretrained(pair.model, head, quantize="int8")


def test_fingerprint_depends_on_quantized_weights(folder: Path) -> None:
    models = [load_target(folder, quantize=kind) for kind in (None, "int8", "int8", "fp8")]
    whole, one, same, other = map(fingerprint, models)
    assert one == same
    assert len({whole, one, other}) == 3
    with torch.no_grad():
        plain_tensors(weight(models[1]))[0][0, 0] += 1
    assert fingerprint(models[1]) != one


def test_command_quantizes_the_target(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """These weights are not those that the bundled head's settings were calibrated for."""
    words = ["generate", "--device", "cpu", "--quantize", "int8", "--max-new-tokens", "4", "Hello!"]
    monkeypatch.setattr("sys.argv", ["eagle-fsd", *words])
    with contextlib.suppress(SystemExit):
        main()
    assert "calibrated for another target" in caplog.text


def test_int4_needs_a_gpu() -> None:
    """It takes groups of 128 weights, which the smaller targets of other tests do not have."""
    quantized: Any = quantization_config("int4")
    assert quantized.quant_type.int4_packing_format == "tile_packed_to_4d"
    if not torch.cuda.is_available():
        with raises_one_line("cannot load the target", LoadError):
            load_target(BUNDLED_TARGET, "bfloat16", quantize="int4")
