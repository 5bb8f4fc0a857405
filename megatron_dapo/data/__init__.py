"""Prompts in, batches out: prompt files, chat templates and token ids, the batch schema, packing."""
