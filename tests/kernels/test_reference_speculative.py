"""The speculative references against brute force, draws against the distributions they promise, and speculative runs against plain ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels import speculative
from gpukit.kernels.reference import speculative as reference
from gpukit.kernels.speculative import accept_greedy, accept_sampled, argmax_columns, prepare_verify, sample, select_hidden
from tests.helpers.bf16 import bits


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(np.float64(x) - np.max(x))
    return weights / weights.sum()


# The known answers of the Random123 distribution: a counter, a key, and the words.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_has_its_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert reference.philox(np.array(counter)[:, None], key)[:, 0].tolist() == list(words)


def test_noise_is_keyed_by_seed_position_and_id() -> None:
    seed, position = -3, (5 << 32) + 7
    found = reference.noise(11, seed, position)
    key = (seed & 0xFFFFFFFF, (seed & 2**64 - 1) >> 32)
    for token in range(11):
        word = reference.philox(np.array([token // 4, 7, 5, 0])[:, None], key)[token % 4]
        assert found[token] == reference.gumbel(word)[0]
    assert len({float(reference.noise(1, *key)[0]) for key in [(0, 0), (1, 0), (1 << 32, 0), (0, 1), (0, 1 << 32)]}) == 5


def test_gumbel_noise_is_accurate_and_finite_at_both_ends() -> None:
    rng = np.random.default_rng(0)
    ends = np.arange(2_000)
    random = np.concatenate([ends, 2**32 - 1 - ends, 2**30 + ends - 1_000, rng.integers(0, 2**32, 200_000)]).astype(np.uint32)
    v = (random + 0.5) / 2**32
    found = reference.gumbel(random)
    np.testing.assert_allclose(found, -np.log(-np.log1p(-v)), rtol=0, atol=2e-6)
    # What the kernel prunes with: the number of leading zeros bounds the noise.
    zeros = np.array([32 - int(word).bit_length() for word in random])
    assert (found <= np.float32(zeros + 1) * np.float32(0.694)).all()
    # With v rounded to a float near 1 instead, one word in 2^25 would be infinite noise, which beats every logit.
    assert found.max() < 23


def test_masses_are_exponentials_in_integers() -> None:
    x = -np.linspace(0, 31, 100_001).astype(np.float32)
    found = reference.mass(x)
    np.testing.assert_allclose(found.astype(np.float64), np.exp(np.float64(x)) * 2.0**44, rtol=3e-7, atol=1)
    assert found[0] == 2**44 and reference.mass(np.float32([-32, -np.inf, np.nan])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_top_k_then_top_p_keep_what_sorting_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    x = np.round(rng.standard_normal(size) * 3, 1 if seed % 2 else 6).astype(np.float32)
    temperature, top_k, top_p = np.float32(rng.choice([0.5, 1, 2])), int(rng.integers(0, size + 2)), float(rng.choice([0.0, 0.3, 0.9, 0.99, 1.0]))
    expected = np.ones(size, bool)
    if 0 < top_k < size:
        expected = x >= np.sort(x)[::-1][top_k - 1]
    if top_p < 1:
        p = softmax(np.where(expected, x / np.float64(temperature), -np.inf))
        order = np.argsort(-p)
        last = min(int((p[order].cumsum() < top_p - 1e-9).sum()), size - 1)
        expected = expected & (x >= x[order[last]])
    found = reference.kept(x, 1 / temperature, top_k, top_p)
    assert (found == expected).all() and found[x.argmax()]


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Standard deviations above the mean of the statistic, by Wilson and Hilferty; bins of few are joined."""
    n = counts.sum()
    few = p * n < 8
    observed, expected = np.append(counts[~few], counts[few].sum()), np.append(p[~few], p[few].sum()) * n
    live = expected > 0
    assert not observed[~live].any()
    degrees = int(live.sum()) - 1
    statistic = float(((observed - expected)[live] ** 2 / expected[live]).sum())
    return (math.cbrt(statistic / degrees) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


LOGITS = np.array([1.2, -0.3, 2.0, 0.0, 1.9, -4.0, 0.7, 2.0, -np.inf, 1.0], np.float32)
FILTERS = [{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.75}]


def expected_distribution(temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    keep = reference.kept(LOGITS, np.float32(1 / temperature), top_k, top_p)
    return softmax(np.where(keep, LOGITS / temperature, -np.inf))


def vectors(rows: int, filters: dict[str, float]) -> dict[str, np.ndarray]:
    return {name: np.full(rows, value, np.int64 if name == "top_k" else np.float32) for name, value in filters.items()}


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drawn_tokens_have_the_distribution_of_the_model(temperature: float, filters: dict[str, float]) -> None:
    n = 1_500
    p = expected_distribution(temperature, **filters)
    for seeds, positions in ((np.arange(n), np.zeros(n, np.int64)), (np.full(n, 11), np.arange(n))):
        drawn = sample(np.tile(LOGITS, (n, 1)), seeds, positions, np.full(n, temperature, np.float32), **vectors(n, filters))
        assert abs(chi_square(np.bincount(drawn, minlength=10), p)) < 4
    if not filters:
        assert chi_square(np.bincount(drawn, minlength=10), expected_distribution(temperature * 1.6)) > 4


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("draft", [2, 5])
def test_the_first_token_of_a_verification_is_distributed_as_without_drafts(draft: int, filters: dict[str, float]) -> None:
    n = 1_500
    p = expected_distribution(1.0, **filters)
    lengths, anchors, emitted = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros((n, 2), np.int64)
    ids = np.tile([0, draft], (n, 1))
    own = {"seeds": np.arange(n), "temperature": np.ones(n, np.float32), **vectors(n, filters)}
    accepted = accept_sampled(np.tile(LOGITS, (n, 2, 1)), ids, lengths, anchors, **own, emitted=emitted)
    assert abs(chi_square(np.bincount(emitted[:, 0], minlength=10), p)) < 4
    # A draft is accepted with its probability; what replaces it is distributed as the others are; after it comes a free draw.
    assert abs((accepted == 2).mean() - p[draft]) < 4 * math.sqrt(p[draft] * (1 - p[draft]) / n) + 1e-12
    others = np.where(np.arange(10) == draft, 0, p)
    assert abs(chi_square(np.bincount(emitted[accepted == 1, 0], minlength=10), others / others.sum())) < 4
    if p[draft] > 0.1:
        assert abs(chi_square(np.bincount(emitted[accepted == 2, 1], minlength=10), p)) < 4


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_padding_and_nan_are_never_drawn(filters: dict[str, float], dtype: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((300, 12)).astype(np.float32)
    logits[:, 9], logits[:, 10], logits[:, 11] = np.inf, np.nan, 100
    settings_ = np.arange(300), np.arange(300), np.where(np.arange(300) < 150, 1, 0).astype(np.float32)
    given_logits = logits if dtype == "float32" else bits(logits)
    signal = Signal()
    drawn = sample(given_logits, *settings_, **vectors(300, filters), vocabulary=9, signal=signal)
    assert drawn.max() < 9 and signal.counts() == {}
    assert (argmax_columns(given_logits.T, vocabulary=9) < 9).all()
    logits[:, 4] = np.nan
    given_logits = logits if dtype == "float32" else bits(logits)
    drawn = sample(given_logits, *settings_, **vectors(300, filters), vocabulary=9, signal=signal)
    assert not (drawn == 4).any() and signal.counts() == {"out_of_range": 300}


def test_bad_settings_are_counted_and_greedy_takes_the_lowest_id() -> None:
    signal = Signal()
    temperature = np.array([0, 9e-6, -1, np.nan, np.inf, -np.inf, 1], np.float32)
    top_p = np.array([1, 1, 1, 1, 1, np.nan, np.nan], np.float32)
    logits = np.tile(np.float32([-0.0, 1, 3, 3, np.nan]), (7, 1))
    drawn = sample(logits[:, :4], np.arange(7), np.arange(7), temperature, top_p=top_p, signal=signal)
    assert drawn[:6].tolist() == [2] * 6 and signal.counts() == {"out_of_range": 5}
    assert sample(np.float32([[-0.0, 0.0], [-np.inf] * 2]), *np.zeros((2, 2), np.int64), np.zeros(2, np.float32)).tolist() == [0, 0]
    assert sample(np.float32([[-np.inf] * 3]), *np.zeros((2, 1), np.int64), np.ones(1, np.float32), top_p=np.float32([0.5])).tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_prepare_verify_against_slices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors, drafts, lengths = rng.integers(0, 99, 6), rng.integers(0, 99, (6, 9)), rng.integers(-1, 50, 6)
    starts = rng.integers(-2, 12, 6)
    ids, positions = prepare_verify(anchors, drafts, lengths, tokens=5, draft_starts=starts, padding=-7)
    for row in range(6):
        padded = {place: int(token) for place, token in enumerate(drafts[row])}
        wanted = [int(anchors[row])] + [padded.get(int(starts[row]) + i, -7) for i in range(4)]
        assert ids[row].tolist() == (wanted if lengths[row] >= 0 else [-7] * 5)
        assert positions[row].tolist() == ([int(lengths[row]) + i for i in range(5)] if lengths[row] >= 0 else [-1] * 5)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_greedy_acceptance_has_its_properties(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 6))
    few = st.integers(-1, 2)
    targets, ids = (np.array(data.draw(st.lists(few, min_size=tokens, max_size=tokens)))[None] for _ in range(2))
    length, valid, slot = data.draw(st.integers(-2, 5)), data.draw(st.integers(-1, tokens + 1)), data.draw(st.integers(-1, 9))
    lengths, anchors, rows, emitted = np.array([length]), np.array([-9]), np.zeros((1, 3), np.int64), np.zeros((1, tokens), np.int64)
    signal = Signal()
    own = {"valid": np.array([valid]), "slots": np.array([slot]), "rows": rows, "emitted": emitted, "signal": signal}
    m = int(accept_greedy(targets, ids, lengths, anchors, **own)[0])
    idle = length < 0 or not 0 < valid <= tokens
    assert (m == 0) == idle and signal.counts() == ({"out_of_range": 1} if length >= 0 and not 0 <= valid <= tokens else {})
    assert rows.tolist() == [[slot, slot, m]] and emitted[0].tolist() == targets[0, :m].tolist() + [-1] * (tokens - m)
    if idle:
        assert lengths[0] == length and anchors[0] == -9
        return
    assert lengths[0] == length + m and anchors[0] == targets[0, m - 1] and m <= valid
    assert all(ids[0, i] == targets[0, i - 1] >= 0 for i in range(1, m))
    assert m == valid or ids[0, m] != targets[0, m - 1] or ids[0, m] < 0


def a_model(rng: np.random.Generator, vocabulary: int) -> np.ndarray:
    """Logits after every token: the model of a first-order language."""
    return (rng.standard_normal((vocabulary, vocabulary)) * 2).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("filters", [{}, {"top_k": 8, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_a_speculative_run_emits_the_tokens_of_a_plain_run(quality: float, filters: dict[str, float], temperature: float) -> None:
    rng = np.random.default_rng(3)
    batch, tokens, steps, vocabulary = 4, 4, 40, 50
    model = a_model(rng, vocabulary)
    own = {"seeds": np.array([3, 1, 4, 1]), "temperature": np.full(batch, temperature, np.float32), **vectors(batch, filters)}
    starts = np.array([7, 8, 9, 10])
    plain, token = [], starts.copy()
    for step in range(steps):
        token = sample(model[token], own["seeds"], np.array([20, 0, 5, 5]) + step, own["temperature"], **vectors(batch, filters))
        plain.append(token)
    expected = np.stack(plain, axis=1)
    lengths, anchors = np.array([20, 0, 5, 5]), starts.copy()
    emitted, written, rounds = np.zeros((batch, tokens), np.int64), [[] for _ in range(batch)], 0
    while min(map(len, written)) < steps:
        guesses = rng.integers(0, vocabulary, (batch, tokens - 1))
        for row in range(batch):
            known = expected[row, len(written[row]) : len(written[row]) + tokens - 1]
            guesses[row, : len(known)] = np.where(rng.random(len(known)) < quality, known, guesses[row, : len(known)])
        ids, _ = prepare_verify(anchors, guesses, lengths)
        accepted = accept_sampled(model[ids], ids, lengths, anchors, **own, emitted=emitted)
        for row in range(batch):
            written[row] += emitted[row, : accepted[row]].tolist()
        rounds += 1
    assert [row[:steps] for row in written] == expected.tolist()
    assert rounds <= steps and (quality < 1 or rounds == steps // tokens)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float16])
def test_select_hidden_against_a_loop(dtype: type) -> None:
    rng = np.random.default_rng(2)
    hidden = rng.integers(1, 99, (5, 3, 7)).astype(dtype)
    signal = Signal()
    found = select_hidden(hidden, np.array([0, 3, 1, 4, -1]), signal=signal)
    assert (found[1] == hidden[1, 2]).all() and (found[2] == hidden[2, 0]).all() and not found[[0, 3, 4]].any()
    assert signal.counts() == {"out_of_range": 2}


def test_argmax_columns_against_a_loop() -> None:
    rng = np.random.default_rng(4)
    logits = np.round(rng.standard_normal((200, 30)) * 2).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[:, 3], logits[:, 4] = np.nan, -np.inf
    logits[:5, 5], logits[0, 6] = np.inf, -0.0
    signal = Signal()
    found = argmax_columns(logits, signal=signal)
    for column, values in enumerate(logits.T):
        best = max((float(value) for value in values if value == value), default=-math.inf)
        first = next((place for place, value in enumerate(values) if value == best), 0) if best > -math.inf else 0
        assert found[column] == first
    assert signal.counts() == {"out_of_range": int(np.isnan(logits).any(axis=0).sum())}
    assert (argmax_columns(bits(logits)) == found).all() and (argmax_columns(np.ascontiguousarray(logits.T).T) == found).all()


def test_a_workspace_is_zeros_of_three_words_a_row() -> None:
    made = speculative.workspace(5)
    assert made.shape == (15,) and made.dtype == np.int64 and not made.any()


def test_ids_of_two_widths_wrap_like_the_devices() -> None:
    targets, ids = np.full((1, 2), 2**40 + 5), np.zeros((1, 2), np.int64)
    lengths, anchors, rows = np.array([3]), np.array([1], np.int32), np.zeros((1, 3), np.int32)
    speculative.accept_greedy(targets, ids, lengths, anchors, slots=np.array([2**33 + 1]), rows=rows)
    assert lengths.tolist() == [4] and anchors.tolist() == [5] and rows.tolist() == [[1, 1, 1]]
