"""Small tokenizers of the kinds that teachers have: byte-level BPE, SentencePiece, normalising, without bytes."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_core.data.tokenizer import CHAT_TEMPLATE

TEXTS = [
    "Ab cD hello hello low lower lowest the abacus unhappy happy 12 34 caf\u00e9 caf\u00e9"
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]


def wrap(tokenizer, end="</s>"):
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, unk_token="<unk>"
    )
    wrapped.chat_template = CHAT_TEMPLATE.replace("<|end|>", end)
    return wrapped


def train_sentencepiece(size=330, prepend="always", is_legacy=False):
    """SentencePiece's BPE with byte fallback; legacy: the space before a text is put by the normaliser."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_legacy or prepend != "never":
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        max_token_length=4,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # Byte tokens are ordinary ones in a SentencePiece vocabulary.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return wrap(Tokenizer.from_str(json.dumps(content)))


def train_byte_level(size=300, normalizer=None, digits=None):
    """Byte-level BPE, with a normaliser, or with groups of digits as in Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if digits:
        steps.insert(0, pre_tokenizers.Split(Regex(rf"\d{{1,{digits}}}"), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrap(tokenizer)


def train_word_pieces():
    """BERT's kind, whose tokens do not say where a space was."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrap(tokenizer)
