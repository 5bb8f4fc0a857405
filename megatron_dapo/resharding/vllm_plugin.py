"""Makes our weight-transfer backend known to any vLLM in whose environment this package is installed.

The entry point of the group `vllm.general_plugins` calls `register` in every vLLM process, so this file stays light.
"""

BACKEND = "megatron_dapo"


def register() -> None:
    """Register the backend by name; its code is imported when a worker first uses it. May be called more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_dapo.resharding.vllm_worker", "SliceTransferEngine"
        )
