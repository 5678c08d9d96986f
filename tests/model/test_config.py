"""The option models of decoding: defaults, bounds, and the ``fsd.json`` files that hold them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pairs import aligned_pair, batch

from eagle_fsd import AcceptanceConfig, OptionsError, SamplingConfig, TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.evaluation.config import GridConfig
from eagle_fsd.model.acceptance import RULES, FuzzyRule, LimitedRule, MarginRule, rule_for
from eagle_fsd.model.config import read_settings, settings_dict
from eagle_fsd.train.config import TrainConfig
from eagle_fsd.utils.options import describe_field

#: The documented range of every option. Changing one changes every interface.
RANGES: dict[type, dict[str, str]] = {
    TreeConfig: {
        "total_tokens": "an integer in [1, 1024]",
        "depth": "an integer in [1, 64]",
        "top_k": "an integer in [1, 256]",
    },
    AcceptanceConfig: {
        "threshold": "a number of at least 0",
        "divergence": "one of js, js_reference, kl, kl_reversed, tv, top_k_js, top_k_js_reference,"
        " top_k_kl, top_k_kl_reversed, top_k_tv, top_p_js, top_p_js_reference, top_p_kl,"
        " top_p_kl_reversed, top_p_tv",
        "min_ratio": "a number in [0, 1]",
        "fallback": "one of exact, stop",
        "selection": "one of longest, priced, target, sample",
        "divergence_on": "one of raw, warped",
        "price": "a finite number of at least 0",
        "max_fuzzy_nats": "a number of at least 0",
        "exact_first": "an integer in [0, 1048576]",
        "rule": f"one of {', '.join(('fsd', *RULES))}",
    },
    SamplingConfig: {
        "temperature": "a finite number of at least 0",
        "top_p": "a number in (0, 1]",
        "top_k": "an integer of at least 0",
        "min_p": "a number in [0, 1]",
    },
}


def test_every_option_has_its_documented_range() -> None:
    for options, ranges in RANGES.items():
        assert {*options.model_fields} - {"seed"} == {*ranges}
        for name, text in ranges.items():
            assert describe_field(options, name) == text
            assert options.model_fields[name].description
            invalid = "none" if text.startswith("one of") else -1
            with pytest.raises(OptionsError, match=re.escape(f"{name} must be {text}")):
                options.from_dict({name: invalid})


def test_limit_per_answer_needs_whole_paths() -> None:
    limited = AcceptanceConfig(threshold=0.1, max_fuzzy_nats=3.0)
    assert limited.updated(selection="priced").max_fuzzy_nats == 3.0
    for selection in ("target", "sample"):
        message = f"max_fuzzy_nats needs selection longest or priced; got {selection}"
        with pytest.raises(OptionsError, match=message):
            limited.updated(selection=selection)


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


def test_named_rules_decode_or_are_rejected() -> None:
    """No valid configuration fails in the middle of decoding, where it would end a whole batch."""
    pair, decoded = aligned_pair(), set()
    for name, limit, selection in itertools.product(
        RULES, (None, 2.0), ("longest", "priced", "target", "sample")
    ):
        values = {"rule": name, "max_fuzzy_nats": limit, "selection": selection}
        if selection in ("target", "sample") or (limit and RULES[name].replaces_samples):
            with pytest.raises(OptionsError, match=r"needs selection|has no fuzzy tokens"):
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


def test_settings_dict_is_the_content_of_the_shipped_file() -> None:
    """The same keys in the same order."""
    content = json.loads((BUNDLED_HEAD / "fsd.json").read_text())
    found = read_settings(BUNDLED_HEAD / "fsd.json")
    merged = settings_dict(TreeConfig(**found.tree), AcceptanceConfig(**found.acceptance))
    assert list(content.items())[: len(merged)] == list(merged.items())
    rest = ["exact", "batch", "target", "drafter", "certificate", "about"]
    assert list(content)[len(merged) :] == rest


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
