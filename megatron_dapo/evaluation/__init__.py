"""`megatron-dapo eval`: a model's answers to prompt files, by an engine of its own or a server, judged and counted."""

from megatron_dapo.evaluation.run import evaluate

__all__ = ["evaluate"]
