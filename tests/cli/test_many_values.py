"""Options with several values: ``--thresholds 0 0.1`` is ``--thresholds 0 --thresholds 0.1``."""

from __future__ import annotations

import pytest

from eagle_fsd.cli.many import is_number, spread

OPTIONS = {"-T": is_number, "--thresholds": is_number, "-d": {"js", "kl"}.__contains__}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("-T 0 0.1 0.2", "-T 0 -T 0.1 -T 0.2"),
        ("--thresholds=0 0.1 --json", "--thresholds 0 --thresholds 0.1 --json"),
        ("-T 0 gsm8k", "-T 0 gsm8k"),
        ("gsm8k -T 0 1 -d js kl -T 2 --out 3 4", "gsm8k -T 0 -T 1 -d js -d kl -T 2 --out 3 4"),
        ("-d js 0.1", "-d js 0.1"),
        # What cannot be right is left for the parser to name.
        ("-T nonsense", "-T nonsense"),
        ("-T -d js", "-T -d js"),
        ("-T", "-T"),
        ("--json", "--json"),
        ("", ""),
    ],
)
def test_spread(given: str, expected: str) -> None:
    assert spread(given.split(), OPTIONS) == expected.split()
