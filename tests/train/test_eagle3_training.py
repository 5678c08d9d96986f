"""Tests for the training of EAGLE-3 heads: features, draft vocabulary, losses, files and export."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pairs import VOCAB_SIZE, prompt, randomize, tiny_target
from torch import Tensor
from trainings import (
    Train,
    command,
    read_losses,
    read_metrics,
    read_weights,
    same_weights,
    train_here,
    write_target,
)

from eagle_fsd import CheckpointError, EagleFSD, OptionsError
from eagle_fsd.model.acceptance import TopKRule
from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.eagle3_checkpoint import declared_rule, load_eagle3, save_eagle3
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.train.config import (
    EAGLE3_DEFAULTS,
    ExportFormat,
    FeaturesRequest,
    TrainConfig,
)
from eagle_fsd.train.dataset import most_frequent_tokens, split_validation
from eagle_fsd.train.export import convert_head
from eagle_fsd.train.feature_store import FeatureStore, store_features
from eagle_fsd.train.features import compute_features
from eagle_fsd.train.heads import empty_copy, head_reads, new_head, split_features, training_states
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.losses import HeadLosses, unroll

LAYERS = 8
READS = (2, 4, 5)
CHATS, LENGTH, RUNS = 2, 11, 4
#: Ten of the target's tokens.
TOKEN_IDS = torch.tensor([1, 4, 5, 9, 30, 31, 50, 77, 80, 95])
FLAGS: dict[str, dict[str, bool]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "normed-residual": {"norm_before_residual": True},
}
#: Options of trainings.
EAGLE3: dict[str, Any] = {"head_type": "eagle3", "unroll": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with three different hidden states to read."""
    return write_target(tmp_path_factory.mktemp("deep") / "target", num_hidden_layers=LAYERS)


def make_head(token_ids: Tensor | None = None, **options: Any) -> Eagle3Head:
    """Create a random float64 head of a random target."""
    model = tiny_target(num_hidden_layers=LAYERS, dtype=torch.float64).requires_grad_(False)
    config = TrainConfig(head_type="eagle3", **options)
    head = new_head(config, Target(model), token_ids)
    assert isinstance(head, Eagle3Head)
    randomize(head, 3)
    return head.double()


def inputs(head: Eagle3Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random chats: features, the token after each, the target's state there, loss mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB_SIZE, (CHATS, LENGTH), generator=generator)
    features = compute_features(head.target, ids, training_states(head.reads))
    loss_mask = torch.rand(CHATS, LENGTH - 1, generator=generator) < 0.6
    states, labels = split_features(head, features)
    return states, ids[:, 1:], labels, loss_mask


# -- features --------------------------------------------------------------------------------------


def test_features_are_hidden_states_of_the_target() -> None:
    target = Target(tiny_target(num_hidden_layers=LAYERS))
    ids = prompt(9)
    states = training_states(head_reads("eagle3", target))
    assert states == (*READS, LAST)
    assert training_states(head_reads("eagle", target)) == (LAST,)
    with torch.no_grad():
        hidden = target.model(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[state] for state in states], -1)
    assert torch.equal(compute_features(target, ids, states), expected)


