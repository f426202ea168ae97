# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Bijection or lookup table?
#
# **The question.** A network maps the states of one model almost exactly to those of another, on text that it has
# not seen. Has it found how the two spaces correspond? Or has it learned a vocabulary: for each word, where its
# state goes? A new *text* does not tell, since its words are old. New *words* do.

# %%
import os

import matplotlib.pyplot as plt
import torch

from aligners.api import INN, MLP, Linear
from aligners.reports.drawing import method_looks
from datamodules.pairings import pair_states

small = os.environ.get("ALIGNERS_TUTORIAL_SIZE") == "small"  # as the tests run it
size = ":layers=2,width=32,steps=100,batch=2" if small else ""

# %% [markdown]
# ## Leave out a tenth of the words
#
# This data module pairs the states of two models. It leaves all rows of a tenth of the token types out of fitting:
# the maps never see where those go. The texts stay whole, so that other words are read in their company.

# %%
data = pair_states(f"embedded-gpt:0{size}", f"embedded-gpt:1{size}", sites=["1"], held_out_types=0.1, batch_size=50)


def rows_of(split, texts):
    """States of X and of Y at site 1, token ids, and whether fitting leaves the type out, for the first texts."""
    parts = []
    for batch in data.paired(split, only=texts):
        tokens = batch.texts.inputs_x["input_ids"].flatten()[batch.rows.index]
        left_out = batch.rows.unseen if split == "test" else torch.zeros(len(tokens), dtype=torch.bool)
        parts.append((batch.x[0], batch.y[0], tokens, left_out))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


x, y, tokens, _ = rows_of("fit", 500 if small else 5000)
x_test, y_test, tokens_test, unseen = rows_of("test", 200 if small else 1000)
print(f"{len(x)} rows to fit on; held out {int((~unseen).sum())} of seen types and {int(unseen.sum())} of unseen ones")

# %% [markdown]
# ## A lookup table, and three maps
#
# The table is the extreme case: it answers each token with the mean of Y's states for that token, and does not look
# at x at all. For a token that it has not met, it has nothing better than the mean of all.

# %%
table = {int(token): y[tokens == token].mean(0) for token in tokens.unique()}
looked_up = torch.stack([table.get(int(token), y.mean(0)) for token in tokens_test])
steps = 150 if small else 1000
maps = {
    "linear": Linear(),
    "mlp": MLP(steps=steps, hidden=[128, 128], learning_rate=2e-3),
    "inn": INN(steps=steps, learning_rate=2e-3),
}
mapped = {"lookup table": looked_up} | {name: map.fit(x, y).transform(x_test) for name, map in maps.items()}


def fvu(found, rows):
    """Fraction of variance unexplained of some rows, about the mean of the fitting rows."""
    return float((found - y_test)[rows].square().sum() / (y_test - y.mean(0))[rows].square().sum())


left = {name: (fvu(found, ~unseen), fvu(found, unseen)) for name, found in mapped.items()}
for name, (seen, new) in left.items():
    print(f"{name:13} leaves {seen:.2f} on seen types and {new:.2f} on unseen ones, {new / seen:.1f} times as much")

# %%
colours = {"lookup table": "0.45"} | {name: look["color"] for name, look in method_looks(maps).items()}
figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
for place, (name, (seen, new)) in enumerate(left.items()):
    axis.bar(place - 0.2, seen, 0.38, color=colours[name])
    axis.bar(place + 0.2, new, 0.38, color=colours[name], alpha=0.45, hatch="//", edgecolor="w")
axis.bar(0, 0, color="k", label="seen types")  # for the legend
axis.bar(0, 0, color="k", alpha=0.45, hatch="//", edgecolor="w", label="unseen types")
axis.axhline(1, color="0.6", lw=0.8, ls=":")
axis.set_xticks(range(len(left)), left)
axis.set_ylabel("FVU: variance left unexplained")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# The table does well on tokens that it has met, and is useless on others (near 1, the dotted line: no better than
# the mean). Read the maps between these extremes: a map that has found how the spaces correspond leaves as much on
# unseen types as on seen ones; the larger the factor that is printed above, the more of it is a vocabulary. Of two
# maps, the one that is ahead on seen types need not be ahead by as much on unseen ones.
#
# ## What it does not say
#
# Why. Unseen types are also rarer and read in other contexts; nothing was held out from the two models themselves.
# And these models are tiny: at this size, much of a state after block 1 is the word itself. Every report of the
# commands has these two columns (`fvu_seen`, `fvu_unseen`), for every map and site.
