"""`python -m aligners`: the same as the command `aligners`."""

from aligners.cli.table import main

if __name__ == "__main__":
    main()
