"""Where a rank stands in five dimensions, its process groups, and the backend that runs Megatron-core without CUDA."""
