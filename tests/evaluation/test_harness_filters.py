"""Our GSM8K filters agree with lm-evaluation-harness's own, where the harness is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import yaml
from harness import LM_EVAL, requires_harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_fsd.evaluation.scoring import HARNESS_FILTERS, harness_match

pytestmark = [requires_harness, pytest.mark.slow]  # the harness is installed for slow tests

#: Grades an answer by a filter: text, worked solution, name of the filter.
Grader = Callable[[str, str, str], bool]
#: Parts of answers, which the filters or the comparison treat specially.
PARTS = ["#### ", "####", "-", "$", ",", ".", "\n", " ", "1", "18", "1,234", "0", "x"]
PARTS += ["Question:", "</s>", "<|im_end|>"]


@pytest.fixture(scope="module")
def grade() -> Iterator[Grader]:
    """Cut at stop strings, filter and compare with the code and the task of the harness."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LM_EVAL))
        from lm_eval.api.metrics import exact_match_hf_evaluate
        from lm_eval.filters.extraction import RegexFilter
        from lm_eval.models.utils import postprocess_generated_text

        task = yaml.safe_load((LM_EVAL / "lm_eval/tasks/gsm8k/gsm8k.yaml").read_text())
        (metric,) = task["metric_list"]
        settings = ("ignore_case", "ignore_punctuation", "regexes_to_ignore")
        comparison = {name: metric[name] for name in settings}
        filters = {}
        for item in task["filter_list"]:
            first, second = item["filter"]
            assert first.pop("function") == "regex"
            assert second == {"function": "take_first"}
            filters[item["name"]] = RegexFilter(**first)

        def grade(text: str, solution: str, name: str) -> bool:
            text = postprocess_generated_text(text, task["generation_kwargs"]["until"], None)
            ((found,),) = filters[name].apply([[text]], [{}])
            return bool(exact_match_hf_evaluate([found], [solution], **comparison)["exact_match"])

        assert filters.keys() == HARNESS_FILTERS.keys()
        yield grade


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=1000)
@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.sampled_from(["18", "1,234", "-1", "0", "1.18"]),
)
def test_filters_grade_as_in_the_harness(grade: Grader, text: str, answer: str) -> None:
    for name in HARNESS_FILTERS:
        expected = grade(text, f"Worked: 2 + 2\n#### {answer}", name)
        assert harness_match(text, answer, name) is expected, (name, text)
