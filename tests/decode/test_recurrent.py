"""Decoding with a model's recurrent layers: one layer against its formulas in float64, speculative against plain decoding in every mode, and each
planted fault found and named.

A fault is planted by a decoder whose round does something else once, the way a wrong kernel or a forgotten step would.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from gpukit import cli
from gpukit.decode import ModelOptions, ModelRun, model_run, recurrent, run_model
from gpukit.decode import weights as weights_module
from gpukit.decode.backend import CupyBackend, NumpyBackend
from gpukit.decode.geometry import EXPERT_FORMATS, GEOMETRIES, Geometry
from gpukit.decode.model_run import plan_rounds
from gpukit.decode.recurrent import Decoder
from gpukit.decode.weights import Weights
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import gated_delta, moe
from gpukit.kernels.reference.moe import rows_of
from tests.helpers.bf16 import bits, numbers, sigmoid
from tests.helpers.fake_device import FakeDevice
from tests.helpers.moe import oracle

TINY = GEOMETRIES["tiny"]
WITHOUT = dataclasses.replace(TINY, name="without experts", experts=0)
# Several key heads, and widths that are multiples of nothing much.
ODD = Geometry("odd", layers=3, hidden=96, key_heads=2, value_heads=6, dim=64, vocabulary=101)
SMALL = ModelOptions(sequences=3, tokens=10, backend="numpy")
runner = CliRunner()


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights.random(TINY, NumpyBackend())


def float64_logits(geometry: Geometry, weights: Weights, ids: list[int]) -> np.ndarray:
    """The model by its formulas, token by token, rounded to bfloat16 where the decoder rounds."""

    def rounded(values: np.ndarray) -> np.ndarray:
        return numbers(bits(values))

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    heads, dim, channels, values = geometry.value_heads, geometry.dim, geometry.channels, geometry.values
    share = heads // geometry.key_heads
    states = np.zeros((geometry.layers, heads, dim, dim))
    histories = np.zeros((geometry.layers, 3, channels))
    logits = []
    for token in ids:
        hidden = numbers(weights.embedding)[token]
        for layer, own in enumerate(weights.layers):
            projected = rounded(numbers(own.projection) @ rounded(rms(hidden) * numbers(own.norm)))
            columns, gate, x_a, x_b = np.split(projected, [channels, channels + values, channels + values + heads])
            seen = np.concatenate((histories[layer], columns[None]))
            histories[layer] = seen[1:]
            mixed = (numbers(own.taps).T * seen).sum(0)
            q, k, v = np.split(rounded(mixed * sigmoid(mixed)), [geometry.key_heads * dim, 2 * geometry.key_heads * dim])
            q, k = (np.repeat(x.reshape(-1, dim), share, axis=0) for x in (q, k))
            q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
            decay = np.exp(-np.exp(own.a_log.astype(float)) * np.logaddexp(0, x_a + own.dt_bias))[:, None]
            state = states[layer]
            change = sigmoid(x_b)[:, None] * (v.reshape(heads, dim) - decay * np.einsum("hvk,hk->hv", state, k))
            state[...] = decay[:, :, None] * state + change[:, :, None] * k[:, None]
            out = rms(rounded(np.einsum("hvk,hk->hv", state, q) * dim**-0.5)) * numbers(own.output_norm)
            gates = gate.reshape(heads, dim)
            hidden = rounded(hidden + numbers(own.output) @ rounded(out * gates * sigmoid(gates)).ravel())
            if own.experts is not None:
                normed = rms(hidden) * numbers(own.expert_norm)
                hidden = rounded(oracle(np, bits(normed)[None], own.experts, bits(hidden)[None])[0][0])
        logits.append(numbers(weights.head) @ rounded(rms(hidden) * numbers(weights.final_norm)))
    return np.array(logits)


def check_plain_decoding(geometry: Geometry, backend: Any) -> None:
    """Decode two sequences and compare every logit with the formulas'; weights are the same on every backend."""
    weights = Weights.random(geometry, backend, seed=5)
    decoder = Decoder(geometry, weights, backend, 2)
    decoder.start(np.array([7, 50]))
    inputs, logits = [], []
    for _ in range(12):
        inputs.append(np.array(backend.to_host(decoder.anchors)))
        decoder.round()
        logits.append(np.array(backend.to_host(decoder.logits)))
    assert (backend.to_host(decoder.lengths) == 12).all()
    for sequence in range(2):
        expected = float64_logits(geometry, Weights.random(geometry, NumpyBackend(), seed=5), [int(step[sequence]) for step in inputs])
        found = np.array(logits)[:, sequence]
        # Activations that round to a neighbour now and then move the logits by less than a hundredth.
        assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)
        assert 0.3 < found.std() < 3


