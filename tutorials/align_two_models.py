# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Align two models
#
# **The question.** Two small language models differ only in the seed that they were trained from. Do they compute the
# same thing in different coordinates? If so, there is a map from the hidden states of one to those of the other, and
# the second model can go on with mapped states in place of its own.
#
# These two come with the package. Others like them are trained on first use, in a minute or two each, and then kept.

# %%
import matplotlib.pyplot as plt

from aligners.api import (
    INN,
    Identity,
    Linear,
    Permutation,
    Procrustes,
    TextSource,
    cka,
    inject,
    load,
    load_texts,
    states,
)
from aligners.reports.drawing import method_looks

# %% tags=["parameters"]
name_x, name_y = "embedded-gpt:0", "embedded-gpt:1"
texts_to_fit, texts_to_test = 3000, 400
steps = 900  # of training the invertible network

# %%
model_x, model_y = load(name_x), load(name_y)
texts = load_texts(TextSource())  # sentences from film reviews, split by text
fit, test = texts.fit["text"][:texts_to_fit], texts.test["text"][:texts_to_test]

# %% [markdown]
# ## Read both on the same text
#
# A *site* is a place where states can be read or replaced: site 1 is the output of block 1. Each row is the state
# of one token. Row i of x and row i of y belong to the same token in the same context.

# %%
site = 1
x, y = states(model_x, fit, site), states(model_y, fit, site)
x_test, y_test = states(model_x, test, site), states(model_y, test, site)
print(f"{len(x):,} tokens to fit on, {len(x_test):,} held out, {x.shape[1]} neurons in each model")
print(f"CKA of the two models: {cka(x_test, y_test):.2f}")

# %% [markdown]
# CKA measures how alike two sets of states are up to a rotation and a scale. It does not show whether the second
# model can *use* the states of the first. So we fit maps: a one-to-one matching of neurons (`Permutation`), a rotation
# (`Procrustes`), a linear map, and an invertible network (`INN`). `Identity` leaves the states as they are.
#
# ## Fit on some texts, measure on others
#
# *FVU* is the fraction of Y's variance that a map leaves unexplained on held-out text: 0 is perfect, 1 is no better
# than the mean of Y. Then the mapped states replace the second model's own at every token. The *penalty* is the rise
# of its loss, in nats a token.

# %%
maps = {
    "identity": Identity(),
    "permutation": Permutation(),
    "procrustes": Procrustes(),
    "linear": Linear(),
    "inn": INN(steps=steps),
}
fvu, penalty = {}, {}
print(f"{'map':12} {'FVU':>6} {'penalty, nats a token':>22}")
for name, map in maps.items():
    map.fit(x, y)
    fvu[name] = 1 - map.score(x_test, y_test)
    penalty[name] = inject(model_x, model_y, map, test, site=site).penalty
    print(f"{name:12} {fvu[name]:6.3f} {penalty[name]:22.3f}")

# %% [markdown]
# ## See both at once

# %%
looks = method_looks(maps)  # each map has one colour in all figures of the project
figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name in maps:
    axis.plot(
        fvu[name],
        penalty[name],
        color=looks[name]["color"],
        marker=looks[name]["marker"],
        markersize=7,
    )
    axis.annotate(
        name, (fvu[name], penalty[name]), xytext=(0, -14), textcoords="offset points", ha="center"
    )
axis.axhline(0, color="0.7", lw=0.8)
axis.axvline(1, color="0.7", lw=0.8, ls=":")  # no better than the mean
axis.set_xscale("log")
axis.set_yscale("symlog", linthresh=0.01)
axis.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5], [".05", ".1", ".2", ".5", "1", "2", "5"])
axis.set_xticks([], minor=True)
axis.set_yticks([0, 0.01, 0.1, 1], ["0", ".01", ".1", "1"])
axis.set_ylim(-0.004, 2 * max(penalty.values()))
axis.set_xlabel("FVU on held-out text")
axis.set_ylabel("penalty, nats a token")
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# * Put in as they are (`identity`), the states of the first model raise the loss of the second by more than 3 nats a
#   token. Every map lowers that penalty.
# * A one-to-one matching of neurons removes more than half of it, a rotation or a linear map nine tenths, and the
#   invertible network 98 %.
# * The order by FVU and the order by penalty are the same, but the distances are not. The linear map has an FVU that is
#   more than two fifths below that of the rotation, and a penalty that is less than a fifth below: not all that varies
#   in a state matters to the blocks above.
#
# ## What it does not say
#
# * That the models are *the same*. A map that restores the loss may still lose what these texts do not need.
# * That the network is better because the two spaces are related non-linearly. It may have learned where the state of
#   each *word* goes: [bijection or lookup table?](bijection_or_lookup_table.md)
# * Anything about large models. These are tiny, and this is one pair of seeds: [many seeds at
#   once](many_seeds_at_once.md).
#
# The commands do this at every site, with ceilings, floors and intervals, and on words that were left out of fitting:
# `train.py fit`, then `evaluate.py inject`.
