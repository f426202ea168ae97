"""Fit aligners, and prepare models for them: `python train.py COMMAND`. `--help` tells the commands."""

from commands.table import main

if __name__ == "__main__":
    main()
