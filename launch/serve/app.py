"""A Hugging Face checkpoint behind Ray Serve: every replica is vLLM's own OpenAI server, one address in front of all.

    python launch/serve/app.py runs/demo/hf                                        # this machine, http://127.0.0.1:8000/v1
    python launch/serve/app.py MODEL --replicas 2 --tensor-parallel-size 8         # GPUs  # untested on GPU
    RAY_ADDRESS=auto python launch/serve/app.py MODEL …                            # in a cluster that runs already

Words that are not ours go to vLLM as they are (`vllm serve --help`). The checkpoint's own precision is kept unless
--dtype says otherwise. The program stays until Ctrl-C or SIGTERM, which take the deployment down.
"""

import argparse
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack

import ray
from fastapi import FastAPI
from ray import serve


@serve.ingress()
class OpenAIServer:
    """One replica: an engine (its tensor-parallel workers are processes of its own) and the API in front of it."""

    async def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.stack = AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(self.arguments)
        args.model = args.model_tag or args.model
        validate_parsed_serve_args(args)
        engine = await self.stack.enter_async_context(build_async_engine_client(args))
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        self.engine = engine
        return app

    async def check_health(self) -> None:
        """Ray asks this now and then and replaces a replica that raises."""
        await self.engine.check_health()

    async def __del__(self) -> None:
        await self.stack.aclose()


def vllm_words(model: str, words: list[str]) -> list[str]:
    """vLLM's command line: the model, its own precision (`auto` would halve float32), and what the user says."""
    from megatron_dapo.evaluation.embedded import checkpoint_dtype

    return [model, "--dtype", checkpoint_dtype(model), "--disable-log-stats", "--enable-prefix-caching", *words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--replicas", type=int, default=1, help="engines")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of one engine")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-in-flight", type=int, default=1024, help="requests that one replica takes at once")
    ours, words = parser.parse_known_args()
    words += ["--tensor-parallel-size", str(ours.tensor_parallel_size)]
    gpus = ours.tensor_parallel_size if os.path.exists("/dev/nvidiactl") else 0
    if not gpus:
        words += ["--enforce-eager"]
    environment = {"VLLM_NO_USAGE_STATS": "1", **({} if gpus else {"TORCHDYNAMO_DISABLE": "1"})}
    address = os.environ.get("RAY_ADDRESS", "local")  # a cluster of our own, not whichever happens to run here
    own = {"include_dashboard": False} if address == "local" else {}
    ray.init(address, log_to_driver="VERBOSE" in os.environ, **own)
    serve.start(http_options={"host": ours.host, "port": ours.port, "request_timeout_s": None})
    deployment = serve.deployment(OpenAIServer).options(
        name="openai",
        num_replicas=ours.replicas,
        max_ongoing_requests=ours.max_in_flight,
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1, "runtime_env": {"env_vars": environment}},
    )
    serve.run(deployment.bind(vllm_words(ours.model, words)), name="openai", route_prefix="/")
    print(f"serving {ours.model} at http://{ours.host}:{ours.port}/v1", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
