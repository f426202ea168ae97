"""Tokenizers of embedded models, learned from their texts and the same in every process."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from aligners.errors import check_range

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
END_OF_TEXT = "<|endoftext|>"


def word_pieces(texts: list[str], vocabulary: int, max_length: int) -> BertTokenizer:
    """Word pieces as BERT has them, lower case.

    The trainer numbers single letters in the order of a hash table, which differs between processes, and
    breaks ties between merges by these numbers. Here the letters are given to it in order.

    Args:
        texts: to learn from.
        vocabulary: number of pieces.
        max_length: longest text in tokens, for those who ask the tokenizer.
    """
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    used: set[str] = set()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        used.update("".join(normal.split()))
    letters = sorted(used)
    inner = [f"##{letter}" for letter in letters]
    trainer = WordPieceTrainer(
        vocab_size=vocabulary,
        initial_alphabet=letters,
        special_tokens=SPECIAL + inner,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BertTokenizer(vocab=tokenizer.get_vocab(), model_max_length=max_length)


def byte_pairs(
    texts: list[str], vocabulary: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Byte-level pieces as GPT-2 has them: no text is unknown, and none changed.

    Its one special token ends texts and is the padding too: what is padding, the attention mask says.

    Args:
        texts: to learn from.
        vocabulary: number of pieces, at least 257: every byte and the end of text.
        max_length: longest text in tokens, for those who ask the tokenizer.

    Raises:
        ValueError: the vocabulary is smaller.
    """
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())  # in order, as above
    check_range(least=len(bytes_) + 1, vocabulary=vocabulary)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=bytes_,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
    )


def ended_texts(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, end: int
) -> list[list[int]]:
    """Tokenise each text for packing: uncut, without special tokens, and with an end-of-text token."""
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        truncation=False,
        return_attention_mask=False,
        verbose=False,
    )
    return [[*ids, end] for ids in encoded["input_ids"]]
