"""Evaluating the bundled pair: answers, resumption, and reports."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import reset_accelerator_state
from pair_answers import answerer
from safetensors.torch import load_file, save_file

from eagle_fsd import AcceptanceConfig, EagleFSD, OptionsError, TreeConfig
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_TARGET
from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.evaluation.answer_store import CHOICE_LISTS, AnswerStore
from eagle_fsd.evaluation.config import DEFAULT_METHODS
from eagle_fsd.evaluation.methods import (
    BEFORE_RESULT,
    EXACT,
    FSD,
    HF,
    PLAIN,
    Method,
    find_methods,
    fsd_method,
)
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import QuestionSetError
from eagle_fsd.evaluation.runner import PairEvaluation
from eagle_fsd.evaluation.search.prediction import step_seconds
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.tables import footnote, tree_text
from eagle_fsd.model.acceptance import RULES
from eagle_fsd.model.batch import Batch
from eagle_fsd.model.config import Settings
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.chat_templates import encode_prompt, load_chat_template
from eagle_fsd.utils.files import read_jsonl

pytestmark = [
    pytest.mark.usefixtures("no_figures"),
    pytest.mark.xdist_group("evaluate"),
]

#: Longer than the bundled target's context.
LONG = "pens " * 1100


def run(
    out: Path,
    methods: Sequence[str | Method] = ("exact",),
    settings: Settings | None = None,
    request: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate two questions with short answers."""
    report = evaluate(
        EvaluationRequest(**{"out": out, "count": 2, **(request or {})}),
        EvaluationConfig(**{"max_new_tokens": 8, **options}),
        methods,
        settings=settings,
    )
    assert report is not None
    return report


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the default methods."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr("eagle_fsd.evaluation.runner.draw_figures", lambda *_: None)
        reset_accelerator_state()
        run(folder, DEFAULT_METHODS, max_new_tokens=24)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


# -- answers and reports ---------------------------------------------------------------------------


def test_default_methods_are_answered_and_reported(finished: Path) -> None:
    """Answers have FastChat's fields, and exact decoding gives plain decoding's."""
    report = json.loads((finished / "report.json").read_text())
    plain, exact, fuzzy = report["rows"]
    assert [row["method"] for row in report["rows"]] == list(DEFAULT_METHODS)
    assert plain["speedup"] == pytest.approx(1.0)
    assert plain["tau"] == 1.0
    assert exact["tau"] > 2.0
    assert fuzzy["origins"]["fuzzy"] > 0.0 == exact["origins"]["fuzzy"]
    assert exact["log_likelihood"] == pytest.approx(plain["log_likelihood"], abs=1e-5)
    assert "phase_shares" not in exact
    assert report["environment"]["revision"]
    assert report["about"]["seed"] == 0
    answers = {name: read_jsonl(finished / f"{name}.jsonl") for name in DEFAULT_METHODS}
    for name, records in answers.items():
        assert [record["question_id"] for record in records] == [0, 1]
        for record in records:
            assert record["model_id"] == name
            assert len(record["answer_id"]) == 22
            (choice,) = record["choices"]
            assert "phases" not in choice
            assert {len(choice[key]) for key in CHOICE_LISTS} == {1}
            assert len(choice["origins"][0]) == choice["new_tokens"][0]
            assert len(choice["accepted"][0]) == choice["idxs"][0]
    for plain_record, exact_record in zip(answers["plain"], answers["exact"], strict=True):
        assert plain_record["choices"][0]["turns"] == exact_record["choices"][0]["turns"]


def test_likelihoods_follow_from_the_stored_token_ids(model: EagleFSD, finished: Path) -> None:
    template = load_chat_template(model.tokenizer)
    questions = bundled_questions(2)
    for name in ("exact", "fsd"):
        for question, record in zip(questions, read_jsonl(finished / f"{name}.jsonl"), strict=True):
            (choice,) = record["choices"]
            chat = [{"role": "user", "content": question.turns[0]}]
            prompt = encode_prompt(chat, model.tokenizer, template)[0]
            ids = torch.tensor(choice["token_ids"][0])
            assert choice["prompt_ids"][0] == prompt.tolist()
            with torch.no_grad():
                whole = torch.cat([prompt, ids])[None].to(model.model.device)
                logits = model.model(whole).logits[0].cpu()
            log_probs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            own, best = log_probs.gather(1, ids[:, None])[:, 0], log_probs.amax(-1)
            assert float(own.mean()) == pytest.approx(choice["log_likelihood"][0], abs=1e-5)
            fuzzy = torch.tensor(choice["origins"][0]) == Origin.FUZZY
            assert choice["regrets"][0] == pytest.approx((best - own)[fuzzy].tolist(), abs=1e-5)
            assert model.tokenizer.decode(ids, skip_special_tokens=True).strip() in choice["turns"]


