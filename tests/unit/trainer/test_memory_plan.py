from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.backends.model import model_size, role_sizes, sequence_cost
from search_r1.compose import compose_config
from search_r1.config import Config, LoraConfig
from search_r1.data.model_size import ModelSize
from search_r1.main import main
from search_r1.trainer.memory_plan import GIB, Row, memory_plan, remedies, render
from tests.model_factory import tiny_model, tiny_model_dir

SEVEN_B = ModelSize(7_600_000_000, 1_090_000_000, 0, layers=28, hidden=3584, attention_width=3584)
SIZES = {"policy": SEVEN_B, "reference": SEVEN_B}


def configured(*overrides: str) -> Config:
    return compose_config("grpo", ["rollout.group_size=5", "engine.name=vllm", "cluster.gpus_per_worker=1", *overrides])


def row(config: Config, name: str, gpu_gib: float = 80) -> Row:
    return next(r for r in memory_plan(config, SIZES, gpu_gib * GIB).rows if r.name.startswith(name))


def test_weights_gradients_and_moments_are_counted_as_float32() -> None:
    config = configured()
    assert row(config, "policy: weights").training == 4 * 7.6e9
    assert row(config, "policy: gradients").training == 4 * 7.6e9
    assert row(config, "policy: optimizer").training == 8 * 7.6e9
    assert row(config, "reference: weights").training == 4 * 7.6e9
    assert row(config, "policy: gradients").generating == 0


@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (2, 4), (4, 2)])
def test_full_and_hybrid_sharding_divide_by_the_workers_of_one_copy(replicas: int, shards: int) -> None:
    config = configured("sharding.name=fsdp2", "cluster.num_workers=8", f"sharding.replicas={replicas}")
    assert row(config, "policy: optimizer").training == 8 * 7.6e9 / shards
    assert row(replace(config, sharding=replace(config.sharding, cpu_offload=True)), "policy: optimizer").training == 0


def test_adapters_alone_need_gradients_and_moments() -> None:
    sizes = {"policy": replace(SEVEN_B, adapters=40_000_000)}
    rows = {r.name: r.training for r in memory_plan(configured(), sizes, 80 * GIB).rows}
    assert rows["policy: weights"] == 4 * 7.64e9
    assert rows["policy: optimizer"] == 8 * 4e7
    assert not any(name.startswith("reference") for name in rows)


def test_engine_and_trainer_take_turns_where_asked_to() -> None:
    shared = configured("cluster.gpus_per_worker=0.5", "engine.gpu_memory_utilization=0.5")
    for phase in ("training", "sync", "generating"):
        engine = [getattr(row(shared, name), phase) for name in ("engine: weights", "engine: cache")]
        assert engine == [4 * 7.6e9, 40 * GIB - 4 * 7.6e9]
    turns = configured(
        "cluster.gpus_per_worker=0.5", "engine.sleep_while_training=true", "policy.offload_while_generating=true"
    )
    assert row(turns, "engine: weights").training == row(turns, "engine: cache").training == 0
    assert row(turns, "policy: weights").generating == 0
    assert row(turns, "engine: weights").sync > 0
    assert row(turns, "engine: cache").sync == 0, "it wakes for its weights first"
    assert row(turns, "policy: weights").sync > 0
    assert not any(r.name.startswith("engine") for r in memory_plan(configured(), SIZES, 80 * GIB).rows)


def test_an_engine_on_gpus_of_its_own_is_told_its_weights_and_what_is_left_for_its_cache() -> None:
    config = configured("model.dtype=bfloat16", "engine.tensor_parallel_size=2", "engine.gpu_memory_utilization=0.5")
    plan = memory_plan(config, SIZES, 80 * GIB)
    assert plan.engine_weights == 7.6e9
    assert plan.engine_cache == 40 * GIB - 7.6e9
    assert "7.08 GiB of weights on each of its GPUs and leaves about 32.92 GiB for its cache" in render(plan, [])
    crowded = render(memory_plan(config, SIZES, 14 * GIB), [])
    assert "An engine will not start" in crowded
    assert "engine.gpu_memory_utilization or engine.tensor_parallel_size" in crowded


