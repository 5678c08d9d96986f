"""Tests for the training of EAGLE-3 heads: features, draft vocabulary, losses, files and export."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pairs import VOCAB_SIZE, prompt, randomize, tiny_target
from safetensors.torch import load_file
from torch import Tensor
from trainings import (
    Train,
    read_losses,
    read_metrics,
    read_weights,
    same_weights,
    write_target,
)

from eagle_fsd import CheckpointError, EagleFSD, OptionsError
from eagle_fsd.model.acceptance import TopKRule
from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.checkpoint import load_head
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.eagle3_checkpoint import declared_rule, load_eagle3, save_eagle3
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.train.chat_file import write_chats
from eagle_fsd.train.config import (
    EAGLE3_DEFAULTS,
    ExportFormat,
    FeaturesRequest,
    RanksRequest,
    TrainConfig,
)
from eagle_fsd.train.dataset import collate, split_validation
from eagle_fsd.train.export import convert_head
from eagle_fsd.train.feature_store import FeatureStore, store_features
from eagle_fsd.train.features import compute_features
from eagle_fsd.train.heads import empty_copy, head_reads, new_head, split_features, training_states
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.losses import HeadLosses, unroll
from eagle_fsd.train.token_ranks import rank_tokens

LAYERS = 8
READS = (2, 4, 5)
CHATS, LENGTH, RUNS = 2, 11, 4
#: Ten of the target's tokens.
TOKEN_IDS = torch.tensor([1, 4, 5, 9, 30, 31, 50, 77, 80, 95])
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True},
)
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


def test_features_of_an_eagle3_head_train_both_types_of_heads(
    train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """Features are stored in bfloat16; those of an EAGLE-2 head are too few for the other type."""
    request = FeaturesRequest(data=data, out=tmp_path / "features", target=target, max_length=64)
    store_features(request.updated(head_type="eagle3"))
    store = FeatureStore(request.out)
    assert store.fingerprint["states"] == [*READS, LAST]
    ids, features = torch.tensor([store[3].ids]), store[3].features
    computed = compute_features(Target(load_target(target)), ids, [*READS, LAST])[0]
    torch.testing.assert_close(features.float(), computed, rtol=2**-7, atol=1e-3)
    batch = collate([store[3]])
    needed = batch.best[0, 1:][batch.loss_mask[0]]
    logits = load_target(target)(ids).logits[0, 1:][batch.loss_mask[0]]
    assert torch.equal(needed, logits.argmax(-1))
    losses = read_losses(train("stored", features=request.out, max_steps=3, **EAGLE3))
    assert losses.isfinite().all()
    second = request.updated(head_type="eagle", out=tmp_path / "own")
    store_features(second)
    shared = read_losses(train("eagle", features=request.out, max_steps=3))
    assert torch.equal(shared, read_losses(train("own-eagle", features=second.out, max_steps=3)))
    message = r"holds the hidden states \[-1\], without \[2, 4, 5\]; run .* --head-type eagle3"
    with pytest.raises(ValueError, match=message):
        train("third", features=second.out, **EAGLE3)
    assert not (tmp_path / "third").exists()


# -- draft vocabulary ------------------------------------------------------------------------------


def test_draft_vocabulary_is_that_of_the_answers(
    train: Train,
    target: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Held-out chats and prompts do not count. Large vocabularies of EAGLE-3 are reduced."""
    options = {**EAGLE3, "validation": 1, "max_steps": 1}
    out = train(**options, draft_vocab_size=12)
    eagle = train("eagle", validation=1, max_steps=1, draft_vocab_size=12)
    chats = LoadedTarget.load(TargetOptions(target=target)).open_chats(data, 64)
    counts: Counter[int] = Counter()
    for index in split_validation(len(chats), 1, 0)[0]:
        example = chats[index]
        pairs = zip(example.ids, example.assistant_mask, strict=True)
        counts.update(token for token, is_answer in pairs if is_answer)
    expected = sorted(sorted(counts, key=lambda token: (-counts[token], token))[:12])
    loaded = Target(load_target(target))
    assert load_eagle3(out, loaded).token_ids.tolist() == expected
    assert load_head(eagle, loaded).token_ids.tolist() == expected
    convert_head(eagle, loaded, tmp_path / "exported", "vllm")  # which drafts all tokens
    assert load_head(tmp_path / "exported", loaded).token_ids is None
    assert "trained to draft 12 tokens; vllm will draft all" in caplog.text
    assert read_weights(out)["lm_head.weight"].shape == (12, 32)
    assert "d2t" not in read_weights(train("whole", **options))
    monkeypatch.setattr("eagle_fsd.train.trainer.DRAFT_VOCAB_SIZE", 50)
    assert read_weights(train("reduced", **options))["d2t"].shape == (50,)


