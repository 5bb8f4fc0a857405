"""A Hugging Face checkpoint as a Megatron-core model on any layout: tables, configuration, build, load, export."""

from megatron_dapo import parallel as parallel  # the import hook of the host backend comes before any Megatron import
