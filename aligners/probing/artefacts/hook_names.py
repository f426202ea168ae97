"""Names of places in a model, as other libraries write them, and the site that each is."""

import re
from pathlib import Path

from aligners.errors import UserError

# TransformerLens: HookedTransformer, and TransformerBridge since 3.0
LENS = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_post|in|out)")
BEFORE = ("resid_pre", "in")
# the module of a block in transformers, such as model.layers.5, transformer.h.5 or gpt_neox.layers.5
BLOCK = re.compile(r"(?:\w+\.)*(?:h|layers?|blocks?|block)\.(\d+)")


def site_of_hook(name: str, path: Path) -> int:
    """Return the site of a hook's name: 0 is the input of block 1, l the output of block l.

    Args:
        name: of TransformerLens, or of a block's module in transformers, whose output it is.
        path: file that has the name, for the error message.

    Raises:
        ValueError: it is none of the residual stream between blocks.
    """
    found = LENS.fullmatch(name)
    if found is not None:
        return int(found[1]) + (found[2] not in BEFORE)
    found = BLOCK.fullmatch(name)
    if found is not None:
        return int(found[1]) + 1
    raise UserError(
        f"Expected `hook_name` of {path} to be blocks.N.hook_resid_pre, hook_resid_post, hook_in or hook_out, or the "
        f"module of a block such as model.layers.N, but got {name!r}: only dictionaries of the residual stream between "
        "blocks can be carried."
    )


def hook_like(name: str, site: int) -> str:
    """Return the name of a site in the style of another hook's name, which stays as it is if it is that site's."""
    block = max(site - 1, 0)
    if site and BLOCK.fullmatch(name):
        module = name.rpartition(".")[0]
        return f"{module}.{block}"
    pre, post = "resid_pre", "resid_post"
    found = LENS.fullmatch(name)
    if found is not None and found[2] in ("in", "out"):
        pre, post = "in", "out"
    if site == 0:
        return f"blocks.0.hook_{pre}"
    return f"blocks.{block}.hook_{post}"
