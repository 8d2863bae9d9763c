"""Every kernel, in every type variant it declares, compiles for every architecture without spills or stack frame and within its register budget.

The cubins are the ones that users load: same source, same options, same pinned compiler; no GPU and no driver take part.
"""

from __future__ import annotations

import pytest

from gpukit import launch
from gpukit.compile import cache, cubin
from gpukit.kernels._moe_decode import FORMATS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")

# Registers per thread. 64 lets 1,024 threads live on a multiprocessor, which hides the latency of index kernels.
BUDGET = {"numba": 64, "cuda": 128}
# A few blocks of 256 threads in all: how many fit on a multiprocessor is nothing to decode_step. Tensor-core sums of 128 tokens are registers, and
# so are weights on their way, and a unit's activations. A replay beside a long convolution is rare. The kernels of a single token share the registers
# of a multiprocessor: two warps of each on a quarter of it, which has 512 for a lane.
OWN_BUDGET = {"decode_step": 96, "moe": 168, "down_slots_fp8": 255, "down_slots_w8": 255, "moe_prefill": 255, "conv_fold_record_long": 168}
OWN_BUDGET |= {f"gate_up_one_{kind}": 72 for kind in FORMATS} | {f"down_one_{kind}": 184 for kind in FORMATS} | {"scores_one": 48}
# Warps that hand registers over to others have those of the block's start between them: with fewer there, whoever takes more would wait for ever.
EXACTLY_ON_HOPPER = {"experts_few_q4_q5": 128, "experts_few_q6": 128}
# What is tuned for Hopper must fit there as it was measured; elsewhere a few registers more are better than a spill.
BUDGET_ELSEWHERE = {"gated_delta": 168}


def files() -> dict[str, list[launch.Kernel]]:
    """The kernels that are compiled together: a file of CUDA C, or one of Numba's by itself."""
    together: dict[str, list[launch.Kernel]] = {}
    for kernel in launch.kernels():
        together.setdefault(kernel.subject if kernel.language == "cuda" else f"{kernel.subject}.{kernel.name}", []).append(kernel)
    return together


FILES = files()


def test_the_compilers_are_here() -> None:
    pytest.importorskip("numba.cuda", reason="the compile gate needs the extra cu13")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_within_their_budget(file: str, arch: str) -> None:
    from tests.helpers.cubin import resources

    wrong = []
    for kernel in FILES[file]:
        budget = OWN_BUDGET.get(kernel.name) or OWN_BUDGET.get(kernel.subject, BUDGET[kernel.language])
        if arch != "sm_90":
            budget = BUDGET_ELSEWHERE.get(kernel.subject, budget)
        for variant in kernel.variants:
            used = resources(cubin(kernel.language, kernel.subject, kernel.name, variant, arch))[f"gpukit_{kernel.name}"]
            if arch == "sm_90" and used.registers != EXACTLY_ON_HOPPER.get(kernel.name, used.registers):
                wrong.append(f"{kernel.name}: expected exactly {EXACTLY_ON_HOPPER[kernel.name]} registers, got {used.registers}")
            if used.frame_bytes or not 0 < used.registers <= budget:
                wrong.append(f"{kernel.name}{list(variant)}: expected no stack frame and at most {budget} registers, got {used}")
    assert not wrong, "\n".join(wrong)


def test_a_kernel_that_does_not_compile_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpukit.compile import cuda_c, numba_dsl
    from gpukit.compile.device import kernel
    from gpukit.errors import CompileError

    @kernel(out="int64*")
    def wrong(out):  # type: ignore[no-untyped-def]
        out[0] = no_such_name  # noqa: F821

    with pytest.raises(CompileError, match=r"(?s)kernel wrong\[\] does not compile for sm_90.*no_such_name"):
        numba_dsl.to_ptx(wrong, (), "sm_90")
    broken = cuda_c.source_path("page_copy").with_name("no_such_subject.cu")
    with pytest.raises(FileNotFoundError):
        cuda_c.compile_subject(broken.stem, "sm_90")


def test_a_kernel_declares_exactly_its_parameters() -> None:
    from gpukit.compile.device import kernel

    with pytest.raises(TypeError, match="declared parameters"):

        @kernel(out="int64*")
        def mistaken(target):  # type: ignore[no-untyped-def]
            target[0] = 1


def test_the_disk_cache_serves_the_second_request(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from gpukit import compile_stats

    monkeypatch.setenv("GPUKIT_CACHE_DIR", str(tmp_path))
    before = compile_stats()
    first = cubin("numba", "page_table", "unbind", ("int64",), "sm_90")
    second = cubin("numba", "page_table", "unbind", ("int64",), "sm_90")
    after = compile_stats()
    assert first == second
    assert (after.compiled - before.compiled, after.cached - before.cached) == (1, 1)
    assert cache.path(cache.key("numba", "page_table", "unbind", ("int64",), "sm_90")) is not None


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUKIT_CACHE_DIR", "/proc/no/such/place")
    assert cubin("numba", "page_table", "unbind", ("int64",), "sm_90")[:4] == b"\x7fELF"


def test_the_key_follows_source_types_and_target() -> None:
    keys = {
        cache.key("numba", "page_table", name, variant, arch)
        for name in ("bind", "unbind")
        for variant in (("int32",), ("int64",))
        for arch in ("sm_80", "sm_90")
    }
    assert len(keys) == 8
