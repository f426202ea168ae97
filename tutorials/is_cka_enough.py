# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Is CKA enough?
#
# **The question.** A paper says that two layers have a CKA of .8. Is that much? CKA is a number between 0 and 1
# that says how alike two sets of states are, up to a rotation and a scale. This tutorial asks what the number is
# where it should be low.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

from aligners.api import cka, load, states, unbiased_cka
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource

small = os.environ.get("ALIGNERS_TUTORIAL_SIZE") == "small"  # as the tests run it
draw = np.random.default_rng(0)

# %% [markdown]
# ## Few rows: unrelated states look alike
#
# Two arrays of noise have nothing in common. With few rows for the width, CKA says otherwise; the unbiased estimate
# does not.

# %%
width = 64 if small else 256
counts = [16, 32, 64, 128, 256, 512] if small else [32, 64, 128, 256, 512, 1024, 2048]
pairs = [(draw.normal(size=(n, width)), draw.normal(size=(n, width))) for n in counts]
biased, unbiased = ([measure(*pair) for pair in pairs] for measure in (cka, unbiased_cka))
for n, one, two in zip(counts, biased, unbiased, strict=True):
    print(f"{n:5} rows of width {width}: CKA {one:.2f}, unbiased {two:5.2f}")

# %% [markdown]
# ## One large dimension: unrelated states look alike, however many rows
#
# Transformers have dimensions that are far larger than all others. Here is more noise, without anything in common
# but one such dimension, of growing size. Dividing each dimension by its deviation takes the effect away.

# %%
rows = 1000 if small else 4000
a, b, shared = draw.normal(size=(rows, width)), draw.normal(size=(rows, width)), draw.normal(size=rows)
sizes = [0, 2, 4, 8, 16, 32]
outliers = []
for outlier in sizes:
    x, y = a.copy(), b.copy()
    x[:, 0] += outlier * shared
    y[:, 0] += outlier * shared
    outliers.append((unbiased_cka(x, y), unbiased_cka(x / x.std(0), y / y.std(0))))
    print(f"a shared dimension of size {outlier:2}: CKA {outliers[-1][0]:.2f}, standardised {outliers[-1][1]:.2f}")

# %% [markdown]
# ## Two models, beside their controls
#
# Now two language models that differ in nothing but the seed. Beside their CKA stand two controls. *Rows shuffled*:
# every token of X is paired with some other token of Y, so what is left is no more than chance. *Untrained*: the
# same two models with their weights drawn anew, which have learned nothing and still see the same words.

# %%
size = ":layers=2,width=32,steps=40,batch=2" if small else ""
models = [load(f"embedded-gpt:{seed}{size}") for seed in (0, 1)]
untrained = [model.untrained(seed) for seed, model in enumerate(models)]
texts = load_texts(TextSource()).test["text"][: 100 if small else 500]
layers = range(models[0].depth + 1)
found = {"trained": [], "rows shuffled": [], "untrained": []}
for layer in layers:
    x, y = (states(model, texts, layer).numpy() for model in models)
    found["trained"].append(unbiased_cka(x, y))
    found["rows shuffled"].append(unbiased_cka(x, y[draw.permutation(len(y))]))
    found["untrained"].append(unbiased_cka(*(states(model, texts, layer).numpy() for model in untrained)))
for name, values in found.items():
    print(f"{name:14}", " ".join(f"{value:6.2f}" for value in values))

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained", sharey=True)
axes[0].plot(counts, biased, "o-", color="#0072B2", label="CKA")
axes[0].plot(counts, unbiased, "s--", color="#D55E00", label="unbiased CKA")
axes[0].set_xscale("log", base=2)
axes[0].set_xticks(counts, counts)
axes[0].set(xlabel=f"rows, of width {width}", ylabel="CKA", title="noise: how many rows?")
axes[1].plot(sizes, [raw for raw, _ in outliers], "o-", color="#0072B2", label="as it is")
axes[1].plot(sizes, [scaled for _, scaled in outliers], "s--", color="#D55E00", label="standardised")
axes[1].set(xlabel="deviations of the shared dimension", title="noise: one shared dimension")
styles = {"trained": ("o-", "#0072B2"), "rows shuffled": ("^:", "#D55E00"), "untrained": ("D--", "#009E73")}
for name, (style, colour) in styles.items():
    axes[2].plot(layers, found[name], style, color=colour, label=name)
axes[2].set(xlabel="layer", xticks=list(layers), title="two models")
for axis in axes:
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# * Left: the fewer the rows, the higher the CKA of pure noise. The unbiased estimate stays near zero throughout,
#   and may be negative.
# * Middle: one shared dimension, if it is large enough, makes unrelated states look alike. Standardised, it is one
#   of many.
# * Right: shuffled rows show that nothing is left by chance here. How far the trained models are above the
#   *untrained* ones is what training adds; the rest comes of the words that both read.
#
# ## What it does not say
#
# That a high CKA means that one model could use the states of the other, or a low one that it could not: for that,
# map the states and put them in: [align two models](align_two_models.md). CKA is also blind to whether single
# neurons agree.
#
# `python evaluate.py similarity --controls true` sets every measure, at all pairs of layers, beside these controls.
