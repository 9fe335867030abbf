from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from search_r1.backends.critic import LocalCritic
from search_r1.backends.model import load_causal_lm
from search_r1.backends.policy import BaseReference, LocalPolicy, ReferencePolicy, build_reference
from search_r1.backends.sharding import Replicated
from search_r1.backends.supervised import SupervisedPolicy
from search_r1.config import Config, LoraConfig, ModelConfig, OptimConfig
from search_r1.data.sft_examples import SFTExample
from search_r1.engines.hf_engine import HFEngine
from search_r1.errors import ConfigError
from search_r1.types import SamplingConfig
from tests.batches import random_batch, tiny_training_config
from tests.model_factory import tiny_model, tiny_model_dir, tiny_tokenizer

Folders = dict[bool, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return {tied: str(tiny_model_dir(tmp_path_factory.mktemp("lora"), tied=tied)) for tied in (True, False)}


def lora_config(path: str, rank: int = 4, lr: float = 1e-2, **lora: object) -> Config:
    config = tiny_training_config(path, lr=lr)
    return replace(config, model=replace(config.model, lora=LoraConfig(rank=rank, **lora)))  # type: ignore[arg-type]


def trained_policy(config: Config, steps: int = 2) -> LocalPolicy:
    torch.manual_seed(0)
    policy = LocalPolicy(config, Replicated(), 10)
    for seed in range(steps):
        policy.update(random_batch(seed=seed))
    return policy


@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_stream_is_what_peft_merges(folders: Folders, tmp_path: Path, tied: bool) -> None:
    policy = trained_policy(lora_config(folders[tied]))
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    streamed = dict(policy.weights())
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.module.state_dict().items())
    policy.save(str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(folders[tied], dtype=torch.float32)
    names = list(base.state_dict())
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    assert streamed.keys() == set(names) == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(streamed[name], tensor, atol=1e-6, rtol=0)
    base_weight = load_causal_lm(folders[tied], lora_config(folders[tied]).model).model.layers[0].mlp.up_proj.weight
    assert (streamed["model.layers.0.mlp.up_proj.weight"] - base_weight).abs().max() > 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_after_a_sync_samples_from_the_adapted_model(folders: Folders, tied: bool) -> None:
    config = lora_config(folders[tied])
    policy = trained_policy(config)
    engine = HFEngine(tiny_model(tied=tied, seed=9), tiny_tokenizer())
    engine.load_weights(policy.weights())
    batch = random_batch().rollout
    contexts = [row[:length].tolist() for row, length in zip(batch.input_ids, (4, 5, 6, 7), strict=True)]
    completions = engine.generate(contexts, SamplingConfig(6, temperature=0.7), [0, 1, 2, 3])
    for context, completion in zip(contexts, completions, strict=True):
        ids = torch.tensor([[*context, *completion.token_ids]])
        mask = torch.arange(ids.shape[1])[None] >= len(context)
        log_probs, _ = policy.module(ids, mask, 0.7)
        torch.testing.assert_close(log_probs[0, len(context) :], torch.tensor(completion.log_probs), atol=1e-4, rtol=0)


def test_the_reference_of_an_adapted_policy_is_its_base_and_no_second_model(folders: Folders) -> None:
    config = lora_config(folders[True])
    policy = trained_policy(config)
    reference = build_reference(config, Replicated(), policy)
    assert isinstance(reference, BaseReference)
    batch = random_batch().rollout
    adapted = policy.log_probs(batch)
    plain = ReferencePolicy(tiny_training_config(folders[True]), Replicated()).log_probs(batch)
    assert torch.equal(reference.log_probs(batch), plain)
    assert torch.equal(policy.log_probs(batch), adapted)
    assert (adapted - plain).abs().max() > 1e-3
    assert policy.update(random_batch(seed=5))["actor/grad_norm"] > 0


def test_another_reference_is_a_model_of_its_own(folders: Folders) -> None:
    config = lora_config(folders[True])
    config = replace(config, model=replace(config.model, reference_path=folders[False]))
    assert isinstance(build_reference(config, Replicated(), LocalPolicy(config, Replicated(), 1)), ReferencePolicy)


def test_only_adapters_are_trained_and_the_first_step_starts_from_the_base(folders: Folders) -> None:
    policy = LocalPolicy(lora_config(folders[False]), Replicated(), 1)
    base = dict(ReferencePolicy(tiny_training_config(folders[False]), Replicated()).module.lm.state_dict())
    assert all(torch.equal(base[name], tensor) for name, tensor in policy.weights())
    names = {name for name, parameter in policy.module.named_parameters() if parameter.requires_grad}
    assert names
    assert all(".lora_" in name and "lm_head" not in name for name in names)
    assert sum(len(g["params"]) for g in policy.trainable.optimizer.param_groups) == len(names)


def test_a_saved_adapter_goes_on_exactly_and_is_small(folders: Folders, tmp_path: Path) -> None:
    config = lora_config(folders[True])
    first = trained_policy(config)
    first.save(str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "model.safetensors").exists()
    torch.manual_seed(1)
    second = LocalPolicy(config, Replicated(), 10)
    second.load(str(tmp_path))
    assert first.update(random_batch(seed=7)) == second.update(random_batch(seed=7))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.weights(), second.weights(), strict=True))


