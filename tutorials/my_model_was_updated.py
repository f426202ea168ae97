# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # My model was updated
#
# **The question.** You own things that read or change a model's hidden states: a head that tells good reviews from
# bad ones, a direction to steer by. Now the model is replaced. What has changed, and what becomes of them? Here the new
# model is the hardest case of an update: the same network, trained again from another seed.

# %%
import matplotlib.pyplot as plt
import torch
from torchmetrics.functional.classification import binary_auroc

from aligners.api import (
    Direction,
    Head,
    Linear,
    Ridge,
    TextSource,
    carry,
    compare,
    load,
    load_texts,
    states,
    steer,
)

# %% tags=["parameters"]
name_old, name_new = "embedded-gpt:0", "embedded-gpt:1"
site = 2
texts_with_labels, texts_without, texts_to_test, texts_to_steer = 2000, 2000, 800, 60
cost = 0.02  # KL at which directions are compared, nats a token

# %% [markdown]
# ## What changed
#
# `compare` gives a verdict. Beside the new model stands the old one itself, of which nothing has changed.

# %%
old, new = load(name_old), load(name_new)
fit, held_out = (
    split.shuffle(seed=0) for split in (load_texts(TextSource()).fit, load_texts(TextSource()).test)
)
mine, labels = fit["text"][:texts_with_labels], torch.tensor(fit["label"][:texts_with_labels])
free = fit["text"][texts_with_labels:][:texts_without]  # their labels are not used
test, truth = held_out["text"][:texts_to_test], torch.tensor(held_out["label"][:texts_to_test])
for name, model in (("the same model", old), ("the new model", new)):
    verdict = compare(old, model, test).verdict
    print(f"{name}: {verdict.kind}, answers {'the same' if verdict.same_answers else 'others'}")

# %% [markdown]
# ## A head, carried
#
# Its owner trained the head on labelled texts, long ago. To carry it takes a map from the new model's states to the old
# one's, fitted on texts without labels: the head reads the new model through it. Beside it: the head on the old model;
# the head put on the new one as it is (*stale*); and one trained anew, which needs the labels again.


# %%
def read(model, some):
    """One state of each text, the mean over its tokens."""
    return states(model, some, site, rows="mean")


def head_of(model):
    """A linear head that is trained on the labels."""
    fitted = Ridge().fit(read(model, mine), labels[:, None].float())
    return Head.of(
        fitted.coef_,
        fitted.intercept_,
        name="good or bad",
        model=model.name,
        site=site,
        rows="mean",
    )


def score(head, model):
    """How well a head tells the held-out texts apart."""
    return float(binary_auroc(head.answers(read(model, test))[:, 0].double().sigmoid(), truth))


head = head_of(old)
back = Ridge().fit(read(new, free), read(old, free))  # from new states to old ones
carried = carry(head, back, model=new.name)
scores = {
    "on the old": score(head, old),
    "stale": score(head, new),
    "carried": score(carried, new),
    "trained anew": score(head_of(new), new),
}
for name, value in scores.items():
    print(f"{name:14} AUROC {value:.3f}")

# %% [markdown]
# ## A direction, carried
#
# A direction to steer by is pushed forward, from old states to new ones. Here it is the difference between the old
# model's mean states of good and of bad reviews. It is added to the new model's states in growing amounts, and compared
# at equal cost with the direction that the new model's own states give (*native*), and with random ones. The effect is
# the log-odds of some good words against some bad ones as the next token.


# %%
def direction_of(model):
    """From bad reviews to good ones."""
    means = read(model, mine)
    return Direction(
        {"vector": means[labels == 1].mean(0) - means[labels == 0].mean(0)}, {"site": site}
    )


forward = Linear().fit(read(old, free), read(new, free))
directions = {
    "native": direction_of(new),
    "carried": carry(direction_of(old), back, forward, model=new.name),
}
words = (["good", "funny", "best"], ["bad", "dull", "worst"])
steered = steer(new, directions, test[:texts_to_steer], words=words, equal_kl=[cost])
for row in steered.equal:
    print(f"{row['method']:8} log-odds {row['value']:+.2f} at a KL of {row['kl']:g} nats")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
colours = ["#009E73", "0.6", "#D55E00", "#0072B2"]
axes[0].bar(list(scores), list(scores.values()), color=colours)
axes[0].axhline(0.5, color="0.3", linewidth=0.8, linestyle=":")
axes[0].set(ylim=(0.4, 1), ylabel="AUROC", title="a head")
for name, style in {"native": "o-", "carried": "s--", "random 1": "^:"}.items():
    line = [row for row in steered.curve if row["method"] == name]
    axes[1].plot([row["kl"] for row in line], [row["words"] for row in line], style, label=name)
axes[1].set(xlabel="cost: KL, nats a token", ylabel="log-odds of the words", title="a direction")
axes[1].legend(frameon=False, fontsize=8)
for axis in axes:
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What one sees
#
# * Of the old model beside itself the verdict is that nothing differs beyond rounding, and of the new one that it is
#   different: no permutation or rotation makes even the first states agree.
# * Put on the new model as it is, the head is at chance. Carried without a label, it is within .01 of what it was on
#   the old model, and within .03 of one that was trained anew.
# * The direction lowers the log-odds of good words instead of raising them: what tells good reviews from bad ones is
#   not what makes a good word come next. At equal cost the carried direction has more than half of the effect of the
#   native one, and random ones have less than a quarter.
#
# ## What it does not say
#
# Whether a head that was carried is good enough: `python train.py carry` says beforehand, with intervals, what will
# become of it. Nor how it is after a small update, or for models of other families. [After an update](../updates.md)
# explains what is done, and [the recipe](../howto/model_updated.md) has the commands.
