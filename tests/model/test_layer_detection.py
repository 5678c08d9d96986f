"""Finding the hidden states that an EAGLE-3 head was trained on."""

from __future__ import annotations

import pytest
import torch
from eagle3_heads import aligned_eagle3_pair, target_model, untrained_eagle3
from pairs import VOCAB_SIZE

from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.drafters.layer_detection import detect_layers, is_cheap, sample_texts
from eagle_fsd.model.target import Target


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


def test_declared_hidden_states_are_kept_where_others_are_as_good() -> None:
    """An untrained head agrees with its target by chance only."""
    model = target_model()
    head = untrained_eagle3(model)
    choice = detect_layers(head, Target(model), sample_texts(Target(model)))
    assert choice.reads == head.reads == (2, 3, 4)
    assert set(choice.agreement) == {(2, 3, 4), (1, 2, 3), (3, 4, 5)}
    assert max(choice.agreement.values()) < 0.1


def test_default_candidates_are_within_the_target() -> None:
    pair = aligned_eagle3_pair()
    texts = [torch.arange(9)]
    first, last = (reading(pair.drafter, reads) for reads in ((0, 3, 5), (1, 3, 6)))
    assert set(detect_layers(first, pair.target, texts).agreement) == {(0, 3, 5), (1, 4, 6)}
    assert set(detect_layers(last, pair.target, texts).agreement) == {(1, 3, 6), (0, 2, 5)}


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


def test_targets_on_the_meta_device_are_not_cheap() -> None:
    """They cannot generate texts, even if only their layers are on it."""
    model = target_model()
    assert is_cheap(Target(model))
    model.model.layers.to("meta")
    assert not is_cheap(Target(model))


def test_sampled_texts_are_varied_and_reproducible() -> None:
    """And leave torch's generator alone, also if the target would end its answers early."""
    model = target_model()
    model.generation_config.eos_token_id = list(range(VOCAB_SIZE))
    before = torch.get_rng_state()
    first, again = (sample_texts(Target(model)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [text.tolist() for text in first] == [text.tolist() for text in again]
    assert {len(text) for text in first} == {48}
    assert len({tuple(text.tolist()) for text in first}) == len(first)
