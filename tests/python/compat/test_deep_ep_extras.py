"""Gathers, tensors to the next rank and rows of a table, in the twin."""
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

import crossdock
import extras_rounds
from crossdock.compat import deep_ep
from kits import KITS, NumPyKit


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)
@pytest.mark.parametrize("what", ["gathers", "pipeline", "table"])
def test_values(what, kit):
    threads = deep_ep.Threads(3, backend="twin", timeout=120)
    threads.run(lambda group: getattr(extras_rounds, what)(group, kit))


def refused(call, *texts):
    with pytest.raises(crossdock.InvalidArgument) as caught:
        call()
    for text in texts:
        assert text in caught.value.message, caught.value.message


def test_mistakes_are_named():
    kit = NumPyKit()

    def one(group):
        buffer = deep_ep.ElasticBuffer(group, 1 << 20)
        x = kit.array(np.zeros(4, np.float32))
        refused(buffer.create_agrs_session, "agrs_set_config() comes before")
        refused(lambda: buffer.all_gather(x), "there is no session")
        refused(buffer.destroy_agrs_session, "there is no session")
        refused(lambda: buffer.pp_send(x, 1), "pp_set_config() comes before")
        refused(lambda: buffer.engram_fetch(kit.array(np.zeros(1, np.int32))), "engram_write() comes before")
        refused(lambda: buffer.engram_write(kit.array(np.zeros((2, 3), np.float32)), None), "12 bytes")
        buffer.agrs_set_config(1024, 2)
        buffer.create_agrs_session()
        refused(buffer.create_agrs_session, "there is a session already")
        refused(lambda: buffer.all_gather(kit.array(np.zeros(3, np.float32))), "12 bytes", "multiple of 16")
        buffer.destroy_agrs_session()
        buffer.pp_set_config(1024, 1)
        refused(lambda: buffer.pp_send(x, group.rank()), "is not next to rank")
        buffer.destroy()

    deep_ep.Threads(2, backend="twin", timeout=60).run(one)


def test_names_and_sizes():
    def one(group):
        buffer = deep_ep.ElasticBuffer(group, 1 << 20, num_allocated_qps=17)
        assert (buffer.rank_idx, buffer.num_allocated_qps) == (group.rank(), 17)
        size = deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes
        item = np.dtype(np.float32)
        assert size(group, (3, 5), item) == size(group, [(3, 5)], item) == 128
        assert size(group, [(3, 5), (64,)], item) == 128 + 256
        table = deep_ep.ElasticBuffer.get_engram_storage_size_hint
        assert table(100, 512, 64) == (100 * 512 * 2, 0) and table(100, 512, 64, dtype=item) == (100 * 512 * 4, 0)
        with buffer.agrs_new_session(enabled=False):
            refused(lambda: buffer.all_gather(np.zeros(4, np.float32)), "there is no session")
        for more in ({"num_max_session_bytes": 0, "num_max_all_gathers_per_session": 1},
                     {"num_max_session_bytes": 256, "num_max_all_gathers_per_session": 0}):
            refused(lambda: buffer.agrs_set_config(**more), "= 0 must be at least 1")
        buffer.agrs_set_config(num_max_session_bytes=256, num_max_all_gathers_per_session=2)
        with buffer.agrs_new_session(enabled=True):
            x = np.full(4, group.rank(), np.float32)
            one, wait = buffer.all_gather([x])
            wait()
            same, wait = buffer.all_gather(t=x)
            wait()
            for out in (one, same):
                np.testing.assert_array_equal(out[:, 0], [0, 1])
            refused(lambda: buffer.all_gather(x), "at most gathers = 2")
            refused(lambda: buffer.all_gather([]), "there is no tensor")
        buffer.destroy()

    deep_ep.Threads(2, backend="twin", timeout=60).run(one)
