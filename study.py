"""Run studies of many models, and look after the store of states: `python study.py COMMAND`. `--help` lists them."""

from aligners.cli.table import study

if __name__ == "__main__":
    study()
