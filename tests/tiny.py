"""Tiny random models of every supported architecture, with a tokenizer, from explicit configs."""

import functools
import io
import pickle
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.kinds import ALIKE, COMMON, KINDS, RANGE, SPECIAL, WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from aligners.models import FrozenModel

TEXTS = (
    "the film is good",
    "a dull plot and a poor story but the actor was great",
    "not funny",
    "this very long scene feels rather cold and never looks warm",
    "good",
)
ARCHITECTURES = tuple(KINDS)
CLASSIFIERS = tuple(name for name in KINDS if name != "t5")  # its classifier reads the text again
# Blocks that are shared, that answer with a tensor or more, that take what the trunk made of positions in its own way.
VARIED = ("albert", "bert", "deberta-v2", "gemma3_text", "gpt2", "mpnet", "opt", "xlnet")
LANGUAGE_HEADS = tuple(
    (name, task) for name, (_, heads) in KINDS.items() for task in heads if task in ("masked", "causal")
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; `<s> text </s>`, or `<s> text </s> text </s>` for pairs."""
    tokens = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", tokens["<s>"]), ("</s>", tokens["</s>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<unk>",
        model_max_length=60,
    )


def tiny_model(
    architecture: str,
    *,
    seed: int = 0,
    layers: int = 3,
    width: int = 16,
    n_labels: int | None = 2,
    task: str = "classification",
    **settings: object,
) -> PreTrainedModel:
    """A random model; `n_labels=None`: without any head; `settings` go to the config."""
    head = None if n_labels is None else task
    return pickle.loads(_pickled(architecture, seed, layers, width, n_labels or 2, head, **settings))


def kind(architecture: str, head: str | None) -> type[PreTrainedModel]:
    """The class of a family's models with that head, or without any."""
    return getattr(transformers, (KINDS | ALIKE)[architecture][1][head])


@functools.cache
def _pickled(
    architecture: str, seed: int, layers: int, width: int, n_labels: int, head: str | None, **settings: object
) -> bytes:
    explicit, _ = (KINDS | ALIKE)[architecture]
    made = kind(architecture, head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made(made.config_class(**explicit(width, layers) | {"num_labels": n_labels} | settings)).eval()
    if architecture == "openai-gpt":  # its recipe leaves most weights at .02, whatever the config says
        for part in model.modules():
            if isinstance(part, Conv1D):
                part.weight.data.mul_(RANGE / 0.02)
    limit = 2 * (width * (COMMON["vocab_size"] + 64) + layers * 10 * width**2)
    size = sum(weight.numel() for weight in model.parameters())
    assert size < limit, f"the tiny {architecture} has {size} weights: a config name is misspelt"
    pickled = io.BytesIO()
    _Pickler(pickled).dump(model)  # read back faster than built or copied
    return pickled.getvalue()


class _Pickler(pickle.Pickler):
    """Keeps weights as arrays, which are read back in a tenth of the time."""

    def reducer_override(self, part: object) -> Any:
        if isinstance(part, torch.Tensor):
            return _tensor, (part.detach().numpy(), part.requires_grad if isinstance(part, nn.Parameter) else None)
        return NotImplemented


def _tensor(values: Any, trains: bool | None) -> torch.Tensor:
    found = torch.from_numpy(values)
    return found if trains is None else nn.Parameter(found, trains)


def tiny_frozen(architecture: str = "bert", **options: Any) -> FrozenModel:
    """`tiny_model` as a FrozenModel with its tokenizer."""
    return FrozenModel(tiny_model(architecture, **options), tiny_tokenizer(), name=f"tiny-{architecture}")


def tiny_folder(folder: Path, architecture: str = "bert", **options: Any) -> Path:
    """`tiny_model` and its tokenizer, saved as a model folder."""
    tiny_model(architecture, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def hooks_of(frozen: FrozenModel) -> int:
    """How many hooks there are in a model."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in frozen.model.modules())


def tokenised(texts: tuple[str, ...] = TEXTS, side: str = "right") -> dict[str, torch.Tensor]:
    """A batch of texts, padded to its longest on `side`."""
    batch = tiny_tokenizer()(list(texts), padding=True, padding_side=side, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def reference(frozen: FrozenModel, inputs: dict[str, torch.Tensor], **options: bool) -> tuple[list[torch.Tensor], Any]:
    """The states at all sites by torch's own hooks on the plain model, and what the model answers."""
    received: list[torch.Tensor] = []

    def first(block: nn.Module, args: tuple[Any, ...]) -> None:
        if not received:
            received.append(args[0])

    def keep(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        received.append(output if isinstance(output, torch.Tensor) else output[0])

    handles = [frozen.blocks[0].register_forward_pre_hook(first)]
    handles += [block.register_forward_hook(keep) for block in set(frozen.blocks)]
    with torch.no_grad():
        expected = frozen.model(**inputs, output_hidden_states=True, **options)
    for handle in handles:
        handle.remove()
    sequence_first = frozen.model.config.model_type == "xlnet"
    return [states.transpose(0, 1) if sequence_first else states for states in received], expected