@pytest.mark.parametrize("geometry", [TINY, WITHOUT, ODD], ids=lambda geometry: geometry.name)
def test_plain_decoding_is_the_model_by_its_formulas(geometry):
    check_plain_decoding(geometry, NumpyBackend())


@pytest.mark.parametrize("verify", model_run.VERIFICATIONS)
@pytest.mark.parametrize("commit", model_run.COMMITS)
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("sequences", "drafts"), [(1, 3), (3, 2), (5, 1), (2, 7)])
def test_speculative_decoding_is_plain_decoding(sequences, drafts, acceptance, commit, verify):
    options = ModelOptions(sequences=sequences, tokens=9, drafts=drafts, acceptance=acceptance, commit=commit, verify=verify, backend="numpy")
    report = run_model(options)
    assert report.ok and report.violations == [] and report.differences == []
    assert report.checked_tokens == report.tokens >= 9 * sequences
    assert report.checked_states == (sequences * TINY.layers if verify == "exact" else 0)
    if acceptance in (0.0, 1.0):
        assert report.accepted == acceptance * drafts
        assert report.rounds == -(-9 // (1 + int(acceptance * drafts)))


@pytest.mark.parametrize("commit", model_run.COMMITS)
def test_a_geometry_of_the_callers_and_no_drafts(commit):
    report = run_model(dataclasses.replace(SMALL, drafts=2, commit=commit, seed=3), geometry=ODD)
    assert report.ok and report.geometry.name == "odd" and report.checked_states == 9
    report = run_model(dataclasses.replace(SMALL, drafts=0, commit=commit))
    assert report.ok and report.rounds == 10 and report.accepted == 0


def test_counts_and_times_of_a_report():
    report = run_model(SMALL)
    # Input ids, embedding, 7 ops a layer and 2 of its experts, norm, head, argmax, acceptance; a round folds too.
    assert (report.kernels_per_step, report.kernels_per_round) == (24, 25)
    assert run_model(dataclasses.replace(SMALL, experts="none")).kernels_per_round == 21
    assert run_model(dataclasses.replace(SMALL, commit="fold_record")).kernels_per_round == 24
    # Fast verification convolves in the same kernel, and folds histories where it does not fold states.
    for commit in model_run.COMMITS:
        report = run_model(dataclasses.replace(SMALL, commit=commit, verify="fast"))
        assert (report.kernels_per_step, report.kernels_per_round) == (24, 23)
    assert report.step_us > 0 and report.round_us > 0
    assert (report.floor_us, report.tokens_per_second, report.census) == (None, None, {})
    assert report.tokens == round((report.accepted + 1) * report.rounds * 3)
    text = io.StringIO()
    report.print(Console(file=text, width=160))
    printed = " ".join(text.getvalue().split())
    assert "2 recurrent layers, each with 16 experts in bf16, no attention" in printed and "no violations in" in printed
    fields = json.loads(json.dumps(report.to_dict()))
    assert fields["ok"] and fields["options"]["drafts"] == 3 and fields["geometry"]["hidden"] == 128


@pytest.mark.parametrize(
    ("verify", "ending"),
    [("exact", " and 6 states"), ("fast", "; states not compared: fast agrees within rounding")],
)
def test_a_report_says_what_was_compared(verify, ending):
    report = run_model(dataclasses.replace(SMALL, verify=verify))
    text = io.StringIO()
    report.print(Console(file=text, width=240))
    tokens = f"{report.tokens} tokens (of all sequences, each up to its first difference)"
    assert f"compared: no violations in {tokens}{ending}\n" in text.getvalue()


@pytest.mark.parametrize("experts", EXPERT_FORMATS)
def test_experts_in_every_format(experts):
    options = dataclasses.replace(SMALL, experts=experts, tokens=6)
    report = run_model(options)
    assert report.ok and report.geometry.expert_format == experts and report.checked_states == 6
    of_none = run_model(dataclasses.replace(options, experts="none"))
    assert of_none.ok and of_none.round_bytes < report.round_bytes


@pytest.mark.parametrize("left_out", [0, 3, 9])
def test_experts_that_are_left_out_once_are_found(monkeypatch, left_out):
    calls = []

    def sparse_moe(x: Any, weights: Any, dest: Any, **keywords: Any) -> None:
        # The plain run's are of three tokens.
        calls.extend(["verified"] * (len(x) == 12))
        if len(x) != 12 or len(calls) != left_out + 1:
            moe.sparse_moe(x, weights, dest, **keywords)

    monkeypatch.setattr(recurrent, "moe", SimpleNamespace(sparse_moe=sparse_moe, workspace_bytes=moe.workspace_bytes))
    report = run_model(dataclasses.replace(SMALL, tokens=30))
    assert len(calls) > 10 and not report.ok
    assert {violation.name for violation in report.violations} <= {"token", "acceptance", "state", "history"}


def test_runs_are_repeatable_and_follow_the_seed():
    def tokens(seed: int) -> np.ndarray:
        decoder = Decoder(TINY, Weights.random(TINY, NumpyBackend(), seed), NumpyBackend(), 2)
        decoder.start(np.array([1, 2]))
        found = []
        for _ in range(6):
            decoder.round()
            found.append(decoder.anchors.copy())
        return np.array(found)

    assert (tokens(0) == tokens(0)).all() and (tokens(0) != tokens(1)).any()


def test_random_numbers_have_their_deviation_and_do_not_depend_on_the_pieces_they_are_made_in(monkeypatch):
    whole = weights_module.random_bfloat16(NumpyBackend(), (50, 1000), 0.25, seed=3)
    monkeypatch.setattr(weights_module, "_CHUNK", 777)
    assert (weights_module.random_bfloat16(NumpyBackend(), (50, 1000), 0.25, seed=3) == whole).all()
    values = numbers(whole)
    assert abs(values.std() - 0.25) < 2e-3 and abs(values.mean()) < 4e-3 and abs(values).max() <= 0.25 * 3**0.5 + 2e-3
    assert abs(np.corrcoef(values.ravel()[:-1], values.ravel()[1:])[0, 1]) < 0.02
    other = weights_module.random_bfloat16(NumpyBackend(), (50, 1000), 0.25, seed=4)
    assert abs(np.corrcoef(values.ravel(), numbers(other).ravel())[0, 1]) < 0.02


def test_plans_are_those_of_rounds_played_by_hand():
    rng = np.random.default_rng(0)
    for _ in range(50):
        batch, tokens, drafts = rng.integers(1, 5), int(rng.integers(1, 20)), int(rng.integers(0, 5))
        right = rng.random((batch, tokens * (drafts + 1) + drafts)) < rng.random()
        plan = plan_rounds(right, tokens, drafts)
        lengths = [0] * batch
        for produced in plan.produced:
            assert min(lengths) < tokens
            for sequence in range(batch):
                m = 1
                while m <= drafts and right[sequence, lengths[sequence] + m - 1]:
                    m += 1
                assert produced[sequence] == m
                lengths[sequence] += m
        assert lengths == plan.lengths.tolist() and min(lengths) >= tokens


def rounds(decoder: Decoder, count: int) -> list[list[int]]:
    """Play rounds and commit the last; the tokens of each sequence."""
    tokens: list[list[int]] = [[] for _ in range(decoder.batch)]
    for number in range(count):
        decoder.round(number % max(len(decoder.logs), 1))
        for sequence, produced in enumerate(decoder.accepted.tolist()):
            tokens[sequence] += decoder.emitted[sequence, :produced].tolist()
    if decoder.deferred and count:
        decoder.commit((count - 1) % 2)
    return tokens


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("commit", model_run.COMMITS)
def test_rejected_drafts_leave_no_trace(weights, commit, exact):
    """Two tables that are wrong in different ways at the same places."""
    plain = Decoder(TINY, weights, NumpyBackend(), 2)
    plain.start(np.array([3, 4]))
    truth = np.array(rounds(plain, 12))
    right = np.random.default_rng(1).random(truth.shape) < 0.5
    ends = []
    for shift in (1, 200):
        decoder = Decoder(TINY, weights, NumpyBackend(), 2, drafts=3, width=12, commit=commit, exact=exact)
        decoder.start(np.array([3, 4]), np.where(right, truth, (truth + shift) % 512))
        ends.append((rounds(decoder, 4), decoder.pool.rec[:, decoder.places].tobytes(), decoder.pool.conv[:, decoder.places].tobytes()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("commit", model_run.COMMITS)
def test_idle_sequences_keep_their_states_and_disturb_nobody(weights, commit, exact):
    ends = []
    for idle in (False, True):
        decoder = Decoder(TINY, weights, NumpyBackend(), 3, drafts=2, width=40, commit=commit, exact=exact)
        decoder.start(np.array([3, 4, 5]), np.full((3, 40), 9))
        rounds(decoder, 2)
        parts = [array[:, decoder.places[1]] for array in (decoder.pool.rec, decoder.pool.conv)]
        before = [part.copy() for part in parts]
        if idle:
            decoder.set_active(np.where([True, False, True], decoder.lengths, -1))
        tokens = rounds(decoder, 3)
        assert (tokens[1] == []) == idle and [(part == kept).all() for part, kept in zip(parts, before, strict=True)] == [idle, idle]
        assert decoder.signal.counts() == {}
        ends.append((tokens[0], tokens[2], decoder.pool.rec[:, decoder.places[[0, 2]]].tobytes()))
    assert ends[0] == ends[1] and len(ends[0][0]) >= 3


def check_commits_end_alike(geometry: Geometry, backend: Any, exact: bool, drafts: int, captured: bool) -> None:
    """Both commits, half of the drafts right: the same tokens, states and histories, to the bit."""
    weights = Weights.random(geometry, backend)
    with recurrent.own_stream(backend) as stream:
        plain = Decoder(geometry, weights, backend, 3)
        plain.start(np.array([3, 4, 5]))
        truth = []
        for _ in range(6 * (drafts + 1)):
            plain.round()
            truth.append(np.array(backend.to_host(plain.anchors)))
        table = np.array(truth).T.copy()
        wrong = np.random.default_rng(1).random(table.shape) < 0.5
        table[wrong] = (table[wrong] + 1) % geometry.vocabulary
        ends = []
        for commit in model_run.COMMITS:
            decoder = Decoder(geometry, weights, backend, 3, drafts=drafts, width=table.shape[1], commit=commit, exact=exact)
            decoder.start(np.array([3, 4, 5]), table)
            sides = decoder.compile(stream) if captured else [functools.partial(decoder.round, side) for side in range(len(decoder.logs))]
            tokens = []
            for number in range(5):
                sides[number % len(sides)]()
                tokens.append(np.array(backend.to_host(decoder.emitted)))
            if decoder.deferred:
                decoder.commit(4 % len(sides))
            # More tokens than rounds: drafts were accepted.
            assert (backend.to_host(decoder.lengths) > 5).all()
            live = [backend.to_host(array)[:, decoder.places].view(np.uint16) for array in (decoder.pool.rec, decoder.pool.conv)]
            ends.append((np.array(tokens), *live))
            assert decoder.signal.counts() == {}
            decoder.close()
    for fold, fold_record in zip(*ends, strict=True):
        assert np.array_equal(fold, fold_record)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("geometry", [TINY, ODD], ids=lambda geometry: geometry.name)
def test_both_commits_end_with_the_same_states(geometry, exact):
    check_commits_end_alike(geometry, NumpyBackend(), exact, 3, captured=False)


# Planted faults.


class Faulty(Decoder):
    """Does something else in one round."""

    fault: Callable[[Decoder], Any]
    at = 1
    before = False

    def round(self, side: int = 0) -> None:
        self.played = getattr(self, "played", -1) + 1
        if not self.speculative or self.played != self.at:
            return super().round(side)
        if self.before:
            type(self).fault(self)
            return super().round(side)
        super().round(side)
        return type(self).fault(self)


def without_fold(decoder: Decoder, side: int) -> None:
    """A round that forgets its commit."""


def flip(array: np.ndarray, *place: int) -> None:
    """Change the lowest bit of a number."""
    array.view(np.uint32 if array.itemsize == 4 else np.uint16)[place] ^= 1


# What to do, the commit, whether before a round or after it, and the violations it may cause. A bit of a state may heal within some tokens, as its
# updates forget: the bit faults come after the last round, the others after the second.
FAULTS = {
    "a bit of a state": (lambda d: flip(d.pool.rec, 1, d.places[0], 1, 3, 3), "fold", False, {"state"}),
    "a bit of a history": (lambda d: flip(d.pool.conv, 1, d.places[2], 2, 100), "fold", False, {"history"}),
    "a spare slot": (lambda d: flip(d.pool.conv, 0, d.spare[0], 1, 5), "fold", False, {"foreign_state"}),
    "a logged key": (lambda d: d.logs[1].k.__setitem__((0, 1, 0, 0, 0), 0x4000), "fold_record", False, {"state", "history", "token"}),
    "the wrong log": (lambda d: d.logs.reverse(), "fold_record", True, {"state", "history", "token", "acceptance", "skipped_value"}),
    "an anchor": (lambda d: d.anchors.__setitem__(0, (d.anchors[0] + 1) % 512), "fold", False, {"token", "state", "history"}),
    "a length": (lambda d: d.lengths.__setitem__(1, d.lengths[1] + 1), "fold", False, {"acceptance", "token"}),
    "a slot": (lambda d: d.slots.__setitem__(0, d.spare[0]), "fold", True, {"foreign_state", "token", "state", "skipped_value"}),
    "an emitted token": (lambda d: d.emitted.__setitem__((1, 0), (d.emitted[1, 0] + 1) % 512), "fold", False, {"token"}),
    "a count": (lambda d: d.accepted.__setitem__(0, 1 + d.accepted[0] % 4), "fold", False, {"acceptance", "token"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(monkeypatch, name):
    fault, commit, before, kinds = FAULTS[name]
    options = dataclasses.replace(SMALL, commit=commit, acceptance=0.5)
    at = len(ModelRun(options).plan.produced) - 1 if name.startswith("a bit") else 1
    monkeypatch.setattr(model_run, "Decoder", type("Planted", (Faulty,), {"fault": staticmethod(fault), "before": before, "at": at}))
    report = run_model(options)
    found = {violation.name for violation in report.violations}
    assert not report.ok and found and found <= kinds, found
    assert all(violation.message and 0 <= violation.round < report.rounds for violation in report.violations)


@pytest.mark.parametrize("number", [0, 2])
def test_a_fold_that_is_skipped_once_is_found(monkeypatch, number):
    calls = []

    def fold(pool: Any, log: Any, rows: Any, **keywords: Any) -> None:
        calls.append(rows)
        if len(calls) != number + 1:
            gated_delta.fold(pool, log, rows, **keywords)

    class Module:
        direct, record, fold_record = gated_delta.direct, gated_delta.record, gated_delta.fold_record

    monkeypatch.setattr(recurrent, "gated_delta", Module)
    Module.fold = staticmethod(fold)
    report = run_model(SMALL)
    assert not report.ok and {violation.name for violation in report.violations} <= {"token", "acceptance", "state", "history"}


def test_the_last_commit_of_a_deferred_run_is_checked(monkeypatch):
    monkeypatch.setattr(Decoder, "commit", without_fold)
    report = run_model(dataclasses.replace(SMALL, commit="fold_record"))
    assert {violation.name for violation in report.violations} == {"state", "history"}


@pytest.mark.parametrize("skipped", [0, 1])
def test_histories_that_are_left_behind_once_are_found_with_fast_verification(monkeypatch, skipped):
    calls = []

    def fold(*args: Any, states: bool = True, **keywords: Any) -> None:
        calls.append(states)
        if states or len(calls) != skipped + 1:
            gated_delta.fold(*args, states=states, **keywords)

    module = SimpleNamespace(direct=gated_delta.direct, conv_fold_record=gated_delta.conv_fold_record, fold=fold)
    monkeypatch.setattr(recurrent, "gated_delta", module)
    report = run_model(dataclasses.replace(SMALL, commit="fold_record", verify="fast"))
    # One fold of histories a round, and one of the last round's states.
    assert calls == [False] * report.rounds + [True]
    assert not report.ok and {violation.name for violation in report.violations} <= {"token", "acceptance"}


def test_fast_verification_forgives_near_ties_and_nothing_else(monkeypatch):
    """Another token is reported with its logit; the limit decides."""
    fault = staticmethod(lambda d: d.emitted.__setitem__((1, 0), (d.emitted[1, 0] + 1) % 512))
    monkeypatch.setattr(model_run, "Decoder", type("Planted", (Faulty,), {"fault": fault}))
    fast = dataclasses.replace(SMALL, verify="fast")
    report = run_model(fast)
    (difference,) = report.differences
    assert [violation.name for violation in report.violations] == ["token"] and "no near tie (limit" in report.violations[0].message
    assert difference.sequence == 1 and difference.got == (difference.expected + 1) % 512 and difference.margin > difference.limit
    text = io.StringIO()
    report.print(Console(file=text, width=160))
    assert "difference: sequence 1, token" in text.getvalue() and "1 violations in" in text.getvalue()
    monkeypatch.setattr(model_run, "NEAR_TIE", 100.0)
    report = run_model(fast)
    assert report.ok and report.differences[0].near_tie


def test_near_ties_are_wider_where_experts_follow():
    assert ModelRun(dataclasses.replace(SMALL, experts="none")).near_tie == model_run.NEAR_TIE == 0.1
    assert ModelRun(SMALL).near_tie == 2 * model_run.NEAR_TIE


def test_rounds_neither_wait_nor_read_back():
    device = FakeDevice()
    run = ModelRun(SMALL, backend=device)
    decoder = Decoder(TINY, Weights.random(TINY, device), device, 3, drafts=3, width=run.wrong.shape[1])
    table = run.drafts(np.zeros((3, 5), np.int64))
    for number in range(3):
        if number == 0:
            decoder.start(run.anchors, table)
        decoder.round()
    assert (device.waits, device.reads) == (0, 0)
    run.speculate(decoder, table, 0)
    assert (device.waits, device.reads) == (0, 2)
    assert run_model(SMALL, backend=FakeDevice()).ok


def test_geometries_have_the_sizes_of_their_models():
    model = GEOMETRIES["qwen3.6-35b-a3b"]
    assert (model.channels, model.projection, model.log_bytes, model.state_bytes) == (8192, 12352, 867_840, 64_389_120)
    assert GEOMETRIES["qwen3.8-27b"].channels == 10_240
    decoder = Decoder(TINY, Weights.random(TINY, NumpyBackend()), NumpyBackend(), 2, drafts=2)
    held = sum(array.nbytes for array in (decoder.pool.rec, decoder.pool.conv)) // (2 + recurrent.SPARE_SLOTS)
    logged = sum(array.nbytes for log in decoder.logs for array in (log.k, log.v, log.gates, log.conv)) // (2 * 3)
    read = sum(layer.projection.nbytes + layer.output.nbytes for layer in decoder.weights.layers) + decoder.weights.head.nbytes
    assert (held, logged, read) == (TINY.state_bytes, TINY.log_bytes, TINY.weight_bytes)


@pytest.mark.parametrize("experts", EXPERT_FORMATS)
def test_geometries_have_the_sizes_of_their_experts(experts):
    geometry = dataclasses.replace(TINY, expert_format=experts)

    def size(one: Any) -> int:
        if one is None or isinstance(one, str):
            return 0
        return sum(size(getattr(one, field.name)) for field in dataclasses.fields(one)) if dataclasses.is_dataclass(one) else one.nbytes

    layers = Weights.random(geometry, NumpyBackend()).layers
    assert sum(size(layer.experts) for layer in layers) == geometry.expert_bytes
    # A token has half of the sixteen, and many have all.
    of_all_tokens = geometry.read_expert_bytes(0)
    assert geometry.read_expert_bytes(1) - of_all_tokens == (geometry.expert_bytes - of_all_tokens) // 2
    assert geometry.read_expert_bytes(64) == geometry.expert_bytes and WITHOUT.expert_bytes == WITHOUT.read_expert_bytes(4) == 0


@pytest.mark.parametrize("kind", ["bf16", "fp8", "q4", "q5", "q6", "w8"])
def test_random_matrices_have_their_deviation(kind):
    values = rows_of(weights_module.random_matrix(NumpyBackend(), 200, 512, kind, 0.25, seed=7), 0, 200)
    assert abs(values.std() - 0.25) < 5e-3 and abs(values.mean()) < 5e-3 and len(np.unique(values)) > 15
    plain = numbers(weights_module.random_matrix(NumpyBackend(), 200, 512, "bf16", 0.25, seed=7))
    # Half of the last of four bits, or of a step of the largest there is.
    largest = 0.25 * 3**0.5
    bound = {"bf16": 0, "fp8": np.abs(plain) / 16 + 2**-10, "q4": largest / 14, "q5": largest / 30, "q6": largest / 62, "w8": largest / 254}[kind]
    assert (np.abs(values - plain) <= 1.01 * bound + (kind != "bf16") * 1e-3).all()


def test_a_model_that_does_not_fit_into_the_device_is_refused():
    backend = CupyBackend.__new__(CupyBackend)
    device, pool = SimpleNamespace(mem_info=(9 * 10**9, 10**11)), SimpleNamespace(free_bytes=lambda: 10**9)
    backend.cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device), get_default_memory_pool=lambda: pool)
    with pytest.raises(ArgumentError, match=r"model: expected a model whose weights fit into the 10,000,000,000 bytes .* got 5\d,.* of qwen3.6"):
        ModelRun(ModelOptions(model="qwen3.6-35b-a3b"), backend=backend)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"model": "small"}, ArgumentError, "model: expected one of tiny, .*, got 'small'"),
        ({"sequences": 0}, ArgumentError, "sequences: expected a number from 1 to 1024, got 0"),
        ({"drafts": 16}, ArgumentError, "drafts: expected a number from 0 to 15, got 16"),
        ({"tokens": 1.5}, ArgumentTypeError, "tokens: expected a whole number, got 1.5"),
        ({"acceptance": 1.1}, ArgumentError, "acceptance: expected a number from 0 to 1, got 1.1"),
        ({"verify": "no"}, ArgumentError, "verify: expected one of exact, fast, got 'no'"),
        ({"commit": "x"}, ArgumentError, "commit: expected one of fold, fold_record, got 'x'"),
        ({"backend": "cuda"}, ArgumentError, "backend: expected one of auto, numpy, gpu, got 'cuda'"),
        ({"experts": "q4"}, ArgumentError, "experts: expected one of bf16, fp8, q4_q5, q6, w8, none, got 'q4'"),
    ],
)
def test_bad_options_are_named(change, kind, message):
    with pytest.raises(kind, match=message):
        dataclasses.replace(SMALL, **change)