def test_each_turn_sees_the_turns_before(model: EagleFSD, tmp_path: Path) -> None:
    template = load_chat_template(model.tokenizer)
    asked = answerer(model, tmp_path, max_new_tokens=8)
    (record,) = asked.answer([Question(0, "c", ("Hello!", "What can you do?"))], EXACT)
    first, second = record["choices"][0]["turns"]
    chat = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What can you do?"},
    ]
    ids = encode_prompt(chat, model.tokenizer, template)
    tokens = model.generate(ids, max_new_tokens=8, threshold=0.0).sequences[0, ids.shape[1] :]
    assert model.tokenizer.decode(tokens, skip_special_tokens=True).strip() == second


def test_turns_that_do_not_fit_into_the_context_are_counted(tmp_path: Path) -> None:
    lines = [{"question_id": n, "turns": ["Hello!", LONG, "Hello!"][: 1 + 2 * n]} for n in (0, 1)]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, lines)))
    request = {"questions": str(tmp_path / "turns.jsonl")}
    (row,) = run(tmp_path / "out", request=request)["rows"]
    assert (row["answers"], row["failed"], row["accuracy"]) == (2, 2, None)
    first, second = read_jsonl(tmp_path / "out" / "exact.jsonl")
    assert first["choices"][0]["errors"] == [None]
    (choice,) = second["choices"]
    assert [error is None for error in choice["errors"]] == [True, False, False]
    assert [text == "" for text in choice["turns"]] == [False, True, True]
    assert "fill the context: 2 over all" in (tmp_path / "out" / "report.md").read_text()
    assert "NaN" not in (tmp_path / "out" / "report.json").read_text()


def test_the_batch_does_not_change_answers(model: EagleFSD, tmp_path: Path) -> None:
    """Different lengths, one with a second turn and one too long for the context."""
    turns = (("Hello!",), ("Hello!", "Thank you!"), (LONG,), ("What can you do?",))
    questions = [Question(at, "c", item) for at, item in enumerate(turns)]
    sampled = {"temperature": 1.0, "samples": 2}
    for method, options in ((PLAIN, sampled), (EXACT, sampled), (FSD, {})):
        singles, batched = (
            answerer(model, tmp_path, batch=batch, max_new_tokens=8, **options).answer(
                questions, method
            )
            for batch in (1, 8)
        )
        assert len(singles) == len(batched) == 4
        assert singles[2]["choices"][0]["errors"] != [None]
        for single, other in zip(singles, batched, strict=True):
            for one, two in zip(single["choices"], other["choices"], strict=True):
                for key in ("turns", "new_tokens", "token_ids", "errors"):
                    assert one[key] == two[key]
                assert one["log_likelihood"] == pytest.approx(two["log_likelihood"], abs=1e-5)


@pytest.mark.parametrize(
    ("assistant", "name"), [(str(BUNDLED_TARGET), "hf assisted"), ("ngram", "hf lookup")]
)
def test_hugging_face_gives_the_same_answers(assistant: str, name: str, tmp_path: Path) -> None:
    """Its generate, assisted generation, for which the target assists itself, and prompt lookup."""
    request = {"baseline": "hf", "assistant": assistant}
    report = run(tmp_path, ["exact", "hf"], request=request, max_new_tokens=8)
    rows = report["rows"]
    assert [row["method"] for row in rows] == ["hf", name, "exact"]
    assert rows[0]["tokens"] == rows[1]["tokens"] == rows[2]["tokens"] > 0
    assert rows[0]["speed_over_hf"] == pytest.approx(1.0)
    answers = [read_jsonl(tmp_path / f"{row['method']}.jsonl") for row in rows]
    for records in zip(*answers, strict=True):
        texts = [record["choices"][0]["turns"] for record in records]
        assert texts[0] == texts[1] == texts[2]


