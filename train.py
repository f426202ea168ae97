"""Fit aligners between two frozen models: `python train.py fit`. `--help` tells every option."""

from callbacks.cli import AlignmentCLI

if __name__ == "__main__":
    AlignmentCLI()
