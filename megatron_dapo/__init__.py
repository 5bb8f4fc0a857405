"""DAPO training of mixture-of-experts language models: Megatron-core for training, vLLM for rollouts."""

__version__ = "0.1.0"
