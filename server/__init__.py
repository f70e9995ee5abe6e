"""The Flower ServerApp: strategy, evaluation on held-out data, and results."""
