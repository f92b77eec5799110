"""Cases of expert parallelism for the tests here: tokens of all ranks from a seed, and the comparison of
a whole round with the reference of crossdock.testing; and members of a group on threads."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import threading

import numpy as np

import crossdock
from crossdock import ep
from crossdock.testing import ep_reference as ref
from crossdock.testing import moe_reference as moe_ref

TIMEOUT = 120.0


@dataclasses.dataclass
class Case:
    world: int = 2
    experts: int = 8
    top_k: int = 3
    max_tokens: int = 24
    hidden: int = 128
    payload: str = "bf16"  # or "e4m3" with scales, "cast", or "ue8m0": a cast with powers of two
    wide_ids: bool = False
    weights: bool = True
    scales_by_column: bool = False
    alignment: int = 0
    slots: int = 2

    def options(self) -> ep.Options:
        return ep.Options(experts=self.experts, top_k=self.top_k, max_tokens=self.max_tokens,
                          hidden=self.hidden, wide_ids=self.wide_ids, slots=self.slots, fall_back=False,
                          cast=bool(self.cast), expert_alignment=self.alignment,
                          dispatch_sms=2, combine_sms=2)

    @property
    def cast(self):
        """As dispatch() takes it."""
        return {"cast": True, "ue8m0": "ue8m0"}.get(self.payload, False)

    def deliveries(self, sent: list) -> list:
        """What the reference delivers to each rank."""
        if self.payload == "ue8m0":
            casts = [moe_ref.cast_rows(of.rows, "ue8m0") for of in sent]
            sent = [dataclasses.replace(of, rows=codes, scales=moe_ref.pack_scales(powers).view(np.int32))
                    for of, (codes, powers) in zip(sent, casts)]
        return [ref.dispatch(r, self.experts, sent, self.payload == "cast") for r in range(self.world)]

    def group(self) -> ep.Group:
        return ep.Group(self.options(), world=self.world, backend="twin", timeout=TIMEOUT)


def tokens_of(case: Case, rank: int, seed: int) -> ref.Tokens:
    """Different numbers of tokens at each rank, none at the last of four or more; some ids masked."""
    random = np.random.default_rng([seed, rank])
    count = case.max_tokens - rank % case.max_tokens
    if case.world >= 4 and rank == case.world - 1:
        count = 0
    ids = random.integers(0, case.experts, (count, case.top_k))
    ids = np.where(random.random(ids.shape) < 0.1, -1, ids)
    weights = random.random((count, case.top_k), dtype=np.float32) if case.weights else None
    values = random.normal(0, 3, (count, case.hidden)).astype(np.float32)
    # Some values of every special kind.
    values[random.random(values.shape) < 0.002] = np.nan
    values[random.random(values.shape) < 0.002] = np.inf
    values[random.random(values.shape) < 0.01] = 0
    rows, scales = ref.bf16_encode(values), None
    if case.payload == "e4m3":
        rows, scales = ref.cast(rows)
    ids = ids.astype(np.int64 if case.wide_ids else np.int32)
    return ref.Tokens(rows, ids, weights, scales)


def dispatch(case: Case, group: ep.Group, sent: list) -> list:
    return [group.dispatch(of.rows, of.ids, of.weights, scales=of.scales,
                           cast=case.cast, scales_by_column=case.scales_by_column, rank=r)
            for r, of in enumerate(sent)]


def check_received(case: Case, handle: ep.Handle, want: ref.Delivery) -> None:
    """Everything that one handle shows."""
    n = handle.rows(timeout=TIMEOUT)
    got = handle.received
    np.testing.assert_array_equal(got.source_ends, want.source_ends)
    assert n == len(want.tokens)
    np.testing.assert_array_equal(got.tokens[:n], want.tokens)
    np.testing.assert_array_equal(got.ids[:n], want.ids)
    np.testing.assert_array_equal(got.rows[:n], want.rows)
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    assert handle.expert_counts(timeout=TIMEOUT) == list(want.expert_counts)
    if want.weights is None:
        assert got.weights is None
    else:
        np.testing.assert_array_equal(got.weights[:n], want.weights)
    if want.scales is None:
        assert got.scales is None
    else:
        np.testing.assert_array_equal(got.scales[:n], want.scales)


def bf16_rows(seed: int, shape: tuple) -> np.ndarray:
    random = np.random.default_rng([seed, *shape])
    return ref.bf16_encode(random.normal(0, 2, shape).astype(np.float32))


def round_of(case: Case, group: ep.Group, seed: int, biases: int = 0) -> None:
    """Dispatch, experts and combine of one set of tokens, everything compared."""
    sent = [tokens_of(case, r, seed) for r in range(case.world)]
    want = case.deliveries(sent)
    handles = dispatch(case, group, sent)
    group.synchronize(TIMEOUT)
    made, made_weights = [], []
    for r, handle in enumerate(handles):
        check_received(case, handle, want[r])
        n = handle.rows(timeout=TIMEOUT)
        made.append(bf16_rows(seed * 100 + r, (n, case.hidden)))
        made_weights.append(np.random.default_rng([seed, r, 5]).random((n, case.top_k),
                                                                     dtype=np.float32))
        handle.expert_input.rows[:n] = made[r]
        handle.expert_input.weights[:n] = made_weights[r]
    bias = [[bf16_rows(seed * 31 + b, (len(of.ids), case.hidden)) for b in range(biases)]
            for of in sent]
    outputs = [group.combine(handle, bias=bias[r], weights=True) for r, handle in enumerate(handles)]
    group.synchronize(TIMEOUT)
    for r, (rows, weights) in enumerate(outputs):
        count = len(sent[r].ids)
        np.testing.assert_array_equal(rows, ref.combine(r, want, made, count, bias[r]))
        np.testing.assert_array_equal(
            weights, ref.combine_weights(r, want, made_weights, count, case.top_k))
    for handle in handles:
        handle.received.rows[:] = 0xEE  # so that a row left out later is seen
        handle.close()


def raises(error: type, *texts: str):
    """A context that expects `error` with all of the texts in its message."""
    import contextlib

    import pytest

    @contextlib.contextmanager
    def expecting():
        with pytest.raises(error) as caught:
            yield caught
        for text in texts:
            assert text in caught.value.message, caught.value.message

    assert issubclass(error, crossdock.Error)
    return expecting()


def in_threads(members, body):
    """Runs body(member) on a thread for each member; returns what they gave or raised, by member."""
    results = [None] * members

    def run(member):
        try:
            results[member] = body(member)
        except Exception as e:  # what it was is for the test to say
            results[member] = e

    threads = [threading.Thread(target=run, args=(m,)) for m in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
