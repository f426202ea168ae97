"""Inject mapped states into a frozen model and report: `python evaluate.py inject --checkpoints FILE ...`."""

from commands.inject import main

if __name__ == "__main__":
    main()
