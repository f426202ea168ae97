# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Align two models
#
# **The question.** Two small language models differ in nothing but the seed that they were trained from. Do they
# compute the same thing in different coordinates? If so, there is a map from the states of the one to those of the
# other, and the second model can work on with mapped states in place of its own.
#
# The models are made on first use, which takes a while and is said, and then kept.

# %%
import os

import matplotlib.pyplot as plt

from aligners.api import INN, Identity, Linear, Permutation, Procrustes, cka, inject, load, states
from aligners.reports.drawing import method_looks
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource

small = os.environ.get("ALIGNERS_TUTORIAL_SIZE") == "small"  # as the tests run it
size = ":layers=2,width=32,steps=40,batch=2" if small else ""
model_x, model_y = load(f"embedded-gpt:0{size}"), load(f"embedded-gpt:1{size}")

texts = load_texts(TextSource())  # sentences from film reviews, split by text
fit, test = texts.fit["text"][: 400 if small else 3000], texts.test["text"][: 60 if small else 400]

# %% [markdown]
# ## Read both on the same text
#
# A *site* is a place where states can be read or replaced: site 1 is the output of block 1. Each row is the state
# of one token, and row by row the two models have read the same token in the same context.

# %%
site = 1
x, y = states(model_x, fit, site), states(model_y, fit, site)
x_test, y_test = states(model_x, test, site), states(model_y, test, site)
print(f"{len(x)} tokens to fit on, {len(x_test)} held out, {x.shape[1]} neurons in each model")
print(f"CKA of the two models: {cka(x_test, y_test):.2f}")

# %% [markdown]
# CKA says how alike the two clouds of points are, up to a rotation. It is blind to what the second model can *do*
# with the states of the first. So we fit maps: a matching of neurons one to one, a rotation, a linear map, and an
# invertible network. `Identity` leaves the states as they are: it is the floor.
#
# ## Fit on some texts, measure on others
#
# The score is the share of Y's variance that a map explains on held-out text: 1 is perfect, 0 is no better than the
# mean. Then the mapped states are put into the second model, for every token, and its *penalty* is how much its
# loss rises, in nats a token.

# %%
maps = {
    "identity": Identity(),
    "permutation": Permutation(),
    "procrustes": Procrustes(),
    "linear": Linear(),
    "inn": INN(steps=40 if small else 500, learning_rate=2e-3),
}
scores, penalties = {}, {}
for name, map in maps.items():
    map.fit(x, y)
    scores[name] = map.score(x_test, y_test)
    penalties[name] = inject(model_x, model_y, map, test, site=site).penalty
    print(f"{name:12} score {scores[name]:6.2f}   penalty {penalties[name]:6.3f} nats")

# %% [markdown]
# ## See both at once

# %%
looks = method_looks(maps)  # each map has one colour in all figures of the project
figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name in maps:
    look = {"color": looks[name]["color"], "marker": looks[name]["marker"], "markersize": 7}
    axis.plot(1 - scores[name], penalties[name], ls="", label=name, **look)
axis.axhline(0, color="0.7", lw=0.8)
axis.axvline(1, color="0.7", lw=0.8, ls=":")  # no better than the mean
axis.set_xscale("log")
axis.set_yscale("symlog", linthresh=0.01)
axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 5], [".1", ".2", ".5", "1", "2", "5"])
axis.set_xticks([], minor=True)
axis.set_yticks([0, 0.01, 0.1, 1], ["0", ".01", ".1", "1"])
axis.set_ylim(-0.004, 2 * max(penalties.values()))
axis.set_xlabel("variance left unexplained (1 − score), held-out text")
axis.set_ylabel("penalty, nats a token")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# The states as they are explain less than nothing (a score below 0, right of the dotted line), and cost the second
# model most. Every fitted map does better on both counts. Both axes are logarithmic, the vertical one above .01.
# Compare where the maps stand: one that explains more of the states need not be as much better for the model, since
# not all that varies in a state is used further up.
#
# ## What it does not say
#
# * That the models are *the same*: a map that repairs the loss may still lose what these texts do not ask for.
# * That a network beats a linear map because the models differ by something curved. It may have learned where each
#   *word* goes: [bijection or lookup table?](bijection_or_lookup_table.md)
# * Anything about large models. These are tiny, and this is one pair of seeds: [many seeds at
#   once](many_seeds_at_once.md).
#
# The commands do all this at every site at once, with floors, ceilings and intervals: `train.py fit`, then
# `evaluate.py inject`.
