# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Many seeds at once
#
# **The question.** A linear map from one model's states explains a part of the variance of another's. Does that part
# depend on the two seeds? To answer this takes several seeds and all their pairs, k (k − 1) / 2 for k models.

# %%
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import torch

from aligners.datamodules.pairings import pairs_states
from aligners.maps import Linear, Permutation, Procrustes
from aligners.reports.drawing import method_looks
from aligners.similarity.algebra.moments import moments_of

# %% tags=["parameters"]
names = ["embedded-gpt:0", "embedded-gpt:1", "embedded-gpt:2", "embedded-gpt:3", "embedded-gpt:4"]
texts_to_fit, texts_to_test = 2000, 500

# %% [markdown]
# ## Every model is read once
#
# The data module runs each model once for every batch, reads every block, and puts the paired rows of all pairs along
# one leading axis: x and y are (pairs × sites, rows, width).

# %%
data = pairs_states(names, sites="blocks", held_out_types=0.0)


def rows_of(split, texts):
    """All paired rows of the first texts of a split."""
    batches = [(batch.x, batch.y) for batch in data.paired(split, only=texts)]
    return [torch.cat(part, dim=1) for part in zip(*batches, strict=True)]


x, y = rows_of("fit", texts_to_fit)
x_test, y_test = rows_of("test", texts_to_test)
pairs, depth = list(combinations(names, 2)), data.frozen[0].depth
print(f"{len(names)} models, {len(pairs)} pairs x {depth} blocks: x is {tuple(x.shape)}")

# %% [markdown]
# ## All maps are solved together
#
# A *bank* holds one map for each place on the leading axis; the maps share nothing. Closed forms are solved from sums
# over the rows, all at once.

# %%
moments = moments_of(x, y)
total = (y_test - moments.mean_y[:, None]).square().sum((1, 2))
results = {}
for kind in (Permutation, Procrustes, Linear):
    bank = kind(len(x), x.shape[2], y.shape[2])
    bank.fit(moments)
    fvu = (bank(x_test) - y_test).square().sum((1, 2)) / total
    results[kind.__name__.lower()] = fvu.view(
        len(pairs), depth
    ).numpy()  # pair after pair, each with its blocks
print(
    f"{'FVU, mean ± SD':14}", " ".join(f"{f'block {block}':>13}" for block in range(1, depth + 1))
)
for name, fvu in results.items():
    cells = [
        f"{mean:.3f} ± {sd:.3f}" for mean, sd in zip(fvu.mean(0), fvu.std(0, ddof=1), strict=True)
    ]
    print(f"{name:14}", " ".join(cells))

# %%
looks = method_looks(results)
figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
blocks = np.arange(1, depth + 1)
for order, (name, fvu) in enumerate(results.items()):
    aside = 0.12 * (order - 1)
    axis.plot(blocks + aside, fvu.mean(0), color=looks[name]["color"], lw=1.2, label=name)
    for pair in fvu:  # a point for each pair
        axis.plot(
            blocks + aside,
            pair,
            color=looks[name]["color"],
            marker=looks[name]["marker"],
            ls="",
            ms=4,
            alpha=0.6,
        )
axis.set(xlabel="after block", ylabel="FVU on held-out text", xticks=blocks)
axis.legend(
    frameon=False, title="line: mean\npoints: pairs", loc="center left", bbox_to_anchor=(1, 0.5)
)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# * On average over pairs, the linear map leaves about .2 of the variance, the rotation .36, and the matching of neurons
#   1.1, which is worse than the mean of Y.
# * After every block, the means of any two maps are more than six standard deviations apart, so the order of the maps
#   does not depend on which two seeds one picks.
# * From block to block, the mean of each map changes by less than one standard deviation.
#
# ## What it does not say
#
# * The points are not independent, because each model is in several pairs. So the standard deviation (SD) over pairs
#   does not give a standard error. The studies of this project permute models instead of pairs for that reason.
# * Nothing about other sizes, data or lengths of training: the models differ only in their seed.
#
# A study does this with any number of models, tasks and maps, can be resumed, and reports intervals:
# `python study.py run embedded`, [studies](../studies.md).
