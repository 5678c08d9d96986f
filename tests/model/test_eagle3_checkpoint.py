"""EAGLE-3 checkpoints: both layouts, their variants, and errors for damaged files."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import (
    DRAFT_VOCAB_SIZE,
    aligned_eagle3_pair,
    draft_tokens,
    target_model,
    untrained_eagle3,
)
from pairs import (
    VOCAB_SIZE,
    one_line,
    prompt,
    raises_one_line,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from eagle_fsd import CheckpointError
from eagle_fsd.model import eagle3_checkpoint
from eagle_fsd.model.acceptance import TopKRule
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags, Eagle3Head
from eagle_fsd.model.eagle3_checkpoint import declared_rule, load_eagle3, save_eagle3
from eagle_fsd.model.target import Target

LAYOUTS = ["eagle", "speculators"]
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return target_model()


def published(
    folder: Path,
    model: PreTrainedModel,
    layout: str = "eagle",
    *,
    file: str = "model.safetensors",
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
    rename: dict[str, str] | None = None,
    **head: Any,
) -> Eagle3Head:
    """Write a head as others publish them, and return it.

    The configuration has neither the hidden states that the head reads nor names of transformers 5;
    ``config`` overrides its fields and ``tensors`` overrides tensors; None removes one. ``rename``
    replaces prefixes of tensor names.
    """
    made = untrained_eagle3(model, **head)
    save_eagle3(made, folder, layout)
    values = json.loads((folder / "config.json").read_text())
    layers = values["transformer_layer_config"] if layout == "speculators" else values
    for fields, name in ((values, IDS), (values, "eagle_config"), (layers, "rope_parameters")):
        fields.pop(name, None)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for old, new in (rename or {}).items():
        state = {
            new + name.removeprefix(old) if name.startswith(old) else name: item
            for name, item in state.items()
        }
    write_checkpoint(folder, values, state, file, config, tensors)
    return made


def same_head(one: Eagle3Head, other: Eagle3Head) -> bool:
    """Whether two heads have the same weights and draft the same."""
    state, expected = one.state_dict(), other.state_dict()
    if state.keys() != expected.keys() or one.reads != other.reads or one.flags != other.flags:
        return False
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 6, one.feature_size, generator=generator)
    positions = torch.tensor([[0, 3, 40, 41, 100, 200]])
    with torch.no_grad():
        found = [
            head.log_probs(head.carry(head(head.fuse(features), prompt(6), positions)))
            for head in (one, other)
        ]
    return torch.equal(*found) and all(torch.equal(state[name], expected[name]) for name in state)


def rejected(path: Path, model: PreTrainedModel) -> str:
    """Return the one-line message of the error that loading ``path`` raises."""
    with pytest.raises(CheckpointError) as error:
        load_eagle3(path, Target(model))
    return one_line(error)


def test_head_loads_in_the_target_s_data_type(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    head = load_eagle3(tmp_path, Target(model))
    assert head.reads == (2, 3, 4)
    assert not head.training
    assert not any(item.requires_grad for item in head.parameters())
    half = Target(target_model(dtype=torch.bfloat16))
    head = load_eagle3(tmp_path, half)
    assert {item.dtype for item in head.parameters()} == {torch.bfloat16}
    assert torch.equal(head.token_ids, draft_tokens())
    assert load_eagle3(tmp_path, half, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_variants_load(layout: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Names of tensors and fields that differ between projects, or are missing."""
    first = "midlayer." if layout == "eagle" else "layers.0."
    aux = {"fc_norm": None, "use_aux_norm": True}  # SGLang's name
    wide = {"hidden_size": 48, "embedding": True, "config": {"target_hidden_size": 32}}
    for number, options in enumerate(
        (
            {},
            {"file": "pytorch_model.bin", "flags": Eagle3Flags(fc_norm=True), "config": aux},
            {"draft_vocab_size": VOCAB_SIZE},
            {"tensors": {"t2d": None}},  # a map to the target alone is enough
            {"rename": {first: "midlayer." if layout == "speculators" else "layers.0."}},
            {"rename": {"": "model."}},
            wide,
        )
    ):
        expected = published(tmp_path / str(number), model, layout, **options)
        assert same_head(load_eagle3(tmp_path / str(number), Target(model)), expected), options