def test_fsd_without_a_threshold_is_not_decoded_beside_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tree is that of two answers, which fill no batch of eight."""
    single, pairs, eight = (TreeConfig(total_tokens=n, depth=n - 2, top_k=1) for n in (8, 6, 4))
    settings = Settings(threshold=0.0, exact=single, batch={"2": pairs, "8": eight})
    report = run(tmp_path, ["exact", "fsd"], settings, batch=8)
    assert [row["method"] for row in report["rows"]] == ["exact"]
    assert tree_text(report["rows"][0]) == "6/4/1"
    assert "; tree 6/4/1;" in footnote(report)
    assert not (tmp_path / "fsd.jsonl").exists()
    for said in ((tmp_path / "report.md").read_text(), caplog.text):
        assert "Without a threshold, fsd is exact decoding, so it is not decoded a second" in said


# -- resumption ------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes(copied: Path) -> None:
    """After a partial line, the missing answer alone is drawn, in another session."""
    first = json.loads((copied / "report.json").read_text())
    before = read_jsonl(copied / "exact.jsonl")
    unchanged = (copied / "fsd.jsonl").read_bytes()
    content = (copied / "exact.jsonl").read_bytes()
    (copied / "exact.jsonl").write_bytes(content[: content.index(b"\n") + 200])
    finished: list[dict[str, Any]] = []
    again = evaluate(
        EvaluationRequest(count=2, out=copied),
        EvaluationConfig(max_new_tokens=24),
        ["exact", "fsd"],
        on_report=finished.append,
    )
    assert finished == [again]
    assert json.loads((copied / "report.json").read_text()) == json.loads(json.dumps(again))
    after = read_jsonl(copied / "exact.jsonl")
    assert after[0] == before[0]
    assert after[1]["choices"][0]["turns"] == before[1]["choices"][0]["turns"]
    assert after[1]["answer_id"] != before[1]["answer_id"]
    assert (copied / "fsd.jsonl").read_bytes() == unchanged
    assert len(again["sessions"]) == 2
    assert again["sessions"].items() > first["sessions"].items()
    assert again["rows"][0]["speed_over_exact"] == pytest.approx(1.0)
    assert "The answers come from 2 sessions" in (copied / "report.md").read_text()
    # A run that only reports answers of earlier ones is not a session.
    reported = run(copied, ["exact", "fsd"], max_new_tokens=24)
    assert reported["sessions"] == again["sessions"]
    assert reported["environment"] == again["environment"]


def test_a_run_cannot_grow_until_its_bound_holds(model: EagleFSD, tmp_path: Path) -> None:
    """Bounds of a run that is read again and again while it grows err more often than stated."""
    questions = bundled_questions(200)

    def store(count: int, seed: int = 0) -> AnswerStore:
        request, config = EvaluationRequest(), EvaluationConfig(seed=seed)
        grown = PairEvaluation(model, questions[:count], [EXACT], request, config, tmp_path)
        grown.open()
        return grown.stores["exact"]

    choice = {name: [0] for name in CHOICE_LISTS}
    record = {"question_id": 0, "session": "a", "batch": 0, "choices": [choice]}
    store(100).append(record)
    with pytest.raises(ValueError, match=r"fixed before the first answer; .* --skip 100$"):
        store(200)
    with pytest.raises(ValueError, match="choose another output folder, or delete this one"):
        store(200, seed=1)  # other questions
    store(100)


def test_answers_with_other_settings_are_rejected(model: EagleFSD, copied: Path) -> None:
    """Only methods that depend on a changed setting are rejected, and no file is changed."""
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    questions = bundled_questions(2)
    changed: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({}, {"max_new_tokens": 5}, ["max_new_tokens was 24, is 5"]),
        ({}, {"seed": 1}, ["seed was 0, is 1"]),
        ({}, {"temperature": 0.5, "top_k": 5}, ["temperature was 0.0, is 0.5", "top_k was 0, is"]),
        ({"chat_template": "vicuna_v1.1"}, {}, ["template was None, is 'vicuna_v1.1'"]),
    ]
    for request, options, messages in changed:
        config = EvaluationConfig(**{"max_new_tokens": 24, **options})
        other = PairEvaluation(
            model, questions, [EXACT], EvaluationRequest(**request), config, copied
        )
        with pytest.raises(ValueError, match=r"exact\.jsonl holds answers with other set") as error:
            other.open()
        assert all(message in str(error.value) for message in messages)
    other_threshold = Settings(threshold=0.3)
    with pytest.raises(ValueError, match=r"fsd\.jsonl .*\(.*threshold was 0.05, is 0.3"):
        run(copied, ["fsd"], other_threshold, max_new_tokens=24)
    with pytest.raises(ValueError, match=r"exact\.jsonl .*depth was \d+, is 3"):
        run(copied, ["exact"], Settings(depth=3), max_new_tokens=24)
    assert {path: path.read_bytes() for path in before} == before
    run(copied, ["plain", "exact"], other_threshold, max_new_tokens=24)


def change_weight(folder: Path, suffix: str) -> None:
    """Scale a tensor of a checkpoint by 1.01."""
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(suffix))
    weights[name] = weights[name] * 1.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_other_weights_with_the_same_name_are_detected(tmp_path: Path) -> None:
    """A changed weight of the target or the draft model raises an error and keeps the answers."""
    out = tmp_path / "out"
    shutil.copytree(BUNDLED_TARGET, tmp_path / "target")
    shutil.copytree(BUNDLED_DRAFT_MODEL, tmp_path / "drafter")
    request = {name: str(tmp_path / name) for name in ("target", "drafter")}
    run(out, request=request)
    before = (out / "exact.jsonl").read_bytes()
    for changed, suffix in (("drafter", "0.mlp"), ("target", "13.mlp")):
        change_weight(tmp_path / changed, f"{suffix}.down_proj.weight")
        with pytest.raises(ValueError, match=r"holds answers with other settings") as error:
            run(out, request=request)
        assert f"fingerprint of the {changed} was" in str(error.value)
        assert ("fingerprint of the target was" in str(error.value)) == (changed == "target")
        assert (out / "exact.jsonl").read_bytes() == before
    # Another base of RoPE leaves all weights as they are.
    file = tmp_path / "target" / "config.json"
    text = file.read_text()
    file.write_text(re.sub(r'"rope_theta": [\d.]+', '"rope_theta": 20000.0', text))
    assert file.read_text() != text
    with pytest.raises(ValueError, match=r"configuration of the target was"):
        run(out, request=request)


# -- invalid requests ------------------------------------------------------------------------------


def test_invalid_requests_leave_no_folder(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], list[Any], type[Exception], str]] = [
        ({"questions": "no-set"}, {}, ["exact"], QuestionSetError, "neither a file nor"),
        ({}, {}, ["nonsense"], OptionsError, "method must be one of plain, exact, fsd, hf, rules"),
        ({}, {}, ["fsd", Method("fsd", {"threshold": 0.4})], OptionsError, "two methods have the"),
        ({"chat_template": "x"}, {}, ["exact"], ValueError, "FastChat template 'x'"),
        ({"baseline": "hf", "assistant": "x"}, {"batch": 2}, ["exact"], OptionsError, "--batch 1"),
        ({"assistant": "x"}, {}, ["exact"], ValueError, "--assistant requires --baseline hf"),
        ({"unsafe": True}, {}, ["exact"], ValueError, "--unsafe requires --execute-code"),
        ({}, {"samples": 2}, ["exact"], ValueError, "--samples 2 requires a --temperature above 0"),
        ({}, {"seeds": 2}, ["exact"], ValueError, "--seeds 2 requires a --temperature above 0"),
    ]
    for request, options, methods, error, words in cases:
        with pytest.raises(error, match=words):
            run(tmp_path / "out", methods, request=request, **options)
        assert not (tmp_path / "out").exists()


# -- methods ---------------------------------------------------------------------------------------


def test_describe_names_what_answers_depend_on(model: EagleFSD) -> None:
    fuzzy = copy.copy(model)
    fuzzy.acceptance = AcceptanceConfig(threshold=0.2, min_ratio=0.1)
    assert fsd_method(0.1).describe(fuzzy)["min_ratio"] == 0.0
    described = [method.describe(fuzzy) for method in find_methods(["rules"])]
    assert len({json.dumps(item, sort_keys=True) for item in described}) == len(described)
    for method in find_methods(["rules"]):
        if method.name in RULES:
            assert method.describe(fuzzy)["method"] == repr(RULES[method.name])
            chosen = copy.copy(fuzzy)
            chosen.acceptance = AcceptanceConfig(rule=method.name, fallback="stop")
            chosen.exact_tree = fuzzy.tree
            assert FSD.describe(chosen) == {**method.describe(fuzzy), "fallback": "stop"}


def test_describe_names_the_tree_of_a_method(model: EagleFSD) -> None:
    """It is the method's own, or else the model's for the method's threshold."""
    pair = copy.copy(model)
    pair.tree, pair.exact_tree = TreeConfig(depth=9), TreeConfig(depth=7)
    pair.batch_trees = {2: TreeConfig(total_tokens=1)}
    assert EXACT.describe(pair)["depth"] == 7
    assert EXACT.describe(pair)["batch_trees"].keys() == {"2"}
    assert fsd_method(0.1).describe(pair)["depth"] == BEFORE_RESULT.describe(pair)["depth"] == 9
    own = replace(EXACT, tree=TreeConfig(depth=5)).describe(pair)
    assert own["depth"] == 5
    assert "batch_trees" not in own


