"""The kernels of a speculative round: their arguments anywhere, their results against the reference on a GPU, in every case to the bit.

Draws are compared exactly too: noise, probabilities and thresholds are computed with the same roundings on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import speculative
from gpukit.kernels.speculative import accept_greedy, accept_sampled, argmax_columns, prepare_verify, sample, select_hidden
from tests.helpers.bf16 import bits
from tests.helpers.both import Both, poison

VALUE, TYPE = ArgumentError, ArgumentTypeError
TARGETS, IDS, LENGTHS, ANCHORS = np.ones((2, 3), np.int64), np.ones((2, 3), np.int32), np.ones(2, np.int64), np.ones(2, np.int64)
LOGITS, SEEDS, ONES = np.zeros((2, 3, 8), np.float32), np.ones(2, np.int64), np.ones(2, np.float32)
READ_ONLY = LENGTHS.copy()
READ_ONLY.flags.writeable = False


def greedy(*args: Any, **kwargs: Any) -> Any:
    return accept_greedy(*args, **{"accepted": np.zeros(2, np.int64), **kwargs})


def sampled(logits: Any = LOGITS, **kwargs: Any) -> Any:
    return accept_sampled(logits, IDS, LENGTHS, ANCHORS, **{"seeds": SEEDS, "temperature": ONES, **kwargs})


BAD_CALLS = [
    (lambda: prepare_verify(ANCHORS * 1.0, TARGETS, LENGTHS), TYPE, "anchors: expected dtype int32 or int64, got float64"),
    (lambda: prepare_verify(ANCHORS, TARGETS[:1], LENGTHS), VALUE, r"drafts: expected shape \(2, any\), the sequences of anchors, got \(1, 3\)"),
    (lambda: prepare_verify(ANCHORS, TARGETS, LENGTHS[:1]), VALUE, r"lengths: expected shape \(2,\), got \(1,\)"),
    (lambda: prepare_verify(ANCHORS, TARGETS, LENGTHS, tokens=0), VALUE, "tokens: expected at least 1, got 0"),
    (lambda: prepare_verify(ANCHORS, TARGETS, LENGTHS, draft_starts=SEEDS[:1]), VALUE, r"draft_starts: expected shape \(2,\)"),
    (lambda: prepare_verify(ANCHORS, TARGETS, LENGTHS, ids=TARGETS), VALUE, r"ids: expected shape \(2, 4\), got \(2, 3\)"),
    (lambda: prepare_verify(ANCHORS, TARGETS, LENGTHS, tokens=3, ids=TARGETS), VALUE, "ids: expected memory apart from drafts"),
    (lambda: prepare_verify(ANCHORS, TARGETS, LENGTHS, tokens=3, padding=0.5), TYPE, "padding: expected an integer, got float"),
    (lambda: greedy(TARGETS[0], IDS, LENGTHS, ANCHORS), VALUE, r"targets: expected 2 dimensions, got shape \(3,\)"),
    (lambda: greedy(TARGETS[:, :0], IDS[:, :0], LENGTHS, ANCHORS), VALUE, "targets: expected at least one token of every sequence"),
    (lambda: greedy(TARGETS, IDS[:, :2], LENGTHS, ANCHORS), VALUE, r"ids: expected shape \(2, 3\) like targets, got \(2, 2\)"),
    (lambda: greedy(TARGETS, IDS, READ_ONLY, ANCHORS), VALUE, "lengths: expected a writable array"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, LENGTHS), VALUE, "(anchors|lengths): expected memory apart from"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, TARGETS[0, :2]), VALUE, "anchors: expected memory apart from targets"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, emitted=TARGETS), VALUE, "emitted: expected memory apart from targets"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, emitted=TARGETS[:, :2].copy()), VALUE, r"emitted: expected shape \(2, 3\), got \(2, 2\)"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, rows=TARGETS[:, :2].copy()), VALUE, r"rows: expected shape \(2, 3\), got \(2, 2\)"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, valid=ONES), TYPE, "valid: expected dtype int32 or int64, got float32"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, slots=SEEDS[:1]), VALUE, r"slots: expected shape \(2,\), got \(1,\)"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, accepted=SEEDS[:1]), VALUE, r"accepted: expected shape \(2,\), got \(1,\)"),
    (lambda: greedy(TARGETS, IDS, LENGTHS, ANCHORS, signal=3), TYPE, "signal: expected a gpukit.Signal of the host"),
    (lambda: sampled(LOGITS.astype(np.float64)), TYPE, "logits: expected dtype float32 or bfloat16 or uint16, got float64"),
    (lambda: sampled(np.zeros((2, 3, 16), np.float32)[:, :, ::2]), VALUE, "logits: expected the last 1 dimension contiguous"),
    (lambda: sampled(LOGITS[:, :2]), VALUE, r"ids: expected shape \(2, 2\) like logits, got \(2, 3\)"),
    (lambda: sampled(vocabulary=9), VALUE, "vocabulary: expected at most 8, got 9"),
    (lambda: sampled(vocabulary=0), VALUE, "vocabulary: expected at least 1, got 0"),
    (lambda: sampled(LOGITS[:, :, :0]), VALUE, "logits: expected a vocabulary of at least one token, got 0"),
    (lambda: sampled(seeds=SEEDS[:1]), VALUE, r"seeds: expected shape \(2,\), got \(1,\)"),
    (lambda: sampled(temperature=SEEDS), TYPE, "temperature: expected dtype float32, got int64"),
    (lambda: sampled(top_k=ONES), TYPE, "top_k: expected dtype int32 or int64, got float32"),
    (lambda: sampled(top_p=SEEDS), TYPE, "top_p: expected dtype float32, got int64"),
    (lambda: sampled(workspace=np.zeros(17, np.int64)), VALUE, r"workspace: expected at least 18 words, got shape \(17,\)"),
    (lambda: sampled(workspace=np.zeros(18, np.int32)), TYPE, "workspace: expected dtype int64, got int32"),
    (lambda: sample(LOGITS, SEEDS, SEEDS, ONES), VALUE, r"logits: expected 2 dimensions, got shape \(2, 3, 8\)"),
    (lambda: sample(LOGITS[:, 0], SEEDS, SEEDS[:1], ONES), VALUE, r"positions: expected shape \(2,\), got \(1,\)"),
    (lambda: sample(LOGITS[:, 0], SEEDS, LENGTHS, ONES, out=LENGTHS), VALUE, "out: expected memory apart from positions"),
    (lambda: select_hidden(LOGITS, SEEDS[:1]), VALUE, r"accepted: expected shape \(2,\), got \(1,\)"),
    (lambda: select_hidden(LOGITS.astype(np.float64), SEEDS), TYPE, "hidden: expected dtype float16 or .*, got float64"),
    (lambda: select_hidden(LOGITS, SEEDS, out=LOGITS[:, 0].astype(np.int32)), TYPE, "out: expected dtype float32 like hidden, got int32"),
    (lambda: select_hidden(LOGITS, SEEDS, out=LOGITS[:, 0]), VALUE, "out: expected memory apart from hidden"),
    (lambda: select_hidden(LOGITS, SEEDS, out=LOGITS[:, 0, :7].copy()), VALUE, r"out: expected shape \(2, 8\) like hidden without its tokens"),
    (lambda: argmax_columns(LOGITS), VALUE, r"logits: expected 2 dimensions, got shape \(2, 3, 8\)"),
    (lambda: argmax_columns(LOGITS[0], out=SEEDS), VALUE, r"out: expected shape \(8,\), got \(2,\)"),
    (lambda: argmax_columns(LOGITS[0], workspace=np.zeros(23, np.int64)), VALUE, "workspace: expected at least 24 words"),
    (lambda: argmax_columns(LOGITS[0], vocabulary=4), VALUE, "vocabulary: expected at most 3, got 4"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not LOGITS.any() and all((array == 1).all() for array in (TARGETS, IDS, LENGTHS, ANCHORS, SEEDS, ONES))


def test_views_that_interleave_are_apart() -> None:
    both = np.ones((2, 6), np.int64)
    accepted = accept_greedy(both[:, :3], both[:, :3], LENGTHS.copy(), ANCHORS.copy(), emitted=both[:, 3:])
    assert accepted.tolist() == [3, 3] and (both == 1).all()


def test_numpy_arrays_run_the_reference() -> None:
    lengths, signal = LENGTHS.copy(), Signal()
    assert accept_greedy(TARGETS, IDS, lengths, ANCHORS.copy(), valid=np.array([2, 4]), signal=signal).tolist() == [2, 0]
    assert lengths.tolist() == [3, 1] and signal.counts() == {"out_of_range": 1}
    call = accept_sampled.prepare(LOGITS, IDS, lengths, ANCHORS.copy(), seeds=SEEDS, temperature=ONES * 0)
    assert call().tolist() == [1, 1] and call().tolist() == [1, 1] and lengths.tolist() == [5, 3]
    assert argmax_columns(LOGITS[0]).dtype == np.int64 and sample(LOGITS[:, 0], SEEDS, SEEDS.astype(np.int32), ONES).dtype == np.int32


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source_path("speculative").read_text())}
    own = speculative._THREADS, speculative._SELECT_THREADS, speculative._AHEAD
    assert (constants["THREADS"], constants["SELECT_THREADS"], constants["AHEAD"]) == own


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


def mixed(rng: np.random.Generator, low: int, high: int, shape: Any, dtype: str = "int64") -> np.ndarray:
    return rng.integers(low, high, shape).astype(dtype)


def zeros(rows: int) -> np.ndarray:
    return speculative.workspace(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("int64", "int32"), ("int32", "int64")])
@pytest.mark.parametrize(("rows", "width", "tokens"), [(0, 3, 4), (1, 0, 1), (1, 1, 2), (3, 5, 6), (2, 0, 3), (257, 40, 5), (9, 3, 300)])
def test_prepare_verify_equals_the_reference(card: Any, rows: int, width: int, tokens: int, dtypes: tuple[str, str]) -> None:
    rng = np.random.default_rng(rows + width)
    first, second = dtypes
    most = 2**31 - 1 if second == "int32" else 2**63 - 1
    starts = np.where(rng.random(rows) < 0.2, rng.choice([-most - 1, most, -3, width], rows), rng.integers(-3, width + 3, rows)).astype(second)
    both = Both(
        card,
        anchors=mixed(rng, 0, 99, rows, first),
        drafts=mixed(rng, 0, 99, (rows, width + 2), second),
        lengths=np.where(rng.random(rows) < 0.3, -1, rng.integers(0, 9999, rows)).astype(first),
        starts=starts,
        ids=poison(rows, tokens + 1, dtype=second),
        positions=poison(rows, tokens + 2, dtype=first),
        plain=poison(rows, tokens),
        where=poison(rows, tokens),
    )
    for a, signal in both:
        drafts = a.drafts[:, :width]
        outs = {"ids": a.ids[:, 1:], "positions": a.positions[:, :tokens]}
        prepare_verify(a.anchors, drafts, a.lengths, tokens=tokens, draft_starts=a.starts, **outs, signal=signal)
        prepare_verify(a.anchors, drafts, a.lengths, tokens=tokens, padding=5, ids=a.plain, positions=a.where)
    both.assert_equal()
    ids, positions = prepare_verify(both.there.anchors, both.there.drafts, both.there.lengths)
    assert ids.shape == positions.shape == (rows, width + 3) and card.host(ids).dtype == card.host(positions).dtype == first


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("int64", "int32"), ("int32", "int64")])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 4), (1, 1), (1, 4), (7, 4), (8, 32), (9, 33), (5, 64), (300, 3), (3, 131)])
def test_accept_greedy_equals_the_reference(card: Any, rows: int, tokens: int, dtypes: tuple[str, str]) -> None:
    rng = np.random.default_rng(rows + tokens)
    first, second = dtypes
    targets = mixed(rng, 0, 9, (rows, tokens + 3), first)
    ids = np.concatenate([poison(rows, 1), targets[:, : tokens - 1]], axis=1)
    wrong = rng.random(ids.shape) < 1 / tokens
    ids[wrong] = rng.choice([-1, 9], int(wrong.sum()))
    targets[:, 1:][rng.random((rows, tokens + 2)) < 0.5 / tokens] = -1
    both = Both(
        card,
        targets=targets,
        ids=ids.astype(second),
        lengths=np.where(rng.random(rows) < 0.2, -5, rng.integers(0, 99, rows)).astype(first),
        anchors=poison(rows, dtype=second),
        valid=np.where(rng.random(rows) < 0.5, tokens, rng.integers(-1, tokens + 2, rows)).astype(second),
        slots=rng.integers(-1, 9, rows).astype(first),
        accepted=poison(rows, dtype=first),
        fold=poison(rows, 3, dtype=second),
        emitted=poison(rows, tokens + 1, dtype=first),
        other=poison(rows, dtype=second),
        plain=poison(rows, 3),
    )
    for a, signal in both:
        own = a.targets[:, :tokens]
        more = {"accepted": a.accepted, "rows": a.fold, "emitted": a.emitted[:, :tokens]}
        accept_greedy(own, a.ids, a.lengths, a.anchors, valid=a.valid, slots=a.slots, **more, signal=signal)
        accept_greedy(own, a.ids, a.lengths, a.anchors, accepted=a.other, rows=a.plain, signal=signal)
    both.assert_equal()
    accepted = accept_greedy(both.there.targets[:, :tokens], both.there.ids, both.there.lengths, both.there.anchors)
    assert card.host(accepted).dtype == first and (card.host(accepted) == card.host(both.there.other)).all()


def some_logits(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Normal logits with a few of every kind of trouble."""
    logits = (rng.standard_normal(shape) * 4).astype(np.float32)
    trouble = rng.random(shape)
    logits[trouble < 0.02] = -np.inf
    logits[trouble > 0.999] = np.nan
    logits[(trouble > 0.4) & (trouble < 0.41)] = -0.0
    logits[(trouble > 0.41) & (trouble < 0.42)] = 0.0
    return logits if dtype == "float32" else bits(logits)


