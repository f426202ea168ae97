"""Run studies of many models, and look after the store of states: `python study.py COMMAND`. `--help` lists them.

Reports have the tables of the five papers, of the folder `papers`.
"""

from aligners.cli.table import study

if __name__ == "__main__":
    study(modules=["papers"])