# -- decoding --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_long_prompt_does_not_shorten_the_rest_of_its_batch(
    model: EagleFSD, tmp_path: Path
) -> None:
    """It gets the room that the context leaves, the others what they would get alone."""
    context = model.target.context_length
    long = "pens " * ((context - 40) // 2)  # two tokens each
    template = load_chat_template(model.tokenizer)
    prompt = encode_prompt([{"role": "user", "content": long}], model.tokenizer, template)[0]
    room = context - len(prompt)
    limit = room + 8
    assert 0 < room < 64
    texts = ("Hello!", long, "What can you do?")
    questions = [Question(index, "c", (text,)) for index, text in enumerate(texts)]
    asked = answerer(model, tmp_path, max_new_tokens=limit, batch=3)
    for method in (EXACT, HF):
        answers = [record["choices"][0] for record in asked.answer(questions, method)]
        assert 0 < answers[1]["new_tokens"][0] <= room
        for index in (0, 2):
            (single,) = asked.answer([questions[index]], method)
            assert single["choices"][0]["turns"] == answers[index]["turns"]


def test_batches_share_engines_and_are_compiled_for_their_size(
    model: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, a timed batch would otherwise start an engine and capture its graphs again."""
    made: list[int] = []
    open_: list[Batch] = []
    make, close = EagleFSD.batch, Batch.close

    def make_batch(pair: EagleFSD, max_rows: int, *, compiled_rows: int = 1) -> Batch:
        open_.append(make(pair, max_rows, compiled_rows=compiled_rows))
        made.append(compiled_rows)
        return open_[-1]

    def close_batch(batch: Batch) -> None:
        close(batch)
        open_.remove(batch)

    monkeypatch.setattr(EagleFSD, "batch", make_batch)
    monkeypatch.setattr(Batch, "close", close_batch)
    asked = answerer(model, tmp_path, max_new_tokens=4, batch=2)
    for method in (EXACT, PLAIN):
        asked.answer(bundled_questions(2), method)
    assert (made, open_) == ([2, 2], [])
    prompts = Workload.of(model, bundled_questions(2), EvaluationRequest(), asked.config)
    step_seconds(prompts, PLAIN, 0)
    assert made == [2, 2, 2]


def test_a_stop_string_ends_decoding(model: EagleFSD, tmp_path: Path) -> None:
    """What follows it is neither decoded nor counted."""
    template = load_chat_template(model.tokenizer)
    question = Question(0, "c", ("Hello!",))
    (record,) = answerer(model, tmp_path, max_new_tokens=32).answer([question], PLAIN)
    text, count = record["choices"][0]["turns"][0], record["choices"][0]["new_tokens"][0]
    stop = text.split()[2]
    template.stop = (stop,)
    asked = answerer(model, tmp_path, template, max_new_tokens=32)
    for method in (EXACT, PLAIN, HF):
        (choice,) = asked.answer([question], method)[0]["choices"]
        assert choice["turns"][0] == text[: text.index(stop)].strip()
        assert 0 < choice["new_tokens"][0] < count
        assert len(choice["origins"][0]) in (0, choice["new_tokens"][0])


def test_the_targets_generation_config_does_not_change_hugging_face(
    model: EagleFSD, tmp_path: Path
) -> None:
    """A repetition penalty, say, would make it decode from another distribution than the rest."""
    asked = answerer(model, tmp_path, max_new_tokens=24)
    question = Question(0, "c", ("Hello!",))
    before = model.model.generation_config
    changed = copy.deepcopy(before)
    changed.update(repetition_penalty=5.0, no_repeat_ngram_size=2, do_sample=True, temperature=9.0)
    model.model.generation_config = changed
    try:
        (hf,), (plain,) = (asked.answer([question], method) for method in (HF, PLAIN))
        assert model.model.generation_config is changed
    finally:
        model.model.generation_config = before
    assert hf["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