def test_shards_are_read_by_their_index(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = published(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)
    (tmp_path / "1.safetensors").unlink()
    assert "has no 1.safetensors" in rejected(tmp_path, model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vocabulary_of_the_target_needs_no_map(
    layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    """``draft_vocab_size`` is ``V`` or absent; null stands for the target's projection."""
    maps = {"d2t": torch.zeros(VOCAB_SIZE).long(), "t2d": torch.ones(VOCAB_SIZE).bool()}
    for options in ({"tensors": maps}, {"config": {"draft_vocab_size": None}}):
        expected = published(tmp_path, model, layout, draft_vocab_size=VOCAB_SIZE, **options)
        head = load_eagle3(tmp_path, Target(model))
        assert same_head(head, expected)
        assert (head.token_ids, head.vocab_size, head.projects) == (None, VOCAB_SIZE, False)
    tensors = {"t2d": torch.arange(VOCAB_SIZE) > 3}
    published(tmp_path, model, layout, draft_vocab_size=VOCAB_SIZE, tensors=tensors)
    assert "t2d lacks tokens" in rejected(tmp_path, model)


BOTH: list[dict[str, Any]] = [
    {},
    {"flags": Eagle3Flags(norm_before_residual=True, fc_norm=True, norm_output=True)},
    {"flags": Eagle3Flags(norm_before_fc=True), "num_hidden_layers": 2},
    {"draft_vocab_size": VOCAB_SIZE, "attention_bias": True},
    {"hidden_size": 48, "embedding": True, "head_dim": 16},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_head_loads_as_it_was(layout: str, model: PreTrainedModel, tmp_path: Path) -> None:
    own: list[dict[str, Any]] = [{"family": Qwen3Config}]
    if layout == "eagle":
        own = [{"flags": Eagle3Flags(bias=True)}, {"draft_vocab_size": None}]
    for number, head in enumerate([*BOTH, *own]):
        made = untrained_eagle3(model, **head)
        made.reads = (1, 4, 5)  # not the default
        folder = tmp_path / str(number)
        save_eagle3(made, folder, layout, binary=number % 2 == 0)
        assert same_head(load_eagle3(folder, Target(model)), made), head


def test_layouts_have_the_names_that_others_read(model: PreTrainedModel, tmp_path: Path) -> None:
    head = untrained_eagle3(model)
    save_eagle3(head, tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    expected: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "num_hidden_layers": 1,
        "eagle_config": {IDS: [1, 2, 3], "use_aux_hidden_state": True},
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rope_scaling"]["rope_type"] == "llama3"
    absent = {"bias", "norm_before_residual", "norm_output", "fc_norm"}
    absent.add("target_hidden_size")  # with which EAGLE's code does not read the target's embedding
    assert not set(config) & absent
    tensors = load_file(tmp_path / "model.safetensors")
    attention = (f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo")
    assert {"fc.weight", "norm.weight", "lm_head.weight", *attention} < tensors.keys()
    assert len(tensors) == 15
    for name, tensor in tensors.items():
        kind = {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
        assert tensor.dtype == kind
    assert torch.equal(tensors["d2t"], draft_tokens() - torch.arange(DRAFT_VOCAB_SIZE))
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], draft_tokens().sort().values)
    save_eagle3(head, tmp_path, "speculators", target_name="some/target")
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["transformer_layer_config"]
    assert (layers["model_type"], layers["rope_theta"]) == ("llama", 10000.0)
    expected = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": 32,
        "norm_before_residual": False,
        IDS: [2, 3, 4],
    }
    assert {name: config[name] for name in expected} == expected
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert load_file(tmp_path / "model.safetensors").keys() == {*head.state_dict(), "t2d"}


def test_declared_rule(model: PreTrainedModel, tmp_path: Path) -> None:
    """A declared rule is read unless it is lossless, and invalid fields raise an error."""
    head, rule = untrained_eagle3(model), TopKRule(5, ratio=0.25)
    with pytest.raises(ValueError, match="declares no acceptance rule"):
        save_eagle3(head, tmp_path, "eagle", rule=rule)
    for other in (TopKRule(10, gap=0.6), TopKRule(3, gap=0.3, ratio=0.5)):
        with raises_one_line("declares a ratio above 0 and no gap; got TopKRule"):
            save_eagle3(head, tmp_path, "speculators", rule=other)
    save_eagle3(head, tmp_path, "speculators", rule=rule)
    assert declared_rule(tmp_path) == rule
    published(tmp_path, model)
    assert declared_rule(tmp_path) is None
    smallest = TopKRule(3, ratio=sys.float_info.min)
    for fields, expected in (
        ({"verifier_accept_k": 5}, None),
        ({"accept_tolerance": 2.0}, None),
        ({"verifier_accept_k": 3, "accept_tolerance": 0.5}, TopKRule(3, ratio=math.exp(-0.5))),
        ({"verifier_accept_k": 3, "accept_tolerance": math.inf}, smallest),
        ({"verifier_accept_k": 0}, CheckpointError),
        ({"verifier_accept_k": math.inf}, CheckpointError),
        ({"accept_tolerance": -1}, CheckpointError),
        ({"accept_tolerance": "much"}, CheckpointError),
    ):
        published(tmp_path, model, "speculators")
        file = tmp_path / "config.json"
        values = json.loads(file.read_text())
        values["speculators_config"]["proposal_methods"][0].update(fields)
        file.write_text(json.dumps(values))
        if expected is not CheckpointError:
            assert declared_rule(tmp_path) == expected
            continue
        with pytest.raises(CheckpointError, match="speculators_config"):
            declared_rule(tmp_path)


def test_outputs_and_inputs_of_layers_are_told_apart(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbering is measured only where it is ambiguous."""
    monkeypatch.setattr(eagle3_checkpoint, "detect_layers", None)
    for layout, config, reads in (
        ("eagle", {"eagle_config": {IDS: [0, 2, 4]}}, (1, 3, 5)),
        ("eagle", {"eagle_config": {IDS: [1, 2, 3]}}, (2, 3, 4)),
        ("eagle", {"eagle_config": {IDS: []}}, (2, 3, 4)),
        ("eagle", {"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 4)),
        ("eagle", {IDS: [2, 3, 4]}, (2, 3, 4)),
        ("speculators", {IDS: [0, 2, 4]}, (0, 2, 4)),
        ("speculators", {IDS: [2, 3, 4]}, (2, 3, 4)),
        ("speculators", {IDS: [0, 3, 6], "eagle_config": {IDS: [-1, 2, 5]}}, (0, 3, 6)),
        ("eagle", {"eagle_config": {IDS: [1, 2, 3]}, IDS: [5, 6, 7]}, (2, 3, 4)),
    ):
        published(tmp_path, model, layout, config=config)
        assert load_eagle3(tmp_path, Target(model)).reads == reads
    for ids in ([2, 3, 7], [2, -1, 4]):
        published(tmp_path, model, "speculators", config={IDS: ids})
        with raises_one_line("the target has layers 0 to 6"):
            load_eagle3(tmp_path, Target(model))


@pytest.mark.parametrize(
    ("active", "layout", "config"),
    [
        (4, "eagle", {"eagle_config": {IDS: [2, 3, 4]}}),  # inputs where outputs belong
        (1, "speculators", {IDS: [1, 2, 3]}),  # outputs where inputs belong
        (1, "eagle", {"eagle_config": {IDS: [0, 1, 2]}, IDS: [2, 3, 4]}),  # contradictory
    ],
)
def test_ambiguous_numbering_is_measured_and_reported(
    active: int,
    layout: str,
    config: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = aligned_eagle3_pair(active=active)
    save_eagle3(pair.drafter, tmp_path, layout)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    values.pop("eagle_config", None)
    file.write_text(json.dumps({**values, **config}))
    with caplog.at_level(logging.WARNING):
        head = load_eagle3(tmp_path, pair.target)
    assert head.reads == (2, 3, 4)
    (record,) = caplog.records
    assert "ambiguous" in record.getMessage()
    assert "using the inputs of layers (2, 3, 4)" in record.getMessage()


def test_problems_of_tensors_are_named(model: PreTrainedModel, tmp_path: Path) -> None:
    """Missing ones, other shapes, and wrong maps of the vocabulary."""
    first, tokens, count = "layers.0.", draft_tokens(), torch.arange(DRAFT_VOCAB_SIZE)
    for number, (name, tensor, message) in enumerate(
        (
            ("d2t", None, "missing d2t"),
            (first + "hidden_norm.weight", None, f"missing {first}hidden_norm.weight"),
            ("fc.weight", torch.ones(32, 64), "fc.weight is [32, 64], not [32, 96]"),  # EAGLE-2's
            ("lm_head.weight", torch.ones(96, 32), "lm_head.weight is [96, 32], not [40, 32]"),
            ("d2t", count[1:], "d2t is [39], not [40]"),
            ("t2d", torch.zeros(97, dtype=torch.bool), "t2d is [97], not [96]"),
            ("d2t", tokens, "the vocabulary map sends"),  # token ids instead of offsets
            ("d2t", (tokens - count).roll(1), "the vocabulary map sends"),
            ("d2t", tokens + 60 - count, "outside the target's vocabulary of 96 tokens"),
            ("d2t", tokens - 60 - count, "outside the target's vocabulary of 96 tokens"),
            ("d2t", 0 * count, "d2t and t2d select different tokens"),
            ("d2t", tokens // 2 - count, "the vocabulary map sends 2 tokens to"),
        )
    ):
        layout = LAYOUTS[number % 2]
        stored = name.replace(first, "midlayer.") if layout == "eagle" else name
        published(tmp_path, model, layout, tensors={stored: tensor})
        assert message in rejected(tmp_path, model)


def test_damaged_and_unsupported_checkpoints_are_rejected(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    for layout, config, message in (
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config"),
        ("speculators", {"transformer_layer_config": {"model_type": "no-such"}}, "no-such"),
        ("speculators", {"transformer_layer_config": {"model_type": "gpt2"}}, "gpt2"),
        ("speculators", {"speculators_model_type": "peagle"}, "P-EAGLE"),
        ("speculators", {"speculators_model_type": "dflash"}, "got 'dflash'"),
        ("eagle", {"hidden_size": "32"}, "hidden_size"),
        ("eagle", {"draft_vocab_size": 400}, r"[1, 96]; got 400"),
        ("eagle", {"draft_vocab_size": "40"}, "config.json"),
        ("eagle", {"norm_output": "yes"}, "norm_output must be true or false; got 'yes'"),
        ("eagle", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ("eagle", {"eagle_config": {IDS: "2,3,4"}}, f"{IDS} must be a list of integers"),
        ("eagle", {"eagle_config": [2, 3, 4]}, "eagle_config"),
    ):
        published(tmp_path, model, layout, config=config)
        assert message in rejected(tmp_path, model)
    for layout in LAYOUTS:
        published(tmp_path, model, layout, tensors={"mask_hidden": torch.zeros(1, 96)})
        assert "is a P-EAGLE head" in rejected(tmp_path, model)
    published(tmp_path, model, tensors={"layers.0.hidden_norm.weight": torch.ones(32)})
    assert "both midlayer.* and layers.0.*" in rejected(tmp_path, model)
