"""Resharding: layouts, the plan between two of them, and the ways weights travel to vLLM."""
