"""The bundled pair: a small target, a draft head, and a generator of problems for them.

``target`` and ``head`` contain the weights; :mod:`eagle_fsd.bundled.problems` generates the word
problems that both are trained on and evaluated with. Nothing here imports the rest of the package.
Start with ``target/README.md`` and ``head/README.md``, the model cards.
"""

from pathlib import Path

BUNDLED = Path(__file__).parent
BUNDLED_TARGET = BUNDLED / "target"
BUNDLED_HEAD = BUNDLED / "head"
BUNDLED_EAGLE3 = BUNDLED / "eagle3"
BUNDLED_DRAFT_MODEL = BUNDLED / "draft_model"
