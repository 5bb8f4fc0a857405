"""What the rank pool's fork server imports once, before it forks the ranks."""

import megatron_dapo.engine.engine
import megatron_dapo.models.export
import megatron_dapo.parallel.groups  # noqa: F401
