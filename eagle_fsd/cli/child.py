"""``python -m eagle_fsd.cli.child``: the command line in a process that exits with its parent."""

from eagle_fsd.cli import main
from eagle_fsd.utils.signals import exit_with_parent

if __name__ == "__main__":
    exit_with_parent()
    main()
