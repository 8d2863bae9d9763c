"""A model's plain and speculative greedy decoding of the same sequences, and the checks that they agree.

The plain run comes first, a token a round. Its tokens are the truth that the drafts are made of: at every position the true token with a given
probability, else a wrong one, drawn beforehand. So the host knows how many rounds there will be and how far each sequence comes, and launches them
all without reading anything back.

With exact verification everything in a round computes each token as plain decoding does, to the bit: tokens, states and histories must be equal.
With the fast one the model's choice may differ where two tokens are nearly tied, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpukit.decode.backend import Backend, CupyBackend, Meter, NumpyBackend, array_module, choose_backend
from gpukit.decode.checks import Violation
from gpukit.decode.geometry import EXPERT_FORMATS, GEOMETRIES, Geometry
from gpukit.decode.options import BACKENDS
from gpukit.decode.recurrent import SUBJECTS, Decoder, own_stream
from gpukit.decode.weights import Weights
from gpukit.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from rich.console import Console

    from gpukit.graphs import Plan

__all__ = [
    "COMMITS",
    "EXPERTS",
    "MODELS",
    "NEAR_TIE",
    "VERIFICATIONS",
    "Difference",
    "ModelOptions",
    "ModelReport",
    "ModelRun",
    "RoundPlan",
    "plan_rounds",
    "run_model",
]

MODELS = tuple(GEOMETRIES)
VERIFICATIONS = ("exact", "fast")
COMMITS = ("fold", "fold_record")
EXPERTS = (*EXPERT_FORMATS, "none")
MOST_DRAFTS = 15

# Two tokens are nearly tied if the plain run's logits of them differ by less than this share of the standard deviation of all its logits there. In 30
# layers of width 256, one bit changed in one of 250 outputs of the delta rule moved logits by 0.01 deviations, and by 0.05 at most; with 64 experts
# behind each layer, of which others are chosen then, by 0.017, and by 0.09 at most (NumPy): there it may be so many times as much.
NEAR_TIE = 0.1
WIDER_WITH_EXPERTS = 2
# Above this the NumPy backend would take minutes for a token.
MOST_BYTES_ON_HOST = 2**28


@dataclass(frozen=True)
class ModelOptions:
    """Options of `gpukit.decode.run_model`.

    Attributes
    ----------
    model : str
        Name of a geometry.
    sequences : int
        Sequences decoded at once.
    tokens : int
        Tokens that every sequence gets at least.
    drafts : int
        Tokens guessed per round, 0 … 15.
    acceptance : float
        Probability that a draft is right, each by itself.
    verify : {"exact", "fast"}
        Whether verification computes the bits of plain decoding, or agrees with it within rounding, and is quicker: with the convolution in
        front in the same kernel.
    commit : {"fold", "fold_record"}
        Whether states are taken past accepted tokens at the end of their round, or while the next one is recorded.
    seed : int
        Of weights, first tokens, drafts and slots.
    backend : str
        "numpy", "gpu", or "auto".
    residency : str
        L2 plan of the speculative rounds on a GPU: "off", "auto" (measured on them), or the JSON file of a plan.
    experts : {"bf16", "fp8", "q4_q5", "q6", "w8", "none"}
        Format of the experts behind the layers of models that have them; "none" leaves them out.
    """

    model: str = "tiny"
    sequences: int = 4
    tokens: int = 24
    drafts: int = 3
    acceptance: float = 0.7
    verify: str = "exact"
    commit: str = "fold"
    seed: int = 0
    backend: str = "auto"
    residency: str = "off"
    experts: str = "bf16"

    def __post_init__(self) -> None:
        for name, least, most in (("sequences", 1, 1024), ("tokens", 1, 4096), ("drafts", 0, MOST_DRAFTS), ("seed", 0, 2**31 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ArgumentTypeError(f"{name}: expected a whole number, got {value!r}")
            if not least <= value <= most:
                raise ArgumentError(f"{name}: expected a number from {least} to {most}, got {value}")
        if not isinstance(self.acceptance, float | int) or not 0 <= self.acceptance <= 1:
            raise ArgumentError(f"acceptance: expected a number from 0 to 1, got {self.acceptance!r}")
        for name, known in (("model", MODELS), ("verify", VERIFICATIONS), ("commit", COMMITS), ("backend", BACKENDS), ("experts", EXPERTS)):
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class RoundPlan:
    """What the drafts' rightness alone decides: how many tokens come out of every round.

    Attributes
    ----------
    produced : int array, shape (rounds, batch)
        Tokens of each sequence in each round.
    lengths : int array, shape (batch,)
        Tokens of each sequence in all.
    """

    produced: np.ndarray
    lengths: np.ndarray


def plan_rounds(right: np.ndarray, tokens: int, drafts: int) -> RoundPlan:
    """Play rounds of right and wrong drafts until every sequence has its tokens.

    Parameters
    ----------
    right : bool array, shape (batch, at least tokens + 2 * drafts)
        Whether the draft for the token behind each position is right; positions past the last are wrong.
    tokens, drafts : int
        Tokens that every sequence gets at least, and drafts of a round.

    Examples
    --------
    >>> plan = plan_rounds(np.array([[True, False, True, True, True, False]]), tokens=5, drafts=2)
    >>> plan.produced.ravel(), plan.lengths
    (array([2, 3]), array([5]))
    """
    lengths = np.zeros(len(right), np.int64)
    padded = np.concatenate((right, np.zeros((len(right), drafts + 1), bool)), axis=1)
    produced = []
    while lengths.min() < tokens:
        seen = padded[np.arange(len(right))[:, None], np.minimum(lengths[:, None] + np.arange(drafts + 1), padded.shape[1] - 1)]
        seen[:, drafts] = False
        produced.append(1 + seen.argmin(axis=1))
        lengths = lengths + produced[-1]
    return RoundPlan(np.array(produced), lengths)


@dataclass(frozen=True)
class Difference:
    """The first token of a sequence where a speculative run left the plain one.

    Attributes
    ----------
    sequence, position, expected, got : int
        Which token, the plain run's and the speculative run's.
    margin, limit : float
        How far apart the plain run's logits of both are, and below what that is a near tie.
    """

    sequence: int
    position: int
    expected: int
    got: int
    margin: float
    limit: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.limit


@dataclass
class ModelReport:
    """What `run_model` found out.

    Attributes
    ----------
    options : ModelOptions
        What was asked for.
    geometry : Geometry
        The model: recurrent layers with the experts behind them, embedding and head, without the attention layers between them.
    backend : str
        "numpy" or "gpu".
    plain_steps, rounds : int
        Rounds of the plain and of the speculative run.
    tokens : int
        Tokens that the speculative rounds emitted.
    accepted : float
        Mean number of drafts accepted, per round and sequence.
    kernels_per_step, kernels_per_round : int
        Calls of ops; on a GPU, kernels of the captured graph.
    census : dict of str to int
        Kernels of the graph of a speculative round, by name. Empty on NumPy.
    residency : str
        The plan of the speculative rounds, and how many of their kernels carry its window. Empty on NumPy.
    step_us, round_us : float
        Median time of a plain step and of a speculative round: of the device where there is one, else of the host.
    round_bytes : int
        Bytes that a round must move: weights, states, log and logits; of experts as many as tokens have that choose independently, where those
        that choose alike have fewer.
    floor_us : float or None
        What these take at the measured copy bandwidth of the device. None on NumPy.
    plain_tokens_per_second, tokens_per_second : float or None
        Of the device, over all rounds. None on NumPy.
    differences : list of Difference
        Where speculative decoding chose another token; the first of each sequence.
    checked_tokens, checked_states : int
        Tokens that were compared, those of each sequence up to its first difference, and (sequence, layer) states. Fast verification agrees with
        plain decoding within rounding, so its states are not compared: 0.
    violations : list of Violation
        What the checks found.
    """

    options: ModelOptions
    geometry: Geometry
    backend: str
    plain_steps: int = 0
    rounds: int = 0
    tokens: int = 0
    accepted: float = 0.0
    kernels_per_step: int = 0
    kernels_per_round: int = 0
    census: dict[str, int] = field(default_factory=dict)
    residency: str = ""
    step_us: float = 0.0
    round_us: float = 0.0
    round_bytes: int = 0
    floor_us: float | None = None
    plain_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    differences: list[Difference] = field(default_factory=list)
    checked_tokens: int = 0
    checked_states: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no check found anything."""
        return not self.violations

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types, `ok` included."""
        return {"ok": self.ok, **asdict(self)}

    def print(self, console: Console) -> None:
        """Print the table, the differences and the violations."""
        from rich.table import Table

        options, model = self.options, self.geometry
        experts = f"each with {model.experts} experts in {model.expert_format}" if model.experts else "no experts"
        title = f"{model.name}: {model.layers} recurrent layers, {experts}, no attention layers"
        table = Table(show_header=False, title=title, title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        clock = "host" if self.floor_us is None else "device"
        moved = "bytes of a round whose tokens choose independently" if model.experts else "bytes that a round must move"
        rows = [
            ("sequences, drafts, tokens", f"{options.sequences:,}, {options.drafts}, {self.tokens:,}"),
            ("verification, commit", f"{options.verify}, {options.commit}"),
            ("plain steps, speculative rounds", f"{self.plain_steps:,}, {self.rounds:,}"),
            ("drafts accepted per round", f"{self.accepted:.2f} of {options.drafts}"),
            ("kernels per step, per round", f"{self.kernels_per_step:,}, {self.kernels_per_round:,}"),
            (f"median {clock} µs per step, per round", f"{self.step_us:,.1f}, {self.round_us:,.1f}"),
            (moved, f"{self.round_bytes:,}"),
        ]
        if self.floor_us is not None:
            rows.append(("L2 plan", self.residency))
            rows.append(("µs that these take at the copy ceiling", f"{self.floor_us:,.1f}"))
            rows.append(("tokens/s, plain and speculative", f"{self.plain_tokens_per_second:,.0f}, {self.tokens_per_second:,.0f}"))
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for found in self.differences:
            kind = "near tie" if found.near_tie else "no near tie"
            console.print(
                f"difference: sequence {found.sequence}, token {found.position}: expected {found.expected}, got {found.got};"
                f" logits {found.margin:.4g} apart, {kind} (limit {found.limit:.4g})",
                markup=False,
                highlight=False,
            )
        for violation in self.violations:
            console.print(f"violation: {violation.name} after round {violation.round}: {violation.message}", style="red", markup=False)
        outcome = f"{len(self.violations)} violations" if self.violations else "no violations"
        tokens = f"{self.checked_tokens:,} tokens (of all sequences, each up to its first difference)"
        # Fast verification promises no bits, and states carry every rounding along.
        exact = options.verify == "exact"
        compared = f"{tokens} and {self.checked_states:,} states" if exact else f"{tokens}; states not compared: fast agrees within rounding"
        console.print(
            f"speculative and plain decoding compared: {outcome} in {compared}",
            style="green" if self.ok else "red",
            markup=False,
        )


def run_model(options: ModelOptions, *, geometry: Geometry | None = None, backend: Backend | None = None) -> ModelReport:
    """Decode the same sequences plainly and speculatively, and compare tokens, states and histories.

    Parameters
    ----------
    options : ModelOptions
        What to decode and how.
    geometry : Geometry, optional
        A model of the caller's, instead of the one `options` name.
    backend : Backend, optional
        An array library of the caller's, instead of the one `options` name.

    Returns
    -------
    ModelReport
        Counts, times and violations.

    Raises
    ------
    ArgumentError
        The model is too large for the NumPy backend, or for the memory of the device.
    DeviceError
        The GPU backend was asked for and there is none.

    Examples
    --------
    >>> report = run_model(ModelOptions(sequences=2, tokens=6, backend="numpy"))
    >>> report.ok, report.checked_states
    (True, 4)
    """
    return ModelRun(options, geometry, backend).run()


def _geometry(options: ModelOptions) -> Geometry:
    """The model that options name, with experts as they say."""
    model = GEOMETRIES[options.model]
    return replace(model, experts=0) if options.experts == "none" else replace(model, expert_format=options.experts)


class ModelRun:
    """One comparison: made and checked first, then run. Parameters and errors are those of `run_model`."""

    def __init__(self, options: ModelOptions, geometry: Geometry | None = None, backend: Backend | None = None):
        geometry = geometry if geometry is not None else _geometry(options)
        backend = backend if backend is not None else choose_backend(options.backend)[0]
        held = geometry.weight_bytes + geometry.expert_bytes
        if isinstance(backend, CupyBackend) and held > (free := backend.free_bytes()):
            message = f"expected a model whose weights fit into the {free:,} bytes that are free, got {held:,} of {geometry.name}"
            raise ArgumentError(f"model: {message}; choose experts in q4_q5, or none")
        if not isinstance(backend, CupyBackend) and held > MOST_BYTES_ON_HOST:
            raise ArgumentError(f"model: expected tiny on the NumPy backend, which would take minutes for a token of another, got {geometry.name}")
        if options.residency != "off" and not isinstance(backend, CupyBackend):
            raise ArgumentError(f"residency: expected off on the NumPy backend, which has no L2 to plan, got {options.residency}")
        self.options, self.geometry, self.backend = options, geometry, backend
        self.xp = array_module(backend)
        self.meter = Meter(backend)
        self.report = ModelReport(options, geometry, "gpu" if isinstance(backend, CupyBackend) else NumpyBackend.name)
        rng = np.random.default_rng([options.seed, 3])
        # Some sequences come further than others: no more than all drafts being right would take them.
        self.right = rng.random((options.sequences, options.tokens * (options.drafts + 1) + options.drafts)) < options.acceptance
        self.plan = plan_rounds(self.right, options.tokens, options.drafts)
        self.anchors = rng.integers(0, geometry.vocabulary, options.sequences)
        self.wrong = rng.integers(1, geometry.vocabulary, (options.sequences, int(self.plan.lengths.max()) + options.drafts))

    def run(self) -> ModelReport:
        """Both runs and all checks."""
        if isinstance(self.backend, CupyBackend):
            from gpukit.launch import warmup

            warmup(subjects=SUBJECTS)
        with own_stream(self.backend) as stream:
            self._run(stream)
        return self.report

    def _run(self, stream: int) -> None:
        options, geometry, backend = self.options, self.geometry, self.backend
        weights = Weights.random(geometry, backend, options.seed)
        width = self.wrong.shape[1]
        plain = Decoder(geometry, weights, backend, options.sequences, seed=options.seed)
        speculative = Decoder(
            geometry, weights, backend, options.sequences, drafts=options.drafts, width=width, commit=options.commit,
            exact=options.verify == "exact", seed=options.seed + 1,
        )  # fmt: skip
        try:
            truth = self.decode(plain, stream)
            emitted, produced = self.speculate(speculative, self.drafts(truth), stream)
            self.count(plain, speculative, produced)
            self.compare(plain, speculative, truth, emitted, produced)
        finally:
            plain.close()
            speculative.close()

    def decode(self, decoder: Decoder, stream: int) -> np.ndarray:
        """Decode every sequence to its planned length; tokens, [batch, most of them], -1 behind the last."""
        lengths, backend = self.plan.lengths, self.backend
        steps = int(lengths.max())
        decoder.start(self.anchors)
        tokens = backend.zeros((steps, self.options.sequences), np.int64)
        (step,) = decoder.compile(stream)
        ends = set(lengths.tolist())
        for position in range(steps):
            if position in ends:
                decoder.set_active(np.where(lengths > position, position, -1))
            self.meter("plain step", step)
            tokens[position] = decoder.emitted[:, 0]
        return np.where(np.arange(steps) < lengths[:, None], backend.to_host(tokens).T, -1)

    def drafts(self, truth: np.ndarray) -> np.ndarray:
        """The table of drafts: the token behind each position, or a wrong one."""
        width, vocabulary = self.wrong.shape[1], self.geometry.vocabulary
        known = np.zeros((len(truth), width), np.int64)
        known[:, : truth.shape[1]] = np.maximum(truth, 0)
        return np.where(self.right[:, :width], known, (known + self.wrong) % vocabulary)

    def speculate(self, decoder: Decoder, table: np.ndarray, stream: int) -> tuple[np.ndarray, np.ndarray]:
        """Play the planned rounds; tokens that came out, [rounds, batch, drafts + 1], and how many."""
        backend, (rounds, batch) = self.backend, self.plan.produced.shape
        decoder.start(self.anchors, table)
        emitted, produced = backend.zeros((rounds, batch, decoder.tokens), np.int64), backend.zeros((rounds, batch), np.int64)
        sides: list[Callable[[], Any]] = decoder.compile(stream, self.planned(decoder, stream))
        if decoder.graphs:
            # Choosing a plan plays rounds.
            decoder.start(self.anchors, table)
        for number in range(rounds):
            self.meter("speculative round", sides[number % len(sides)])
            emitted[number], produced[number] = decoder.emitted, decoder.accepted
        self.kernels = decoder.kernels
        if decoder.deferred:
            decoder.commit((rounds - 1) % len(sides))
        return backend.to_host(emitted), backend.to_host(produced)

    def planned(self, decoder: Decoder, stream: int) -> Plan | None:
        """The L2 plan of the rounds; None on NumPy and without one."""
        if not isinstance(self.backend, CupyBackend):
            return None
        from gpukit.decode.residency import plan_for

        return plan_for(self.options.residency, decoder, stream)

    def count(self, plain: Decoder, speculative: Decoder, produced: np.ndarray) -> None:
        """What the rounds cost and brought."""
        report, meter, options = self.report, self.meter, self.options
        meter.settle()
        report.plain_steps, report.rounds = int(self.plan.lengths.max()), len(produced)
        report.tokens, report.accepted = int(produced.sum()), float(produced.mean()) - 1
        report.kernels_per_step, report.kernels_per_round = plain.kernels, self.kernels
        # A record reads states and a fold reads and writes them; together they read once.
        report.round_bytes = self.geometry.round_bytes(options.sequences, options.drafts + 1, 2 if speculative.deferred else 3)
        step, played = meter.times["plain step"], meter.times["speculative round"]
        if not isinstance(self.backend, CupyBackend):
            report.step_us, report.round_us = (float(np.median(times.host_ns)) / 1e3 for times in (step, played))
            return
        from gpukit.graphs import audit
        from gpukit.measure.ceilings import ceilings

        report.step_us, report.round_us = float(np.median(step.device_us)), float(np.median(played.device_us))
        report.floor_us = report.round_bytes / ceilings().dram_copy.value / 1e3
        report.plain_tokens_per_second = 1e6 * float(self.plan.lengths.sum()) / sum(step.device_us)
        report.tokens_per_second = 1e6 * report.tokens / sum(played.device_us)
        report.census = dict(Counter(speculative.graphs[0].kernels))
        report.residency = f"{self.options.residency}: {audit(speculative.graphs[0])}"

    def compare(self, plain: Decoder, speculative: Decoder, truth: np.ndarray, emitted: np.ndarray, produced: np.ndarray) -> None:
        """Tokens against tokens, states against states, and what nobody should have touched."""
        report, exact = self.report, self.options.verify == "exact"
        agreed = np.ones(self.options.sequences, bool)
        for sequence in range(self.options.sequences):
            ends = np.cumsum(produced[:, sequence])
            got = emitted[:, sequence][np.arange(emitted.shape[2]) < produced[:, sequence, None]]
            compared = min(len(got), int(self.plan.lengths[sequence]))
            wrong = np.flatnonzero(got[:compared] != truth[sequence, :compared])
            report.checked_tokens += int(wrong[0]) + 1 if len(wrong) else compared
            if len(wrong):
                agreed[sequence] = False
                position = int(wrong[0])
                self.differ(plain, sequence, position, truth, int(got[position]), int(np.searchsorted(ends, position, side="right")))
            elif not np.array_equal(produced[:, sequence], self.plan.produced[:, sequence]):
                agreed[sequence] = False
                number = int(np.flatnonzero(produced[:, sequence] != self.plan.produced[:, sequence])[0])
                expected, came = self.plan.produced[number, sequence], produced[number, sequence]
                self.violate("acceptance", number, f"sequence {sequence}: expected {expected} tokens of the round, got {came}")
        if exact:
            for sequence in np.flatnonzero(agreed).tolist():
                self.compare_states(plain, speculative, sequence)
        for name, decoder in (("plain", plain), ("speculative", speculative)):
            for slot in decoder.spare.tolist():
                untouched = bool(self.xp.isnan(decoder.pool.rec[:, slot]).all()) and bool((decoder.pool.conv[:, slot] == 0x7FC0).all())
                if not untouched:
                    self.violate("foreign_state", report.rounds - 1, f"{name}: slot {slot} is no sequence's and was written")
            for kind, number in decoder.signal.counts().items():
                self.violate("skipped_value", report.rounds - 1, f"{name}: ops skipped {number} values of kind {kind}, expected none")

    def compare_states(self, plain: Decoder, speculative: Decoder, sequence: int) -> None:
        """States and histories of a sequence, to the bit."""
        here, there = (decoder.places[sequence] for decoder in (plain, speculative))
        for layer in range(self.geometry.layers):
            for name, unit in (("rec", np.uint32), ("conv", np.uint16)):
                expected, got = (getattr(decoder.pool, name)[layer, slot] for decoder, slot in ((plain, here), (speculative, there)))
                different = int((expected.view(unit) != got.view(unit)).sum())
                if different:
                    what = "state" if name == "rec" else "history"
                    message = f"sequence {sequence}, layer {layer}: {different} of {expected.size} numbers differ from plain decoding's"
                    self.violate(what, self.report.rounds - 1, message)
            self.report.checked_states += 1

    def differ(self, plain: Decoder, sequence: int, position: int, truth: np.ndarray, got: int, number: int) -> None:
        """Note another token than the plain run's: a violation, but for near ties under fast verification."""
        expected = int(truth[sequence, position])
        logits = self.plain_logits(plain, sequence, position)
        if int(logits.argmax()) != expected:
            message = f"sequence {sequence}, token {position}: expected {expected} again from plain decoding alone, got {int(logits.argmax())}"
            self.violate("not_repeatable", number, message)
        margin, limit = float(logits[expected] - logits[got]), self.near_tie * float(logits.std())
        found = Difference(sequence, position, expected, got, margin, limit)
        self.report.differences.append(found)
        if self.options.verify == "exact" or not found.near_tie:
            kind = "a near tie" if found.near_tie else "no near tie"
            message = f"sequence {sequence}, token {position}: expected {expected} like plain decoding, got {got}"
            self.violate("token", number, f"{message}, whose logit is {margin:.4g} below, {kind} (limit {limit:.4g})")

    @property
    def near_tie(self) -> float:
        """What two logits may differ by in a near tie, as a share of the deviation of all."""
        return NEAR_TIE * (WIDER_WITH_EXPERTS if self.geometry.experts else 1)

    def plain_logits(self, plain: Decoder, sequence: int, position: int) -> np.ndarray:
        """The plain run's logits of a token: the sequence is decoded again as far, by itself, which gives the same bits."""
        again = Decoder(self.geometry, plain.weights, self.backend, 1, seed=self.options.seed)
        again.start(self.anchors[sequence : sequence + 1])
        for _ in range(position + 1):
            again.round()
        logits: np.ndarray = self.backend.to_host(again.logits)[0].astype(np.float64)
        return logits

    def violate(self, name: str, number: int, message: str) -> None:
        self.report.violations.append(Violation(number, name, message))
