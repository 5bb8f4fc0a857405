"""The training engine of one rank: packed micro-batches, Megatron's schedules, losses, optimizer, checkpoint."""
