# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Many seeds at once
#
# **The question.** A linear map explains so much of one model's states by another's. Is that a property of how
# these models are trained, or of the two seeds that happened to be picked? One needs several seeds, and all their
# pairs: of k models k (k − 1) / 2.

# %%
import os
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import torch

from aligners.maps import Linear, Permutation, Procrustes
from aligners.reports.drawing import method_looks
from aligners.similarity.algebra.moments import moments_of
from datamodules.pairings import pairs_states

small = os.environ.get("ALIGNERS_TUTORIAL_SIZE") == "small"  # as the tests run it
size = ":layers=2,width=32,steps=40,batch=2" if small else ""
seeds = range(3 if small else 5)

# %% [markdown]
# ## Every model is read once
#
# The data module reads each model once a batch, at every block, and lays the paired rows of all pairs along one
# leading axis: x and y are (pairs × sites, rows, width).

# %%
data = pairs_states([f"embedded-gpt:{seed}{size}" for seed in seeds], sites="blocks", held_out_types=0.0)


def rows_of(split, texts):
    """All paired rows of the first texts of a split."""
    batches = [(batch.x, batch.y) for batch in data.paired(split, only=texts)]
    return [torch.cat(part, dim=1) for part in zip(*batches, strict=True)]


x, y = rows_of("fit", 300 if small else 2000)
x_test, y_test = rows_of("test", 100 if small else 500)
pairs, depth = list(combinations(seeds, 2)), data.frozen[0].depth
print(f"{len(seeds)} models, {len(pairs)} pairs x {depth} blocks: x is {tuple(x.shape)}")

# %% [markdown]
# ## All maps are solved together
#
# A *bank* is one map for each place on the leading axis, and nothing is shared between them. Closed forms are
# solved from sums over the rows, all at once.

# %%
moments = moments_of(x, y)
total = (y_test - moments.mean_y[:, None]).square().sum((1, 2))
found = {}
for kind in (Permutation, Procrustes, Linear):
    bank = kind(len(x), x.shape[2], y.shape[2])
    bank.fit(moments)
    fvu = (bank(x_test) - y_test).square().sum((1, 2)) / total
    found[kind.__name__.lower()] = fvu.view(len(pairs), depth).numpy()  # pair after pair, each with its blocks
for name, fvu in found.items():
    cells = [f"{mean:.2f} ± {spread:.2f}" for mean, spread in zip(fvu.mean(0), fvu.std(0, ddof=1), strict=True)]
    print(f"{name:12} variance left unexplained after each block, mean ± deviation over pairs:", "  ".join(cells))

# %%
looks = method_looks(found)
figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
blocks = np.arange(1, depth + 1)
for order, (name, fvu) in enumerate(found.items()):
    aside = 0.12 * (order - 1)
    axis.plot(blocks + aside, fvu.mean(0), color=looks[name]["color"], lw=1.2, label=name)
    for pair in fvu:  # a point for each pair
        axis.plot(
            blocks + aside, pair, color=looks[name]["color"], marker=looks[name]["marker"], ls="", ms=4, alpha=0.6
        )
axis.set(xlabel="after block", ylabel="FVU: variance left unexplained", xticks=blocks)
axis.legend(frameon=False, title="line: mean\npoints: pairs", loc="center left", bbox_to_anchor=(1, 0.5))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# Each map has a cloud of points, one for each pair of seeds. Where the clouds of two maps do not overlap, the
# difference between the maps is larger than what seeds do, and one pair would have shown it; where they do, one
# pair could have shown either.
#
# ## What it does not say
#
# * The points are not independent: each model is in several pairs, so the deviation printed above is no standard
#   error. The studies of this project permute models, not pairs, for that reason.
# * Nothing is said of other sizes, data or training lengths: the models differ in the seed alone.
#
# A study does this with any number of models, tasks and maps, stops and goes on, and reports intervals: `python
# study.py run embedded`; [studies](../studies.md).