def test_stored_features_train_the_same_head(
    train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """Almost: they are in bfloat16. Those for another type of head are refused."""
    request = FeaturesRequest(data=data, out=tmp_path / "features", target=target, max_length=64)
    store_features(request.updated(head_type="eagle3"))
    store = FeatureStore(request.out)
    assert store.fingerprint["states"] == [*READS, LAST]
    ids, features = torch.tensor([store[3].ids]), store[3].features
    assert features is not None
    computed = compute_features(Target(load_target(target)), ids, [*READS, LAST])[0]
    torch.testing.assert_close(features.float(), computed, rtol=2**-7, atol=1e-3)
    stored = train("stored", features=request.out, **EAGLE3)
    fresh = train("fresh", **EAGLE3)
    assert read_losses(stored).tolist() == pytest.approx(read_losses(fresh).tolist(), rel=0.1)
    with pytest.raises(ValueError, match=r"holds the hidden states \[2, 4, 5, -1\], not \[-1\]"):
        train("eagle", features=request.out)
    assert not (tmp_path / "eagle").exists()


# -- draft vocabulary ------------------------------------------------------------------------------


def test_most_frequent_tokens_are_in_order() -> None:
    counts = torch.tensor([0, 3, 1, 7, 3, 0, 3])
    assert most_frequent_tokens(counts, 3).tolist() == [1, 3, 4]
    assert most_frequent_tokens(counts, 6).tolist() == [0, 1, 2, 3, 4, 6]


def test_draft_vocabulary_is_that_of_the_answers(train: Train, target: Path, data: Path) -> None:
    """Held-out chats and prompts do not count."""
    options = {**EAGLE3, "validation": 1, "max_steps": 1, "draft_vocab_size": 12}
    out = train(**options)
    chats = LoadedTarget.load(TargetOptions(target=target)).open_chats(data, 64)
    counts: Counter[int] = Counter()
    for index in split_validation(len(chats), 1, 0)[0]:
        example = chats[index]
        pairs = zip(example.ids, example.assistant_mask, strict=True)
        counts.update(token for token, is_answer in pairs if is_answer)
    expected = sorted(sorted(counts, key=lambda token: (-counts[token], token))[:12])
    head = load_eagle3(out, Target(load_target(target)))
    assert head.token_ids is not None
    assert head.token_ids.tolist() == expected
    assert read_weights(out)["lm_head.weight"].shape == (12, 32)


def test_large_vocabularies_are_reduced_by_default(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("whole", max_steps=1, **EAGLE3)
    assert "d2t" not in read_weights(whole)
    monkeypatch.setattr("eagle_fsd.train.trainer.DRAFT_VOCAB_SIZE", 50)
    reduced = train("reduced", max_steps=1, **EAGLE3)
    assert read_weights(reduced)["d2t"].shape == (50,)


def test_new_head_starts_with_the_targets_projection() -> None:
    target = Target(tiny_target(num_hidden_layers=LAYERS))
    head = new_head(TrainConfig(head_type="eagle3"), target, TOKEN_IDS)
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[TOKEN_IDS])
    assert head.token_ids is not None
    assert torch.equal(head.token_ids, TOKEN_IDS)


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_unrolled_runs_match_decoding(flags: dict[str, bool]) -> None:
    """From every root: the chat up to it in the cache, then a chain on the head's own outputs."""
    head = make_head(**flags)
    head.plain = False  # transformers computes norms in float32
    features, tokens, _, _ = inputs(head)
    cache = head.new_cache(CHATS, LENGTH + RUNS)

    def run_pairs(x: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + x.shape[1]).expand(CHATS, -1)
        keys = cache.keys(start + x.shape[1], x.device)
        cache.place(positions, keys)
        seen = keys <= positions[:, :, None]
        mask = additive_mask(seen, head.dtype)
        return head(x, tokens[:, start : start + x.shape[1]], positions, mask, cache)

    with torch.no_grad():
        outputs = unroll(head, features, tokens, RUNS)
        for root in range(tokens.shape[1]):
            z = run_pairs(head.fuse(features[:, : root + 1]), 0)[:, -1:]
            torch.testing.assert_close(outputs[0][:, root], z[:, 0], rtol=1e-6, atol=1e-8)
            for run in range(1, min(RUNS, tokens.shape[1] - root)):
                z = run_pairs(head.carry(z), root + run)
                ours = outputs[run][:, root + run]
                torch.testing.assert_close(ours, z[:, 0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_losses_are_those_of_eagle3(reduced: bool) -> None:
    """As in ``eagle/traineagle3/cnets.py``, but a mean over the runs instead of a sum.

    Position by position: the target's distribution is the softmax of its logits of the draft's
    vocabulary, and a position counts if the most likely token of all is among them.
    """
    ids = TOKEN_IDS if reduced else torch.arange(VOCAB_SIZE)
    head = make_head(TOKEN_IDS if reduced else None)
    config = TrainConfig(head_type="eagle3", unroll=RUNS, divergence_weight=0.5)
    features, tokens, labels, loss_mask = inputs(head)
    # Make the tokens of the draft likely, so that some positions count and some do not.
    labels = labels + 2.0 * head.target.lm_head.weight[TOKEN_IDS].mean(0)
    sums = HeadLosses(head, config)(features, tokens, labels, loss_mask)
    with torch.no_grad():
        outputs = unroll(head, features, tokens, RUNS)
    token = divergence = top1 = top3 = 0.0
    used = 0
    for chat, at in loss_mask.nonzero().tolist():
        logits = head.target.model.lm_head(labels[chat, at])
        if int(logits.argmax()) not in ids.tolist():
            continue
        used += 1
        p = logits[ids].float().softmax(-1)
        for run in range(min(RUNS, at + 1)):
            weight = 0.8**run / (1 + 0.8 + 0.64 + 0.512)
            log_q = head.log_probs(outputs[run][chat, at]).detach()
            token -= weight * float((p * log_q).sum())
            divergence += weight * float(DIVERGENCES["js"](p.log(), log_q))
            if run == 0:
                likely = log_q.topk(3).indices.tolist()
                top1 += int(p.argmax()) == likely[0]
                top3 += int(p.argmax()) in likely
    assert used == int(loss_mask.sum()) if not reduced else 0 < used < int(loss_mask.sum())
    found = {name: float(value.detach()) for name, value in sums.items()}
    assert found["token"] == pytest.approx(token, rel=1e-5)
    assert found["divergence"] == pytest.approx(divergence, rel=1e-5)
    assert found["loss"] == pytest.approx(token + 0.5 * divergence, rel=1e-5)
    assert (found["top1"], found["top3"], found["feature"]) == (top1, top3, 0.0)


def test_every_weight_has_a_gradient() -> None:
    head = make_head(TOKEN_IDS, fc_norm=True, norm_output=True)
    losses = HeadLosses(head, TrainConfig(head_type="eagle3", unroll=2))
    features, tokens, labels, _ = inputs(head)
    loss_mask = torch.ones(CHATS, LENGTH - 1, dtype=torch.bool)
    losses(features, tokens, labels, loss_mask)["loss"].backward()
    assert all(item.grad is not None for item in head.parameters())
    losses.zero_grad(set_to_none=True)
    losses(features, tokens, labels, torch.zeros_like(loss_mask))["loss"].backward()
    assert all(item.grad is not None and not item.grad.any() for item in head.parameters())


def test_copy_has_the_shape_of_the_head() -> None:
    head = make_head(TOKEN_IDS, fc_norm=True, norm_output=True)
    head.embed_tokens = torch.nn.Embedding(VOCAB_SIZE, 32, dtype=torch.float64)
    copy = empty_copy(head, torch.bfloat16)
    assert isinstance(copy, Eagle3Head)
    assert (copy.flags, copy.reads) == (head.flags, head.reads)
    assert copy.token_ids is not None
    assert torch.equal(copy.token_ids, TOKEN_IDS)
    shapes = {name: item.shape for name, item in head.state_dict().items()}
    assert {name: item.shape for name, item in copy.state_dict().items()} == shapes
    assert copy.dtype == torch.bfloat16


# -- trainings -------------------------------------------------------------------------------------


def test_training_writes_a_head_that_decodes(train: Train, target: Path) -> None:
    """Losslessly at ``T = 0``, like every drafter."""
    options = {**EAGLE3, "validation": 1, "validate_every": 5, "draft_vocab_size": 200}
    out = train(norm_output=True, fc_norm=True, **options)
    for line in read_metrics(out):
        assert line["loss"] == pytest.approx(line["token"])
        assert line["feature"] == line["divergence"] == 0
        assert 0 <= line["top1"] <= line["top3"] <= 1
    assert [line["step"] for line in read_metrics(out, "validation")] == [5, 10, 12]
    assert read_metrics(out, "validation")[-1]["tau"] >= 1
    saved = json.loads((out / "recipe.json").read_text())["recipe"]
    assert {name: saved[name] for name in EAGLE3_DEFAULTS} == {**EAGLE3_DEFAULTS, "unroll": 3}
    assert "EAGLE-3 draft head" in (out / "README.md").read_text()
    model = EagleFSD.from_pretrained(target, out)
    assert isinstance(model.drafter, Eagle3Head)
    assert model.drafter.flags.norm_output
    ids = prompt(9, vocab_size=1024)
    answer = model.generate(ids, max_new_tokens=20, threshold=0.0).sequences
    greedy = model.model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(answer, greedy)


def test_training_starts_from_a_head(train: Train, target: Path) -> None:
    """Its vocabulary and its variants stay. A head of another type is refused."""
    options = {**EAGLE3, "max_steps": 2, "lr": 0.0}
    variants = {"draft_vocab_size": 100, "norm_before_residual": True}
    first = train("first", **options, **variants)
    second = train("second", head=first, **options)
    assert same_weights(read_weights(second), read_weights(first))
    assert load_eagle3(second, Target(load_target(target))).flags.norm_before_residual
    with pytest.raises(CheckpointError, match="first is not a head of type eagle; see --head-type"):
        train("third", head=first, max_steps=2)


# -- options ---------------------------------------------------------------------------------------


def test_defaults_depend_on_the_type_of_the_head() -> None:
    config = TrainConfig(head_type="eagle3")
    assert (config.unroll, config.unroll_decay) == (7, 0.8)
    assert (config.feature_weight, config.token_weight, config.divergence_weight) == (0, 1, 0)
    assert (config.noise, config.weight_decay) == (0, 0)
    assert config.learning_rate(4096) == 5e-5
    assert TrainConfig(head_type="eagle3", unroll=2).unroll == 2
    assert config.model_dump(exclude_unset=True) == {"head_type": "eagle3"}
    assert TrainConfig.from_dict(config.model_dump()) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 9}, "draft_vocab_size requires head_type eagle3"),
        ({"fc_norm": True}, "fc_norm requires head_type eagle3"),
        ({"head_type": "eagle3", "bias": True}, "bias requires head_type eagle"),
        (
            {"head_type": "eagle3", "feature_weight": 0.5},
            "feature_weight must be 0 with head_type eagle3, which predicts no features; got 0.5",
        ),
    ],
)
def test_options_of_the_other_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=f"^{message}$"):
        TrainConfig.from_dict(options)