def test_a_large_model_is_refused_without_a_device():
    with pytest.raises(ArgumentError, match=r"model: expected tiny on the NumPy backend, .* got qwen3.6-35b-a3b"):
        run_model(dataclasses.replace(SMALL, model="qwen3.6-35b-a3b"))


# The command.

COMMAND = ["decode", "--backend", "numpy", "--requests", "3", "--batch", "2", "--pages", "300", "--swa-pages", "60", "--tokens", "6"]


def test_the_command_decodes_with_a_model_after_the_replay(tmp_path):
    path = tmp_path / "report.json"
    numbers = {"sequences": 2, "tokens": 6, "drafts": 2, "seed": 4}
    words = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    modes = {"model": "tiny", "acceptance": 0.5, "verify": "fast", "commit": "fold_record", "residency": "off", "experts": "q4_q5"}
    words += [word for name, value in modes.items() for word in (f"--{name}", str(value))]
    result = runner.invoke(cli.app, [*COMMAND, *words, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "3 of 3" in result.stdout and "speculative and plain decoding compared: no violations" in " ".join(result.stdout.split())
    fields = json.loads(path.read_text())
    assert fields["ok"] and fields["model"]["ok"] and fields["model"]["options"] == {**numbers, **modes, "backend": "numpy"}


def test_there_is_no_l2_to_plan_on_the_host():
    with pytest.raises(ArgumentError, match="residency: expected off on the NumPy backend"):
        run_model(ModelOptions(residency="auto", backend="numpy"))


def test_without_a_model_the_command_only_replays(tmp_path):
    path = tmp_path / "report.json"
    result = runner.invoke(cli.app, [*COMMAND, "--model", "none", "--json", str(path)])
    assert result.exit_code == 0 and "recurrent" not in result.stdout and json.loads(path.read_text())["model"] is None


def test_the_defaults_of_the_command_are_those_of_the_options(monkeypatch):
    from gpukit import decode

    made = []
    monkeypatch.setattr(decode, "ModelRun", lambda options: made.append(options) or 1 / 0)
    runner.invoke(cli.app, ["decode"])
    assert made == [ModelOptions()]


def test_a_violation_of_the_model_fails_the_command(monkeypatch):
    monkeypatch.setattr(Decoder, "commit", without_fold)
    result = runner.invoke(cli.app, COMMAND)
    assert result.exit_code == 1 and "violation: " in result.stdout and "no violations in" in result.stdout


def test_an_interrupt_while_the_model_decodes_keeps_the_replay(monkeypatch):
    def interrupt(run: ModelRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRun, "run", interrupt)
    result = runner.invoke(cli.app, COMMAND)
    assert result.exit_code == 130 and "3 of 3" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--model", "huge"], "model: expected one of tiny"), (["--model", "qwen3.8-27b"], "model: expected tiny on the NumPy backend")],
)
def test_a_bad_model_is_refused_before_the_replay(words, message):
    result = runner.invoke(cli.app, [*COMMAND, *words])
    assert result.exit_code == 2 and result.stdout == "" and message in " ".join(result.stderr.split())


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [TINY, ODD], ids=lambda geometry: geometry.name)
def test_plain_decoding_is_the_model_by_its_formulas_on_a_gpu(geometry):
    check_plain_decoding(geometry, CupyBackend())


