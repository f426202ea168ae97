"""Fit aligners, and prepare models for them: `python train.py COMMAND`. `--help` lists the commands."""

from aligners.cli.table import train

if __name__ == "__main__":
    train()
