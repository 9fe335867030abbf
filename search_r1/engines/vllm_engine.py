"""Sampling with vLLM's asynchronous engine, on CUDA or on a CPU. The only module of this process that imports vllm."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from search_r1.engines.sleep import KEEP_WEIGHTS, SleepState
from search_r1.engines.stop import decode, end_of_text_ids, new_token_limits
from search_r1.engines.weights import WeightNames
from search_r1.errors import EngineError, EngineLostError
from search_r1.protocols import Weights
from search_r1.types import Completion, FinishReason, SamplingConfig

# Read by vLLM when it is imported; a person's own settings win. "nobind" leaves the threads to OMP_NUM_THREADS.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    TrainerWeightTransferEngine,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from search_r1.engines.vllm_senders import BACKENDS, DeviceStream, Stream, Way, open_sender

logger = logging.getLogger(__name__)
T = TypeVar("T")
_WORKER_EXTENSION = "search_r1.engines.shm_weight_transfer.Extension"
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class VLLMEngine:
    """A `RolloutEngine` over one vLLM engine, which lives in processes of its own.

    A script that builds one guards its entry with `if __name__ == "__main__"`, since those processes are spawned.

    Log-probs are vLLM's processed ones: at the sampling temperature and, where `top_p` is below 1, renormalised over
    the nucleus (training samples with top_p 1, where they are those of the full distribution). Seeds are used on
    CUDA; vLLM's CPU back-end cannot seed a request, so there only greedy completions are repeated.

    Weights come through `load_weights`, or from another process that drives `init_weight_transfer_engine`,
    `start_weight_update`, `update_weights` and `finish_weight_update`: the engine is a `VLLMWeightSyncClient`.
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
        weight_transfer: Way = "shm",
        sleep_mode: bool = False,
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
            weight_transfer: How weights come: through shared memory, CUDA IPC from a process on the same GPU, or NCCL
                from a process on another one.
            sleep_mode: `sleep` will be called. On a CPU it frees nothing.
            seed: Of the engine's own random draws.
            trust_remote_code: Run model code that comes with the checkpoint.

        Raises:
            EngineError: the engine did not start; the message carries the cause, or says that vLLM logged it above.
        """
        self._on_cpu = current_platform.is_cpu()
        self._read(model_path, trust_remote_code)
        self._way: Way = weight_transfer
        self._sleep_mode = sleep_mode
        self._launch(
            model=model_path,
            dtype=dtype,
            max_num_seqs=max_batch_size,
            max_num_batched_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=int(cpu_cache_gib * 2**30) if self._on_cpu else None,
            enforce_eager=enforce_eager or self._on_cpu,
            enable_sleep_mode=sleep_mode and not self._on_cpu,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )

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

    def score(
        self, contexts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[list[float]]:
        """Log-probs of each context's candidates as its next token; see `ScoringEngine`."""
        self._engine()
        new_token_limits(contexts, 1, self._window)
        return self._call(self._score_all(contexts, candidates, sampling))

    def forget(self) -> None:
        """Drop the prefix cache; requests in flight are computed anew."""
        if not self._call(self._living().reset_prefix_cache(reset_running_requests=True)):
            raise EngineError("vLLM kept its prefix cache")

    def sleep(self, level: int = KEEP_WEIGHTS) -> None:
        """Give device memory back once the requests in flight are done. See `engines.sleep` for the levels.

        Raises:
            EngineError: the engine was started without `sleep_mode`.
        """
        llm = self._living()
        if not self._sleep_mode:
            raise EngineError("the engine was started without sleep mode: set engine.sleep_while_training=true")
        self._sleep.fall_asleep(level)
        self._call(llm.sleep(level=level, mode="wait"))

    def wake_up(self, weights_only: bool = False) -> None:
        """Take device memory again; with `weights_only` just what new weights need."""
        self._call(self._living().wake_up(tags=["weights"] if weights_only else None))
        self._sleep.wake_up(weights_only)

    def load_weights(self, weights: Weights) -> None:
        """Stream Hugging Face named tensors into the engine's processes.

        Requests in flight wait and are computed anew under the new weights; the prefix cache is dropped.

        Raises:
            EngineError: names missing, unknown or of another shape, or the transfer failed. The engine then holds
                neither the old nor the new weights and refuses to sample.
        """
        self._living()
        self._sleep.check_may_load()
        with self._undefined_on_error():
            if self._sender is None:
                self._sender = open_sender(self._way, self, self._stream)
            self._stream.weights = weights
            self._sender.send_weights()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Agree with a sender on the way; an earlier sender's is given up."""
        self._call(self._living().shutdown_weight_transfer_engine())
        self._call(self._living().init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        llm = self._living()
        self._sleep.check_may_load()
        with self._undefined_on_error():
            self._call(llm.pause_generation(mode="keep"))
            self._call(llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """One bucket; what it holds is up to the way."""
        with self._undefined_on_error():
            self._call(self._living().update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All weights have come: nothing is sampled under others any more."""
        llm = self._living()
        with self._undefined_on_error():
            self._call(llm.finish_weight_update(weight_version or str(self._version + 1)))
            self.forget()
            self._call(llm.resume_generation())
        self._version += 1
        self._sleep.take_weights()

    @contextmanager
    def _undefined_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            kind = EngineLostError if isinstance(error, EngineLostError) else EngineError
            cause = f"the vLLM engine cannot be used: a weight update failed, so its weights are undefined ({error!r})"
            self._broken = self._broken or kind(cause)
            raise

    def close(self) -> None:
        """End the engine's processes and free the shared memory. May be called twice."""
        if self._llm is not None:
            self._call(_stop(self._llm))
            self._llm = None
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _read(self, model_path: str, trust_remote_code: bool) -> None:
        """What the engine has to know of a model beside its weights."""
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._names = WeightNames.of_checkpoint(model_path, trust_remote_code)
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._eos = sorted(end_of_text_ids(_generation_config(model_path), config, self._tokenizer))

    def _launch(self, **chosen: Any) -> None:
        """Start vLLM with what was chosen and what has to be so."""
        if self._way == "ipc":  # its handles are Python objects, which go to the engine's own processes only
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        arguments = AsyncEngineArgs(
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            disable_log_stats=True,
            worker_extension_cls=_WORKER_EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=BACKENDS[self._way]),
            **chosen,
        )
        self._request_ids = itertools.count()
        self._version = 0
        self._broken: EngineError | None = None
        self._sleep = SleepState()
        self._sender: TrainerWeightTransferEngine[Any] | None = None
        self._llm: AsyncLLM | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            self._llm = self._call(_start(arguments))
        except (RuntimeError, ValueError, OSError) as error:
            self.close()
            raise EngineError(f"vLLM did not start with {arguments.model}: {error}") from error
        self._window: int = self._llm.model_config.max_model_len
        kind = Stream if self._on_cpu else DeviceStream
        self._stream = kind(self._names, self._llm.model_config.dtype)

    def _living(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the vLLM engine is closed")
        if self._broken:
            raise type(self._broken)(str(self._broken))
        return self._llm

    def _engine(self) -> AsyncLLM:
        """The engine, fit for sampling."""
        llm = self._living()
        self._sleep.check_may_sample()
        return llm

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
        params = self._params(
            sampling,
            seed,
            max_tokens=max_new_tokens,
            stop=list(sampling.stop),
            stop_token_ids=self._eos,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=0,
            detokenize=bool(sampling.stop),
        )
        return self._completion(await self._request(context, params))

    async def _score_all(
        self, contexts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[list[float]]:
        async def score(context: Sequence[int], tokens: Sequence[int]) -> list[float]:
            params = self._params(sampling, 0, max_tokens=1, logprob_token_ids=list(tokens), detokenize=False)
            (found,) = (await self._request(context, params)).logprobs
            return [found[token].logprob for token in tokens]

        return await asyncio.gather(*map(score, contexts, candidates))

    def _params(self, sampling: SamplingConfig, seed: int, **others: Any) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=None if self._on_cpu or sampling.temperature == 0 else seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **others,
        )

    async def _request(self, context: Sequence[int], params: SamplingParams) -> Any:
        prompt = TokensPrompt(prompt_token_ids=list(context))
        request = self._engine().generate(prompt, params, f"rollout-{next(self._request_ids)}")
        try:
            outputs = [output async for output in request]
        except EngineDeadError as error:
            raise EngineLostError(f"the vLLM engine died: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed on a context of {len(context)} tokens: {error}") from error
        return outputs[-1].outputs[0]

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


def _generation_config(model_path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # a folder without generation_config.json
        return None
