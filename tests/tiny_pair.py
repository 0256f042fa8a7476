"""A pair of random models over a byte-level tokenizer, saved as a user's own would be."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """All 256 bytes, some whole words, and an end token."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_llama(
    seed: int, layers: int = 2, vocab_size: int = 260, heads: int = 4
) -> LlamaForCausalLM:
    """A Llama of random weights with an opinion: its logits are spread."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=256,
        bos_token_id=256,
    )
    return LlamaForCausalLM(config).eval()


def save_pair(folder: Path, draft_words: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """A target and a draft; the embeddings are padded beyond the 257 tokens."""
    target, draft = folder / "target", folder / "draft"
    random_llama(0).save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    random_llama(1, layers=1).save_pretrained(draft)
    byte_tokenizer(*draft_words).save_pretrained(draft)
    return target, draft
