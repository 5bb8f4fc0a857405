"""The command `megatron-dapo`: thin, and importing a room only when its command is called."""
