"""Settings and fixtures that all tests share: one thread, no network, seeded generators."""

import os

# Two cores are shared by many jobs, and no test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
hypothesis.settings.register_profile("rotfed", deadline=None, max_examples=40, derandomize=True, database=None)
hypothesis.settings.load_profile("rotfed")


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of its own for every test, always with the same seed."""
    return torch.Generator().manual_seed(20250202)
