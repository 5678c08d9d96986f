"""The option models of decoding: defaults, bounds, and the ``fsd.json`` files that hold them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pairs import aligned_pair, batch

from eagle_fsd import AcceptanceConfig, OptionsError
from eagle_fsd.evaluation.config import GridConfig
from eagle_fsd.model.acceptance import RULES, FuzzyRule, LimitedRule, MarginRule, rule_for
from eagle_fsd.model.config import DivergenceName, RuleName, read_settings
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.train.config import TrainConfig


def test_names_of_rules_and_divergences_are_complete() -> None:
    """The options write them out, because their module does not import torch."""
    assert get_args(RuleName) == ("fsd", *RULES)
    assert set(get_args(DivergenceName)) == set(DIVERGENCES)


def test_a_threshold_and_another_rule_replace_each_other() -> None:
    fuzzy = AcceptanceConfig(threshold=0.1, min_ratio=0.3, max_fuzzy_nats=3.0)
    other = fuzzy.updated(rule="margin")
    assert (other.threshold, other.rule, other.lossless) == (0.0, "margin", False)
    assert other.updated(min_ratio=0.2).rule == "margin"
    assert other.updated(threshold=0.1) == fuzzy
    assert other.updated(threshold=0.0).lossless
    assert (fuzzy.label, other.label) == ("threshold 0.1", "rule margin")
    assert rule_for(other) == LimitedRule(MarginRule(), 3.0)
    assert fuzzy.updated(rule="margin", threshold=None) == other
    with pytest.raises(OptionsError, match=r"rule 'margin' takes no threshold; got 0\.2"):
        other.updated(rule="margin", threshold=0.2)
    with pytest.raises(OptionsError, match="max_fuzzy_nats needs selection longest or priced"):
        fuzzy.updated(selection="sample")


def test_named_rules_decode_or_are_rejected() -> None:
    """No valid configuration fails in the middle of decoding, where it would end a whole batch."""
    pair, decoded = aligned_pair(), set()
    for name, limit, selection in itertools.product(
        RULES, (None, 2.0), ("longest", "priced", "target", "sample")
    ):
        values = {"rule": name, "max_fuzzy_nats": limit, "selection": selection}
        if selection in ("target", "sample") or (limit and RULES[name].replaces_samples):
            with pytest.raises(OptionsError, match=r"needs selection|cannot limit"):
                AcceptanceConfig.from_dict(values)
            continue
        acceptance = AcceptanceConfig.from_dict(values)
        kind = type(RULES[name]), limit or selection  # once for each kind of rule
        if kind not in decoded:
            decoded.add(kind)
            out = pair.generate(*batch(), 4, acceptance=acceptance, temperature=1.0, seed=1)
            assert out.stats.tokens == 4 * len(batch()[0])


def test_reverse_kl_is_another_name_of_kl_reversed(tmp_path: Path) -> None:
    """``reverse_kl`` names a divergence wherever one is set, and is stored as ``kl_reversed``."""
    pair = aligned_pair()
    for prefix in ("", "top_k_", "top_p_"):
        other, own = f"{prefix}reverse_kl", f"{prefix}kl_reversed"
        acceptance = AcceptanceConfig.from_dict({"threshold": 0.3, "divergence": other})
        assert acceptance == AcceptanceConfig(threshold=0.3, divergence=own)
        assert AcceptanceConfig().updated(divergence=other).divergence == own
        path = _write(tmp_path, {"divergence": other})
        assert read_settings(path).acceptance == {"divergence": own}
        assert GridConfig.from_dict({"divergences": (other, "js", own)}).divergences == (own, "js")
        rules = [FuzzyRule(0.3, divergence=name) for name in (other, own)]
        first, second = (pair.generate(*batch(), 8, rule=rule) for rule in rules)
        assert first.sequences.equal(second.sequences)
    assert TrainConfig(divergence_loss="reverse_kl").divergence_loss == "kl_reversed"
    with pytest.raises(OptionsError, match=r"divergence must be one of .*; got 'reverse_js'"):
        AcceptanceConfig.from_dict({"divergence": "reverse_js"})
    with pytest.raises(ValueError, match=r"^divergence must be one of .*; got 'reverse_js'$"):
        FuzzyRule(0.3, "reverse_js")


def _write(folder: Path, content: Any) -> Path:
    path = folder / "fsd.json"
    data = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_invalid_file_raises_one_line_with_its_path(tmp_path: Path) -> None:
    for content, reason in (
        ("", "line 1"),
        (b"\xff\xfe\x00", "decode"),
        (None, "not a JSON object"),
        ({"threshold": -0.1}, "threshold must be a number of at least 0; got -0.1"),
        ('{"threshold": NaN}', "threshold must be a number of at least 0; got nan"),
        ({"threshold": "0.1"}, "threshold must be a number of at least 0; got '0.1'"),
        ({"depth": 2.5}, r"depth must be an integer in \[1, 64\]; got 2.5"),
        ({"tau": 4}, "unknown option tau"),
        ({"exact": {"depth": 99}}, "exact.depth must be less than or equal to 64; got 99"),
        ({"drafter": "head"}, "drafter must be"),
    ):
        path = _write(tmp_path, content)
        with pytest.raises(ValueError, match=reason) as error:
            read_settings(path)
        assert str(path) in str(error.value)
        assert str(error.value).isprintable()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_settings(path)
