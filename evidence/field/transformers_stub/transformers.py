"""Replaces BERT, whose weights are online: a sentence's embedding is computed from its letters."""

import torch


class _Tokenizer:
    def __call__(self, text, max_length, **ignored):
        ids = [[ord(letter) for letter in sentence[:max_length].ljust(max_length)] for sentence in text]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), max_length)}


class _Model:
    def __call__(self, ids, mask):
        weights = torch.randn(ids.shape[1], 16, generator=torch.Generator().manual_seed(0))
        return {"pooler_output": torch.tanh(ids.float() / 100 @ weights)}


class AutoTokenizer:
    @staticmethod
    def from_pretrained(name, **ignored):
        return _Tokenizer()


class AutoModel:
    @staticmethod
    def from_pretrained(name, **ignored):
        return _Model()


class logging:
    @staticmethod
    def set_verbosity_error():
        pass