def test_file_overrides_the_defaults_of_the_type(
    succeed: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("unroll: 2\ndivergence_weight: 0.5\n")
    out = tmp_path / "out"
    arguments = command(data, out, target, "--config", str(path), max_steps=1, head_type="eagle3")
    succeed(*arguments)
    saved = json.loads((out / "recipe.json").read_text())["recipe"]
    assert (saved["unroll"], saved["divergence_weight"], saved["noise"]) == (2, 0.5, 0.0)


# -- export ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    options = {**EAGLE3, "max_steps": 2, "draft_vocab_size": 100, "fc_norm": True}
    return train_here(data, out, target, **options)


@pytest.mark.parametrize("engine", get_args(ExportFormat))
def test_export_computes_what_the_head_computes(
    engine: ExportFormat, target: Path, trained: Path, tmp_path: Path
) -> None:
    wrapped = Target(load_target(target))
    out = convert_head(trained, wrapped, tmp_path / "out", engine)
    before, after = load_eagle3(trained, wrapped), load_eagle3(out, wrapped)
    assert (after.flags, after.reads) == (before.flags, before.reads)
    assert same_weights(dict(after.state_dict()), dict(before.state_dict()))
    config = json.loads((out / "config.json").read_text())
    assert (out / "pytorch_model.bin").exists() == (engine == "eagle")
    assert ("speculators_model_type" in config) == (engine in ("vllm", "speculators"))


def test_eagle_export_warns_of_variants(
    target: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert_head(trained, Target(load_target(target)), tmp_path / "out", "eagle")
    assert "EAGLE's own code ignores variants of this head: fc_norm" in caplog.text
    assert "its RoPE scaling is llama3" in caplog.text


@pytest.mark.parametrize("engine", get_args(ExportFormat))
def test_export_keeps_a_declared_rule_where_the_layout_has_one(
    engine: ExportFormat,
    target: Path,
    trained: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapped, rule = Target(load_target(target)), TopKRule(5, ratio=0.5)
    declaring = tmp_path / "declaring"
    save_eagle3(load_eagle3(trained, wrapped), declaring, "speculators", rule=rule)
    out = convert_head(declaring, wrapped, tmp_path / "out", engine)
    lost = f"the layout for {engine} has no acceptance rule; this head's is left out"
    if engine in ("vllm", "speculators"):
        assert declared_rule(out) == rule
        assert not caplog.records
    else:
        assert declared_rule(out) is None
        assert lost in [record.getMessage() for record in caplog.records]


def test_export_keeps_the_dtype(target: Path, trained: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    wrapped = Target(load_target(target, "float16"))
    save_eagle3(load_eagle3(trained, wrapped), half)
    out = convert_head(half, Target(load_target(target)), tmp_path / "out", "speculators")
    assert read_weights(out)["fc.weight"].dtype == torch.float16


def test_export_command(succeed: Any, target: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--head", trained, "--target", target, "--out", out, "--format", "speculators")
    printed, _ = succeed("train", "export", *arguments)
    assert "as speculators reads it" in printed
    assert read_weights(out).keys() >= {"d2t", "layers.0.hidden_norm.weight"}
