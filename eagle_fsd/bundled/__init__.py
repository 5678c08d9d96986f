"""The bundled drafters: those of a small target that comes with them, and heads of SmolLM2.

``target``, ``head`` (EAGLE-2), ``eagle3`` and ``draft_model`` contain the weights of the bundled
pair, ``smollm2_eagle2`` and ``smollm2_eagle3`` heads of the target ``smollm2``;
:mod:`eagle_fsd.bundled.problems` generates the word problems that the pair is trained on and
evaluated with. Nothing here imports the rest of the package. Start with the model cards, the
folders' ``README.md`` files.
"""

from pathlib import Path

BUNDLED = Path(__file__).parent
BUNDLED_TARGET = BUNDLED / "target"
BUNDLED_HEAD = BUNDLED / "head"
BUNDLED_EAGLE3 = BUNDLED / "eagle3"
BUNDLED_DRAFT_MODEL = BUNDLED / "draft_model"
#: Heads of SmolLM2-135M-Instruct by name, see ``recipes/smollm2.py``.
SMOLLM2_HEADS = {
    "smollm2-eagle2": BUNDLED / "smollm2_eagle2",
    "smollm2-eagle3": BUNDLED / "smollm2_eagle3",
}
#: Drafters by name, for ``--drafter`` and ``EagleFSD.from_pretrained``.
BUNDLED_DRAFTERS = {
    "bundled": BUNDLED_HEAD,
    "bundled-eagle3": BUNDLED_EAGLE3,
    "bundled-draft-model": BUNDLED_DRAFT_MODEL,
    **SMOLLM2_HEADS,
}
