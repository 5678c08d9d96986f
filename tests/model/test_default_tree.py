"""The draft tree of a pair without fsd.json follows the costs of its passes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import aligned_pair, greedy_reference, prompt

from eagle_fsd import DraftModel, EagleFSD, TreeConfig
from eagle_fsd.model import execution
from eagle_fsd.model.default_tree import (
    DEPTHS,
    NODES,
    WIDTHS,
    choose_tree,
    fit_tree,
)


def test_costs_choose_the_tree() -> None:
    """Nodes that cost nothing are used; levels that cost much are not."""
    flat, free = dict.fromkeys(NODES, 1.0), dict.fromkeys(WIDTHS, 0.0)
    assert choose_tree(flat, free, free) == TreeConfig(total_tokens=60, depth=8, top_k=8)
    steep = {nodes: float(nodes) for nodes in NODES}
    assert choose_tree(steep, free, free).total_tokens == NODES[0]
    levels = dict.fromkeys(WIDTHS, 1.0)
    assert choose_tree(flat, levels, free).depth == DEPTHS[0]
    wide = {width: 0.01 * width**2 for width in WIDTHS}
    assert choose_tree(flat, wide, free).top_k < WIDTHS[-1]
    narrow = {**levels, 2: 0.01}  # levels of two nodes: 6 of them propose too few nodes for 60
    assert choose_tree(flat, narrow, free) == TreeConfig(total_tokens=32, depth=6, top_k=2)


def test_tree_is_chosen_once_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(execution, "compiled", None)  # no tree is compiled to choose one
    pair = aligned_pair()
    file = tmp_path / "eagle_fsd" / "trees.json"

    def fitted(**options: Any) -> EagleFSD:
        model = EagleFSD.from_pretrained(pair.model, pair.drafter, compile=True, **options)
        fit_tree(model)
        assert model.compile is True
        model.compile = False
        return model

    assert fitted(depth=3).tree.depth == 3
    settings = tmp_path / "fsd.json"
    settings.write_text('{"batch": {"4": {"depth": 3}}}')
    assert fitted(settings=settings).batch_trees == {4: TreeConfig(depth=3)}
    for name, shapes in (("exact_tree", TreeConfig(depth=3)), ("batch_trees", {4: TreeConfig()})):
        assigned = EagleFSD.from_pretrained(pair.model, pair.drafter)
        setattr(assigned, name, shapes)
        fit_tree(assigned)
        assert getattr(assigned, name) == shapes
    bundled = EagleFSD.from_pretrained()  # has fsd.json
    tree = bundled.tree
    fit_tree(bundled)
    assert bundled.tree == tree
    split = EagleFSD.from_pretrained(pair.model, pair.drafter)
    vars(split.target)["group"] = object()  # processes, whose measurements could differ
    fit_tree(split)
    assert split.has_default_tree
    draft = copy.deepcopy(pair.model)
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    adaptive = EagleFSD(pair.model, DraftModel(draft))  # steps are shallower than its tree
    fit_tree(adaptive)
    assert adaptive.has_default_tree
    assert not file.exists()
    model = fitted()
    (stored,) = json.loads(file.read_text()).values()
    assert model.tree == model.exact_tree == TreeConfig.from_dict(stored)
    ids = prompt(7)
    expected = greedy_reference(pair.model, ids, new=20)
    assert torch.equal(model.generate(ids, max_new_tokens=20).sequences, expected)
    assert fitted().tree == model.tree
    assert caplog.text.count("timing a few steps") == 1
    file.write_text("{")
    fitted()
    assert caplog.text.count("timing a few steps") == 2
    assert len(json.loads(file.read_text())) == 1
