"""A Hugging Face checkpoint as a Megatron-core model on any layout: tables, configuration, build, load, export."""
