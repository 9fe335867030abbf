"""Text to vectors, by plain transformers. How a model wants its text is one named profile, kept in the manifest."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from retriever_server.errors import StartError

logger = logging.getLogger(__name__)

_CPU_BATCH, _CUDA_BATCH = 32, 64
_SAME_ENCODER = 0.98
"""Median cosine from which on stored vectors count as this encoder's; half precision costs under 0.001."""
_SAME_PASSAGE = 0.9
"""Cosine that no stored vector may fall below. A long passage that was cut elsewhere stays above it."""


@dataclass(frozen=True, slots=True)
class Profile:
    query_prefix: str
    passage_prefix: str
    pooling: str
    """mean (over tokens that are no padding) or cls (the first token)."""
    normalize: bool
    max_query_tokens: int
    max_passage_tokens: int


PROFILES = {
    "e5": Profile("query: ", "passage: ", "mean", True, 256, 256),
    "bge": Profile("Represent this sentence for searching relevant passages: ", "", "cls", True, 256, 512),
    "contriever": Profile("", "", "mean", False, 256, 256),
    "minilm": Profile("", "", "mean", True, 256, 256),
}


def device_named(name: str) -> torch.device:
    """Raises StartError where there is no such device on this machine."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise StartError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


class Encoder:
    """One model on one device; float32 on a CPU, float16 on a GPU.

    A text's vector does not depend on the texts encoded with it: texts are padded to a length that follows from their
    own alone, and on a GPU every batch has the same number of rows, so that the same kernels run.

    Args:
        model: a Hugging Face folder or hub name. Code that comes with a model is not run.
    """

    def __init__(self, model: str, profile: Profile, device: str = "cpu") -> None:
        self.profile = profile
        self._device = device_named(device)
        self._batch = _CPU_BATCH if self._device.type == "cpu" else _CUDA_BATCH
        dtype = torch.float32 if self._device.type == "cpu" else torch.float16
        disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model = AutoModel.from_pretrained(model, dtype=dtype).to(self._device).eval()
        except (OSError, ValueError) as error:
            raise StartError(f"the encoder {model} cannot be loaded: {str(error).splitlines()[0]}") from None
        self.dim = int(self._model.config.hidden_size)
        self._limit = int(getattr(self._model.config, "max_position_embeddings", 1 << 30))
        self.name = Path(model).name
        self.fingerprint = self._fingerprint()

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, dim) vectors."""
        return self._encode(texts, self.profile.query_prefix, self.profile.max_query_tokens)

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, dim) vectors."""
        return self._encode(texts, self.profile.passage_prefix, self.profile.max_passage_tokens)

    def describe(self) -> dict[str, Any]:
        """What a manifest keeps; another encoder or profile differs in it."""
        return {"name": self.name, "fingerprint": self.fingerprint, "dim": self.dim, **asdict(self.profile)}

    def _fingerprint(self) -> str:
        """Digest of a sample of every tensor: the same weights from another folder or file format count as the same."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            sample = tensor.flatten()[:: max(tensor.numel() // 256, 1)].half().cpu().numpy()
            digest.update(name.encode() + str(tuple(tensor.shape)).encode() + sample.tobytes())
        return digest.hexdigest()[:32]

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str], prefix: str, max_tokens: int) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        if not texts:
            return vectors
        limit = min(max_tokens, self._limit)
        token_ids = self._tokenizer([prefix + text for text in texts], truncation=True, max_length=limit)["input_ids"]
        for length, places in same_shape_batches([len(ids) for ids in token_ids], limit, self._batch):
            vectors[places] = self._forward([token_ids[place] for place in places], length)
        return vectors

    def _forward(self, token_ids: Sequence[Sequence[int]], length: int) -> NDArray[np.float32]:
        num_rows = len(token_ids) if self._device.type == "cpu" else self._batch
        rows = [*token_ids, *[token_ids[0]] * (num_rows - len(token_ids))]
        input_ids = torch.full((num_rows, length), self._tokenizer.pad_token_id or 0)
        mask = torch.zeros((num_rows, length), dtype=torch.long)
        for row, ids in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        mask = mask.to(self._device)
        hidden = self._model(input_ids=input_ids.to(self._device), attention_mask=mask).last_hidden_state.float()
        if self.profile.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weights = mask.unsqueeze(-1).float()
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        if self.profile.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        found: NDArray[np.float32] = pooled[: len(token_ids)].cpu().numpy()
        return found


def refuse_other_encoder(encoder: Encoder, texts: Sequence[str], stored: NDArray[np.float32], where: str) -> None:
    """Compare stored vectors, one row a text, with what the encoder gives; `where` as in "the files hold".

    Raises:
        StartError: another encoder made them, or some of them belong to other texts.
    """
    if stored.shape[1] != encoder.dim:
        raise StartError(
            f"{where} vectors of {stored.shape[1]} numbers and the encoder {encoder.name} makes {encoder.dim}"
        )
    ours = encoder.encode_passages(texts)
    lengths = np.linalg.norm(stored, axis=1) * np.linalg.norm(ours, axis=1)
    cosines = (stored * ours).sum(1) / np.maximum(lengths, 1e-30)
    facts = f"median cosine {np.median(cosines):.3f}, lowest {cosines.min():.3f}, over {len(texts)} passages"
    if np.median(cosines) < _SAME_ENCODER or cosines.min() < _SAME_PASSAGE:
        raise StartError(
            f"the encoder {encoder.name} gives other vectors than {where} ({facts}): another model, prefix, pooling or "
            "passage length, or another corpus order"
        )
    logger.info("the encoder gives the vectors that %s: %s", where, facts)


def same_shape_batches(num_tokens: Sequence[int], limit: int, most: int) -> Iterator[tuple[int, list[int]]]:
    """Texts to run together, as (padded length, places). What a text is padded to follows from its own length alone:
    the next multiple of 8 (of 32 above 64), so that there are few lengths. Every row has padding, or none has: a model
    may leave out a mask that hides nothing, and rounds differently then."""
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for place, count in enumerate(num_tokens):
        step = 8 if count < 64 else 32
        alike[min((count // step + 1) * step, limit), count == limit].append(place)
    for (length, _), places in alike.items():
        for start in range(0, len(places), most):
            yield length, places[start : start + most]