# -- losses ----------------------------------------------------------------------------------------


def test_unrolled_runs_match_decoding() -> None:
    """At every root, runs equal cached drafting of a chain on the head's own outputs."""
    for flags in FLAGS:
        head = make_head(**flags)
        head.plain = False  # transformers computes norms in float32
        features, tokens, _, _ = inputs(head)
        cache = head.new_cache(CHATS, LENGTH + RUNS)
        with torch.no_grad():
            outputs = unroll(head, features, tokens, RUNS)
            for root in range(tokens.shape[1]):
                x, start = head.fuse(features[:, : root + 1]), 0
                for run in range(min(RUNS, tokens.shape[1] - root)):
                    stop = root + run + 1
                    positions = torch.arange(start, stop).expand(CHATS, -1)
                    keys = cache.keys(stop, x.device)
                    cache.place(positions, keys)
                    mask = additive_mask(keys <= positions[:, :, None], head.dtype)
                    z = head(x, tokens[:, start:stop], positions, mask, cache)[:, -1:]
                    ours = outputs[run][:, root + run]
                    torch.testing.assert_close(ours, z[:, 0], rtol=1e-6, atol=1e-8)
                    x, start = head.carry(z), stop


def test_losses_are_those_of_eagle3() -> None:
    """The losses are those of ``eagle/traineagle3/cnets.py``, averaged over the runs.

    Position by position: the target's distribution is the softmax of its logits of the draft's
    vocabulary, and a position counts if the most likely token of all is among them.
    """
    config = TrainConfig(head_type="eagle3", unroll=RUNS, divergence_weight=0.5)
    for reduced in (False, True):
        ids = TOKEN_IDS if reduced else torch.arange(VOCAB_SIZE)
        head = make_head(TOKEN_IDS if reduced else None)
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


def test_new_heads_and_their_copies() -> None:
    """The projection is the target's, every weight has a gradient, and copies have its shape."""
    target = Target(tiny_target(num_hidden_layers=LAYERS))
    head = new_head(TrainConfig(head_type="eagle3"), target, TOKEN_IDS)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[TOKEN_IDS])
    assert torch.equal(head.token_ids, TOKEN_IDS)
    head = make_head(TOKEN_IDS, fc_norm=True, norm_output=True)
    losses = HeadLosses(head, TrainConfig(head_type="eagle3", unroll=2))
    features, tokens, labels, loss_mask = inputs(head)
    for mask in (loss_mask, torch.zeros_like(loss_mask)):
        losses.zero_grad(set_to_none=True)
        losses(features, tokens, labels, mask)["loss"].backward()
        assert all(item.grad is not None for item in head.parameters())
    head.embed_tokens = torch.nn.Embedding(VOCAB_SIZE, 32, dtype=torch.float64)
    copy = empty_copy(head, torch.bfloat16)
    assert (copy.flags, copy.reads, copy.dtype) == (head.flags, head.reads, torch.bfloat16)
    assert torch.equal(copy.token_ids, TOKEN_IDS)
    shapes = {name: item.shape for name, item in head.state_dict().items()}
    assert {name: item.shape for name, item in copy.state_dict().items()} == shapes


# -- trainings -------------------------------------------------------------------------------------


def test_training_writes_a_head_that_decodes(train: Train, target: Path) -> None:
    """A trained head decodes losslessly at ``T = 0``, like every drafter."""
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
    second = train("second", head=first, **{**options, "draft_vocab_size": None})
    assert same_weights(read_weights(second), read_weights(first))
    assert load_eagle3(second, Target(load_target(target))).flags.norm_before_residual
    with pytest.raises(OptionsError, match="fc_norm must be that of --head, False; got True"):
        train("third", head=first, **{**options, "draft_vocab_size": 100, "fc_norm": True})
    with pytest.raises(CheckpointError, match="first is not a head of type eagle; see --head-type"):
        train("third", head=first, max_steps=2)


