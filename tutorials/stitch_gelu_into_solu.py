# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Stitch GELU into SoLU
#
# **The question.** Brown et al. (2023) put the lower half of one language model under the upper half of another,
# with a small layer between the two that is trained on the task itself. They ask whether a model with GELU can feed
# one with SoLU better than the other way round. What does it cost to stitch, in each direction?

# %%
import logging
import os
import warnings
from functools import partial

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import torch

from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.training import Stitching
from aligners.maps import AffineLayer
from datamodules.model_texts import stitched_texts
from datamodules.text.sources import TextSource

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")  # Lightning's, about processes and steps
small = os.environ.get("ALIGNERS_TUTORIAL_SIZE") == "small"  # as the tests run it
size = ["layers=2", "width=32", "steps=40", "batch=2"] if small else []
gelu = ":".join(["embedded-gpt:0", ",".join(size)]).rstrip(":")
solu = ":".join(["embedded-gpt:1", ",".join(["activation=solu", *size])])

# %% [markdown]
# ## Texts, layers, and a Trainer
#
# Any two models of one tokenizer can be stitched. Of two models there are four *routes*, counting each model into
# itself. A layer φ stands between the front of one, up to a block, and the tail of the other, from there on; both
# stay frozen. It starts at the linear map that is nearest to the target's states, and is then trained on the next
# token, through the tail.
#
# The data module and the LightningModule are those of `train.py stitch`; any Trainer runs them.

# %%
text = TextSource(max_held_out=60 if small else 1500)
data = stitched_texts(
    [gelu, solu], sites="blocks", text=text, packed=True, batch_size=8, max_length=64 if small else 128
)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
length = {"max_steps": 8 if small else 200, "max_epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0}

stitching = Stitching(
    {"affine": AffineLayer},
    start_batches=4 if small else 50,
    optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0),
)
pl.Trainer(accelerator="cpu", **quiet, **length).fit(stitching, datamodule=data)

# %% [markdown]
# ## What it costs on held-out text
#
# The *penalty* is the loss of the stitched model minus that of the target by itself, in nats a token. Beside the
# trained layer stands `identity`: the states put in as they are, without any layer.

# %%
evaluation = StitchingEvaluation(stitching.stored().freeze())
pl.Trainer(accelerator="cpu", **quiet).test(evaluation, datamodule=data, verbose=False)

short = {data.frozen[0].name: "GELU", data.frozen[1].name: "SoLU"}
routes = {}
for row in evaluation.rows:
    if row["method"] in ("affine", "identity"):
        route = f"{short[row['model_x']]} → {short[row['model_y']]}"
        routes.setdefault((route, row["method"]), []).append(row)
for (route, method), rows in routes.items():
    cells = [f"{row['penalty']:6.3f} [{row['penalty_low']:.3f}, {row['penalty_high']:.3f}]" for row in rows]
    print(f"{route:12} {method:9}", "  ".join(cells))

# %%
looks = {
    "GELU → SoLU": ("#332288", "o"),
    "SoLU → GELU": ("#CC6677", "s"),
    "GELU → GELU": ("#117733", "D"),
    "SoLU → SoLU": ("#999933", "^"),
}
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.4), layout="constrained")
for axis, method in zip(axes, ("identity", "affine"), strict=True):
    for order, (route, (colour, marker)) in enumerate(looks.items()):
        rows = routes[route, method]
        sites = [row["site_y"] + 0.06 * (order - 1.5) for row in rows]
        middle = [row["penalty"] for row in rows]
        below = [max(0, row["penalty"] - row["penalty_low"]) for row in rows]
        above = [max(0, row["penalty_high"] - row["penalty"]) for row in rows]
        axis.errorbar(sites, middle, [below, above], color=colour, marker=marker, label=route, lw=1.2)
    axis.axhline(0, color="0.7", lw=0.8)
    axis.set(title=f"{method}: {'no layer' if method == 'identity' else 'trained layer'}", xlabel="after block")
    axis.set_xticks(range(1, len(rows) + 1))
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("penalty, nats a token")
axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## What one sees
#
# A model stitched to itself without a layer costs exactly nothing: its own states are put back. Between the two
# models, states as they are cost most (left); mind the scale of the right panel, where a single affine layer has
# repaired most of it. The bars are 95 % intervals over held-out sequences: where those of the two directions
# overlap, this run does not tell them apart.
#
# ## What it does not say
#
# * Which activation is better. Each direction here is one pair of seeds; with other seeds the order may change.
# * That the two models compute the same: the layer was trained *on the task*, so it may bring what the target needs
#   from anywhere in the source's states. Set it beside maps that were never shown the task: [align two
#   models](align_two_models.md).
#
# At full length: `python train.py stitch --config stitching_solu`; [how to read a
# penalty](../stitching.md).
