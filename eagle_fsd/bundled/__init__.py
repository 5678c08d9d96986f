"""The bundled pair: a small target, drafters for it, and a generator of problems for them.

``target``, ``head`` (EAGLE-2), ``eagle3`` and ``draft_model`` contain weights;
:mod:`eagle_fsd.bundled.problems` generates the word problems that all are trained on and evaluated
with. Nothing here imports the rest of the package. Start with the model cards, the folders'
``README.md`` files.
"""

from pathlib import Path

BUNDLED = Path(__file__).parent
BUNDLED_TARGET = BUNDLED / "target"
BUNDLED_HEAD = BUNDLED / "head"
BUNDLED_EAGLE3 = BUNDLED / "eagle3"
BUNDLED_DRAFT_MODEL = BUNDLED / "draft_model"
#: Drafters by name, for ``--drafter`` and ``EagleFSD.from_pretrained``.
BUNDLED_DRAFTERS = {
    "bundled": BUNDLED_HEAD,
    "bundled-eagle3": BUNDLED_EAGLE3,
    "bundled-draft-model": BUNDLED_DRAFT_MODEL,
}
