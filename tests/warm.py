"""What the server of processes does once, as every command would, before it splits off any: see tests/processes.py."""

import gc

import attrs  # noqa: F401
from PIL import Image
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from aligners.cli.table import find

find("train", "fit").parser()  # reads the sources of Lightning's Trainer
get_checkpoint_conversion_mapping("bert")  # compiles a thousand expressions
Image.preinit()
gc.freeze()  # no command need look through all this for garbage
