"""The loops and their shared stages: how generation, reward, advantage, update and push follow each other."""
