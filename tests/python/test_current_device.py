"""Which GPU a process with one rank takes where no framework says so."""
# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from crossdock import _ranks


@pytest.mark.parametrize("local, visible, device", [
    (None, None, 0),
    ("3", None, 3),
    ("3", "0,1,2,3", 3),
    ("3", "3", 0),  # a launcher that shows each process its own alone
    ("5", "GPU-1,GPU-2", 1),
    ("3", "", 3),
])
def test_local_rank_counts_among_the_gpus_that_are_seen(monkeypatch, local, visible, device):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name, value in (("LOCAL_RANK", local), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert _ranks.current_device() == device
