"""Replaces transformers if it is not installed: robomimic loads a CLIP model, 0.5.0 at import.

An embedding depends only on the text.
"""

from __future__ import annotations

import types
import zlib
from typing import Any

import torch

EMBEDDING_SIZE = 768
# torch before 2.2 writes to it when `torch._dynamo` is imported.
configuration_utils = types.SimpleNamespace(PretrainedConfig=type("PretrainedConfig", (), {}))


class _Tokens(dict):  # type: ignore[type-arg]
    def to(self, device: torch.device) -> _Tokens:
        return self


class _Pretrained:
    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls()

    def to(self, device: torch.device) -> Any:
        return self

    def eval(self) -> Any:
        return self


class AutoTokenizer(_Pretrained):
    def __call__(self, text: Any, **options: Any) -> _Tokens:
        texts = [text] if isinstance(text, str) else list(text)
        return _Tokens(input_ids=torch.tensor([zlib.crc32(str(one).encode()) for one in texts]))


class CLIPTextModelWithProjection(_Pretrained):
    def __call__(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn = [torch.randn(EMBEDDING_SIZE, generator=torch.Generator().manual_seed(int(i))) for i in input_ids]
        return {"text_embeds": torch.stack(drawn)}


class AutoModel(_Pretrained): ...


def pipeline(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no part of robomimic's training calls this")
