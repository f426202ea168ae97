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
# that measures how alike two sets of states are, up to a rotation and a scale. This tutorial looks at cases in which it
# should be low.

# %%
import matplotlib.pyplot as plt
import numpy as np

from aligners.api import TextSource, cka, load, load_texts, states, unbiased_cka

draw = np.random.default_rng(0)

# %% tags=["parameters"]
name_x, name_y = "embedded-gpt:0", "embedded-gpt:1"
texts_to_read = 500
width = 256  # of the noise
counts = [32, 64, 128, 256, 512, 1024, 2048]  # rows of the noise
many = 4000

# %% [markdown]
# ## Few rows: unrelated states look alike
#
# Two arrays of noise have nothing in common. If they have few rows for their width, CKA is high all the same. The
# unbiased estimate of CKA is not.

# %%
pairs = [(draw.normal(size=(n, width)), draw.normal(size=(n, width))) for n in counts]
biased, unbiased = ([measure(*pair) for pair in pairs] for measure in (cka, unbiased_cka))
print(f"{'rows':>5} {'CKA':>6} {'unbiased':>9}")
for n, one, two in zip(counts, biased, unbiased, strict=True):
    print(f"{n:5} {one:6.2f} {two:z9.2f}")

# %% [markdown]
# ## One large dimension: unrelated states look alike, however many rows
#
# Transformers have dimensions that are far larger than all others. Here two arrays of noise have nothing in common but
# one such dimension, of growing size. *Standardised* means that each dimension is divided by its standard deviation.

# %%
a, b, shared = (
    draw.normal(size=(many, width)),
    draw.normal(size=(many, width)),
    draw.normal(size=many),
)
sizes = [0, 2, 4, 8, 16, 32]
outliers = []
print(f"{'size':>5} {'CKA':>6} {'standardised':>13}")
for outlier in sizes:
    x, y = a.copy(), b.copy()
    x[:, 0] += outlier * shared
    y[:, 0] += outlier * shared
    outliers.append((unbiased_cka(x, y), unbiased_cka(x / x.std(0), y / y.std(0))))
    print(f"{outlier:5} {outliers[-1][0]:z6.2f} {outliers[-1][1]:z13.2f}")

# %% [markdown]
# ## Two models, beside their controls
#
# Now two language models that differ only in their seed, and two controls. *Rows shuffled*: every token of X is
# paired with some other token of Y, so that only chance is left. *Untrained*: the same two models with random weights,
# which have learned nothing, but read the same words.

# %%
models = [load(name) for name in (name_x, name_y)]
untrained = [model.untrained(seed) for seed, model in enumerate(models)]
texts = load_texts(TextSource()).test["text"][:texts_to_read]
layers = range(models[0].depth + 1)
values = {"trained": [], "rows shuffled": [], "untrained": []}
for layer in layers:
    x, y = (states(model, texts, layer).numpy() for model in models)
    values["trained"].append(unbiased_cka(x, y))
    values["rows shuffled"].append(unbiased_cka(x, y[draw.permutation(len(y))]))
    values["untrained"].append(
        unbiased_cka(*(states(model, texts, layer).numpy() for model in untrained))
    )
print(f"{'layer':14}", " ".join(f"{layer:6}" for layer in layers))
for name, row in values.items():
    print(f"{name:14}", " ".join(f"{value:z6.2f}" for value in row))

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained", sharey=True)
axes[0].plot(counts, biased, "o-", color="#0072B2", label="CKA")
axes[0].plot(counts, unbiased, "s--", color="#D55E00", label="unbiased CKA")
axes[0].set_xscale("log", base=2)
axes[0].set_xticks(counts, counts)
axes[0].set(xlabel=f"rows, of width {width}", ylabel="CKA", title="noise: how many rows?")
axes[1].plot(sizes, [raw for raw, _ in outliers], "o-", color="#0072B2", label="as it is")
axes[1].plot(
    sizes, [scaled for _, scaled in outliers], "s--", color="#D55E00", label="standardised"
)
axes[1].set(
    xlabel="standard deviation of the shared dimension", title="noise: one shared dimension"
)
styles = {
    "trained": ("o-", "#0072B2"),
    "rows shuffled": ("^:", "#D55E00"),
    "untrained": ("D--", "#009E73"),
}
for name, (style, colour) in styles.items():
    axes[2].plot(layers, values[name], style, color=colour, label=name)
axes[2].set(xlabel="layer", xticks=list(layers), title="two models")
for axis in axes:
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# * Left: the fewer the rows, the higher the CKA of noise. It is .88 with 32 rows and still .11 with 2048. The unbiased
#   estimate stays within .05 of zero, and may be negative.
# * Middle: one shared dimension of 8 standard deviations brings the CKA of unrelated states above .9. Standardised,
#   they stay at zero.
# * Right: with rows shuffled, CKA is zero at every layer, so chance plays no part. The trained models are above .8 and
#   the untrained ones between .2 and .3. So some of the similarity comes from the words that both models read, and most
#   of it from training.
#
# ## What it does not say
#
# Whether one model can use the states of the other. A high CKA does not show that it can, nor a low one that it cannot:
# map the states and put them in, as in [align two models](align_two_models.md). Nor does CKA show whether single
# neurons agree.
#
# `python evaluate.py similarity --controls true` shows every measure beside these controls, for all pairs of layers.
