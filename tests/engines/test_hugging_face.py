"""Repositories for ``model.generate(..., custom_generate="user/repo")``."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import CERTIFICATE
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from eagle_fsd import __version__
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET

Run = Callable[..., tuple[int, str, str]]


def test_a_repository_decodes_with_its_drafter(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At ``T = 0`` the output equals ``generate``'s, and a call may set options and a streamer."""
    out = tmp_path / "repository"
    status, _, errors = run("export", "custom-generate", out, "--drafter", BUNDLED_HEAD)
    assert status == 0, errors
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache")
    )
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_TARGET)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Mia buys 4 boxes with 6 pencils in every box."}],
        return_tensors="pt",
        return_dict=True,
        add_generation_prompt=True,
    )

    def generate(**options: Any) -> torch.Tensor:
        return model.generate(**inputs, max_new_tokens=40, do_sample=False, **options)

    trusted = {"custom_generate": str(out), "trust_remote_code": True}
    plain, loose = generate(), generate(**trusted, threshold=1.0)
    assert torch.equal(generate(**trusted, threshold=0.0), plain)
    assert not torch.equal(loose, plain)
    streamed = generate(**trusted, threshold=1.0, streamer=TextStreamer(tokenizer))
    assert torch.equal(streamed, loose)
    assert "Mia" in capsys.readouterr().out
    stop = {"stop_strings": ["4"], "tokenizer": tokenizer}
    assert torch.equal(generate(**trusted, threshold=0.0, **stop), generate(**stop))


def test_the_card_names_target_settings_and_certificate(run: Run, tmp_path: Path) -> None:
    head, out = tmp_path / "head", tmp_path / "out"
    shutil.copytree(BUNDLED_HEAD, head)
    settings = {"rule": "regret", "certificate": CERTIFICATE}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    words = ("export", "custom-generate", out, "--drafter", head, "--target", "some/target")
    status, _, errors = run(*words, "--settings", tmp_path / "mine.json")
    assert status == 0, errors
    card = (out / "README.md").read_text()
    assert "tags:\n- custom_generate\n" in card
    assert 'target = "some/target"\nmodel = ' in card
    assert "Settings: rule regret. accuracy on gsm8k: at most 0.96 points lost" in card
    assert json.loads((out / "fsd.json").read_text()) == settings
    assert (out / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    requirement = Requirement((out / "custom_generate" / "requirements.txt").read_text().strip())
    assert requirement.specifier.contains(__version__, prereleases=True)
    assert not requirement.specifier.contains("0.2.0")

    (head / "fsd.json").unlink()
    for number, (drafter, code) in enumerate(
        (
            (head, 'target = "path/to/the/target"'),
            ("bundled-eagle3", "from eagle_fsd.bundled import BUNDLED_TARGET\n"),
            ("bundled", "from eagle_fsd.bundled import BUNDLED_TARGET\n"),
        )
    ):
        plain = tmp_path / str(number)
        assert run("export", "custom-generate", plain, "--drafter", drafter)[0] == 0
        card = (plain / "README.md").read_text()
        assert code in card
        (example,) = re.findall(r"```python\n(.*?)model = ", card, re.DOTALL)
        exec(example, {})
        has_file = (plain / "fsd.json").exists()
        assert has_file == (drafter == "bundled") == ("`fsd.json`" in card)
        assert ("Settings: lossless decoding. Arguments" in card) == (not has_file)
    for drafter, place, reason in (
        ("ngram", "new", "ngram is not the folder of an EAGLE head or a draft model"),
        (BUNDLED_HEAD, "out", "must be an empty or a new folder"),
    ):
        status, _, errors = run("export", "custom-generate", tmp_path / place, "--drafter", drafter)
        assert status == 1
        assert reason in errors
