"""``eagle-fsd evaluate`` end to end on the bundled pair, with few questions and short answers."""

from __future__ import annotations

import copy
import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eagle_fsd
from eagle_fsd import EagleFSD
from eagle_fsd.evaluation.answer_store import Session
from eagle_fsd.evaluation.answering import Answerer, answer_log_likelihood
from eagle_fsd.evaluation.config import Decoding
from eagle_fsd.evaluation.methods import (
    EXACT,
    HF,
    PLAIN,
    RULES,
    Method,
    decode,
    fsd,
    fsd_grid,
    fsd_groups,
)
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import QuestionSetError, find_questions
from eagle_fsd.evaluation.report import Summary, summarise
from eagle_fsd.evaluation.tables import main_table, markdown
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.utils.chat_templates import ChatFormat, chat_format, encode_prompt

#: Calls ``eagle-fsd`` in this process: (status, standard output, standard error).
Command = Callable[..., tuple[int, str, str]]

COUNT = 3
COMMAND = ("evaluate", "--count", str(COUNT), "--max-new-tokens", "48")


@pytest.fixture(scope="module")
def model() -> EagleFSD:
    return EagleFSD.from_pretrained()


def _answers(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_default_methods_answer_and_are_reported(tmp_path: Path, run: Command) -> None:
    """FastChat's fields are there; exact decoding says what plain decoding says."""
    status, printed, _ = run(*COMMAND, "--out", str(tmp_path), "--json")
    assert status == 0
    report = json.loads(printed)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [row["method"] for row in report["rows"]] == ["plain", "exact", "fsd"]
    plain, exact, fuzzy = report["rows"]
    assert plain["speedup"] == 1.0
    assert plain["tau"] == 1.0
    assert exact["tau"] > 2.0
    assert fuzzy["origins"]["fuzzy"] > 0.0 == exact["origins"]["fuzzy"]
    assert exact["log_likelihood"] == pytest.approx(plain["log_likelihood"], abs=1e-5)
    assert report["environment"]["revision"]
    assert report["about"]["seed"] == 0
    answers = {name: _answers(tmp_path, name) for name in ("plain", "exact", "fsd")}
    for name, records in answers.items():
        assert [record["question_id"] for record in records] == list(range(COUNT))
        for record in records:
            assert record["model_id"] == name
            assert len(record["answer_id"]) == 22
            (choice,) = record["choices"]
            lists = ("turns", "idxs", "new_tokens", "wall_time", "origins", "accepted", "cut_off")
            assert {len(choice[key]) for key in lists} == {1}
            assert len(choice["origins"][0]) == choice["new_tokens"][0]
            assert len(choice["accepted"][0]) == choice["idxs"][0]
    for plain_record, exact_record in zip(answers["plain"], answers["exact"], strict=True):
        assert plain_record["choices"][0]["turns"] == exact_record["choices"][0]["turns"]


def test_a_run_goes_on_and_answers_nothing_twice(tmp_path: Path, run: Command) -> None:
    """After a kill that cut the second answer short; greedy, so the same is said."""
    command = (*COMMAND, "--out", str(tmp_path), "-m", "exact", "fsd")
    assert run(*command)[0] == 0
    assert len(_answers(tmp_path, "fsd")) == COUNT
    before = _answers(tmp_path, "exact")
    whole = (tmp_path / "exact.jsonl").read_text()
    cut = whole.index("\n") + 200
    (tmp_path / "exact.jsonl").write_text(whole[:cut])
    assert run(*command)[0] == 0
    after = _answers(tmp_path, "exact")
    assert after[0] == before[0]  # to its time stamp
    for old, new in zip(before[1:], after[1:], strict=True):
        assert new["choices"][0]["turns"] == old["choices"][0]["turns"]
        assert new["answer_id"] != old["answer_id"]


def test_other_settings_are_refused_for_the_method_they_concern(
    tmp_path: Path, run: Command
) -> None:
    command = (*COMMAND, "--out", str(tmp_path), "--threshold", "0.2")
    assert run(*command)[0] == 0
    changed = (*command, "--threshold", "0.3")
    assert run(*changed, "-m", "plain", "-m", "exact")[0] == 0
    status, _, errors = run(*changed)
    assert status == 1
    assert "fsd.jsonl holds answers of other settings (threshold was 0.2, is 0.3)" in errors
    assert run(*command, "--seed", "4", "-m", "plain")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("evaluate", "no-such-set"), 1, "neither a file nor a known set"),
        (("evaluate", "-m", "nonsense"), 2, "unknown method nonsense"),
        (("evaluate", "--count", "0"), 2, "count"),
        (("evaluate", "--conv-template", "nonsense"), 1, "FastChat has no template"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...],
    status: int,
    words: str,
    tmp_path: Path,
    run: Command,
) -> None:
    found, _, errors = run(*arguments, "--out", str(tmp_path / "out"))
    assert found == status
    assert len(errors.splitlines()) == 1
    assert words in errors


