from __future__ import annotations

from pathlib import Path

import pytest

from search_r1.backends.model import check_tensor_parallel
from search_r1.errors import ConfigError
from tests.model_factory import tiny_config


@pytest.mark.parametrize(
    ("heads", "shared", "vocabulary", "fitting"),
    [
        (28, 4, 152_064, [1, 2, 4]),
        (12, 2, 151_936, [1, 2, 4]),
        (32, 8, 128_256, [1, 2, 4, 8, 16]),
        (12, 12, 500, [1, 2, 4]),
        (12, 12, 192, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_an_engine_is_cut_only_where_heads_key_value_heads_and_vocabulary_divide(
    tmp_path: Path, heads: int, shared: int, vocabulary: int, fitting: list[int]
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": shared, "vocab_size": vocabulary}
    tiny_config(**sizes).save_pretrained(tmp_path)
    for size in range(1, 17):
        if size in fitting:
            check_tensor_parallel(str(tmp_path), size)
        else:
            with pytest.raises(ConfigError, match=rf"size={size} .*set it to one of {', '.join(map(str, fitting))}$"):
                check_tensor_parallel(str(tmp_path), size)
