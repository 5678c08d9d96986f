"""EAGLE-3 checkpoints: both layouts, their variants, and errors for damaged files."""

from __future__ import annotations

import json
import logging
import math
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
from pairs import ACCEPT_ALL, VOCAB_SIZE, prompt, small_tree
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from eagle_fsd import CheckpointError, EagleFSD
from eagle_fsd.model import eagle3_checkpoint
from eagle_fsd.model.acceptance import TopKRule
from eagle_fsd.model.drafters import layer_detection
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
    """Write a head as others publish them, independently of :func:`save_eagle3`, and return it.

    ``config`` overrides fields of ``config.json`` and ``tensors`` overrides tensors; None removes
    one. ``rename`` replaces prefixes of tensor names.
    """
    made = untrained_eagle3(model, **head)
    layers = {
        "model_type": made.config.model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": made.config.hidden_size,
        "intermediate_size": made.config.intermediate_size,
        "num_attention_heads": made.config.num_attention_heads,
        "num_key_value_heads": made.config.num_key_value_heads,
        "num_hidden_layers": made.config.num_hidden_layers,
        "head_dim": made.config.head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": made.config.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "attention_bias": False,
        "torch_dtype": "float32",
    }
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
    for name, value in (config or {}).items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    state: dict[str, Tensor | None] = dict(made.state_dict())
    if made.token_ids is not None:
        state["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        state["t2d"][made.token_ids] = True
    if layout == "eagle":
        state = {name.replace("layers.0.", "midlayer."): item for name, item in state.items()}
    state |= tensors or {}
    for old, new in (rename or {}).items():
        state = {
            new + name.removeprefix(old) if name.startswith(old) else name: item
            for name, item in state.items()
        }
    kept = {name: item.clone() for name, item in state.items() if item is not None}
    if file.endswith(".bin"):
        torch.save(kept, folder / file)
    else:
        save_file(kept, folder / file)
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


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the message after checking that it is a single printable line."""
    message = str(error.value)
    assert message
    assert message.isprintable()
    return message


def rejected(path: Path, model: PreTrainedModel) -> str:
    """Return the one-line message of the error that loading ``path`` raises."""
    with pytest.raises(CheckpointError) as error:
        load_eagle3(path, Target(model))
    return one_line(error)


# -- valid checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_published_head_loads(
    file: str, layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, layout, file=file)
    head = load_eagle3(tmp_path, Target(model))
    assert same_head(head, expected)
    assert head.reads == (2, 3, 4)
    assert torch.equal(head.token_ids, draft_tokens())
    assert not head.training
    assert not any(item.requires_grad for item in head.parameters())


@pytest.mark.parametrize(
    ("layout", "rename"),
    [
        ("eagle", {"midlayer.": "layers.0."}),
        ("eagle", {"": "model."}),
        ("speculators", {"layers.": "model.layers."}),
        ("speculators", {"layers.0.": "midlayer."}),
    ],
)
def test_tensor_names_vary(
    layout: str, rename: dict[str, str], model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, layout, rename=rename)
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)


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
@pytest.mark.parametrize(
    "head",
    [
        {"flags": Eagle3Flags(norm_before_residual=True)},
        {"flags": Eagle3Flags(norm_before_fc=True)},
        {"flags": Eagle3Flags(fc_norm=True, norm_output=True)},
        {"flags": Eagle3Flags(bias=True)},
        {"family": Qwen3Config},
        {"num_hidden_layers": 2},
        {"draft_vocab_size": VOCAB_SIZE},
    ],
    ids=str,
)
def test_variants_load(
    head: dict[str, Any], layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, layout, **head)
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)


def test_use_aux_norm_is_fc_norm(model: PreTrainedModel, tmp_path: Path) -> None:
    """SGLang's name."""
    expected = published(
        tmp_path,
        model,
        flags=Eagle3Flags(fc_norm=True),
        config={"fc_norm": None, "use_aux_norm": True},
    )
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("maps", [False, True])
def test_vocabulary_of_the_target_needs_no_map(
    maps: bool, layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    """``draft_vocab_size`` is ``V`` or absent; a map that changes nothing is ignored."""
    tensors = {"d2t": torch.zeros(VOCAB_SIZE).long(), "t2d": torch.ones(VOCAB_SIZE).bool()}
    expected = published(
        tmp_path,
        model,
        layout,
        draft_vocab_size=VOCAB_SIZE,
        config=None if maps else {"draft_vocab_size": None},
        tensors=tensors if maps else {},
    )
    head = load_eagle3(tmp_path, Target(model))
    assert same_head(head, expected)
    assert (head.token_ids, head.vocab_size, head.projects) == (None, VOCAB_SIZE, False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_null_vocabulary_is_the_projection_of_the_target(
    layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    expected = published(tmp_path, model, layout, draft_vocab_size=None)
    values = json.loads((tmp_path / "config.json").read_text()) | {"draft_vocab_size": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    head = load_eagle3(tmp_path, Target(model))
    assert same_head(head, expected)
    assert (head.token_ids, head.vocab_size, head.projects) == (None, VOCAB_SIZE, True)


def test_map_to_the_target_alone_is_enough(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = published(tmp_path, model, tensors={"t2d": None})
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)


@pytest.mark.parametrize("own", [True, False])
def test_embedding_is_kept_if_it_is_not_the_target_copy(
    own: bool, model: PreTrainedModel, tmp_path: Path
) -> None:
    table = model.get_input_embeddings().weight.detach()
    published(tmp_path, model, tensors={"embed_tokens.weight": table.flip(0) if own else table})
    head = load_eagle3(tmp_path, Target(model))
    assert (head.embed_tokens is not None) == own
    assert torch.equal(head.embed(torch.tensor([4])), table[VOCAB_SIZE - 5 if own else 4][None])


def test_head_wider_than_its_target_loads(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = published(
        tmp_path, model, hidden_size=48, embedding=True, config={"target_hidden_size": 32}
    )
    assert same_head(load_eagle3(tmp_path, Target(model)), expected)


def test_weights_get_the_dtype_of_the_target_by_default(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model)
    half = Target(target_model(dtype=torch.bfloat16))
    head = load_eagle3(tmp_path, half)
    assert {item.dtype for item in head.parameters()} == {torch.bfloat16}
    assert torch.equal(head.token_ids, draft_tokens())
    assert load_eagle3(tmp_path, half, torch.float32).dtype == torch.float32


# -- saving ----------------------------------------------------------------------------------------


BOTH: list[dict[str, Any]] = [
    {},
    {"flags": Eagle3Flags(norm_before_residual=True, fc_norm=True, norm_output=True)},
    {"flags": Eagle3Flags(norm_before_fc=True), "num_hidden_layers": 2},
    {"draft_vocab_size": VOCAB_SIZE, "attention_bias": True},
    {"hidden_size": 48, "embedding": True, "head_dim": 16},
]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("layout", "head"),
    [
        *(("eagle", head) for head in BOTH),
        *(("speculators", head) for head in BOTH),
        ("eagle", {"flags": Eagle3Flags(bias=True)}),
        ("eagle", {"draft_vocab_size": None}),
        ("speculators", {"family": Qwen3Config}),
    ],
    ids=str,
)
def test_saved_head_loads_as_it_was(
    head: dict[str, Any], layout: str, binary: bool, model: PreTrainedModel, tmp_path: Path
) -> None:
    made = untrained_eagle3(model, **head)
    made.reads = (1, 4, 5)  # not the default
    save_eagle3(made, tmp_path, layout, binary=binary)
    assert same_head(load_eagle3(tmp_path, Target(model)), made)


@pytest.mark.parametrize(
    ("layout", "head", "message"),
    [
        ("speculators", {"flags": Eagle3Flags(bias=True)}, "has no bias in fc"),
        ("speculators", {"draft_vocab_size": None}, "needs a head with an output projection"),
        ("eagle", {"family": Qwen3Config}, "for Llama layers; got qwen3: use the speculators"),
    ],
)
def test_head_that_the_layout_cannot_hold_is_rejected(
    layout: str, head: dict[str, Any], message: str, model: PreTrainedModel, tmp_path: Path
) -> None:
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
    assert tensors.keys() == published_shapes(32, 48, 4, 2, 8, DRAFT_VOCAB_SIZE, VOCAB_SIZE).keys()
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


# -- the declared acceptance rule ------------------------------------------------------------------


def test_declared_rule_survives_a_round_trip(model: PreTrainedModel, tmp_path: Path) -> None:
    head, rule = untrained_eagle3(model), TopKRule(5, ratio=0.25)
    save_eagle3(head, tmp_path, "speculators", rule=rule)
    assert declared_rule(tmp_path) == rule
    with pytest.raises(ValueError, match="declares no acceptance rule"):
        save_eagle3(head, tmp_path, "eagle", rule=rule)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, None),
        ({"verifier_accept_k": 5}, None),
        ({"accept_tolerance": 2.0}, None),
        ({"verifier_accept_k": 3, "accept_tolerance": 0.5}, TopKRule(3, ratio=math.exp(-0.5))),
    ],
)
def test_declared_rule_is_none_where_it_is_lossless(
    fields: dict[str, Any], rule: TopKRule | None, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, "speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    values["speculators_config"]["proposal_methods"][0] |= fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert declared_rule(tmp_path) == rule


@pytest.mark.parametrize(
    "fields", [{"verifier_accept_k": 0}, {"accept_tolerance": -1}, {"accept_tolerance": "much"}]
)
def test_invalid_declared_rule_is_rejected(
    fields: dict[str, Any], model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, "speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    values["speculators_config"]["proposal_methods"][0] |= fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="speculators_config"):
        declared_rule(tmp_path)


def test_eagle_layout_declares_no_rule(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    assert declared_rule(tmp_path) is None


def test_log_gap_rule_bounds_rank_and_log_probability(model: PreTrainedModel) -> None:
    """Every fuzzy token is among the target's ``top``, and within the gap of the largest.

    A wide gap is the same as a probability gap of 1, and a gap of 0 is lossless.
    """
    pair = EagleFSD(model, untrained_eagle3(model), small_tree())
    ids, options = prompt(8), {"max_new_tokens": 40}
    exact = pair.generate(ids, **options).sequences
    assert torch.equal(pair.generate(ids, rule=TopKRule(50, ratio=1.0), **options).sequences, exact)
    assert torch.equal(pair.generate(ids, rule=TopKRule(1, ratio=1e-4), **options).sequences, exact)
    wide = [
        pair.generate(ids, rule=rule, **options).sequences
        for rule in (TopKRule(9, ratio=1e-40), TopKRule(9))
    ]
    assert torch.equal(*wide)
    top, gap = 30, 2.5
    out = pair.generate(ids, rule=TopKRule(top, ratio=math.exp(-gap)), **options)
    assert out.stats.as_dict()["origins"]["fuzzy"] > 2
    with torch.no_grad():
        log_probs = model(out.sequences).logits[0, 7:-1].log_softmax(-1)
    own = log_probs.gather(1, out.sequences[0, 8:, None])
    assert ((log_probs > own).sum(1) < top).all()
    assert (log_probs.amax(1) - own[:, 0]).max() < gap + 1e-4


# -- hidden states ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "config", "reads"),
    [
        ("eagle", {"eagle_config": {IDS: [0, 2, 4]}}, (1, 3, 5)),
        ("eagle", {"eagle_config": {IDS: [1, 2, 3]}}, (2, 3, 4)),
        ("eagle", {"eagle_config": {IDS: []}}, (2, 3, 4)),
        ("eagle", {"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 4)),
        ("eagle", {IDS: [2, 3, 4]}, (2, 3, 4)),
        ("speculators", {IDS: [0, 2, 4]}, (0, 2, 4)),
        ("speculators", {IDS: [2, 3, 4]}, (2, 3, 4)),
        ("speculators", {IDS: [0, 3, 6], "eagle_config": {IDS: [-1, 2, 5]}}, (0, 3, 6)),
        ("eagle", {"eagle_config": {IDS: [1, 2, 3]}, IDS: [5, 6, 7]}, (2, 3, 4)),
    ],
)
def test_outputs_and_inputs_of_layers_are_told_apart(
    layout: str,
    config: dict[str, Any],
    reads: tuple[int, ...],
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbering is measured only where it is ambiguous."""
    monkeypatch.setattr(eagle3_checkpoint, "detect_layers", None)
    published(tmp_path, model, layout, config=config)
    assert load_eagle3(tmp_path, Target(model)).reads == reads


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
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("eagle_config", None)
    values.pop(IDS, None)
    (tmp_path / "config.json").write_text(json.dumps(values | config))
    with caplog.at_level(logging.WARNING):
        head = load_eagle3(tmp_path, pair.target)
    assert head.reads == (2, 3, 4)
    (record,) = caplog.records
    assert "ambiguous" in record.getMessage()
    assert "using the inputs of layers (2, 3, 4)" in record.getMessage()


def test_numbering_is_assumed_where_measuring_is_expensive(
    model: PreTrainedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_detection, "MAX_CPU_PARAMETERS", 100)
    published(tmp_path, model, "speculators", config={IDS: [1, 2, 3]})
    with caplog.at_level(logging.WARNING):
        assert load_eagle3(tmp_path, Target(model)).reads == (1, 2, 3)
    assert "assuming the inputs of layers (1, 2, 3)" in caplog.text
    assert "doctor" in caplog.text


@pytest.mark.parametrize("ids", [[2, 3, 7], [2, -1, 4]])
def test_hidden_states_that_the_target_lacks_are_rejected(
    ids: list[int], model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, "speculators", config={IDS: ids})
    with pytest.raises(ValueError, match="the target has layers 0 to 6") as error:
        load_eagle3(tmp_path, Target(model))
    one_line(error)


# -- a published 8B head ---------------------------------------------------------------------------


def published_shapes(
    hidden: int, inner: int, heads: int, kv_heads: int, head_size: int, draft: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Tensors of an EAGLE-3 head of one layer in the EAGLE layout."""
    attention = {
        "q_proj": (heads * head_size, 2 * hidden),
        "k_proj": (kv_heads * head_size, 2 * hidden),
        "v_proj": (kv_heads * head_size, 2 * hidden),
        "o_proj": (hidden, heads * head_size),
    }
    mlp = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    return {
        "fc.weight": (hidden, 3 * hidden),
        **{f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"midlayer.mlp.{name}.weight": shape for name, shape in mlp.items()},
        **{f"midlayer.{name}.weight": (hidden,) for name in norms},
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
        "d2t": (draft,),
        "t2d": (vocab,),
    }


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_of_the_size_of_a_published_8b_head_loads(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3 for Llama 3.1 8B on the meta device, where tensors take no memory."""
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=32))
    layers = {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 500000.0, **sizes}
    if layout == "speculators":
        values: dict[str, Any] = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layers,
            "norm_before_residual": True,
        }
    else:
        values = {"architectures": ["LlamaForCausalLMEagle3"], **layers}
    (tmp_path / "config.json").write_text(json.dumps({**values, "draft_vocab_size": 32000}))
    shapes = published_shapes(4096, 14336, 32, 8, 128, 32000, 128256)
    if layout == "speculators":
        shapes = {name.replace("midlayer.", "layers.0."): shape for name, shape in shapes.items()}
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    weights["d2t"] = 3 * torch.arange(32000)
    weights["t2d"] = (torch.arange(128256) % 4 == 0) & (torch.arange(128256) < 128000)
    monkeypatch.setattr(eagle3_checkpoint, "read_weights", lambda *_: dict(weights))

    head = load_eagle3(tmp_path, Target(model))
    assert all(item.is_meta for item in head.parameters())
    assert sum(item.numel() for item in head.parameters()) == 424_689_664
    assert head.reads == (2, 16, 29)
    assert (head.vocab_size, head.feature_size) == (32000, 3 * 4096)
    assert head.flags.norm_before_residual == (layout == "speculators")
    expected = {name.replace("midlayer.", "layers.0."): shape for name, shape in shapes.items()}
    assert {name: tuple(item.shape) for name, item in head.state_dict().items()} == {
        name: shape for name, shape in expected.items() if name != "t2d"
    }


# -- damaged checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.up_proj.weight",
    ],
)
def test_missing_tensor_is_named(
    name: str, layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    written = name.replace("layers.0.", "midlayer.") if layout == "eagle" else name
    published(tmp_path, model, layout, tensors={written: None})
    assert rejected(tmp_path, model).endswith(f"configuration: missing {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    ["fc.bias", "input_norm.weight", "fc_norm.0.weight", "layers.1.mlp.up_proj.weight", "extra"],
)
def test_unexpected_tensor_is_named(
    name: str, layout: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Also tensors that belong to a flag which the configuration does not set."""
    published(tmp_path, model, layout, tensors={name: torch.ones(2)})
    assert rejected(tmp_path, model).endswith(f"configuration: unexpected {name}")


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("fc.weight", [32, 64], [32, 96]),  # of an EAGLE-1/2 head
        ("midlayer.self_attn.q_proj.weight", [32, 32], [32, 64]),
        ("lm_head.weight", [VOCAB_SIZE, 32], [DRAFT_VOCAB_SIZE, 32]),
        ("d2t", [DRAFT_VOCAB_SIZE - 1], [DRAFT_VOCAB_SIZE]),
        ("t2d", [VOCAB_SIZE + 1], [VOCAB_SIZE]),
        ("embed_tokens.weight", [90, 32], [96, 32]),
    ],
)
def test_tensor_of_another_shape_is_named_with_both_shapes(
    name: str, found: list[int], expected: list[int], model: PreTrainedModel, tmp_path: Path
) -> None:
    kind = torch.int64 if name in ("d2t", "t2d") else torch.float32
    published(tmp_path, model, tensors={name: torch.zeros(found, dtype=kind)})
    message = rejected(tmp_path, model)
    name = name.replace("midlayer.", "layers.0.")
    assert f"{name} is {found}, not {expected}" in message


def offsets(tokens: Tensor) -> Tensor:
    return tokens - torch.arange(len(tokens))


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (draft_tokens(), "the vocabulary map sends"),  # token ids instead of offsets
        (offsets(draft_tokens()).roll(1), "the vocabulary map sends"),
        (offsets(draft_tokens() + 60), "outside the target's vocabulary of 96 tokens"),
        (offsets(draft_tokens() - 60), "outside the target's vocabulary of 96 tokens"),
        (torch.zeros(DRAFT_VOCAB_SIZE).long(), "d2t and t2d select different tokens"),
        (offsets(draft_tokens() // 2), "the vocabulary map sends 2 tokens to"),
    ],
)
def test_wrong_vocabulary_map_is_rejected(
    d2t: Tensor, message: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, tensors={"d2t": d2t})
    assert message in rejected(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.arange(VOCAB_SIZE), "d2t is not zero"),
        ("t2d", torch.arange(VOCAB_SIZE) > 3, "t2d lacks tokens"),
    ],
)
def test_map_of_a_head_with_the_target_vocabulary_changes_nothing(
    name: str, tensor: Tensor, message: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, draft_vocab_size=VOCAB_SIZE, tensors={name: tensor})
    assert message in rejected(tmp_path, model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_head_is_rejected(layout: str, model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model, layout, tensors={"mask_hidden": torch.zeros(1, 96)})
    assert "is a P-EAGLE head" in rejected(tmp_path, model)


@pytest.mark.parametrize(("kind", "message"), [("peagle", "P-EAGLE"), ("dflash", "got 'dflash'")])
def test_other_kinds_of_speculators_are_rejected(
    kind: str, message: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, "speculators", config={"speculators_model_type": kind})
    assert message in rejected(tmp_path, model)


def test_two_first_layers_are_rejected(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model, tensors={"layers.0.hidden_norm.weight": torch.ones(32)})
    assert "both midlayer.* and layers.0.*" in rejected(tmp_path, model)


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config"),
        ("speculators", {"transformer_layer_config": {"model_type": "no-such"}}, "no-such"),
        ("speculators", {"transformer_layer_config": {"model_type": "gpt2"}}, "gpt2"),
        ("eagle", {"hidden_size": "32"}, "hidden_size"),
        ("eagle", {"draft_vocab_size": 400}, r"[1, 96]; got 400"),
        ("eagle", {"draft_vocab_size": "40"}, "config.json"),
        ("eagle", {"norm_output": "yes"}, "norm_output must be true or false; got 'yes'"),
        ("eagle", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ("eagle", {"eagle_config": {IDS: "2,3,4"}}, f"{IDS} must be a list of integers"),
        ("eagle", {"eagle_config": [2, 3, 4]}, "eagle_config"),
    ],
)
def test_damaged_configuration_is_rejected(
    layout: str, config: dict[str, Any], message: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    published(tmp_path, model, layout, config=config)
    assert message in rejected(tmp_path, model)


def test_head_of_another_target_is_rejected(model: PreTrainedModel, tmp_path: Path) -> None:
    published(tmp_path, model)
    with pytest.raises(ValueError, match=r"vocabulary has 96 tokens.*--target") as error:
        load_eagle3(tmp_path, Target(target_model(vocab_size=128)))
    assert not isinstance(error.value, CheckpointError)
    one_line(error)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_head_decodes_as_before(layout: str, tmp_path: Path) -> None:
    pair = aligned_eagle3_pair(70)
    save_eagle3(pair.drafter, tmp_path, layout)
    loaded = EagleFSD(pair.model, load_eagle3(tmp_path, pair.target), pair.tree)
    options = {"max_new_tokens": 20, "threshold": ACCEPT_ALL}
    before, after = (item.generate(prompt(8), **options) for item in (pair, loaded))
    assert torch.equal(before.sequences, after.sequences)
    assert math.isclose(before.stats.tau, after.stats.tau)
    assert before.stats.tau > 2.0
