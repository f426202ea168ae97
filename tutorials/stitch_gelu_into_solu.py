# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Stitch GELU into SoLU
#
# **The question.** Brown et al. (2023) put the lower half of one language model under the upper half of another, with a
# small layer between the two that is trained on the task itself. One of their pairs is a model with the activation GELU
# and one with SoLU. How much higher is the loss of the stitched model, in each direction?

# %%
import logging
import warnings
from functools import partial

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import torch

from aligners.api import TextSource
from aligners.datamodules.model_texts import stitched_texts
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.stitching_training import Stitching
from aligners.maps import AffineLayer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")  # Lightning's, about processes and steps

# %% tags=["parameters"]
gelu, solu = "embedded-gpt:0", "embedded-gpt:1:activation=solu"
texts_held_out, tokens_each = 1500, 128
start_batches, steps = 50, 200

# %% [markdown]
# ## Texts, layers, and a Trainer
#
# Any two models of one tokenizer can be stitched. Two models have four *routes*, counting each model into itself. A
# layer φ stands between the front of one model, up to a block, and the tail of the other, from there on; both stay
# frozen. The layer starts at the least-squares map to the target's states, and is then trained on the next token,
# through the tail.
#
# The data module and the LightningModule are those of `train.py stitch`; any Trainer runs them.

# %%
text = TextSource(max_held_out=texts_held_out)
data = stitched_texts(
    [gelu, solu], sites="blocks", text=text, packed=True, batch_size=8, max_length=tokens_each
)
quiet = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
length = {"max_steps": steps, "max_epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0}

stitching = Stitching(
    {"affine": AffineLayer},
    start_batches=start_batches,
    optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0),
)
pl.Trainer(accelerator="cpu", **quiet, **length).fit(stitching, datamodule=data)

# %% [markdown]
# ## What it costs on held-out text
#
# The *penalty* is the loss of the stitched model minus that of the target by itself, in nats a token. The brackets are
# 95 % intervals over held-out sequences. `identity` puts the states in as they are, without any layer.

# %%
evaluation = StitchingEvaluation(stitching.stored().freeze())
pl.Trainer(accelerator="cpu", **quiet).test(evaluation, datamodule=data, verbose=False)

short = {data.frozen[0].name: "GELU", data.frozen[1].name: "SoLU"}
routes = {}
for row in evaluation.rows:
    if row["method"] in ("affine", "identity"):
        route = f"{short[row['model_x']]} → {short[row['model_y']]}"
        routes.setdefault((route, row["method"]), []).append(row)
columns = [f"penalty after block {row['site_y']}" for row in routes["GELU → SoLU", "affine"]]
print(f"{'route':11} {'method':8}", " ".join(f"{column:>22}" for column in columns))
for (route, method), rows in routes.items():
    cells = [
        f"{row['penalty']:z6.3f} [{row['penalty_low']:z.3f}, {row['penalty_high']:z.3f}]"
        for row in rows
    ]
    print(f"{route:11} {method:8}", " ".join(f"{cell:>22}" for cell in cells))

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
        axis.errorbar(
            sites, middle, [below, above], color=colour, marker=marker, label=route, lw=1.2
        )
    axis.axhline(0, color="0.7", lw=0.8)
    axis.set(
        title=f"{method}: {'no layer' if method == 'identity' else 'trained layer'}",
        xlabel="after block",
    )
    axis.set_xticks(range(1, len(rows) + 1))
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("penalty, nats a token")
axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## What one sees
#
# * A model stitched to itself without a layer has a penalty of exactly 0: its own states are put back.
# * Between the two models, states put in as they are have a penalty above 3 nats a token (left). One trained affine
#   layer brings it below .25 (right: note the scale).
# * SoLU into GELU has a lower penalty than GELU into SoLU after every block, and the intervals of the two directions do
#   not overlap.
#
# ## What it does not say
#
# * Which activation is better. Each direction is one pair of seeds here; with other seeds the order may change.
# * That the two models compute the same thing. The layer was trained *on the task*, so it may bring what the target
#   needs from anywhere in the source's states. Compare maps that were never shown the task: [align two
#   models](align_two_models.md).
#
# The command for this, with more training: `python train.py stitch --config stitching_solu`. How to read a penalty:
# [stitching](../stitching.md).
