"""Checkpoints of either kind of training as plain model folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1 import sft
from search_r1.backends.model import check_model_folder
from search_r1.backends.policy import LocalPolicy
from search_r1.backends.sharding import Replicated
from search_r1.config import LoraConfig, ModelConfig
from search_r1.errors import ConfigError
from search_r1.merge_adapter import main as merge
from tests.batches import random_batch, tiny_training_config
from tests.model_factory import tiny_model_dir, tiny_tokenizer

IDS = torch.tensor([[5, 9, 13, 17, 3, 4, 8, 2]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("base")))


def logits(folder: Path | str, adapter: Path | None = None) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)) if adapter else model
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def saved_policy(base: str, folder: Path, lora: LoraConfig | None = None) -> LocalPolicy:
    """Two updates of reinforcement learning, saved as a checkpoint of a run."""
    config = tiny_training_config(base, lr=1e-2)
    policy = LocalPolicy(replace(config, model=ModelConfig(base, lora=lora or LoraConfig())), Replicated(), 10)
    for seed in range(2):
        policy.update(random_batch(seed=seed))
    policy.save(str(folder / "policy"))
    tiny_tokenizer().save_pretrained(folder / "policy")
    return policy


@pytest.fixture(scope="module")
def tuned(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fine-tuning of adapters, whose last step is a checkpoint too."""
    folder = tmp_path_factory.mktemp("lora")
    row = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "<answer> a </answer>"}]}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 6)
    arguments = [f"model.path={base}", f"data.train_files=[{folder}/rows.jsonl]", f"output_dir={folder}/tuned"]
    settings = ["model.lora.rank=4", "optim.lr=1e-2", "training.total_steps=4", "trainer.save_every_steps=2"]
    assert sft.main([*arguments, *settings]) == 0
    return folder / "tuned"


def test_a_merged_model_has_the_logits_of_the_adapted_one(
    base: str, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tuned / "checkpoints" / "step_000004"
    assert merge([str(checkpoint), str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().err.endswith(f"wrote {tmp_path}/merged\n")
    adapted, merged = logits(base, checkpoint / "policy"), logits(tmp_path / "merged")
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(tuned), adapted, atol=1e-4, rtol=0)
    assert (adapted - logits(base)).abs().max() > 0.01


def test_weights_may_be_read_by_whom_their_config_may(tuned: Path) -> None:
    policy = tuned / "checkpoints" / "step_000004" / "policy"
    for folder, weights, config in (
        (tuned, "model.safetensors", "config.json"),
        (policy, "adapter_model.safetensors", "adapter_config.json"),
    ):
        assert (folder / weights).stat().st_mode == (folder / config).stat().st_mode


def test_a_run_given_as_a_model_is_refused_with_the_folder_of_its_newest_model(base: str, tmp_path: Path) -> None:
    step = shutil.copytree(base, tmp_path / "run/checkpoints/step_000003/policy").parent
    for folder in (tmp_path / "run", step):
        with pytest.raises(ConfigError, match=f"{folder} holds a training run, .* its checkpoint, {step}/policy"):
            check_model_folder(str(folder))
    saved_policy(base, tmp_path / "run/checkpoints/step_000004", LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"step_000004/policy holds a LoRA adapter, .*merge_adapter"):
        check_model_folder(str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_loads_what_was_merged(tuned: Path, tmp_path: Path) -> None:
    from search_r1.engines.vllm_engine import VLLMEngine
    from search_r1.types import SamplingConfig

    assert merge([str(tuned / "checkpoints" / "step_000004"), str(tmp_path / "merged")]) == 0
    engine = VLLMEngine(str(tmp_path / "merged"), dtype="float32", max_batch_size=4, cpu_cache_gib=0.25)
    try:
        (completion,) = engine.generate([IDS[0].tolist()], SamplingConfig(6, temperature=0.0), [0])
    finally:
        engine.close()
    ids = torch.tensor([[*IDS[0].tolist(), *completion.token_ids]])
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)(ids).logits
    assert scores[0, IDS.shape[1] - 1 : -1].argmax(-1).tolist() == list(completion.token_ids)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)])
def test_a_checkpoint_of_reinforcement_learning_becomes_the_model_that_was_trained(
    base: str, tmp_path: Path, lora: LoraConfig
) -> None:
    policy = saved_policy(base, tmp_path / "run" / "checkpoints" / "step_000002", lora)
    assert merge([str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    check_model_folder(str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in policy.weights():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)
    assert not (tmp_path / "merged" / "optimizer.pt").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tiny_tokenizer().chat_template


def test_the_newest_checkpoint_of_a_run_and_the_asked_precision_are_taken(base: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved_policy(base, run / "checkpoints" / "step_000002")
    newest = saved_policy(base, run / "checkpoints" / "step_000010", LoraConfig(rank=2))
    assert merge([str(run), str(tmp_path / "merged"), "--dtype", "bfloat16"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in newest.weights():
        assert torch.equal(merged[name], tensor.bfloat16())


def test_a_base_model_that_moved_can_be_named(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = shutil.copytree(base, tmp_path / "moved")
    saved_policy(str(moved), tmp_path / "saved", LoraConfig(rank=2))
    shutil.rmtree(moved)
    assert merge([str(tmp_path / "saved"), str(tmp_path / "merged")]) == 2
    assert "--base names the model" in capsys.readouterr().err
    assert merge([str(tmp_path / "saved"), str(tmp_path / "merged"), "--base", base]) == 0


def test_what_cannot_be_merged_is_told_in_a_sentence(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_policy(base, tmp_path / "saved", LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="merge_adapter"):
        check_model_folder(str(tmp_path / "saved" / "policy"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    for arguments, words in (
        ([str(tmp_path / "saved"), str(tmp_path / "full")], "not empty"),
        ([str(tmp_path / "full"), str(tmp_path / "new")], "holds neither an adapter"),
        ([str(tmp_path / "gone"), str(tmp_path / "new")], "does not exist"),
        ([base, str(tmp_path / "new"), "--base", base], "would have no effect"),
    ):
        assert merge(arguments) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
