"""Stands in for transformers where it is not installed: robomimic 0.5.0 loads a CLIP model while it is imported.

Only language-conditioned training uses that model; anything that does use it fails here by name.
"""

from typing import Any


class _Absent:
    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "_Absent":
        return cls()

    def eval(self) -> "_Absent":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("language embeddings need the real transformers package and its CLIP weights")


class AutoModel(_Absent): ...


class AutoTokenizer(_Absent): ...


class CLIPTextModelWithProjection(_Absent): ...


def pipeline(*args: Any, **kwargs: Any) -> Any:
    return _Absent()
