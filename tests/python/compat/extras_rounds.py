"""What every rank does and checks in the tests of what ElasticBuffer has besides dispatch and combine."""
# SPDX-License-Identifier: Apache-2.0
import numpy as np

from crossdock.compat.deep_ep import ElasticBuffer
from crossdock.testing import ep_reference as ref


def values(seed, shape):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def gathers(group, kit):
    """Copied and in place, one and several, in two sessions."""
    buffer, rank, size = ElasticBuffer(group, 1 << 20), group.rank(), group.size()
    shapes = [(4, 8), (16,)]
    dtype = kit.array(values(0, (1,))).dtype
    buffer.agrs_set_config(4 * ElasticBuffer.get_agrs_num_max_session_bytes(group, shapes, dtype), 6)
    for turn in range(2):
        with buffer.agrs_new_session():
            one, wait = buffer.all_gather(kit.array(values([turn, rank], shapes[0])))
            *several, wait_all = buffer.all_gather([kit.array(values([turn, rank, i], shape))
                                                   for i, shape in enumerate(shapes)])
            inplace = buffer.agrs_get_inplace_tensor(shapes, dtype)
            for i, tensor in enumerate(inplace):
                assert tuple(tensor.shape) == shapes[i]
                tensor[...] = kit.array(values([turn, rank, 7, i], shapes[i]))
            assert isinstance(inplace, tuple)
            *placed, wait_placed = buffer.all_gather(inplace)
            for each in (wait, wait_all, wait_placed):
                each()
            everything = [(one, [], shapes[0])]
            everything += [(array, [i], shapes[i]) for i, array in enumerate(several)]
            everything += [(array, [7, i], shapes[i]) for i, array in enumerate(placed)]
            for array, more, shape in everything:
                expected = np.stack([values([turn, r, *more], shape) for r in range(size)])
                np.testing.assert_array_equal(kit.codes(array), expected)
    buffer.destroy()


def pipeline(group, kit):
    """Around the ring, more tensors than may be on their way."""
    buffer, rank, size = ElasticBuffer(group, 1 << 20), group.rank(), group.size()
    buffer.pp_set_config(4096, 2)
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(5):
        shape = (4, 4 + 4 * turn)
        buffer.pp_send(kit.array(values([turn, rank], shape)), after)
        got = kit.array(np.zeros(shape, np.float32))
        buffer.pp_recv(got, before)
        np.testing.assert_array_equal(kit.codes(got), values([turn, before], shape))
    buffer.destroy()


def table(group, kit):
    """Rows of all ranks by number, with and without scales."""
    buffer, rank, size = ElasticBuffer(group, 1 << 20), group.rank(), group.size()
    entries, hidden = 12, 64
    for turn in range(2):
        parts = [ref.bf16_encode(values([turn, r], (entries, hidden))) for r in range(size)]
        scales = values([turn, 99], (size * entries, 2))
        buffer.engram_write(kit.bf16(parts[rank]), kit.array(scales) if turn else None)
        numbers = np.random.default_rng([turn, rank]).integers(0, size * entries, (5, 3)).astype(np.int32)
        whole = np.concatenate(parts)
        for wanted, by_column in ((numbers, bool(turn)), (numbers[:2], False), (numbers[:0], False)):
            rows, got = buffer.engram_fetch(kit.array(wanted), use_tma_aligned_col_major_sf=by_column)()
            assert kit.is_bf16(rows)
            np.testing.assert_array_equal(kit.codes(rows), whole[wanted].reshape(len(wanted), 3 * hidden))
            if not turn:
                assert got is None
                continue
            np.testing.assert_array_equal(kit.codes(got), scales[wanted].reshape(len(wanted), 6))
            strides = got.stride() if hasattr(got, "stride") else tuple(s // 4 for s in got.strides)
            assert not len(wanted) or strides == ((1, 8) if by_column else (6, 1))
        got = buffer.engram_fetch(kit.array(numbers[0]))()
        rows = got[0] if turn else got
        np.testing.assert_array_equal(kit.codes(rows), whole[numbers[0]])
        if turn:
            np.testing.assert_array_equal(kit.codes(got[1]), scales[numbers[0]])
    buffer.destroy()
