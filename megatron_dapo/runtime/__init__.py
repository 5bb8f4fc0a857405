"""How processes exist: ranks under torchrun or Ray, a driver that calls, workers that serve, and how they all end."""
