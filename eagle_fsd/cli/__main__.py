"""``python -m eagle_fsd.cli``, for launchers that start modules."""

from eagle_fsd.cli import main

main()
