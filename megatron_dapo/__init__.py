"""DAPO training of mixture-of-experts language models: Megatron-core for training, vLLM for rollouts."""

from megatron_dapo.parallel import host_cuda

__version__ = "0.1.0"

host_cuda.install()  # before any Megatron import; costs nothing until there is one, and nothing at all with CUDA
