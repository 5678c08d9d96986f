"""EAGLE-3 checkpoints: both layouts, their variants, and errors for damaged files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
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
    LLAMA3_ROPE,
    VOCAB_SIZE,
    one_line,
    prompt,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from eagle_fsd import CheckpointError
from eagle_fsd.model import eagle3_checkpoint
from eagle_fsd.model.acceptance import TopKRule
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags, Eagle3Head
from eagle_fsd.model.drafters.layer_detection import detect_layers, sample_texts
from eagle_fsd.model.eagle3_checkpoint import declared_rule, load_eagle3, save_eagle3
from eagle_fsd.model.target import Target

LAYOUTS = ["eagle", "speculators"]
#: Tensors of a published head in the EAGLE layout.
PUBLISHED = {
    *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm")),
    "midlayer.post_attention_layernorm.weight",
}
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
    """Write a head as others publish them, independently of :func:`save_eagle3`, and return it.

    ``config`` overrides fields of ``config.json`` and ``tensors`` overrides tensors; None removes
    one. ``rename`` replaces prefixes of tensor names.
    """
    made = untrained_eagle3(model, **head)
    layers = {
        "model_type": made.config.model_type,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": {name: LLAMA3_ROPE[name] for name in LLAMA3_ROPE if name != "rope_theta"},
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "head_dim",
        "rms_norm_eps",
    ):
        layers[name] = getattr(made.config, name)
    values: dict[str, Any] = {"draft_vocab_size": made.draft_vocab_size}
    values |= {name: True for name, given in vars(made.flags).items() if given}
    if layout == "speculators":
        values |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layers,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "some/model", "architectures": []},
            },
        }
    else:
        values |= {"architectures": ["LlamaForCausalLMEagle3"], **layers}
    state = dict(made.state_dict())
    if made.token_ids is not None:
        state["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        state["t2d"][made.token_ids] = True
    if layout == "eagle":
        state = {name.replace("layers.0.", "midlayer."): item for name, item in state.items()}
    for old, new in (rename or {}).items():
        state = {
            new + name.removeprefix(old) if name.startswith(old) else name: item
            for name, item in state.items()
        }
    write_checkpoint(folder, values, state, file, config, tensors)
    return made


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a head's ``config.json``."""
    values = json.loads((folder / "config.json").read_text())
    edit(values)
    (folder / "config.json").write_text(json.dumps(values))


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


