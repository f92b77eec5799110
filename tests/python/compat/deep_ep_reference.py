"""What the calls of crossdock.compat.deep_ep have to give, in plain NumPy and slowly: from the rules of the
interface, and from nothing of the library."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np

from crossdock.testing import ep_reference as ref


@dataclasses.dataclass
class Tokens:
    """Of one rank: bf16 codes, ids and weights."""

    rows: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def tokens(world, rank, counts, experts, top_k, hidden, seed, masked=0.1):
    """Every token's experts are different ones; some choices are masked."""
    random = np.random.default_rng([seed, rank])
    count = counts[rank % len(counts)]
    scores = random.random((count, experts))
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int64)
    ids = np.where(random.random(ids.shape) < masked, -1, ids)
    rows = ref.bf16_encode(random.normal(0, 2, (count, hidden)).astype(np.float32))
    return Tokens(rows, ids, random.random((count, top_k), dtype=np.float32))


def layout(ids, experts, world):
    """num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank"""
    per_rank = experts // world
    in_rank = np.zeros((len(ids), world), bool)
    per_expert = np.zeros(experts, np.int32)
    for token, choices in enumerate(ids):
        for expert in choices:
            if expert >= 0:
                in_rank[token, expert // per_rank] = True
                per_expert[expert] += 1
    return in_rank.sum(0).astype(np.int32), per_expert, in_rank


@dataclasses.dataclass
class Received:
    """Of one rank, row by row."""

    pairs: list  #: (source rank, token)
    ids: np.ndarray
    weights: np.ndarray
    counts: list


def received(rank, experts, sent):
    """Rows in the order of source ranks, and of the tokens of one."""
    world, per_rank = len(sent), experts // len(sent)
    first = rank * per_rank
    pairs, ids, weights = [], [], []
    counts = [0] * per_rank
    for source, of in enumerate(sent):
        for token, choices in enumerate(of.ids):
            here = (choices >= first) & (choices < first + per_rank)
            if not here.any():
                continue
            pairs.append((source, token))
            ids.append(np.where(here, choices - first, -1))
            weights.append(np.where(here, of.weights[token], 0))
            for expert in choices[here]:
                counts[expert - first] += 1
    top_k = sent[0].ids.shape[1]
    return Received(pairs, np.array(ids, np.int64).reshape(-1, top_k),
                    np.array(weights, np.float32).reshape(-1, top_k), counts)


def rows_of(planes, pairs):
    """The rows of `pairs` out of one array for each source."""
    out = [planes[source][token] for source, token in pairs]
    return np.array(out, planes[0].dtype).reshape((-1, *planes[0].shape[1:]))


def combined(rank, got, made, count, bias=()):
    """bf16: the biases, then what each rank has made of the token, in fp32."""
    total = np.zeros((count, made[0].shape[1]), np.float32)
    for one in bias:
        total += ref.bf16_decode(one)
    for of, rows in zip(got, made):
        for row, (source, token) in enumerate(of.pairs):
            if source == rank:
                total[token] += ref.bf16_decode(rows[row])
    return ref.bf16_encode(total)


def combined_weights(rank, got, made, count):
    total = np.zeros((count, made[0].shape[1]), np.float32)
    for of, weights in zip(got, made):
        for row, (source, token) in enumerate(of.pairs):
            if source == rank:
                total[token] += weights[row]
    return total


@dataclasses.dataclass
class Masked:
    """Of one rank: for each of its experts the (source, token, choice) of its rows."""

    rows: list

    def counts(self):
        return [len(rows) for rows in self.rows]


def masked(rank, experts, sent):
    per_rank = experts // len(sent)
    rows = [[] for _ in range(per_rank)]
    for source, of in enumerate(sent):
        for token, choices in enumerate(of.ids):
            for k, expert in enumerate(choices):
                if rank * per_rank <= expert < (rank + 1) * per_rank:
                    rows[expert - rank * per_rank].append((source, token, k))
    return Masked(rows)


def weighted(rank, sent, made, experts):
    """fp64, not rounded: the weighted sum for each token; `made`: by rank, [experts, rows, hidden] codes."""
    world, per_rank = len(sent), experts // len(sent)
    lists = [masked(r, experts, sent) for r in range(world)]
    count, hidden = len(sent[rank].ids), made[0].shape[-1]
    total = np.zeros((count, hidden))
    for owner in range(world):
        for expert in range(per_rank):
            for row, (source, token, k) in enumerate(lists[owner].rows[expert]):
                if source == rank:
                    total[token] += (ref.bf16_decode(made[owner][expert][row]).astype(np.float64)
                                     * sent[rank].weights[token, k])
    return total


def cast_rounded(rows):
    """e4m3 codes, and for each 128 values the least power of two that is enough."""
    values = ref.bf16_decode(rows).reshape(len(rows), -1, 128).astype(np.float64)
    largest = np.maximum(np.abs(values).max(2, initial=0), 1e-4)
    scales = np.ones_like(largest)
    for index, value in np.ndenumerate(largest):
        exponent = -126
        while 2.0**exponent < value / 448:
            exponent += 1
        scales[index] = 2.0**exponent
    codes = ref.e4m3_encode((values / scales[:, :, None]).astype(np.float32))
    return codes.reshape(rows.shape), scales.astype(np.float32)


def packed(scales):
    """Exponents of fp32 powers of two, four to an int32."""
    exponents = (scales.view(np.uint32) >> 23).astype(np.uint8)
    return np.ascontiguousarray(exponents).view(np.int32)


def quantised(rows, packs):
    """e4m3 codes and scales: fp32, or of powers of two four exponents to an int32."""
    if not packs:
        return ref.cast(rows)
    codes, scales = cast_rounded(rows)
    return codes, packed(scales)
