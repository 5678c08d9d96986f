"""``python -m eagle_fsd.cli``, for launchers such as ``torchrun -m`` that start modules."""

from eagle_fsd.cli import main

main()
