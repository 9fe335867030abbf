"""vLLM's CUDA engine: what its CPU engine cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_r1.errors import EngineError
from search_r1.types import SamplingConfig
from tests.model_factory import randomize, tiny_model_dir

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
SAMPLED = SamplingConfig(24)
CONTEXTS = [list(range(5, 5 + length)) for length in (3, 200, 40)]
WAYS = ["shm", "ipc"]


@pytest.fixture
def model(gpu: str, tmp_path: Path) -> Any:
    tiny_model_dir(tmp_path, max_length=256, hidden_size=256, num_attention_heads=4, head_dim=64)
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(gpu)


@pytest.fixture
def engine(model: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cuda():
        pytest.skip("this vLLM was built for CPUs")
    from search_r1.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        str(tmp_path),
        dtype="bfloat16",
        max_batch_size=8,
        gpu_memory_utilization=0.3,
        weight_transfer=getattr(request, "param", "ipc"),
        sleep_mode=True,
    )
    yield engine
    engine.close()


def gap(model: Any, engine: Any) -> float:
    """Mean difference between the engine's log-probs and the model's."""
    return gap_of(model, engine.generate(CONTEXTS, SAMPLED, range(3)))


def gap_of(model: Any, completions: list[Any]) -> float:
    gaps = []
    for context, completion in zip(CONTEXTS, completions, strict=True):
        ids = list(completion.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *ids]], device=model.device)).logits[0, len(context) - 1 : -1]
        expected = logits.float().log_softmax(-1)[range(len(ids)), ids].cpu()
        gaps.append((torch.tensor(completion.log_probs) - expected).abs().mean())
    return float(torch.stack(gaps).mean())


@pytest.mark.parametrize("engine", WAYS, indirect=True)
def test_new_weights_arrive_by_every_way_of_one_gpu(model: Any, engine: Any) -> None:
    for seed in (1, 2):
        randomize(model, seed)
        engine.load_weights(model.named_parameters())
        assert gap(model, engine) < 0.1


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_gives_memory_back_and_is_right_afterwards(model: Any, engine: Any, level: int) -> None:
    engine.load_weights(model.named_parameters())
    awake, _ = torch.cuda.mem_get_info()
    engine.sleep(level)
    asleep, total = torch.cuda.mem_get_info()
    assert asleep - awake > 0.2 * total
    engine.wake_up(weights_only=True)
    if level == 2:
        randomize(model, 3)
        engine.load_weights(model.named_parameters())
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(CONTEXTS, SAMPLED, range(3))
    engine.wake_up()
    assert gap(model, engine) < 0.1


def test_the_same_seeds_repeat_a_sample(model: Any, engine: Any) -> None:
    first, second = (engine.generate(CONTEXTS, SAMPLED, range(3)) for _ in range(2))
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]


def test_new_weights_arrive_by_nccl_from_another_gpu(model: Any, tmp_path: Path) -> None:
    """The engine takes the second GPU, the weights lie on the first."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    ray = pytest.importorskip("ray")
    from functools import partial

    from search_r1.cluster.weight_sync import DeviceSender
    from search_r1.cluster.worker import EngineWorker
    from search_r1.engines.vllm_engine import VLLMEngine
    from search_r1.engines.vllm_senders import DeviceStream
    from search_r1.engines.weights import WeightNames

    class Policy:
        def weights(self) -> Any:
            return model.named_parameters()

    ray.init(num_cpus=2, num_gpus=torch.cuda.device_count(), include_dashboard=False)
    factory = partial(VLLMEngine, str(tmp_path), dtype="bfloat16", gpu_memory_utilization=0.3, weight_transfer="nccl")

    @ray.remote(num_gpus=1)
    class Holder:
        """Holds the GPU that this process computes on."""

    holder = Holder.remote()
    worker = EngineWorker.options(num_gpus=1).remote(factory)  # type: ignore[attr-defined]
    ray.get(worker.ready.remote())
    stream = DeviceStream(WeightNames.of_checkpoint(str(tmp_path)), torch.bfloat16)
    sender = DeviceSender(Policy(), 0, "nccl", stream, 1, 120.0)
    randomize(model, 5)
    sender.send([worker])
    assert gap_of(model, ray.get(worker.generate.remote(CONTEXTS, SAMPLED, [0, 1, 2]))) < 0.1
    ray.kill(holder)
    ray.shutdown()
