"""Names of places in a model, as other libraries write them, and the site that each is."""

import re
from pathlib import Path

from aligners.errors import UserError
from aligners.models.architectures import Component

# TransformerLens: HookedTransformer, and TransformerBridge since 3.0
LENS = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_post|in|out)")
BEFORE = ("resid_pre", "in")
# what a sub-layer adds to the stream: of HookedTransformer, and of TransformerBridge
ADDED = re.compile(r"blocks\.(\d+)\.(?:hook_(attn|mlp)_out|(attn|mlp)\.hook_out)")
COMPONENTS: dict[str, Component] = {"attn": "attention", "mlp": "mlp"}
# the module of a block in transformers, such as model.layers.5, transformer.h.5 or gpt_neox.layers.5
BLOCK = re.compile(r"(?:\w+\.)*(?:h|layers?|blocks?|block)\.(\d+)")


def component_of_hook(name: str) -> Component:
    """Return what is read at a hook: what a sub-layer adds to the residual stream, or the stream."""
    found = ADDED.fullmatch(name)
    if found is None:
        return "residual"
    return COMPONENTS[found[2] or found[3]]


def site_of_hook(name: str, path: Path) -> int:
    """Return the site of a hook's name: 0 is the input of block 1, l the output of block l or of its sub-layer.

    Args:
        name: of TransformerLens, or of a block's module in transformers, whose output it is.
        path: file that has the name, for the error message.

    Raises:
        ValueError: it is neither of the residual stream between blocks nor of what a sub-layer adds to it.
    """
    found = LENS.fullmatch(name)
    if found is not None:
        return int(found[1]) + (found[2] not in BEFORE)
    found = ADDED.fullmatch(name) or BLOCK.fullmatch(name)
    if found is not None:
        return int(found[1]) + 1
    raise UserError(
        f"Expected `hook_name` of {path} to be blocks.N.hook_resid_pre, hook_resid_post, hook_in, hook_out, "
        "hook_attn_out or hook_mlp_out, or the module of a block such as model.layers.N, but got "
        f"{name!r}: only dictionaries of the residual stream between blocks, and of what a block's attention or MLP "
        f"adds to it, can be carried.{_why_not(name)}"
    )


def _why_not(name: str) -> str:
    """A sentence on a hook that is nearly one that can be read."""
    if name.endswith("hook_resid_mid"):
        return (
            " The stream in the middle of a block is a sum that no module answers with."
        )
    return ""


def hook_like(name: str, site: int) -> str:
    """Return the name of a site in the style of another hook's name, which stays as it is if it is that site's."""
    block = max(site - 1, 0)
    if ADDED.fullmatch(name):
        return re.sub(r"\d+", str(block), name, count=1)
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
