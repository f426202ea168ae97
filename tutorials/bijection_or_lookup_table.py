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
# not seen. Has it found how the two spaces correspond? Or has it memorised, for each word, where its state goes? New
# *texts* cannot answer this, because most of their words were seen in fitting. New *words* can.

# %%
import matplotlib.pyplot as plt
import torch

from aligners.api import INN, MLP, Linear
from aligners.datamodules.pairings import pair_states
from aligners.reports.drawing import method_looks

# %% tags=["parameters"]
name_x, name_y = "embedded-gpt:0", "embedded-gpt:1"
texts_to_fit, texts_to_test = 5000, 1000
steps = 1000  # of training the networks

# %% [markdown]
# ## Leave out a tenth of the words
#
# This data module pairs the states of two models. It leaves a tenth of the token types (entries of the vocabulary) out
# of fitting, with all their rows. The texts stay whole, so the models read every word in its context.

# %%
data = pair_states(name_x, name_y, sites=["1"], held_out_types=0.1, batch_size=50)


def rows_of(split, texts):
    """States of X and of Y at site 1, token ids, and whether fitting leaves the type out, for the first texts."""
    parts = []
    for batch in data.paired(split, only=texts):
        tokens = batch.texts.inputs_x["input_ids"].flatten()[batch.rows.index]
        left_out = (
            batch.rows.unseen if split == "test" else torch.zeros(len(tokens), dtype=torch.bool)
        )
        parts.append((batch.x[0], batch.y[0], tokens, left_out))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


x, y, tokens, _ = rows_of("fit", texts_to_fit)
x_test, y_test, tokens_test, unseen = rows_of("test", texts_to_test)
print(f"rows to fit on: {len(x):,}")
print(
    f"rows held out: {int((~unseen).sum()):,} of seen types, {int(unseen.sum()):,} of unseen types"
)

# %% [markdown]
# ## A lookup table and three maps
#
# The table is the extreme case: it gives each token the mean of Y's states for that token, and does not look at x at
# all. A token that it has not met gets the mean of all of Y's states.

# %%
table = {int(token): y[tokens == token].mean(0) for token in tokens.unique()}
from_table = torch.stack([table.get(int(token), y.mean(0)) for token in tokens_test])
maps = {"linear": Linear(), "mlp": MLP(steps=steps, hidden=[128, 128]), "inn": INN(steps=steps)}
mapped = {"lookup table": from_table} | {
    name: map.fit(x, y).transform(x_test) for name, map in maps.items()
}


def fvu(result, rows):
    """Fraction of variance unexplained of some rows, about the mean of the fitting rows."""
    return float((result - y_test)[rows].square().sum() / (y_test - y.mean(0))[rows].square().sum())


errors = {name: (fvu(result, ~unseen), fvu(result, unseen)) for name, result in mapped.items()}
print(f"{'FVU on types':13} {'seen':>6} {'unseen':>7} {'ratio':>6}")
for name, (seen, new) in errors.items():
    print(f"{name:13} {seen:6.3f} {new:7.3f} {new / seen:6.1f}")

# %%
colours = {"lookup table": "0.45"} | {
    name: look["color"] for name, look in method_looks(maps).items()
}
figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
for place, (name, (seen, new)) in enumerate(errors.items()):
    axis.bar(place - 0.2, seen, 0.38, color=colours[name])
    axis.bar(place + 0.2, new, 0.38, color=colours[name], alpha=0.45, hatch="//", edgecolor="w")
axis.bar(0, 0, color="k", label="seen types")  # for the legend
axis.bar(0, 0, color="k", alpha=0.45, hatch="//", edgecolor="w", label="unseen types")
axis.axhline(1, color="0.6", lw=0.8, ls=":")
axis.set_xticks(range(len(errors)), errors)
axis.set_ylabel("FVU on held-out text")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# * On types that it has met, the lookup table leaves less than 3 % of the variance unexplained, less than any map. On
#   unseen types its FVU is 1, because it gives the mean of Y there.
# * On seen types, both networks leave less than a third of what the linear map leaves.
# * On unseen types, they leave as much as the linear map or more.
# * The FVU of the linear map is a third higher on unseen types than on seen ones. The FVU of the networks is more than
#   four times as high: most of their lead is memorised words.
#
# ## What it does not say
#
# Why unseen types are harder. They are also rarer and stand in other contexts, and the two models themselves were
# trained on all words. And these models are tiny: at this size, much of a state after block 1 is the word itself.
#
# The reports of the commands have both columns (`fvu_seen`, `fvu_unseen`), for every map and site.
