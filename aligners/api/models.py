"""States of models as arrays, and injection: from names, folders or loaded models, and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from aligners.api.maps import ArrayMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from aligners.models.model import FrozenModel
    from datamodules.text.sources import TextSource

    Model = str | Path | FrozenModel | tuple[PreTrainedModel, PreTrainedTokenizerBase]

__all__ = ["Injected", "inject", "load", "states"]

SELF_TEST = 8  # texts on which injecting what was read must change nothing


class Injected(NamedTuple):
    """What a model does with mapped states in place of its own.

    Attributes:
        loss: in nats a token or text; None for a classifier without labels.
        native_loss: the model's own.
        penalty: loss − native_loss.
        accuracy: share of right answers; None likewise.
        native_accuracy: the model's own.
        agreement: share of answers that are the model's own.
        n: number of answers: texts of a classifier, tokens of a language model.
    """

    loss: float | None
    native_loss: float | None
    penalty: float | None
    accuracy: float | None
    native_accuracy: float | None
    agreement: float
    n: int


def load(model: Model, *, device: str = "cpu", dtype: str = "float32", text: TextSource | None = None) -> FrozenModel:
    """Load a model once, for many calls of `states` and `inject`.

    Args:
        model: a Hub id, a folder, an embedded model such as `embedded-gpt:0`, or a model of `transformers` with its
            tokenizer, (model, tokenizer), which is frozen in place and stays where it is.
        device: where the weights go.
        dtype: of the weights: float32, bfloat16 or float16.
        text: what embedded models are trained on. Default: the Rotten Tomatoes sentences.

    Raises:
        ValueError: there is no such model, or it is given without its tokenizer.
    """
    from aligners.models.model import FrozenModel
    from datamodules.frozen_models import FrozenModels, Wanted
    from datamodules.text.loading import load_texts
    from datamodules.text.sources import TextSource

    if isinstance(model, FrozenModel):
        return model
    if isinstance(model, tuple) and len(model) == 2:
        return FrozenModel(*model, name=getattr(model[0], "name_or_path", "") or type(model[0]).__name__)
    if not isinstance(model, (str, Path)):
        raise ValueError(
            f"Expected a model's name, its folder, or (model, tokenizer), but got a {type(model).__name__}. A loaded "
            "model needs its tokenizer beside it."
        )
    named = FrozenModels(
        Wanted([(str(model), None)]), lambda: load_texts(text or TextSource()), max_length=2, dtype=dtype
    )
    return named.loaded[0].to(device)


@torch.no_grad()
def states(
    model: Model, texts: Sequence[str], site: int, *, rows: str = "tokens", batch_size: int = 32, max_length: int = 128
) -> Tensor:
    """States of a model at a site: one row for each real token, text by text.

    Args:
        model: see `load`.
        texts: what it reads.
        site: 0 is the embedding output, l the output of block l, before any final norm.
        rows: `tokens`; `mean`, the mean over a text's tokens; or `cls`, its first.
        batch_size: texts that are read together.
        max_length: most tokens of a text, or fewer where the model has fewer positions; what is beyond is cut, and the
            log says of how many texts.

    Returns:
        (N, d) float32, on the model's device. Two models of one tokenizer have their rows in one order.

    Raises:
        ValueError: the model has no such site, there are no texts, or `rows` is something else.
    """
    from aligners.api.texts import batches
    from datamodules.rows.policies import select_rows
    from datamodules.rows.reading import read_rows

    if rows not in ("tokens", "mean", "cls"):
        raise ValueError(f"Expected `rows` to be tokens, mean or cls, but got {rows!r}.")
    frozen = load(model)
    frozen.check_site(site, "site")
    found = []
    for batch in batches(frozen, texts, None, batch_size, max_length):
        chosen = select_rows(batch.inputs_x["attention_mask"], batch.special_x, rows).to(frozen.device)
        found.append(read_rows(frozen, batch.to(frozen.device).inputs_x, [site], chosen)[0])
    return torch.cat(found)


@torch.no_grad()
def inject(
    model_x: Model,
    model_y: Model,
    map: ArrayMap | Callable[[Tensor], Tensor],
    texts: Sequence[str],
    *,
    site: int | tuple[int, int],
    labels: Sequence[int] | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    masked_share: float = 0.15,
    seed: int = 0,
) -> Injected:
    """Put mapped states of X into Y in place of its own, for every token, and see what Y answers.

    Args:
        model_x: see `load`.
        model_y: likewise; a classifier, or a causal or masked language model, with X's tokenizer. It must first give
            bit-identical logits with its own states injected.
        map: from X's rows (N, d_x) to Y's (N, d_y): a fitted map of this package, or any function of a tensor.
        texts: what both read: texts that nothing was fitted on.
        site: of both models, or (of X, of Y).
        labels: of a classifier: the class of each text, 0, 1, ... as its head numbers them.
        batch_size: see `states`.
        max_length: see `states`.
        masked_share: of the tokens that a masked language model has to find.
        seed: of the masks.

    Raises:
        ValueError: Y has no head, the tokenizers differ, a site is not there, the map gives rows of another shape, or
            there are not as many labels as texts.
    """
    from aligners.api.answers import Answers
    from aligners.api.texts import batches

    of_x, of_y = site if isinstance(site, tuple) else (site, site)
    source, target = load(model_x), load(model_y)
    source.check_site(of_x, "site")
    target.check_site(of_y, "site")
    asked = Answers(source, target, (of_x, of_y), masked_share, seed, labelled=labels is not None)
    mapped = map.transform if isinstance(map, ArrayMap) else map
    for number, batch in enumerate(batches(target, texts, labels, batch_size, max_length)):
        if number == 0:
            target.self_test({name: part[:SELF_TEST].to(target.device) for name, part in batch.inputs_x.items()})
        asked.add(batch, mapped)
    return Injected(**asked.means())
