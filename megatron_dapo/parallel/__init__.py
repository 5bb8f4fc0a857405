"""Where a rank stands in five dimensions, its process groups, and the backend that runs Megatron-core without CUDA.

Importing this package registers the host backend's import hook (cheap: torch is not imported for it), so every module
that uses Megatron-core only has to live below a package that imported this one first.
"""

from megatron_dapo.parallel import host_cuda

host_cuda.install()
