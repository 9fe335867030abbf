"""A cross-encoder reads query and passage together; slower and better than comparing vectors."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from retriever_server.encoder import device_named, same_shape_batches
from retriever_server.errors import StartError

_BATCH = 32
_ROWS_MULTIPLE = 4
"""A few rows, or the few that are left over, go through other kernels, which round differently."""
_MAX_TOKENS = 512


class CrossEncoder:
    """One sequence classifier on one device. A pair's score does not depend on what else is scored.

    Args:
        model: a Hugging Face folder or hub name. Code that comes with a model is not run.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        self._device = device_named(device)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        dtype = torch.float32 if self._device.type == "cpu" else torch.float16
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError) as error:
            raise StartError(f"the reranker {model} cannot be loaded: {str(error).splitlines()[0]}") from None
        self._model = loaded.to(self._device).eval()
        self._max_tokens = min(_MAX_TOKENS, int(getattr(loaded.config, "max_position_embeddings", _MAX_TOKENS)))
        self._lock = threading.Lock()
        self.name = model

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """One relevance score a document, in order: the model's logit, of the last class where it has several. Called
        by the search's thread and by that of `/rerank`, which take turns: a fast tokenizer is not for two at once."""
        with self._lock:
            return self._score(query, documents) if documents else []

    @torch.inference_mode()
    def _score(self, query: str, documents: Sequence[str]) -> list[float]:
        pairs = self._tokenizer(
            [query] * len(documents), list(documents), truncation="longest_first", max_length=self._max_tokens
        )
        scores = [0.0] * len(documents)
        lengths = [len(ids) for ids in pairs["input_ids"]]
        for length, places in same_shape_batches(lengths, self._max_tokens, _BATCH):
            padded = places + places[:1] * (-len(places) % _ROWS_MULTIPLE)
            rows = [{name: values[place] for name, values in pairs.items()} for place in padded]
            inputs = self._tokenizer.pad(rows, padding="max_length", max_length=length, return_tensors="pt")
            logits = self._model(**inputs.to(self._device)).logits[:, -1].float().tolist()
            for place, score in zip(places, logits, strict=False):
                scores[place] = score
        return scores
