"""A whole sparse mixture of experts by others: Triton kernels that read each expert once a batch, and torch around its grouped matrix product.

The Triton kernels need no alignment of tokens: a program has one expert and a block of its rows, and looks for its tokens in the ids.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TOP = 8


@triton.jit
def _select(logits, ids, alpha, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr):
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    scores = tl.load(logits + token * (EXPERTS + 1) + column, mask=column < EXPERTS, other=-float("inf")).to(tl.float32)
    rank = tl.arange(0, TOP)
    best = tl.zeros((TOP,), tl.float32)
    chosen = tl.zeros((TOP,), tl.int32)
    for r in tl.static_range(TOP):
        value, where = tl.max(scores, 0, return_indices=True)
        best = tl.where(rank == r, value, best)
        chosen = tl.where(rank == r, where.to(tl.int32), chosen)
        scores = tl.where(column == where, -float("inf"), scores)
    weight = tl.exp(best - tl.max(best, 0))
    tl.store(ids + token * TOP + rank, chosen)
    tl.store(alpha + token * (TOP + 1) + rank, weight / tl.sum(weight, 0))
    shared = tl.load(logits + token * (EXPERTS + 1) + EXPERTS).to(tl.float32)
    tl.store(alpha + token * (TOP + 1) + TOP, 1 / (1 + tl.exp(-shared)))


# Few enough to be compiled within a minute.
_CONFIGS = [
    triton.Config({"ROWS": rows, "DEPTH": depth}, num_warps=4, num_stages=stages)
    for rows, depth, stages in ((16, 128, 4), (16, 256, 3), (32, 64, 5), (32, 128, 3), (32, 128, 4), (64, 64, 4))
]


@triton.jit
def _own_tokens(ids, tokens, expert, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, TOP: tl.constexpr):
    token = tl.arange(0, TOKENS)
    rank = tl.arange(0, TOP)
    taken = tl.load(ids + token[:, None] * TOP + rank[None, :], mask=(token < tokens)[:, None], other=-1)
    match = taken == expert
    is_own = (tl.sum(match.to(tl.int32), 1) > 0) | ((expert == EXPERTS) & (token < tokens))
    path = tl.where(expert == EXPERTS, TOP, tl.sum(tl.where(match, rank[None, :], 0), 1))
    return token, is_own, path


@triton.autotune(_CONFIGS, key=["TOKENS", "HIDDEN", "WIDTH"])
@triton.jit
def _gate_up(
    x, ids, bank, shared, act, tokens, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, TOP: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    token, is_own, path = _own_tokens(ids, tokens, expert, EXPERTS, TOKENS, TOP)
    if tl.sum(is_own.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    base = bank + expert.to(tl.int64) * 2 * WIDTH * HIDDEN
    if expert == EXPERTS:
        base = shared
    gates = base + row[None, :] * HIDDEN + column[:, None]
    inputs = x + token[:, None] * HIDDEN + column[None, :]
    gate = tl.zeros((TOKENS, ROWS), tl.float32)
    up = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, HIDDEN, DEPTH):
        values = tl.load(inputs + first, mask=is_own[:, None], other=0.0)
        gate = tl.dot(values, tl.load(gates + first), gate)
        up = tl.dot(values, tl.load(gates + WIDTH * HIDDEN + first), up)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(act + (token * (TOP + 1) + path)[:, None] * WIDTH + row[None, :], result.to(tl.bfloat16), mask=is_own[:, None])


@triton.autotune(_CONFIGS, key=["TOKENS", "HIDDEN", "WIDTH"])
@triton.jit
def _down(
    act, ids, bank, shared, rows, tokens, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, TOP: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    token, is_own, path = _own_tokens(ids, tokens, expert, EXPERTS, TOKENS, TOP)
    if tl.sum(is_own.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    base = bank + expert.to(tl.int64) * WIDTH * HIDDEN
    if expert == EXPERTS:
        base = shared
    weights = base + row[None, :] * WIDTH + column[:, None]
    inputs = act + (token * (TOP + 1) + path)[:, None] * WIDTH + column[None, :]
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, WIDTH, DEPTH):
        sums = tl.dot(tl.load(inputs + first, mask=is_own[:, None], other=0.0), tl.load(weights + first), sums)
    tl.store(rows + (token * (TOP + 1) + path)[:, None] * HIDDEN + row[None, :], sums, mask=is_own[:, None])


@triton.jit
def _reduce(rows, alpha, dest, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PATHS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(dest + token * HIDDEN + column).to(tl.float32)
    for path in tl.static_range(PATHS):
        total += tl.load(alpha + token * PATHS + path) * tl.load(rows + (token * PATHS + path) * HIDDEN + column)
    tl.store(dest + token * HIDDEN + column, total.to(tl.bfloat16))


class TritonMoe:
    """The block for up to 64 tokens, bfloat16; `weights` are those of gpukit as torch tensors."""

    def __init__(self, weights: Any, tokens: int):
        self.weights = weights
        self.experts, self.hidden = weights.router.shape[0] - 1, weights.router.shape[1]
        self.width = weights.shared_down.shape[1]
        device = weights.router.device
        self.ids = torch.zeros((tokens, TOP), dtype=torch.int32, device=device)
        self.alpha = torch.zeros((tokens, TOP + 1), device=device)
        self.act = torch.zeros((tokens, TOP + 1, self.width), dtype=torch.bfloat16, device=device)
        self.rows = torch.zeros((tokens, TOP + 1, self.hidden), device=device)
        self.logits = torch.zeros((tokens, self.experts + 1), dtype=torch.bfloat16, device=device)

    def __call__(self, x: Any, dest: Any) -> None:
        """Add the block to `dest`: five launches."""
        tokens, own = x.shape[0], self.weights
        sizes = {"EXPERTS": self.experts, "HIDDEN": self.hidden, "WIDTH": self.width, "TOKENS": max(16, triton.next_power_of_2(tokens)), "TOP": TOP}
        torch.mm(x, own.router.T, out=self.logits)
        _select[(tokens,)](self.logits, self.ids, self.alpha, EXPERTS=self.experts, BLOCK=triton.next_power_of_2(self.experts), TOP=TOP, num_warps=1)
        _gate_up[lambda meta: (self.width // meta["ROWS"], self.experts + 1)](x, self.ids, own.gate_up, own.shared_gate_up, self.act, tokens, **sizes)
        _down[lambda meta: (self.hidden // meta["ROWS"], self.experts + 1)](self.act, self.ids, own.down, own.shared_down, self.rows, tokens, **sizes)
        _reduce[(tokens, self.hidden // 512)](self.rows, self.alpha, dest, HIDDEN=self.hidden, BLOCK=512, PATHS=TOP + 1)


def torch_moe(x: Any, weights: Any, dest: Any) -> None:
    """Add the block to `dest` by torch: its grouped matrix product over tokens that are sorted by expert. Nothing waits for the host."""
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    tokens, hidden = x.shape
    experts, width = weights.router.shape[0] - 1, weights.shared_down.shape[1]
    scores = torch.mm(x, weights.router.T)
    top, ids = scores[:, :experts].float().topk(TOP)
    alpha = top.softmax(1)
    of_expert, order = ids.flatten().sort(stable=True)
    offsets = torch.searchsorted(of_expert, torch.arange(experts, device=x.device), right=True).to(torch.int32)
    both = grouped_mm(x[order // TOP], weights.gate_up.view(experts, 2 * width, hidden).transpose(1, 2), offs=offsets)
    act = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    down = grouped_mm(act, weights.down.view(experts, hidden, width).transpose(1, 2), offs=offsets)
    rows = torch.empty_like(down)
    rows[order] = down
    both = torch.mm(x, weights.shared_gate_up.T)
    shared = torch.mm(torch.nn.functional.silu(both[:, :width]) * both[:, width:], weights.shared_down.T)
    routed = torch.bmm(alpha.to(rows.dtype)[:, None], rows.view(tokens, TOP, hidden))[:, 0]
    dest.add_(routed).add_(shared * torch.sigmoid(scores[:, experts:].float()).to(shared.dtype))