def test_an_adapted_critic_trains_its_head_too_and_goes_on_exactly(folders: Folders, tmp_path: Path) -> None:
    config = lora_config(folders[True])
    torch.manual_seed(0)
    first, second = (LocalCritic(config, Replicated(), 10) for _ in range(2))
    first.update(random_batch(seed=1))
    first.update(random_batch(seed=2))
    assert first.module.value_head.weight.abs().max() > 0
    first.save(str(tmp_path))
    saved = torch.load(tmp_path / "critic.pt", weights_only=True)
    assert all(".lora_" in name or name.startswith("value_head.") for name in saved)
    second.load(str(tmp_path))
    assert first.update(random_batch(seed=3)) == second.update(random_batch(seed=3))


def test_save_pretrained_writes_the_merged_model(folders: Folders, tmp_path: Path) -> None:
    policy = trained_policy(lora_config(folders[True]))
    policy.save_pretrained(str(tmp_path))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in policy.weights())


def test_fine_tuned_adapters_are_saved_merged(folders: Folders, tmp_path: Path) -> None:
    model = ModelConfig(path=folders[True], lora=LoraConfig(rank=4))
    learner = SupervisedPolicy(
        model, OptimConfig(lr=1e-2), Replicated(), 4, pad_token_id=0, max_tokens_per_micro_batch=99
    )
    examples = [SFTExample((5, 6, 7, 8), (False, False, True, True))]
    before = learner.loss(examples)
    for _ in range(3):
        learner.update(examples)
    learner.save_pretrained(str(tmp_path))
    plain = ModelConfig(path=str(tmp_path))
    again = SupervisedPolicy(plain, OptimConfig(), Replicated(), 1, pad_token_id=0, max_tokens_per_micro_batch=99)
    assert again.loss(examples) == pytest.approx(learner.loss(examples), abs=1e-5)
    assert learner.loss(examples) < before - 0.1


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("layers.1.mlp.up_proj",)])
def test_adapters_stand_where_they_were_asked_for(folders: Folders, targets: tuple[str, ...]) -> None:
    policy = LocalPolicy(lora_config(folders[True], targets=targets), Replicated(), 1)
    adapted = {n.split(".lora_")[0] for n, p in policy.module.named_parameters() if p.requires_grad}
    assert len(adapted) == (4 if len(targets) == 2 else 1)
    assert all(name.endswith(targets) for name in adapted)


@pytest.mark.parametrize("targets", [(), ("q_prj",), ("q_proj", "query"), ("lm_head",)])
def test_targets_that_match_nothing_are_named_beside_what_there_is(folders: Folders, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model.lora.targets.*down_proj, gate_proj, k_proj"):
        LocalPolicy(lora_config(folders[False], targets=targets), Replicated(), 1)


def test_a_checkpoint_of_another_architecture_is_refused_with_both_named(folders: Folders, tmp_path: Path) -> None:
    other = str(tiny_model_dir(tmp_path / "other", "qwen3"))
    wide = str(tiny_model_dir(tmp_path / "wide", intermediate_size=160))
    LocalPolicy(tiny_training_config(other), Replicated(), 1).save(str(tmp_path / "saved"))
    LocalPolicy(tiny_training_config(wide), Replicated(), 1).save(str(tmp_path / "saved_wide"))
    policy = LocalPolicy(tiny_training_config(folders[True]), Replicated(), 1)
    with pytest.raises(ConfigError, match=r"saved does not fit .*bias is missing.*model.path"):
        policy.load(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"has shape \(160, 64\), not \(128, 64\)"):
        policy.load(str(tmp_path / "saved_wide"))


def test_a_checkpoint_with_and_one_without_adapters_are_told_apart(folders: Folders, tmp_path: Path) -> None:
    plain, adapted = tiny_training_config(folders[True]), lora_config(folders[True])
    LocalPolicy(plain, Replicated(), 1).save(str(tmp_path / "plain"))
    LocalPolicy(adapted, Replicated(), 1).save(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="without LoRA"):
        LocalPolicy(adapted, Replicated(), 1).load(str(tmp_path / "plain"))
    with pytest.raises(ConfigError, match="holds a LoRA adapter"):
        LocalPolicy(plain, Replicated(), 1).load(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=4"):
        LocalPolicy(lora_config(folders[True], rank=8), Replicated(), 1).load(str(tmp_path / "adapter"))
    fewer = lora_config(folders[True], targets=("q_proj",))
    with pytest.raises(ConfigError, match="does not fit"):
        LocalPolicy(fewer, Replicated(), 1).load(str(tmp_path / "adapter"))