def test_several_turns_each_see_the_one_before(tmp_path: Path, run: Command) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text('{"question_id": 9, "category": "talk", "turns": ["Hello!", "Hello!"]}\n')
    out = tmp_path / "out"
    assert run("evaluate", str(file), "--out", str(out), "-m", "exact")[0] == 0
    (record,) = _answers(out, "exact")
    assert len(record["choices"][0]["turns"]) == 2
    report = json.loads((out / "report.json").read_text())
    assert report["rows"][0]["accuracy"] is None
    assert list(report["rows"][0]["tau_by_category"]) == ["talk"]


def test_a_prompt_that_fills_the_context_is_told_not_hidden(tmp_path: Path, run: Command) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"question_id": 1, "turns": ["pens " * 3000]}) + "\n")
    status, printed, _ = run("evaluate", str(file), "--out", str(tmp_path / "out"), "-m", "exact")
    assert status == 0
    assert "1 turns, over all methods, were not answered" in printed
    assert "NaN" not in (tmp_path / "out" / "report.json").read_text()


def test_the_likelihood_is_the_targets_own(model: EagleFSD) -> None:
    """Against one plain pass and its log-softmax."""
    prompt, answer = torch.tensor([1, 3, 40, 50, 4]), torch.tensor([60, 70, 80, 2])
    with torch.no_grad():
        logits = model.model(torch.cat([prompt, answer])[None]).logits[0]
    expected = logits[4:-1].log_softmax(-1).gather(1, answer[:, None]).mean()
    found = answer_log_likelihood(model.target, prompt, answer)
    assert found == pytest.approx(float(expected), abs=1e-5)
    assert answer_log_likelihood(model.target, prompt, answer[:0]) is None


def test_questions_answered_at_once_get_the_same_answers(tmp_path: Path, run: Command) -> None:
    """Of different lengths, one with a second turn and one too long for the context."""
    file = tmp_path / "mixed.jsonl"
    turns = [["Hello!"], ["Hello!", "Thank you!"], ["pens " * 3000], ["What can you do?"]]
    lines = [json.dumps({"question_id": n, "turns": turn}) for n, turn in enumerate(turns)]
    file.write_text("\n".join(lines) + "\n")
    found = {}
    for batch in ("1", "3"):
        out = tmp_path / batch
        command = ("evaluate", str(file), "--batch", batch, "--out", str(out))
        assert run(*command, "-m", "exact", "-m", "fsd", "--max-new-tokens", "40")[0] == 0
        found[batch] = [record for name in ("exact", "fsd") for record in _answers(out, name)]
    assert len(found["1"]) == len(found["3"]) == 8
    for alone, together in zip(found["1"], found["3"], strict=True):
        (one,), (other,) = alone["choices"], together["choices"]
        assert alone["question_id"] == together["question_id"]
        for key in ("turns", "idxs", "new_tokens", "accepted", "origins", "errors"):
            assert one[key] == other[key]
        assert one["log_likelihood"] == pytest.approx(other["log_likelihood"], abs=1e-5)
    assert found["3"][2]["choices"][0]["errors"] != [None]