@pytest.mark.parametrize(
    ("layout", "file"), [("eagle", "pytorch_model.bin"), ("speculators", "model.safetensors")]
)
def test_published_head_loads(
    layout: str, file: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, layout, file=file)
    head = load_eagle3(tmp_path, Target(model))
    assert same_head(head, expected)
    assert head.reads == (2, 3, 4)
    assert torch.equal(head.token_ids, draft_tokens())
    assert not head.training
    assert not any(item.requires_grad for item in head.parameters())
    half = Target(target_model(dtype=torch.bfloat16))
    head = load_eagle3(tmp_path, half)
    assert {item.dtype for item in head.parameters()} == {torch.bfloat16}
    assert torch.equal(head.token_ids, draft_tokens())
    assert load_eagle3(tmp_path, half, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_variants_load(layout: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Flags, sizes and families, and names of tensors and fields that differ between projects."""
    first = "midlayer." if layout == "eagle" else "layers.0."
    aux = {"fc_norm": None, "use_aux_norm": True}  # SGLang's name
    wide = {"hidden_size": 48, "embedding": True, "config": {"target_hidden_size": 32}}
    for number, options in enumerate(
        (
            {"flags": Eagle3Flags(norm_before_residual=True)},
            {"flags": Eagle3Flags(norm_before_fc=True)},
            {"flags": Eagle3Flags(fc_norm=True, norm_output=True)},
            {"flags": Eagle3Flags(bias=True)},
            {"flags": Eagle3Flags(fc_norm=True), "config": aux},
            {"family": Qwen3Config, "num_hidden_layers": 2},
            {"draft_vocab_size": VOCAB_SIZE},
            {"tensors": {"t2d": None}},  # a map to the target alone is enough
            {"rename": {first: "midlayer." if layout == "speculators" else "layers.0."}},
            {"rename": {"": "model."}},
            wide,
        )
    ):
        expected = published(tmp_path / str(number), model, layout, **options)
        assert same_head(load_eagle3(tmp_path / str(number), Target(model)), expected), options


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_shards_are_read_by_their_index(file: str, model: PreTrainedModel, tmp_path: Path) -> None:
    expected = published(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {f"a-{file}": {}, f"b-{file}": {}}
    for number, name in enumerate(sorted(tensors)):
        parts[list(parts)[number % 2]][name] = tensors[name]
    save = torch.save if file.endswith(".bin") else save_file
    for name, part in parts.items():
        save(part, tmp_path / name)
    places = {name: part for part, items in parts.items() for name in items}
    (tmp_path / f"{file}.index.json").write_text(json.dumps({"weight_map": places}))
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)
    (tmp_path / f"b-{file}").unlink()
    assert f"has no b-{file}" in rejected(tmp_path, model)


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
    expected = published(tmp_path, model, layout, draft_vocab_size=None)
    edit_config(tmp_path, lambda values: values.update(draft_vocab_size=None))
    head = load_eagle3(tmp_path, Target(model))
    assert same_head(head, expected)
    assert (head.token_ids, head.vocab_size, head.projects) == (None, VOCAB_SIZE, True)
    for name, tensor, message in (
        ("d2t", torch.arange(VOCAB_SIZE), "d2t is not zero"),
        ("t2d", torch.arange(VOCAB_SIZE) > 3, "t2d lacks tokens"),
    ):
        published(tmp_path, model, layout, draft_vocab_size=VOCAB_SIZE, tensors={name: tensor})
        assert message in rejected(tmp_path, model)


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


def test_head_that_the_layout_cannot_hold_is_rejected(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    for layout, head, message in (
        ("speculators", {"flags": Eagle3Flags(bias=True)}, "has no bias in fc"),
        ("speculators", {"draft_vocab_size": None}, "needs a head with an output projection"),
        ("eagle", {"family": Qwen3Config}, "for Llama layers; got qwen3: use the speculators"),
    ):
        with pytest.raises(ValueError, match=message):
            save_eagle3(untrained_eagle3(model, **head), tmp_path, layout)
        assert not any(tmp_path.iterdir())


def test_eagle_layout_has_the_names_that_others_read(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    save_eagle3(untrained_eagle3(model), tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": 32,
        "num_hidden_layers": 1,
        "eagle_config": {IDS: [1, 2, 3], "use_aux_hidden_state": True},
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert not set(config) & {"bias", "norm_before_residual", "norm_output", "fc_norm"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == PUBLISHED
    for name, tensor in tensors.items():
        kind = {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
        assert tensor.dtype == kind
    assert torch.equal(tensors["d2t"], draft_tokens() - torch.arange(DRAFT_VOCAB_SIZE))
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], draft_tokens().sort().values)


def test_speculators_layout_has_the_names_that_others_read(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    head = untrained_eagle3(model)
    save_eagle3(head, tmp_path, "speculators", target_name="some/target")
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config.pop("transformer_layer_config")
    assert (layers["model_type"], layers["vocab_size"]) == ("llama", VOCAB_SIZE)
    assert layers["rope_theta"] == 10000.0
    expected = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": 32,
        "norm_before_residual": False,
        IDS: [2, 3, 4],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert {name: config[name] for name in expected} == expected
    assert load_file(tmp_path / "model.safetensors").keys() == {*head.state_dict(), "t2d"}


def test_declared_rule(model: PreTrainedModel, tmp_path: Path) -> None:
    """None where it is lossless."""
    head, rule = untrained_eagle3(model), TopKRule(5, ratio=0.25)
    with pytest.raises(ValueError, match="declares no acceptance rule"):
        save_eagle3(head, tmp_path, "eagle", rule=rule)
    save_eagle3(head, tmp_path, "speculators", rule=rule)
    assert declared_rule(tmp_path) == rule
    published(tmp_path, model)
    assert declared_rule(tmp_path) is None

    def declare(fields: dict[str, Any]) -> None:
        published(tmp_path, model, "speculators")
        method = "proposal_methods"
        edit_config(tmp_path, lambda values: values["speculators_config"][method][0].update(fields))

    for fields, expected in (
        ({}, None),
        ({"verifier_accept_k": 5}, None),
        ({"accept_tolerance": 2.0}, None),
        ({"verifier_accept_k": 3, "accept_tolerance": 0.5}, TopKRule(3, ratio=math.exp(-0.5))),
    ):
        declare(fields)
        assert declared_rule(tmp_path) == expected
    for fields in (
        {"verifier_accept_k": 0},
        {"accept_tolerance": -1},
        {"accept_tolerance": "much"},
    ):
        declare(fields)
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
        with pytest.raises(ValueError, match="the target has layers 0 to 6") as error:
            load_eagle3(tmp_path, Target(model))
        one_line(error)


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
    edit_config(tmp_path, lambda values: (values.pop("eagle_config", None), values.update(config)))
    with caplog.at_level(logging.WARNING):
        head = load_eagle3(tmp_path, pair.target)
    assert head.reads == (2, 3, 4)
    (record,) = caplog.records
    assert "ambiguous" in record.getMessage()
    assert "using the inputs of layers (2, 3, 4)" in record.getMessage()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_problems_of_tensors_are_named(layout: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Missing ones, unexpected ones, also of flags that are not set, and other shapes."""
    first = "midlayer." if layout == "eagle" else "layers.0."
    problems: list[tuple[str, Tensor | None, str]] = [
        *((name, None, f"missing {name}") for name in ("fc.weight", "lm_head.weight", "d2t")),
        (first + "hidden_norm.weight", None, "missing layers.0.hidden_norm.weight"),
        (first + "mlp.up_proj.weight", None, "missing layers.0.mlp.up_proj.weight"),
    ]
    for name in ("fc.bias", "input_norm.weight", "fc_norm.0.weight", "layers.1.mlp.up_proj.weight"):
        problems.append((name, torch.ones(2), f"unexpected {name}"))
    for name, found, expected in (
        ("fc.weight", [32, 64], [32, 96]),  # of an EAGLE-1/2 head
        (first + "self_attn.q_proj.weight", [32, 32], [32, 64]),
        ("lm_head.weight", [VOCAB_SIZE, 32], [DRAFT_VOCAB_SIZE, 32]),
        ("d2t", [DRAFT_VOCAB_SIZE - 1], [DRAFT_VOCAB_SIZE]),
        ("t2d", [VOCAB_SIZE + 1], [VOCAB_SIZE]),
        ("embed_tokens.weight", [90, 32], [96, 32]),
    ):
        kind = torch.int64 if name in ("d2t", "t2d") else torch.float32
        message = f"{name.replace('midlayer.', 'layers.0.')} is {found}, not {expected}"
        problems.append((name, torch.zeros(found, dtype=kind), message))
    for name, tensor, message in problems:
        published(tmp_path, model, layout, tensors={name: tensor})
        assert rejected(tmp_path, model).endswith(message)


def offsets(tokens: Tensor) -> Tensor:
    return tokens - torch.arange(len(tokens))


def test_wrong_vocabulary_map_is_rejected(model: PreTrainedModel, tmp_path: Path) -> None:
    for d2t, message in (
        (draft_tokens(), "the vocabulary map sends"),  # token ids instead of offsets
        (offsets(draft_tokens()).roll(1), "the vocabulary map sends"),
        (offsets(draft_tokens() + 60), "outside the target's vocabulary of 96 tokens"),
        (offsets(draft_tokens() - 60), "outside the target's vocabulary of 96 tokens"),
        (torch.zeros(DRAFT_VOCAB_SIZE).long(), "d2t and t2d select different tokens"),
        (offsets(draft_tokens() // 2), "the vocabulary map sends 2 tokens to"),
    ):
        published(tmp_path, model, tensors={"d2t": d2t})
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


def test_head_of_another_target_is_rejected(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    with pytest.raises(ValueError, match=r"vocabulary has 96 tokens.*--target") as error:
        load_eagle3(tmp_path, Target(target_model(vocab_size=128)))
    assert not isinstance(error.value, CheckpointError)
    one_line(error)


def reading(head: Eagle3Head, reads: tuple[int, ...]) -> Eagle3Head:
    """Return the same head as if its configuration said ``reads``."""
    copy = Eagle3Head(head.config, head.target_hidden_size, head.draft_vocab_size, reads)
    copy.load_state_dict(head.state_dict())
    return copy.attach(head.target)


def test_wrong_offset_is_found_in_both_directions() -> None:
    """Also over a reduced vocabulary. The head is not changed."""
    for active, wrong in ((1, (1, 2, 3)), (4, (3, 4, 5))):
        pair = aligned_eagle3_pair(70, active)
        head, texts = reading(pair.drafter, wrong), sample_texts(pair.target)
        choice = detect_layers(head, pair.target, texts, [wrong, (2, 3, 4)])
        assert choice.reads == (2, 3, 4)
        assert choice.agreement[2, 3, 4] > choice.agreement[wrong] + 0.1
        assert choice.positions == sum(len(text) - 1 for text in texts)
        assert head.reads == wrong
        assert "using the inputs of layers (2, 3, 4)" in str(choice)


def test_agreement_counts_equal_tokens() -> None:
    """Against the definition, with the head's token by a pass over each prefix."""
    pair = aligned_eagle3_pair(70)
    head, text = pair.drafter, sample_texts(pair.target)[0][:12]
    with torch.no_grad():
        output = pair.model(text[None], output_hidden_states=True)
        features = torch.cat([output.hidden_states[index] for index in head.reads], -1)
        equal = []
        for end in range(1, len(text)):  # pairs of the features before each token, and the token
            positions = torch.arange(end)[None]
            hidden = head(head.fuse(features[:, :end]), text[None, 1 : end + 1], positions)
            drafted = head.token_ids[head.log_probs(hidden[0, -1]).argmax()]
            equal.append(bool(drafted == output.logits[0, end].argmax()))
    choice = detect_layers(head, pair.target, [text], [head.reads])
    assert choice.positions == 11
    assert choice.agreement[head.reads] == pytest.approx(sum(equal) / 11)
    assert 0 < sum(equal) < 11