CUT = Geometry("two layers of qwen3.6-35b-a3b", layers=2, hidden=2048, key_heads=16, value_heads=32, dim=128, vocabulary=4096)
WITH_EXPERTS = dataclasses.replace(CUT, name="two layers and their experts", experts=256, expert_width=512)


@pytest.mark.gpu
@pytest.mark.parametrize("verify", model_run.VERIFICATIONS)
@pytest.mark.parametrize("commit", model_run.COMMITS)
@pytest.mark.parametrize(("geometry", "sequences"), [(TINY, 1), (TINY, 5), (CUT, 1), (CUT, 4), (CUT, 16), (WITH_EXPERTS, 1), (WITH_EXPERTS, 20)])
def test_speculative_decoding_is_plain_decoding_on_a_gpu(geometry, sequences, commit, verify):
    options = ModelOptions(sequences=sequences, tokens=24, drafts=3, commit=commit, verify=verify, backend="gpu")
    report = run_model(options, geometry=geometry)
    assert report.ok, report.violations
    assert report.backend == "gpu" and (verify == "fast" or report.checked_states == sequences * geometry.layers)
    assert report.kernels_per_round == sum(report.census.values()) and report.tokens_per_second > 0 and report.floor_us > 0


@pytest.mark.gpu
@pytest.mark.parametrize("experts", model_run.EXPERTS)
def test_experts_in_every_format_on_a_gpu(experts):
    geometry = CUT if experts == "none" else dataclasses.replace(WITH_EXPERTS, expert_format=experts)
    report = run_model(ModelOptions(sequences=5, tokens=24, backend="gpu"), geometry=geometry)
    # A norm, a launch of routing and two more.
    assert report.ok and report.kernels_per_step == 20 + 2 * 4 * (experts != "none")