def test_hugging_face_beside_us(tmp_path: Path, run: Command) -> None:
    """Its own generate and its assisted generation (the target assists itself) say the same."""
    assistant = Path(eagle_fsd.__file__).parent / "model" / "bundled" / "target"
    command = (*COMMAND, "--out", tmp_path, "--json", "-m", "exact", "hf")
    status, printed, _ = run(*command, "--baseline", "hf", "--assistant", assistant)
    assert status == 0
    rows = json.loads(printed)["rows"]
    assert [row["method"] for row in rows] == ["hf", "hf assisted", "exact"]
    assert rows[0]["tokens"] == rows[1]["tokens"] == rows[2]["tokens"] > 0
    answers = [_answers(tmp_path, row["method"]) for row in rows]
    for hf, assisted, exact in zip(*answers, strict=True):
        texts = [record["choices"][0]["turns"] for record in (hf, assisted, exact)]
        assert texts[0] == texts[1] == texts[2]


def test_what_a_method_depends_on() -> None:
    settings = FSDSettings(threshold=0.2, min_ratio=0.1)
    other = settings.updated(threshold=0.3)
    assert PLAIN.describe(settings) == PLAIN.describe(other)
    assert EXACT.describe(settings) == EXACT.describe(other)
    assert Method("fsd").describe(settings) != Method("fsd").describe(other)
    assert fsd(0.1).describe(settings)["min_ratio"] == 0.0
    for name, rule in RULES.items():
        described = Method(name, {"threshold": 0.0, "rule": rule}).describe(settings)
        assert described["method"] == repr(rule)
    assert json.dumps([PLAIN.describe(settings), fsd(0.1).describe(settings)])


def test_a_grid_has_exact_decoding_once() -> None:
    names = [item.name for item in fsd_grid([0.0, 0.1, 0.2], [0.0, 0.3], ["js", "kl"])]
    assert names[0] == "exact"
    assert len(names) == len(set(names)) == 1 + 2 * 2 * 2
    assert names[1:4] == ["js T=0.1", "js T=0.2", "js T=0.1 r=0.3"]
    assert [item.name for item in fsd_grid([0.1], [0.0], ["js"])] == ["T=0.1"]


def _record(
    number: int, seconds: float, accepted: list[int], origins: list[int], session: str = "a"
) -> dict:
    choice = {
        "turns": ["x"],
        "errors": [None],
        "cut_off": [False],
        "wall_time": [seconds],
        "new_tokens": [sum(accepted)],
        "accepted": [accepted],
        "origins": [origins],
        "log_likelihood": [-0.5 * (number + 1)],
        "memory": [1000 * (number + 1)],
    }
    return {"question_id": number, "category": "c", "session": session, "choices": [choice]}


