"""The process of one rollout engine: vLLM's engine core in a loop that answers its owner between two decoding steps.

Running vLLM here, and not beside Megatron, keeps the two uses of torch.distributed apart. Everything the owner asks for
happens between steps, so a weight update sees no half-computed token and needs no locks.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from copy import copy
from multiprocessing.connection import Connection
from typing import Any

from megatron_dapo.rollout.processes import end_group
from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling
from megatron_dapo.rollout.spec import EngineSpec, vllm_arguments
from megatron_dapo.rollout.wire import pack_generations, unpack_requests

IDLE_SECONDS = 1.0  # how often an idle engine looks whether its workers live


class Server:
    """vLLM's engine and what its owner's commands do to it. Every public method is a command."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self.on_cpu = current_platform.is_cpu()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**vllm_arguments(spec, self.on_cpu)))
        self.engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self.records_routing = spec.routed_experts and self.on_cpu  # on GPU vLLM brings it with its outputs
        if self.records_routing:
            self.engine.collective_rpc("megatron_dapo_record_routing")
        self.version = 0
        self.engine.engine_core.set_weight_version("0")
        self.internal_ids: dict[str, str] = {}
        self.paused = False
        self.broken: str | None = None
        self.results: list[Generation] = []

    @property
    def busy(self) -> bool:
        return not self.paused and self.engine.has_unfinished_requests()

    @property
    def lost_worker(self) -> bool:
        """Whether a tensor-parallel worker process is gone, and this engine with it."""
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor = self.engine.model_executor
        return isinstance(executor, MultiprocExecutor) and executor.is_failed

    def describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "max_model_len": self.engine.vllm_config.model_config.max_model_len,
            "version": self.version,
            "shared_memory": sorted(set(self.engine.collective_rpc("megatron_dapo_shared_memory"))),
        }

    def submit(self, packed: dict[str, Any]) -> None:
        if self.broken is not None:
            raise RuntimeError(f"this engine generates nothing until it has complete weights again: {self.broken}")
        added: list[str] = []
        try:
            for request in self._core_requests(unpack_requests(packed)):
                self.engine.output_processor.add_request(request, None, None, 0)
                added.append(request.request_id)
                self.internal_ids[request.external_req_id] = request.request_id
                self.engine.engine_core.add_request(request)
        except Exception:  # all of a submission is accepted or none
            self.engine.abort_request(added, internal=True)
            self.internal_ids = {k: v for k, v in self.internal_ids.items() if v not in added}
            raise

    def _core_requests(self, requests: list[GenerationRequest]) -> Iterator[Any]:
        """vLLM's request objects. Its checks and conversions, most of the cost, run once per prompt and sampling."""
        from vllm.inputs import tokens_input

        processor, tasks = self.engine.input_processor, self.engine.get_supported_tasks()
        templates: dict[tuple[Any, ...], Any] = {}
        for request in requests:
            key = (request.prompt_ids, request.sampling, request.priority)
            if key not in templates:
                prompt = tokens_input(list(request.prompt_ids))
                params = sampling_params(request.sampling)
                templates[key] = processor.process_inputs("", prompt, params, tasks, priority=request.priority)
            made = copy(templates[key])
            made.request_id = request.request_id
            made.sampling_params = copy(made.sampling_params)
            made.sampling_params.seed = request.seed
            processor.assign_request_id(made)
            yield made

    def step(self) -> None:
        finished = [output for output in self.engine.step() if output.finished]
        internal = [self.internal_ids.pop(output.request_id) for output in finished]
        lengths = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in finished]
        for output, routing in zip(finished, self._routing(internal, lengths), strict=True):
            self.results.append(generation(output, routing))

    def abort(self, request_ids: list[str] | None) -> int:
        """End requests now; what they have sampled so far comes back as generations that finished by "abort"."""
        wanted = list(self.internal_ids) if request_ids is None else [i for i in request_ids if i in self.internal_ids]
        internal = [self.internal_ids.pop(request_id) for request_id in wanted]
        states = [self.engine.output_processor.request_states[i] for i in internal]
        lengths = [state.prompt_len + state.detokenizer.num_output_tokens() - 1 for state in states]
        for request_id, state, routing in zip(wanted, states, self._routing(internal, lengths), strict=True):
            self.results.append(partial_generation(request_id, state, routing))
        self.engine.abort_request(internal, internal=True)
        return len(wanted)

    def _routing(self, internal_ids: list[str], lengths: list[int]) -> list[Any]:
        """Recorded routing of requests that are ending; their cache blocks are still theirs until the next step."""
        if not self.records_routing or not internal_ids:
            return [None] * len(internal_ids)
        wanted = list(zip(internal_ids, lengths, strict=True))
        return self.engine.collective_rpc("megatron_dapo_routing", args=(wanted,))[0]

    def pause(self) -> None:
        self.paused = True
        self._drain()

    def resume(self) -> None:
        self.paused = False

    def sleep(self) -> None:
        """Give up the KV cache and the weights: the next push brings them. # untested on GPU"""
        if not self.on_cpu:
            self.engine.sleep(level=2)
            self.broken = "it is asleep"

    def wake(self, *parts: str) -> None:
        if not self.on_cpu:
            self.engine.wake_up(list(parts))

    def layouts(self) -> list[Any]:
        return self.engine.collective_rpc("megatron_dapo_layout")

    def export_slots(self, nbytes: int) -> list[Any]:
        return self.engine.collective_rpc("megatron_dapo_export_slots", args=(nbytes,))

    def update_weights(self, infos: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        """Load one pushed set of weights; a failure leaves an engine that refuses to generate."""
        self._drain()
        self.broken = "its last weight update did not reach its end"
        try:
            self.engine.collective_rpc("start_weight_update")
            self.engine.collective_rpc("update_weights", kwargs={"update_info": infos})
            self.engine.collective_rpc("finish_weight_update")
        except Exception as error:
            self.broken = f"its last weight update failed ({type(error).__name__}: {error})"
            raise
        self.broken = None
        self.version = version
        self.engine.engine_core.set_weight_version(str(version))
        # requests in flight are recomputed from their tokens, so that no key or value of the old weights stays
        self.engine.reset_prefix_cache(reset_running_requests=True)
        return self.engine.collective_rpc("megatron_dapo_report")

    def _drain(self) -> None:
        """With asynchronous scheduling a batch may still be under way; finish it, start no other. # untested on GPU"""
        core = self.engine.engine_core.engine_core
        if core.batch_queue:
            core.pause_scheduler(mode="keep", clear_cache=False)
            while core.batch_queue:
                self.step()
            core.resume_scheduler()


def sampling_params(wanted: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        max_tokens=wanted.max_tokens,
        stop=list(wanted.stop),
        stop_token_ids=list(wanted.stop_token_ids),
        ignore_eos=wanted.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(wanted.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generation(output: Any, routing: Any) -> Generation:
    """A finished `RequestOutput` of vLLM as ours, with the routing that we recorded, if we did."""
    sample = output.outputs[0]
    spans = sample.weight_versions or []
    return Generation(
        request_id=output.request_id,
        token_ids=tuple(sample.token_ids),
        logprobs=tuple(sample.logprobs.logprobs),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        weight_versions=tuple(int(s.version) for s in spans for _ in range(s.start, s.end)),
        routed_experts=sample.routed_experts if routing is None else routing,
        speculation=speculation(sample.spec_decode_metrics),
    )


def speculation(told: Any) -> tuple[int, int, int] | None:
    """Drafted tokens, accepted ones and verification steps, from vLLM's `RequestSpecDecodeMetrics` of a request.

    None without speculation. vLLM tells it only with the end of a request: of an interrupted one it is not known.
    """
    if told is None:
        return None
    accepted = sum(number * steps for number, steps in enumerate(told.histogram))
    return told.num_draft_tokens, accepted, sum(told.histogram)


def partial_generation(request_id: str, state: Any, routing: Any) -> Generation:
    """What an unfinished request has sampled so far, from vLLM's `RequestState`."""
    tokens = tuple(state.detokenizer.output_token_ids)
    starts = state.weight_version_starts
    ends = [*[start for _, start in starts[1:]], len(tokens)] if starts else []  # none: it has not begun
    versions = tuple(int(v) for (v, start), end in zip(starts, ends, strict=True) for _ in range(start, end))
    logprobs = tuple(state.logprobs_processor.logprobs.logprobs)
    return Generation(request_id, tokens, logprobs, "abort", None, versions, routing)


COMMANDS: dict[str, Callable[..., Any]] = {
    "describe": Server.describe,
    "submit": Server.submit,
    "abort": Server.abort,
    "pause": Server.pause,
    "resume": Server.resume,
    "sleep": Server.sleep,
    "wake": Server.wake,
    "layouts": Server.layouts,
    "export_slots": Server.export_slots,
    "update_weights": Server.update_weights,
}


def serve(connection: Connection, server: Server) -> None:
    """Answer commands and step the engine until the owner says close or is gone."""
    while True:
        while connection.poll(0 if server.busy or server.results else IDLE_SECONDS):
            command, ticket, arguments = connection.recv()
            if command == "close":
                return
            try:
                connection.send(("answer", ticket, COMMANDS[command](server, *arguments)))
            except Exception as error:
                if server.lost_worker:
                    raise
                connection.send(("error", ticket, (f"{type(error).__name__}: {error}", traceback.format_exc())))
        if server.lost_worker:
            raise RuntimeError("a tensor-parallel worker process of vLLM died")
        if server.busy:
            server.step()
        if server.results:
            connection.send(("results", None, pack_generations(server.results)))
            server.results.clear()


def die_with(parent: int) -> None:
    """End this process group when the owner is gone: pipe EOF alone is not noticed while vLLM is starting."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end_group(os.getpgrp())

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    parent = int(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's; it closes us
    logging.getLogger("vllm").addHandler(logging.NullHandler())  # what it says before it has read its logging level
    spec: EngineSpec = connection.recv()
    if spec.cpus is not None:
        os.sched_setaffinity(0, spec.cpus)
    code = 0
    try:
        server = Server(spec)
        gc.collect()
        gc.freeze()  # vLLM's objects live as long as we do: looking through them again and again costs decoding time
        connection.send(("ready", None, server.describe()))
        serve(connection, server)
        if spec.tensor_parallel_size > 1:
            server.engine.engine_core.shutdown()  # its workers and their shared memory
    except (EOFError, ConnectionError):
        code = 1  # the owner is gone: nobody to tell
    except Exception:
        connection.send(("died", None, traceback.format_exc()))
        code = 1
    connection.close()
    sys.stdout.flush()
    os._exit(code)  # taking a loaded interpreter apart takes seconds and frees nothing that the system does not


if __name__ == "__main__":
    main()
