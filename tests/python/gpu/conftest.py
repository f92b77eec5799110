"""Tests on GPUs: every rank a GPU of this host, or a share of one, tokens from torch. All are skipped,
saying why, where there is no torch or no GPU."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys

import pytest

# Loading a kernel of torch at its first launch may wait for what runs on that GPU, and that waits for a
# rank whose call is to come from this very process. So all are loaded when torch begins.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# Ranks that share a GPU (ranks.py) need a queue of it for each of their streams.
if "GPU_TEST_RANKS" in os.environ:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # cases.py


def pytest_collection_modifyitems(items):
    try:
        import torch
        why = None if torch.cuda.is_available() else "torch finds no GPU"
    except ImportError:
        why = "torch is not installed"
    for item in items:  # those of other folders are among them
        if why is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))
