"""Checkpoints at rest: Hugging Face ↔ Megatron distributed, look into one, compare two, GGUF to Hugging Face.

All of it is one operation, reading boxes of tensors through the slice table of `megatron_dapo.models`, one tensor at a
time: no model is ever held in memory.
"""

import megatron_dapo as megatron_dapo  # its import hook comes before any Megatron import
