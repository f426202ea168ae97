"""Tiny random models of every supported architecture, with a tokenizer, from explicit configs."""

import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from aligners.models import FrozenModel

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # <pad> has id 1, as RoBERTa and MPNet expect
# fmt: off
WORDS = [
    "a", "the", "this", "that", "film", "plot", "story", "actor", "scene", "joke", "is", "was", "feels",
    "looks", "good", "great", "fine", "bad", "dull", "poor", "funny", "sad", "warm", "cold", "long", "short",
    "very", "rather", "not", "never", "always", "and", "but", "with", "without",
]
# fmt: on
TEXTS = (
    "the film is good",
    "a dull plot and a poor story but the actor was great",
    "not funny",
    "this very long scene feels rather cold and never looks warm",
    "good",
)
_COMMON = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 1}
_RANGE = 0.3  # far from the usual .02: a random model that hardly moves its states would pass any test
_SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 2}
_WINDOW = 4  # shorter than the texts and than their padding


def _shape(width: int, layers: int) -> dict[str, object]:
    return _COMMON | {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": 64,
        "initializer_range": _RANGE,
    }  # fmt: skip


def _standard(width: int, layers: int) -> dict[str, object]:
    return _shape(width, layers) | {"intermediate_size": 2 * width}


def _decoder(width: int, layers: int) -> dict[str, object]:
    return _standard(width, layers) | _SPECIAL_IDS | {"num_key_value_heads": 1, "head_dim": width // 2}


def _windows(layers: int) -> dict[str, object]:
    """In every layer but the second: settings by position that a wrong one would show."""
    return {"layer_types": ["full_attention" if i == 1 else "sliding_attention" for i in range(layers)]}


def _mixed(width: int, layers: int) -> dict[str, object]:
    return _decoder(width, layers) | _windows(layers) | {"sliding_window": _WINDOW}


def _distilbert(width: int, layers: int) -> dict[str, object]:
    return _COMMON | {
        "dim": width, "n_layers": layers, "n_heads": 2, "hidden_dim": 2 * width, "max_position_embeddings": 64,
        "initializer_range": _RANGE,
    }  # fmt: skip


def _albert(width: int, layers: int) -> dict[str, object]:
    groups = {"embedding_size": width // 2, "num_hidden_groups": 1, "inner_group_num": 1}
    return _standard(width, layers) | _SPECIAL_IDS | groups


def _deberta(width: int, layers: int) -> dict[str, object]:
    return _standard(width, layers) | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    }  # fmt: skip


def _modernbert(width: int, layers: int) -> dict[str, object]:
    ids = _SPECIAL_IDS | {"cls_token_id": 0, "sep_token_id": 2}
    return _standard(width, layers) | ids | _windows(layers) | {
        "local_attention": _WINDOW, "initializer_cutoff_factor": 2.0,
    }  # fmt: skip


def _opt(width: int, layers: int) -> dict[str, object]:
    sizes = {"ffn_dim": 2 * width, "word_embed_proj_dim": width // 2, "init_std": _RANGE}
    return _shape(width, layers) | _SPECIAL_IDS | sizes


def _t5(width: int, layers: int) -> dict[str, object]:
    return _COMMON | {
        "d_model": width, "d_kv": width // 2, "d_ff": 2 * width, "num_layers": layers, "num_decoder_layers": 1,
        "num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "eos_token_id": 2,
        "decoder_start_token_id": 1, "initializer_factor": 2.0,
    }  # fmt: skip


def _xlnet(width: int, layers: int) -> dict[str, object]:
    shape = {"d_model": width, "n_layer": layers, "n_head": 2, "d_inner": 2 * width}
    return _COMMON | _SPECIAL_IDS | shape | {"initializer_range": _RANGE}


_Settings = Callable[[int, int], dict[str, object]]
_Heads = dict[str | None, str]


def _encoder(prefix: str) -> _Heads:
    return _heads(prefix) | {"masked": f"{prefix}ForMaskedLM"}


def _causal(prefix: str, head: str = "ForCausalLM") -> _Heads:
    return _heads(prefix) | {"causal": prefix + head}


def _heads(prefix: str) -> _Heads:
    return {None: f"{prefix}Model", "classification": f"{prefix}ForSequenceClassification"}


# By `model_type`: settings, and the classes by what their head answers. One line for every registered family.
_KINDS: dict[str, tuple[_Settings, _Heads]] = {
    "albert": (_albert, _encoder("Albert")),
    "bert": (_standard, _encoder("Bert")),
    "deberta-v2": (_deberta, _encoder("DebertaV2")),
    "distilbert": (_distilbert, _encoder("DistilBert")),
    "electra": (lambda w, n: _standard(w, n) | {"embedding_size": w // 2}, _encoder("Electra")),
    "gemma2": (_mixed, _causal("Gemma2")),
    "gemma3_text": (
        _mixed,
        _causal("Gemma3") | {None: "Gemma3TextModel", "classification": "Gemma3TextForSequenceClassification"},
    ),
    "gpt2": (lambda w, n: _shape(w, n) | _SPECIAL_IDS | {"n_inner": 2 * w}, _causal("GPT2", "LMHeadModel")),
    "gpt_neox": (lambda w, n: _standard(w, n) | _SPECIAL_IDS, _causal("GPTNeoX")),
    "llama": (_decoder, _causal("Llama")),
    "mistral": (lambda w, n: _decoder(w, n) | {"sliding_window": _WINDOW}, _causal("Mistral")),
    "modernbert": (_modernbert, _encoder("ModernBert")),
    "mpnet": (_standard, _encoder("MPNet")),
    "openai-gpt": (lambda w, n: _shape(w, n), _causal("OpenAIGPT", "LMHeadModel")),
    "opt": (_opt, _causal("OPT")),
    "phi": (lambda w, n: _standard(w, n) | _SPECIAL_IDS, _causal("Phi")),
    "qwen2": (lambda w, n: _mixed(w, n) | {"use_sliding_window": True}, _causal("Qwen2")),
    "qwen3": (lambda w, n: _mixed(w, n) | {"use_sliding_window": True}, _causal("Qwen3")),
    "roberta": (lambda w, n: _standard(w, n) | {"type_vocab_size": 1}, _encoder("Roberta")),
    "t5": (_t5, _heads("T5") | {None: "T5EncoderModel"}),
    "xlm-roberta": (lambda w, n: _standard(w, n) | {"type_vocab_size": 1}, _encoder("XLMRoberta")),
    "xlnet": (_xlnet, _heads("XLNet")),
}
ARCHITECTURES = tuple(_KINDS)
CLASSIFIERS = tuple(name for name in _KINDS if name != "t5")  # its classifier reads the text again
# Blocks that are shared, that answer with a tensor or more, that take what the trunk made of positions in its own way.
VARIED = ("albert", "bert", "deberta-v2", "gemma3_text", "gpt2", "mpnet", "opt", "xlnet")
LANGUAGE_HEADS = tuple(
    (name, task) for name, (_, heads) in _KINDS.items() for task in heads if task in ("masked", "causal")
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


@functools.cache
def _pickled(
    architecture: str, seed: int, layers: int, width: int, n_labels: int, head: str | None, **settings: object
) -> bytes:
    explicit, kinds = _KINDS[architecture]
    kind = getattr(transformers, kinds[head])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(kind.config_class(**explicit(width, layers) | {"num_labels": n_labels} | settings)).eval()
    if architecture == "openai-gpt":  # its recipe leaves most weights at .02, whatever the config says
        for part in model.modules():
            if isinstance(part, Conv1D):
                part.weight.data.mul_(_RANGE / 0.02)
    limit = 2 * (width * (_COMMON["vocab_size"] + 64) + layers * 10 * width**2)
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