# -- options ---------------------------------------------------------------------------------------


def test_defaults_depend_on_the_type_of_the_head() -> None:
    """They count as unset, so that a file can override them."""
    config = TrainConfig(head_type="eagle3")
    assert {name: getattr(config, name) for name in EAGLE3_DEFAULTS} == EAGLE3_DEFAULTS
    assert (config.unroll, config.unroll_decay, config.token_weight) == (7, 0.8, 1.0)
    assert config.learning_rate(4096) == 5e-5
    assert TrainConfig(head_type="eagle3", unroll=2).unroll == 2
    assert config.model_dump(exclude_unset=True) == {"head_type": "eagle3"}
    assert TrainConfig.from_dict(config.model_dump()) == config
    for options, message in (
        ({"fc_norm": True}, "fc_norm requires head_type eagle3"),
        ({"head_type": "eagle3", "bias": True}, "bias requires head_type eagle"),
        ({"head_type": "eagle3", "feature_weight": 0.5}, "feature_weight must be 0 .*; got 0.5"),
    ):
        with pytest.raises(OptionsError, match=f"^{message}$"):
            TrainConfig.from_dict(options)


# -- export ----------------------------------------------------------------------------------------


def test_export_computes_what_the_head_computes(
    train: Train, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines have one of two layouts, one with a rule. EAGLE's own code knows no variants."""
    trained = train(**EAGLE3, max_steps=2, draft_vocab_size=100, fc_norm=True)
    wrapped, rule = Target(load_target(target)), TopKRule(5, ratio=0.5)
    before = load_eagle3(trained, wrapped)
    declaring = tmp_path / "declaring"
    save_eagle3(before, declaring, "speculators", rule=rule)
    for engine in get_args(ExportFormat):
        has_rule = engine in ("vllm", "speculators")
        out = convert_head(declaring, wrapped, tmp_path / engine, engine)
        after = load_eagle3(out, wrapped)
        assert (after.flags, after.reads) == (before.flags, before.reads)
        assert same_weights(dict(after.state_dict()), dict(before.state_dict()))
        config = json.loads((out / "config.json").read_text())
        assert (out / "pytorch_model.bin").exists() == (engine == "eagle")
        assert ("speculators_model_type" in config) == has_rule
        assert declared_rule(out) == (rule if has_rule else None)
    for warning in (
        "EAGLE's own code ignores variants of this head: fc_norm",
        "its RoPE scaling is llama3",
        "the layout for sglang has no acceptance rule; this head's is left out",
    ):
        assert caplog.text.count(warning) == 1
    half = Target(load_target(target, "float16"))
    save_eagle3(load_eagle3(trained, half), tmp_path / "half")
    out = convert_head(tmp_path / "half", wrapped, tmp_path / "half-out", "speculators")
    assert read_weights(out)["fc.weight"].dtype == torch.float16


def test_tokens_of_answers_are_ranked_by_frequency(tmp_path: Path) -> None:
    """Ranks match a recount with the data set's masks; unseen tokens follow in ascending order."""
    write_chats(tmp_path / "chats.jsonl", 20, 3)
    request = RanksRequest(data=tmp_path / "chats.jsonl", out=tmp_path / "head" / "ranks")
    with pytest.raises(OptionsError, match="out must be a file; got the folder"):
        rank_tokens(request.updated(out=tmp_path))
    occurring = rank_tokens(request)
    ranks = load_file(request.out)["tokens"].tolist()
    loaded = LoadedTarget.load(request, "cpu", layers=False)
    counts: Counter[int] = Counter()
    for example in loaded.open_chats(request.data, request.max_length):
        pairs = zip(example.ids, example.assistant_mask, strict=True)
        counts.update(int(token) for token, is_answer in pairs if is_answer)
    assert occurring == len(counts)
    assert ranks == sorted(range(loaded.target.vocab_size), key=lambda id_: (-counts[id_], id_))