def test_a_plan_that_does_not_fit_names_settings_that_make_it_fit() -> None:
    config = configured("cluster.num_workers=8", "model.dtype=bfloat16")
    assert not memory_plan(config, SIZES, 80 * GIB).fits
    advice = remedies(config, SIZES, 80 * GIB)
    assert advice[0] == "sharding.name=fsdp2"
    settings = [setting for change in advice for setting in change.split()]
    changed = configured("cluster.num_workers=8", "model.dtype=bfloat16", *settings)
    assert memory_plan(changed, SIZES, 80 * GIB).fits
    for left_out in settings:
        fewer = [setting for setting in settings if setting != left_out]
        assert not memory_plan(
            configured("cluster.num_workers=8", "model.dtype=bfloat16", *fewer), SIZES, 80 * GIB
        ).fits, f"{left_out} was not needed"


def test_activations_follow_the_micro_batches_of_the_models_that_are_trained() -> None:
    config = configured()
    short = replace(config, policy=replace(config.policy, max_tokens_per_micro_batch=4096))
    grpo, ppo = {"policy": SEVEN_B}, {"policy": SEVEN_B, "critic": SEVEN_B}

    def activations(config: Config, sizes: dict[str, ModelSize]) -> float:
        return next(r.training for r in memory_plan(config, sizes, GIB).rows if r.name.startswith("activations"))

    assert activations(short, grpo) < activations(config, grpo)
    assert activations(short, ppo) == activations(config, ppo)
    short = replace(short, critic=replace(config.critic, max_tokens_per_micro_batch=4096))
    assert activations(short, ppo) == activations(short, grpo)


@pytest.mark.parametrize(
    ("setting", "gpu_gib"), [("rollout.max_staleness=1", 80), ("policy.optim.name=muon", 192)], ids=["stale", "muon"]
)
def test_advice_is_what_the_checks_allow_and_enough(setting: str, gpu_gib: int) -> None:
    settings = [setting, "cluster.num_workers=8", "cluster.gpus_per_worker=0.5", "model.dtype=bfloat16"]
    advice = [one for change in remedies(configured(*settings), SIZES, gpu_gib * GIB) for one in change.split()]
    assert advice
    assert memory_plan(configured(*settings, *advice), SIZES, gpu_gib * GIB).fits


def test_what_fits_gets_no_advice_and_what_cannot_fit_says_so() -> None:
    small = {"policy": replace(SEVEN_B, parameters=5 * 10**8, embeddings=10**8, hidden=896)}
    assert remedies(configured(), small, 80 * GIB) == []
    assert "It fits" in render(memory_plan(configured(), small, 80 * GIB), [])
    huge = {"policy": replace(SEVEN_B, parameters=10**12, embeddings=10**11)}
    assert remedies(configured(), huge, 80 * GIB) == []
    assert "No setting is enough" in render(memory_plan(configured(), huge, 80 * GIB), [])


@pytest.mark.parametrize("tied", [True, False])
def test_models_are_counted_without_being_made(tmp_path: Path, tied: bool) -> None:
    path = str(tiny_model_dir(tmp_path, tied=tied))
    (tmp_path / "model.safetensors").unlink()
    model = tiny_model(tied=tied)
    size = model_size(path)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.embeddings == (1 if tied else 2) * model.get_input_embeddings().weight.numel()
    assert (size.layers, size.hidden, size.attention_width, size.adapters) == (2, 64, 64, 0)
    adapted = model_size(path, lora=LoraConfig(rank=4, targets=("q_proj",)))
    assert adapted.adapters == 2 * (4 * 64 + 64 * 4)
    assert adapted.parameters == size.parameters
    cost = sequence_cost(path)
    assert cost(10) == pytest.approx(10 + 100 * 2 * 64 / (size.parameters - size.embeddings))


def test_the_roles_of_a_run_are_those_that_hold_a_model(tmp_path: Path) -> None:
    path = f"model.path={tiny_model_dir(tmp_path)}"
    assert role_sizes(configured(path), True).keys() == {"policy", "reference"}
    assert role_sizes(configured(path, "model.lora.rank=4"), True).keys() == {"policy"}
    assert role_sizes(configured(path, "algorithm.advantage=gae"), False).keys() == {"policy", "critic"}


def test_the_plan_is_shown_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--show-memory-plan", "--gpu-gib", "0.001", f"model.path={tiny_model_dir(tmp_path)}"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "policy: optimizer" in shown
    assert "It will not fit" in shown
