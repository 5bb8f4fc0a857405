"""How processes exist: ranks under torchrun or Ray, one driver that calls and workers that serve, and how all of them end."""