def test_figures_of_answers_made_by_hand() -> None:
    records = {
        "plain": [_record(0, 2.0, [1] * 4, [3] * 4), _record(1, 2.0, [1] * 2, [3] * 2)],
        "exact": [_record(0, 1.0, [3, 1], [1, 1, 3, 3]), _record(1, 0.5, [2], [1, 3])],
        "fsd": [_record(0, 0.5, [4], [1, 2, 2, 3]), _record(1, 0.5, [2], [2, 3])],
    }
    scores = {"plain": {}, "exact": {0: True, 1: True}, "fsd": {0: False, 1: True}}
    plain, exact, fuzzy = summarise(list(records), records, scores)
    assert plain["tokens_per_second"] == 1.5
    assert exact["speedup"] == pytest.approx(4.0 / 1.5)
    assert exact["speed_over_exact"] == 1.0
    assert fuzzy["speed_over_exact"] == pytest.approx(1.5)
    low, high = fuzzy["speed_over_exact_interval"]
    assert low < 1.5 < high
    assert exact["tau"] == 2.0
    assert exact["reach"] == [1.0, pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert fuzzy["origins"]["fuzzy"] == 0.5
    assert exact["log_likelihood"] == -0.75
    assert fuzzy["against_exact"]["lost"] == 1
    assert fuzzy["against_exact"]["accuracy_change"] == -0.5
    assert fuzzy["against_exact"]["log_likelihood_change"] == 0.0
    assert plain["accuracy"] is None
    assert fuzzy["memory"] == 2000
    assert "a\\|b" in markdown(["x"], [["a|b"]])
    text = markdown(*main_table([plain, exact, fuzzy]))
    assert text.splitlines()[0].startswith("| method | tokens/s | x plain | x exact | tau |")
    assert "50.0% (9.5% to 90.5%)" in text
    assert Summary("nothing").tokens_per_second is None


def test_speeds_are_compared_within_a_session_only() -> None:
    """The machine of session b is ten times as fast; plain decoding was never there."""
    records = {
        "plain": [_record(0, 4.0, [1] * 4, [3] * 4), _record(1, 2.0, [1] * 2, [3] * 2)],
        "exact": [_record(0, 2.0, [4], [3] * 4), _record(1, 0.1, [2], [3] * 2, "b")],
        "fsd": [_record(0, 0.1, [4], [3] * 4, "b"), _record(1, 0.05, [2], [3] * 2, "b")],
        "late": [_record(0, 0.1, [4], [3] * 4, "c")],
    }
    plain, exact, fuzzy, late = summarise(list(records), records, {name: {} for name in records})
    assert exact["speedup"] == pytest.approx(2.0)  # of question 0 alone
    assert fuzzy["speedup"] is None
    assert fuzzy["speed_over_exact"] == pytest.approx(2.0)  # of question 1 alone
    assert (late["speedup"], late["speed_over_exact"]) == (None, None)
    assert plain["speedup"] == 1.0


def test_a_report_names_the_sessions_that_its_answers_were_drawn_in(
    tmp_path: Path, run: Command
) -> None:
    """Not the run that wrote the report: that one may have drawn nothing."""
    command = (*COMMAND, "--out", tmp_path, "--json")
    first = json.loads(run(*command, "-m", "exact")[1])
    again = json.loads(run(*command, "-m", "exact")[1])
    assert list(again["sessions"]) == list(first["sessions"])
    assert len(again["sessions"]) == 1
    assert again["environment"] == first["environment"]
    both = json.loads(run(*command, "-m", "exact", "fsd")[1])
    assert len(both["sessions"]) == 2
    exact, fuzzy = both["rows"]
    assert exact["speed_over_exact"] == 1.0
    assert fuzzy["speed_over_exact"] is None
    assert "The answers were drawn in 2 sessions" in (tmp_path / "report.md").read_text()


def test_rows_tell_their_settings(tmp_path: Path, run: Command) -> None:
    command = ("evaluate", "--count", 1, "--max-new-tokens", 16, "--out", tmp_path)
    sampling = ("--temperature", 0.5, "--top-p", 0.9, "--seed", 7)
    own = ("--threshold", 0.3, "--divergence", "tv", "--min-ratio", 0.2)
    assert run(*command, *sampling, *own)[0] == 0
    with (tmp_path / "report.csv").open(newline="") as file:
        plain, exact, fuzzy = csv.DictReader(file)
    assert [line["rule"] for line in (plain, exact, fuzzy)] == ["plain", "exact", "fsd"]
    assert (plain["threshold"], exact["threshold"]) == ("", "")
    told = [fuzzy[name] for name in ("threshold", "divergence", "min_ratio", "top_p", "seed")]
    assert told == ["0.3", "tv", "0.2", "0.9", "7"]
    assert "temperature 0.5, top-p 0.9, seed 7" in (tmp_path / "report.md").read_text()


def test_another_target_of_the_same_name_is_told_apart(tmp_path: Path, run: Command) -> None:
    """The folder's weights are changed under the answers' feet."""
    pair = Path(eagle_fsd.__file__).parent / "model" / "bundled"
    target = tmp_path / "target"
    shutil.copytree(pair / "target", target)
    command = (*COMMAND, "--target", target, "--head", pair / "head", "--out", tmp_path / "out")
    assert run(*command, "-m", "exact")[0] == 0
    weights = load_file(target / "model.safetensors")
    name = next(name for name in weights if name.endswith("13.mlp.down_proj.weight"))
    weights[name] = weights[name] * 1.01
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    status, _, errors = run(*command, "-m", "exact")
    assert status == 1
    assert "fingerprint of the target was" in errors
    assert "fingerprint of the head" not in errors


def test_a_long_prompt_does_not_cut_its_neighbours_short(model: EagleFSD, tmp_path: Path) -> None:
    """It gets what the context leaves it, the others what they would get alone."""
    long = "pens " * ((model.target.context - 40) // 2)  # two tokens each
    questions = [Question(0, "c", ("Hello!",)), Question(1, "c", (long,))]
    questions += [Question(2, "c", ("What can you do?",))]
    wording = chat_format(model.tokenizer)
    decoding = Decoding(max_new_tokens=64, batch=3)
    session = Session(tmp_path, {})
    for method in (EXACT, PLAIN, HF):
        answerer = Answerer(model, wording, [method], [], decoding, session)
        answers = answerer.answer(list(enumerate(questions)), method)
        counts = [record["choices"][0]["new_tokens"][0] for record in answers]
        for at in (0, 2):
            (alone,) = answerer.answer([(at, questions[at])], method)
            assert alone["choices"][0]["turns"] == answers[at]["choices"][0]["turns"]
        prompt = encode_prompt([{"role": "user", "content": long}], model.tokenizer, wording)[0]
        assert 0 < model.target.context - len(prompt) < 64
        assert 0 < counts[1] <= model.target.context - len(prompt)


def test_hugging_face_decodes_from_the_law_that_everybody_does(model: EagleFSD) -> None:
    """Not from what the target's generation configuration adds, and within the context."""
    chat = [{"role": "user", "content": "Hello!"}]
    ids = encode_prompt(chat, model.tokenizer, chat_format(model.tokenizer))
    before = model.model.generation_config
    changed = copy.deepcopy(before)
    changed.update(repetition_penalty=5.0, no_repeat_ngram_size=2, do_sample=True, temperature=9.0)
    model.model.generation_config = changed
    try:
        found = [
            decode(model, method, ids, torch.ones_like(ids), model.end_tokens, 40).tokens[0]
            for method in (HF, PLAIN)
        ]
        assert model.model.generation_config is changed
    finally:
        model.model.generation_config = before
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize("method", [EXACT, PLAIN, HF])
def test_a_templates_stop_string_ends_decoding(
    method: Method, model: EagleFSD, tmp_path: Path
) -> None:
    """Not just the text: what comes after it is neither decoded, nor counted, nor timed."""
    wording = chat_format(model.tokenizer)
    question = Question(0, "c", ("Hello!",))
    decoding, session = Decoding(max_new_tokens=64), Session(tmp_path, {})
    whole = Answerer(model, wording, [method], [], decoding, session)
    (record,) = whole.answer([(0, question)], method)
    said, count = record["choices"][0]["turns"][0], record["choices"][0]["new_tokens"][0]
    stop = said.split()[2]
    stopping = Stopping(wording, (stop,))
    cut = Answerer(model, stopping, [method], [], decoding, session)
    (record,) = cut.answer([(0, question)], method)
    choice = record["choices"][0]
    assert choice["turns"][0] == said[: said.index(stop)].strip()
    assert 0 < choice["new_tokens"][0] < count
    if choice["origins"][0]:
        assert len(choice["origins"][0]) == choice["new_tokens"][0]


@dataclass
class Stopping:
    """A format of chats whose answers end at stop strings."""

    inner: ChatFormat
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("own", [("--fallback", "stop"), ("--selection", "target")])
def test_what_fsd_is_set_to_changes_nothing_that_it_is_compared_with(
    own: tuple[str, str], tmp_path: Path, run: Command
) -> None:
    """Neither exact decoding nor the literature's rules."""
    command = ("evaluate", "--count", 2, "--max-new-tokens", 24, "-m", "exact", "rules", "--json")
    found = []
    for name, options in (("as it is", ()), ("set", own)):
        status, printed, _ = run(*command, *options, "--out", tmp_path / name)
        assert status == 0
        found.append([(row["method"], row["tau"]) for row in json.loads(printed)["rows"]])
    assert found[0] == found[1]
    assert found[0][0][1] > 2


def test_answers_that_were_cut_off_are_told(tmp_path: Path, run: Command) -> None:
    command = ("evaluate", "--count", 2, "-m", "exact", "--json")
    for tokens, cut in ((4, 2), (256, 0)):
        out = tmp_path / str(tokens)
        printed = run(*command, "--max-new-tokens", tokens, "--out", out)[1]
        assert json.loads(printed)["rows"][0]["cut_off"] == cut
        told = "Answers that had not ended by 4 tokens" in (out / "report.md").read_text()
        assert told == bool(cut)


def test_a_threshold_of_nothing_is_said_to_be_exact(tmp_path: Path, run: Command) -> None:
    command = ("evaluate", "--count", 1, "--max-new-tokens", 8, "-m", "exact", "fsd")
    assert run(*command, "--threshold", 0, "--out", tmp_path)[0] == 0
    text = (tmp_path / "report.md").read_text()
    assert "fsd: no threshold is set, so it is exact decoding" in text
    assert run(*command, "--threshold", 0.25, "--out", tmp_path / "other")[0] == 0
    assert "fsd: divergence js, threshold 0.25, " in (tmp_path / "other/report.md").read_text()


def test_thresholds_that_look_alike_have_names_of_their_own() -> None:
    close = [0.1, 0.1000001, 1e-7, 2.0]
    names = [fsd(threshold).name for threshold in close]
    assert names == ["T=0.1", "T=0.1000001", "T=1e-07", "T=2"]
    groups = fsd_groups([0.1], [0.1, 0.1000001], ["js"])
    assert len(groups) == 2


def test_sets_are_found_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path))
    file = tmp_path / "mt_bench_question.jsonl"
    line = '{"question_id": %d, "category": "w", "turns": ["a", "b"]}\n'
    file.write_text(line % 81 + line % 82)
    assert len(find_questions("mt-bench", 1)) == 1


@pytest.mark.parametrize("fault", ["unreachable", "changed"])
def test_a_download_is_whole_and_right_or_not_at_all(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says where to put the file instead."""
    from eagle_fsd.evaluation.questions import sets

    source = tmp_path / "source.jsonl"
    if fault == "changed":
        source.write_text('{"question_id": 1, "turns": ["not what it was"]}\n')
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path / "data"))
    changed = sets.QuestionSet("set.jsonl", source.as_uri(), "0" * 64)
    monkeypatch.setitem(sets.SETS, "gsm8k", changed)
    words = "cannot be fetched" if fault == "unreachable" else "not the file it was"
    with pytest.raises(QuestionSetError, match=words) as error:
        find_questions("gsm8k")
    assert str(tmp_path / "data" / "set.jsonl") in str(error.value)
    assert not list((tmp_path / "data").iterdir())
