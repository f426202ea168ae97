"""Compare models on held-out text and report: `python evaluate.py COMMAND`. `--help` lists the commands."""

from aligners.cli.table import evaluate

if __name__ == "__main__":
    evaluate()
