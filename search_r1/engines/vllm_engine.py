"""Sampling with vLLM's asynchronous engine, on CUDA or on a CPU. The only module of this process that imports vllm."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from search_r1.engines.stop import decode, end_of_text_ids, new_token_limits
from search_r1.engines.weights import SharedMemoryBuckets, WeightNames
from search_r1.errors import EngineError, EngineLostError
from search_r1.protocols import Weights
from search_r1.types import Completion, FinishReason, SamplingConfig

# Read by vLLM when it is imported; a person's own settings win. "nobind" leaves the threads to OMP_NUM_THREADS.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TRANSFER = "search_r1.engines.shm_weight_transfer"
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class VLLMEngine:
    """A `RolloutEngine` over one vLLM engine, which lives in processes of its own.

    A script that builds one guards its entry with `if __name__ == "__main__"`, since those processes are spawned.

    Log-probs are vLLM's processed ones: at the sampling temperature and, where `top_p` is below 1, renormalised over
    the nucleus (training samples with top_p 1, where they are those of the full distribution). Seeds are used on
    CUDA; vLLM's CPU back-end cannot seed a request, so there only greedy completions are repeated.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        max_batch_size: int = 256,
        max_batch_tokens: int | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        cpu_cache_gib: float = 2.0,
        enforce_eager: bool = False,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            model_path: A Hugging Face folder with its tokenizer.
            dtype: Of weights and arithmetic; `auto` is the checkpoint's.
            max_batch_size: Sequences decoded together.
            max_batch_tokens: Tokens of one scheduling step; None is vLLM's choice.
            max_model_len: Window in tokens; None is the model's.
            tensor_parallel_size: GPUs the model is cut over.
            gpu_memory_utilization: Share of a GPU for weights and cache (CUDA only).
            cpu_cache_gib: GiB of key/value cache (CPU only).
            enforce_eager: No CUDA graphs; always so on a CPU.
            seed: Of the engine's own random draws.
            trust_remote_code: Run model code that comes with the checkpoint.

        Raises:
            EngineError: the engine did not start; the message carries the cause.
        """
        self._on_cpu = current_platform.is_cpu()
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._names = _weight_names(config, trust_remote_code)
        self._eos = sorted(end_of_text_ids(_generation_config(model_path), config, self._tokenizer))
        self._request_ids = itertools.count()
        self._version = 0
        self._broken = ""
        arguments = AsyncEngineArgs(
            model=model_path,
            dtype=dtype,
            max_num_seqs=max_batch_size,
            max_num_batched_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=int(cpu_cache_gib * 2**30) if self._on_cpu else None,
            enforce_eager=enforce_eager or self._on_cpu,
            seed=seed,
            trust_remote_code=trust_remote_code,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            disable_log_stats=True,
            worker_extension_cls=f"{_TRANSFER}.Extension",
            weight_transfer_config=WeightTransferConfig(backend="search_r1_shared_memory"),
        )
        self._launch(arguments)

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion a context, in order; see `RolloutEngine`."""
        self._engine()
        limits = new_token_limits(contexts, sampling.max_new_tokens, self._window)
        return self._call(self._complete_all(contexts, sampling, seeds, limits))

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        """One completion, from any event loop. Cancelling it takes the request out of the engine."""
        self._engine()
        (limit,) = new_token_limits([context], sampling.max_new_tokens, self._window)
        work = self._complete(context, sampling, seed, limit)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def load_weights(self, weights: Weights) -> None:
        """Stream Hugging Face named tensors through shared memory into the engine's processes.

        Requests in flight wait and are computed anew under the new weights; the prefix cache is dropped.

        Raises:
            EngineError: names missing, unknown or of another shape, or the transfer failed. The engine then holds
                neither the old nor the new weights and refuses to sample.
        """
        llm = self._engine()
        try:
            self._call(llm.pause_generation(mode="keep"))
            self._call(llm.start_weight_update())
            for bucket in self._buckets.pack(self._names.fitting(weights)):
                self._call(llm.update_weights(WeightTransferUpdateRequest(update_info=bucket)))
            self._call(llm.finish_weight_update(weight_version=str(self._version + 1)))
            if not self._call(llm.reset_prefix_cache(reset_running_requests=True)):
                raise EngineError("vLLM kept its prefix cache, which was computed under the old weights")
            self._call(llm.resume_generation())
        except BaseException as error:
            self._broken = f"a weight update failed, so its weights are undefined ({error!r})"
            raise
        self._version += 1

    def close(self) -> None:
        """End the engine's processes and free the shared memory. May be called twice."""
        if self._llm is not None:
            self._call(_stop(self._llm))
            self._llm = None
            self._buckets.close()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _launch(self, arguments: AsyncEngineArgs) -> None:
        self._llm: AsyncLLM | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            self._llm = self._call(_start(arguments))
            self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest()))
        except (RuntimeError, ValueError, OSError) as error:
            self.close()
            raise EngineError(f"vLLM did not start with {arguments.model}: {error}") from error
        self._window: int = self._llm.model_config.max_model_len
        self._buckets = SharedMemoryBuckets(self._llm.model_config.dtype)

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the vLLM engine is closed")
        if self._broken:
            raise EngineError(f"the vLLM engine cannot be used: {self._broken}")
        return self._llm

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it; an interruption here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except EngineDeadError as error:
            raise EngineLostError(f"the vLLM engine died: {error}") from error
        finally:
            future.cancel()

    async def _complete_all(
        self,
        contexts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int],
        limits: Sequence[int],
    ) -> list[Completion]:
        tasks = [
            asyncio.create_task(self._complete(context, sampling, seed, limit))
            for context, seed, limit in zip(contexts, seeds, limits, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(
        self, context: Sequence[int], sampling: SamplingConfig, seed: int, max_new_tokens: int
    ) -> Completion:
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=None if self._on_cpu or sampling.temperature == 0 else seed,
            stop=list(sampling.stop),
            stop_token_ids=self._eos,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=0,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(context))
        request = self._engine().generate(prompt, params, f"rollout-{next(self._request_ids)}")
        try:
            outputs = [output async for output in request]
        except EngineDeadError as error:
            raise EngineLostError(f"the vLLM engine died: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed on a context of {len(context)} tokens: {error}") from error
        return self._completion(outputs[-1].outputs[0])

    def _completion(self, output: Any) -> Completion:
        token_ids = tuple(output.token_ids)
        log_probs = tuple(position[token].logprob for position, token in zip(output.logprobs, token_ids, strict=True))
        return Completion(token_ids, log_probs, decode(self._tokenizer, token_ids), finish_reason(output.finish_reason))


def finish_reason(reason: str | None) -> FinishReason:
    """Ours for vLLM's; one that is not known counts as `length`, with a warning, and never ends a job."""
    if reason not in _FINISH_REASONS:
        logger.warning("vLLM finished a request with the reason %r, taken as 'length'", reason)
    return _FINISH_REASONS.get(reason, "length")


async def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Start the engine's processes. On a CPU they run without torch.compile, whose first use would take half a minute
    and a C++ compiler to speed up one small function of the sampler."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    if current_platform.is_cpu():
        os.environ["TORCHDYNAMO_DISABLE"] = before or "1"
    try:
        return AsyncLLM.from_engine_args(arguments)
    finally:
        if before is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)


async def _stop(llm: AsyncLLM) -> None:
    """End the processes, then the tasks that talked to them."""
    llm.shutdown()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _weight_names(config: Any, trust_remote_code: bool) -> WeightNames:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return WeightNames(model)


def _generation_config(model_path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # a folder without generation_config.json
        return None