def hyper(rng: np.random.Generator, rows: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Seeds and sampling parameters, bad ones among them."""
    return {
        "seeds": rng.integers(-(2**63), 2**63 - 1, rows),
        "temperature": rng.choice(np.array([0, 1e-6, 0.3, 1, 1, 1, 2.5, -1, np.nan, np.inf, 3e38], np.float32), rows),
        "top_k": rng.choice([-1, 0, 1, 2, 5, 50, vocabulary - 1, vocabulary, 2**31], rows),
        "top_p": rng.choice(np.array([-1, 0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1, 2, np.nan], np.float32), rows),
    }


MODES = [(), ("top_k",), ("top_p",), ("top_k", "top_p")]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids="+".join)
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize(("rows", "tokens", "vocabulary", "padding"), [(0, 2, 5, 0), (5, 1, 1, 3), (9, 3, 7, 1), (24, 2, 130, 2), (7, 4, 5_003, 1)])
def test_accept_sampled_equals_the_reference(
    card: Any, rows: int, tokens: int, vocabulary: int, padding: int, dtype: str, mode: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(vocabulary + len(mode))
    logits = some_logits(rng, rows, tokens + 1, vocabulary + padding, dtype=dtype)
    # Padding would win everywhere, and its NaN would be counted.
    logits[:, :, vocabulary:] = rng.choice([np.inf, np.nan], padding) if dtype == "float32" else 0x7F80
    settings = hyper(rng, rows, vocabulary)
    values = {
        "logits": logits,
        "ids": mixed(rng, -1, 2, (rows, tokens), "int32"),
        "lengths": np.where(rng.random(rows) < 0.2, -5, rng.choice([0, 7, 2**31, 2**40], rows)),
        "anchors": poison(rows),
        "valid": np.where(rng.random(rows) < 0.7, tokens, rng.integers(-1, tokens + 2, rows)),
        "accepted": poison(rows),
        "fold": poison(rows, 3, dtype="int32"),
        "emitted": poison(rows, tokens),
        "workspace": zeros(rows * tokens),
    }
    # Drafts that are right half of the time.
    drawn = {key: value.copy() for key, value in values.items()}
    accept_sampled(
        drawn["logits"][:, :tokens], np.full_like(drawn["ids"], -1), drawn["lengths"], drawn["anchors"], emitted=drawn["emitted"],
        vocabulary=vocabulary, seeds=settings["seeds"], temperature=settings["temperature"], **{name: settings[name] for name in mode},
    )  # fmt: skip
    values["ids"][:, 1:] = np.where(rng.random((rows, tokens - 1)) < 0.7, drawn["emitted"][:, :-1], values["ids"][:, 1:])
    both = Both(card, **values, **settings)
    for a, signal in both:
        own = {"seeds": a.seeds, "temperature": a.temperature} | {name: getattr(a, name) for name in mode}
        outs = {"accepted": a.accepted, "rows": a.fold, "emitted": a.emitted, "workspace": a.workspace}
        for _ in range(2):
            accept_sampled(
                a.logits[:, :tokens], a.ids, a.lengths, a.anchors, **own, vocabulary=vocabulary, valid=a.valid, **outs, signal=signal
            )  # fmt: skip
    both.assert_equal()


def hard_rows(rng: np.random.Generator, vocabulary: int) -> np.ndarray:
    """Rows whose candidates do not fit a list, or lie close together, or all alike, or far apart."""
    narrow = 1 + rng.random(vocabulary) / 8
    steps = np.repeat(rng.standard_normal(vocabulary // 50 + 1), 50)[:vocabulary]
    steep = -np.arange(vocabulary, dtype=np.float64)
    rows = [np.zeros(vocabulary), narrow, -narrow, steps, steep, np.full(vocabulary, -np.inf), rng.standard_normal(vocabulary) * 1e30]
    tiny = rng.standard_normal(vocabulary) * 1e-40
    return np.array([*rows, tiny, rng.standard_normal(vocabulary) * 3], np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids="+".join)
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("vocabulary", [9_000, 3_073])
def test_sample_of_hard_rows_equals_the_reference(card: Any, vocabulary: int, dtype: str, mode: tuple[str, ...]) -> None:
    rng = np.random.default_rng(vocabulary)
    rows = hard_rows(rng, vocabulary)
    count = len(rows) * 3
    both = Both(
        card,
        logits=np.tile(rows if dtype == "float32" else bits(rows), (3, 1)),
        seeds=mixed(rng, 0, 2**31, count, "int32"),
        positions=np.where(np.arange(count) % 11 == 10, -1, np.arange(count)),
        temperature=np.repeat(np.array([1, 0.5, 1], np.float32), len(rows)),
        top_k=np.repeat([3_000, 40, 4_000], len(rows)),
        top_p=np.repeat(np.array([0.9, 0.3, 0.999], np.float32), len(rows)),
        out=poison(count, dtype="int32"),
        workspace=zeros(count),
    )
    for a, signal in both:
        own = {name: getattr(a, name) for name in mode}
        sample(a.logits, a.seeds, a.positions, a.temperature, **own, out=a.out, workspace=a.workspace, signal=signal)
    both.assert_equal()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[1:], ids="+".join)
@pytest.mark.parametrize("vocabulary", [500, 3_500])
def test_sample_keeps_exactly_the_few_that_are_asked_for(card: Any, vocabulary: int, mode: tuple[str, ...]) -> None:
    # All about equally likely, so that a draw tells one candidate too many or too few; in a list, and too close together for one.
    rng = np.random.default_rng(vocabulary)
    count = np.arange(48)
    logits = (np.where(count % 2, 1, -1)[:, None] * (1 + rng.random((48, vocabulary)) / 8)).astype(np.float32)
    both = Both(
        card,
        logits=logits,
        seeds=count,
        positions=count,
        temperature=np.ones(48, np.float32),
        top_k=1 + count % 12,
        top_p=((0.5 + count % 7) / np.where(len(mode) == 1, vocabulary, 1 + count % 12)).astype(np.float32),
        out=poison(48),
        workspace=zeros(48),
    )
    for a, signal in both:
        own = {name: getattr(a, name) for name in mode}
        sample(a.logits, a.seeds, a.positions, a.temperature, **own, out=a.out, workspace=a.workspace, signal=signal)
    both.assert_equal()


@pytest.mark.gpu
def test_many_small_probabilities_add_up(card: Any) -> None:
    # A third of the mass lies in parts of less than 2^32 units each, whose sums carry from word to word.
    logits = np.float32(np.random.default_rng(6).random((24, 20_000)) / 100 - 10.5)
    logits[:, 5] = 0
    ones = np.ones(24, np.float32)
    both = Both(card, logits=logits, seeds=np.arange(24), temperature=ones, top_p=ones * np.float32(0.9), out=poison(24), workspace=zeros(24))
    for a, signal in both:
        sample(a.logits, a.seeds, a.seeds, a.temperature, top_p=a.top_p, out=a.out, workspace=a.workspace, signal=signal)
    both.assert_equal()
    assert (both.host.out == 5).any() and (both.host.out != 5).any()


@pytest.mark.gpu
def test_candidates_that_are_passed_over_could_not_win(card: Any) -> None:
    # Filters that are off: one block goes through a row, and what it has found bounds what it still looks at.
    logits = np.random.default_rng(5).standard_normal((64, 20_000)).astype(np.float32)
    off, ones = np.zeros(64, np.int64), np.ones(64, np.float32)
    both = Both(card, logits=logits, seeds=np.arange(64), temperature=ones, off=off, out=poison(64), workspace=zeros(64))
    for a, signal in both:
        sample(a.logits, a.seeds, a.seeds, a.temperature, top_k=a.off, out=a.out, workspace=a.workspace, signal=signal)
    both.assert_equal()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids="+".join)
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_sample_of_a_real_vocabulary_equals_the_reference(card: Any, dtype: str, mode: tuple[str, ...]) -> None:
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((6, 151_936)) * 2.5).astype(np.float32)
    logits[:, 151_669:] = np.inf
    both = Both(
        card,
        logits=logits if dtype == "float32" else bits(logits),
        seeds=np.arange(6),
        positions=np.arange(6) * 1_000,
        temperature=np.array([1, 0.7, 1.2, 0, 1, 1], np.float32),
        top_k=np.array([50, 0, 20, 5, 1_000, 100_000]),
        top_p=np.array([0.95, 0.9, 1, 0.9, 0.5, 0.8], np.float32),
        out=poison(6),
        workspace=zeros(6),
    )
    for a, signal in both:
        own = {name: getattr(a, name) for name in mode}
        sample(a.logits, a.seeds, a.positions, a.temperature, **own, vocabulary=151_669, out=a.out, workspace=a.workspace, signal=signal)
    both.assert_equal()


@pytest.mark.gpu
def test_a_draw_depends_on_nothing_but_seed_position_and_logits(card: Any) -> None:
    rng = np.random.default_rng(7)
    logits, rows = some_logits(rng, 40, 4_099), np.arange(40)
    settings = {"seeds": rows % 7, "positions": rows % 5, "temperature": np.ones(40, np.float32)}
    together = card.host(sample(card.array(logits), *(card.array(value) for value in settings.values()), workspace=card.array(zeros(40))))
    off = {"top_k": np.zeros(40, np.int64), "top_p": np.ones(40, np.float32)}
    for chosen, more in ((rows, off), (rows[::-1], {}), (rows[3:5], off), (rows[20:], {})):
        own = [card.array(value[chosen]) for value in settings.values()]
        more = {name: card.array(value[chosen]) for name, value in more.items()}
        found = sample(card.array(logits[chosen]), *own, **more, workspace=card.array(zeros(len(chosen))))
        assert (card.host(found) == together[chosen]).all()
    verified = {"lengths": np.zeros(8, np.int64), "anchors": poison(8), "emitted": poison(8, 5)}
    # Every draft is the draw itself, so that all columns are settled.
    ids = np.concatenate([poison(8, 1), together.reshape(8, 5)[:, :-1]], axis=1)
    # Row b * 5 + t has position t; the seed of a sequence is that of its first row.
    own_seeds = np.arange(8)
    expected = sample(logits, np.repeat(own_seeds, 5), rows % 5, settings["temperature"]).reshape(8, 5)
    ids[:, 1:] = expected[:, :-1]
    there = {name: card.array(value) for name, value in verified.items()}
    accepted = accept_sampled(
        card.array(logits.reshape(8, 5, -1)), card.array(ids), there["lengths"], there["anchors"], emitted=there["emitted"],
        seeds=card.array(own_seeds), temperature=card.array(np.ones(8, np.float32)), workspace=card.array(zeros(40)),
    )  # fmt: skip
    assert (card.host(accepted) == 5).all() and (card.host(there["emitted"]) == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint16", "float32", "float16"])
@pytest.mark.parametrize(
    ("rows", "tokens", "width", "padding"), [(0, 2, 8, 0), (1, 1, 1, 0), (3, 4, 64, 0), (5, 2, 2_047, 1), (4, 3, 2_048, 2), (2, 3, 0, 1)]
)
def test_select_hidden_equals_the_reference(card: Any, rows: int, tokens: int, width: int, padding: int, dtype: str) -> None:
    rng = np.random.default_rng(width)
    both = Both(
        card,
        hidden=rng.integers(1, 200, (rows, tokens, width + padding)).astype(dtype),
        accepted=rng.integers(-1, tokens + 2, rows).astype("int32"),
        out=np.full((rows, width + 2 * padding), 7, dtype),
    )
    for a, signal in both:
        select_hidden(a.hidden[:, :, padding:], a.accepted, out=a.out[:, :width], signal=signal)
    both.assert_equal()
    assert select_hidden(both.there.hidden, both.there.accepted).shape == (rows, width + padding)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize(
    ("vocabulary", "columns", "padding"), [(1, 1, 0), (3, 0, 1), (7, 2, 2), (300, 3, 1), (2_049, 5, 0), (9_001, 33, 7), (70_000, 8, 4)]
)
def test_argmax_columns_equals_the_reference(card: Any, vocabulary: int, columns: int, padding: int, dtype: str) -> None:
    rng = np.random.default_rng(vocabulary)
    # Whole numbers, so that there are ties.
    logits = np.round(some_logits(rng, vocabulary + padding, columns) / 2)
    logits[vocabulary:] = np.inf
    logits[:vocabulary, columns // 2 : columns // 2 + 1] = rng.choice([-np.inf, np.nan], (vocabulary, min(columns, 1)))
    logits = logits if dtype == "float32" else bits(logits)
    out = {name: poison(columns, dtype=kind) for name, kind in (("down", "int32"), ("along", "int64"), ("apart", "int64"))}
    both = Both(card, logits=logits, rows=np.ascontiguousarray(logits.T), wide=np.repeat(logits, 2, axis=1), **out, workspace=zeros(columns))
    for a, signal in both:
        for values, own in ((a.logits, a.down), (a.rows.T, a.along), (a.wide[:, ::2], a.apart)):
            argmax_columns(values, vocabulary=vocabulary, out=own, workspace=a.workspace, signal=signal)
    both.assert_equal()
    assert (both.host.down == both.host.along).all() and (both.host.down == both.host.apart).all()


@pytest.mark.gpu
def test_bad_device_arguments_are_named(card: Any) -> None:
    logits, out = card.array(LOGITS[0]), card.array(np.full(8, 5))
    with pytest.raises(ArgumentTypeError, match="workspace: expected an array in device 0"):
        argmax_columns(logits, out=out, workspace=zeros(8))
    with pytest.raises(ArgumentTypeError, match="seeds: expected an array in device 0"):
        sample(logits, np.ones(3, np.int64), card.array(np.ones(3, np.int64)), out)
    assert (card.host(out) == 5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("selects", [False, True])
def test_prepared_and_captured_calls_equal_eager_ones(card: Any, selects: bool) -> None:
    from tests.helpers.replay import require_same, twice_three_ways

    rng = np.random.default_rng(8)
    arrays = {
        "logits": (rng.standard_normal((3, 4, 2_500)) * 3).astype(np.float32),
        "ids": mixed(rng, 0, 2_500, (3, 4)),
        "lengths": np.array([5, 0, 9]),
        "anchors": np.zeros(3, np.int64),
        "seeds": np.arange(3),
        "temperature": np.ones(3, np.float32),
        "top_p": np.full(3, 0.9, np.float32),
        "accepted": np.zeros(3, np.int64),
        "emitted": np.zeros((3, 4), np.int64),
        "workspace": zeros(12),
    }

    def arguments(a: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = ["seeds", "temperature", "accepted", "emitted", "workspace"] + ["top_p"] * selects
        return (a["logits"], a["ids"], a["lengths"], a["anchors"]), {name: a[name] for name in names}

    ways = twice_three_ways(card, "speculative", accept_sampled, arrays, arguments)
    require_same(ways)
    assert not ways[0]["workspace"].any() and (ways[0]["lengths"] >= arrays["lengths"] + 2).all()


@pytest.mark.gpu
def test_without_a_workspace_one_is_made(card: Any) -> None:
    rng = np.random.default_rng(9)
    logits = some_logits(rng, 5, 3_000)
    there = card.array(logits)
    settings = np.arange(5), np.arange(5), np.ones(5, np.float32)
    assert (card.host(argmax_columns(there.T)) == argmax_columns(logits.T)).all()
    own = [card.array(value) for value in settings]
    call = sample.prepare(there, *own)
    for _ in range(2):
        assert (card.host(call()) == sample(logits, *settings)).all()
