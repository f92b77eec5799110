"""Cases of expert layers for the tests here: weights and tokens from a seed, a layer in the twin with
them, and the comparison with the reference of crossdock.testing."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from typing import Optional

import numpy as np

from cases import TIMEOUT
from crossdock import moe
from crossdock.testing import ep_reference as ep_ref
from crossdock.testing import moe_reference as ref

#: Adding up in fp32 turns hardly a rounding of sums in fp64; on GPUs e4m3 turns many, by little.
MOST_UNEQUAL = 0.005


@dataclasses.dataclass
class Case:
    world: int = 2
    experts: int = 6
    top_k: int = 3
    max_tokens: int = 9
    hidden: int = 256
    inter: int = 128
    format: str = "e4m3"
    scales: str = "f32"
    quantised: bool = False  # the tokens come as e4m3
    clamp: float = 4.0
    weights: bool = True
    residual: bool = False
    wide_ids: bool = False
    shared_inter: int = 0
    shared_weights: bool = False
    bias: bool = False
    seed: int = 1

    def options(self, **more) -> moe.Options:
        return moe.Options(experts=self.experts, top_k=self.top_k, max_tokens=self.max_tokens,
                           hidden=self.hidden, inter=self.inter, format=self.format,
                           scales=self.scales, wide_ids=self.wide_ids, clamp=self.clamp,
                           shared_inter=self.shared_inter, **more)

    def layer(self, **more) -> moe.Layer:
        return moe.Layer(self.options(**more), world=self.world, backend="twin", timeout=TIMEOUT)


@dataclasses.dataclass
class Data:
    """Everything that goes into a layer."""

    case: Case
    gate_up: np.ndarray
    down: np.ndarray
    sent: list
    residual: list
    shared_factors: list
    shared: tuple = ()

    def experts_of(self, rank: int) -> slice:
        return slice(*(ep_ref.first_expert(self.case.experts, self.case.world, r)
                       for r in (rank, rank + 1)))

    def weights(self, rank: int) -> moe.Weights:
        mine = self.experts_of(rank)
        return moe.Weights.prepare(self.gate_up[mine], self.down[mine], format=self.case.format,
                                   scales=self.case.scales)

    def bias(self, rank: Optional[int] = None) -> tuple:
        """Of all experts, or of those of a rank."""
        random = np.random.default_rng(23)
        case, mine = self.case, slice(None) if rank is None else self.experts_of(rank)
        return (ref.round_bf16(random.normal(0, 1, (case.experts, 2 * case.inter)))[mine],
                ref.round_bf16(random.normal(0, 1, (case.experts, case.hidden)))[mine])

    def shared_expert(self) -> moe.Weights:
        return moe.Weights.prepare(*self.shared, format=self.case.format, scales=self.case.scales)

    def want(self) -> list:
        kind = (self.case.format, self.case.scales)
        experts = ref.experts_of(self.gate_up, self.down, *kind)
        if self.case.bias:
            experts.gate_up_bias, experts.down_bias = self.bias()
        shared = ref.experts_of(*self.shared, *kind) if self.shared else None
        return ref.forward(self.sent, experts, clamp=self.case.clamp,
                           residual=self.residual if self.case.residual else None, shared=shared,
                           shared_weights=self.shared_factors if self.case.shared_weights else None)


def matrices(seed: int, shape: tuple) -> np.ndarray:
    """fp32 values that bf16 has, so that every format begins with the same; blocks differ."""
    random = np.random.default_rng(seed)
    values = random.normal(0, 1 / math.sqrt(shape[-1]), shape) * (1 + random.integers(0, 4, shape[:1])
                                                                 [:, None, None])
    return ref.round_bf16(values)


def data_of(case: Case) -> Data:
    sent, residual, factors = [], [], []
    for rank in range(case.world):
        random = np.random.default_rng([case.seed, rank])
        count = 0 if case.world >= 4 and rank == case.world - 1 else case.max_tokens - rank
        ids = random.integers(0, case.experts, (count, case.top_k))
        ids = np.where(random.random(ids.shape) < 0.1, -1, ids)
        rows = ep_ref.bf16_encode(random.normal(0, 1, (count, case.hidden)))
        scales = None
        if case.quantised:
            rows, scales = ref.cast_rows(rows, case.scales)
        weights = random.random(ids.shape, dtype=np.float32) if case.weights else None
        sent.append(ep_ref.Tokens(rows, ids.astype(np.int64 if case.wide_ids else np.int32), weights,
                                  scales))
        residual.append(ep_ref.bf16_encode(random.normal(0, 1, (count, case.hidden))))
        factors.append(random.random(count, dtype=np.float32))
    gate_up = matrices(11, (case.experts, 2 * case.inter, case.hidden))
    shared = ()
    if case.shared_inter:
        shared = (matrices(17, (1, 2 * case.shared_inter, case.hidden)),
                  matrices(19, (1, case.hidden, case.shared_inter)))
    return Data(case, gate_up, matrices(13, (case.experts, case.hidden, case.inter)), sent, residual,
                factors, shared)


def loaded(case: Case, data: Data, **more) -> moe.Layer:
    layer = case.layer(**more)
    for rank in layer.local_ranks:
        layer.load(data.weights(rank), rank=rank)
        if case.bias:
            gate_up, down = data.bias(rank)
            layer.load_bias(gate_up=gate_up, down=down, rank=rank)
        if data.shared:
            layer.load_shared(data.shared_expert(), rank=rank)
    return layer


def scales_of(data: Data, rank: int) -> Optional[np.ndarray]:
    """Of rows that are e4m3 already, as the layer takes them."""
    scales = data.sent[rank].scales
    return scales if scales is None or data.case.scales == "f32" else ref.pack_scales(scales)


def given(data: Data, rank: int) -> dict:
    """What a forward of the rank is called with, its output aside."""
    of = data.sent[rank]
    return {"rows": of.rows, "ids": of.ids, "weights": of.weights, "scales": scales_of(data, rank),
            "rank": rank,
            "shared_weights": data.shared_factors[rank] if data.case.shared_weights else None}


def residual_of(data: Data, rank: int) -> dict:
    return {"residual": data.residual[rank] if data.case.residual else None}


def forward(layer: moe.Layer, data: Data) -> list:
    """Of all ranks; the outputs are there when it returns."""
    outs = [layer.forward(**given(data, r), **residual_of(data, r)) for r in layer.local_ranks]
    layer.synchronize(TIMEOUT)
    return outs


def check(outs: list, wants: list, most_unequal: float = MOST_UNEQUAL, most_far: float = 1) -> None:
    for rank, (out, want) in enumerate(zip(outs, wants)):
        assert out.shape == want.rows.shape
        far, unequal = ref.far_from(out, want)
        assert far <= most_far, f"rank {rank}: a value is {far} times too far away"
        assert unequal <= most_unequal, f"rank {rank}: {unequal:.2%} of the values differ"
