"""Rollout: vLLM engines in their own processes, seeded sample by sample."""

from megatron_dapo.rollout.async_engine import AsyncRolloutEngine
from megatron_dapo.rollout.client import EngineDied, EngineError
from megatron_dapo.rollout.engine import RolloutEngine
from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling, sample_seed
from megatron_dapo.rollout.spec import EngineSpec

__all__ = [
    "AsyncRolloutEngine",
    "EngineDied",
    "EngineError",
    "EngineSpec",
    "Generation",
    "GenerationRequest",
    "RolloutEngine",
    "Sampling",
    "sample_seed",
]