@pytest.mark.gpu
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_nothing_or_everything_accepted_on_a_gpu(acceptance):
    for commit in model_run.COMMITS:
        report = run_model(ModelOptions(tokens=20, acceptance=acceptance, commit=commit, drafts=5, backend="gpu"), geometry=CUT)
        assert report.ok and report.accepted == 5 * acceptance


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("drafts", [3, 7])
@pytest.mark.parametrize("geometry", [ODD, CUT], ids=["odd", "cut"])
def test_both_commits_end_with_the_same_states_on_a_gpu(geometry, drafts, exact):
    from gpukit import warmup

    warmup(subjects=recurrent.SUBJECTS)
    check_commits_end_alike(geometry, CupyBackend(), exact, drafts, captured=True)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("commit", model_run.COMMITS)
def test_graphs_and_eager_rounds_are_the_same_on_a_gpu(commit, exact):
    from gpukit import warmup
    from gpukit.decode.recurrent import SUBJECTS, own_stream

    backend = CupyBackend()
    warmup(subjects=SUBJECTS)
    table = np.random.default_rng(0).integers(0, CUT.vocabulary, (3, 64))
    ends = []
    with own_stream(backend) as stream:
        weights = Weights.random(CUT, backend)
        for captured in (False, True):
            decoder = Decoder(CUT, weights, backend, 3, drafts=3, width=64, commit=commit, exact=exact)
            decoder.start(np.array([1, 2, 3]), table)
            sides = decoder.compile(stream) if captured else [lambda side=side, own=decoder: own.round(side) for side in range(len(decoder.logs))]
            tokens = []
            for number in range(6):
                sides[number % len(sides)]()
                tokens.append(backend.to_host(decoder.emitted))
            parts = [backend.to_host(array).view(np.uint16) for array in (decoder.pool.rec, decoder.pool.conv)]
            ends.append((np.array(tokens), *parts))
            decoder.close()
    for eager, graph in zip(*ends, strict=True):
        assert np.array_equal(eager, graph)


@pytest.mark.gpu
def test_weights_are_the_same_on_every_backend():
    backend = CupyBackend()
    there = backend.to_host(weights_module.random_bfloat16(backend, (300, 1000), 0.1, seed=9))
    assert (there == weights_module.random_bfloat16(NumpyBackend(), (300, 1000), 0.1, seed=9)).all()


@pytest.mark.gpu
def test_a_plan_of_the_rounds_is_on_every_kernel_and_changes_no_bit(tmp_path):
    from gpukit.graphs import Recipe

    path = tmp_path / "plan.json"
    path.write_text(json.dumps(Recipe("some", "states", reserve=8 << 20).to_dict()))
    report = run_model(ModelOptions(residency=str(path), backend="gpu"))
    assert report.ok and report.residency.endswith(f"{report.kernels_per_round} of {report.kernels_per_round} kernel nodes windowed")
