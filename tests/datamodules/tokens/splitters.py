"""Tokenizers that divide text in the ways that are about: word pieces, bytes with the space before, metaspace."""

from pathlib import Path
from string import ascii_lowercase

from tests.tiny import tiny_model
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def _wrapped(inner: Tokenizer, side: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<unk>",
        padding_side=side,
        model_max_length=60,
    )


def word_piece(side: str = "right", drop: str = "right") -> PreTrainedTokenizerFast:
    """As BERT's: lower case, no accents, punctuation apart, pieces of a word marked, [CLS] and [SEP] around."""
    letters = [*ascii_lowercase, *"0123456789.,!?'-"]
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), "film", "the", "##il", "##oo", "go", "##ot"]
    inner = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer = _wrapped(inner, side)
    tokenizer.truncation_side = drop
    return tokenizer


def byte_level(side: str = "right", *, trim: bool = True, prefix: bool = False) -> PreTrainedTokenizerFast:
    """As GPT-2's: bytes and a few merges, the space before a word in its piece, nothing around a text."""
    merges = [("Ġ", "t"), ("Ġ", "g"), ("h", "e"), ("Ġt", "he"), ("i", "l"), ("f", "il"), ("Ġ", "fil"), ("Ġ", "Ġ")]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    inner = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    return _wrapped(inner, side)


def metaspace(side: str = "right") -> PreTrainedTokenizerFast:
    """As those made by SentencePiece: a space becomes a letter, with one more before the text; `<s>` before it."""
    merges = [("▁", "f"), ("▁", "g"), ("i", "l"), ("▁f", "il"), ("o", "o")]
    pieces = [*SPECIAL, "▁", *ascii_lowercase, *".,!", *("".join(merge) for merge in merges)]
    inner = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return _wrapped(inner, side)


def crossing() -> PreTrainedTokenizerFast:
    """One whose pieces reach over white space: "of the" is one."""
    merges = [("o", "f"), ("t", "h"), ("th", "e"), ("of", " "), ("of ", "the")]
    pieces = [*SPECIAL, " ", *ascii_lowercase, *("".join(merge) for merge in merges)]
    return _wrapped(Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>")), "right")


SPLITTERS = {
    "word_piece": word_piece,
    "word_piece_left": lambda: word_piece("left", drop="left"),
    "byte_level": byte_level,
    "byte_level_untrimmed": lambda: byte_level("left", trim=False),
    "byte_level_prefix": lambda: byte_level(trim=False, prefix=True),
    "metaspace": metaspace,
    "crossing": crossing,
}


def splitter_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, **options: int | None) -> str:
    """A tiny model with this tokenizer, saved as a model folder."""
    model = tiny_model("bert", **options)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
