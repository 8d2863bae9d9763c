"""The launcher against a driver double: loading, cold captures, contexts of default streams, refusals, threads, forks."""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gpukit import errors, launch
from gpukit.kernels import page_table  # noqa: F401
from tests.helpers.driver import FakeDriver, Result

KERNEL = next(kernel for kernel in launch.kernels() if kernel.name == "unbind")
VARIANT = ("int64",)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    double = FakeDriver()
    yield double.install(monkeypatch)
    double.restore()


def run(stream: int = 77, device: int = 0, arguments: tuple[int, ...] = (11, 12, -13)) -> object:
    return KERNEL.launch(VARIANT, device, stream, 3, 256, arguments, "result")


def test_arguments_reach_the_driver_eight_bytes_each(driver: FakeDriver) -> None:
    assert run() == "result"
    (call,) = driver.launches
    assert call["grid"] == (3, 1, 1) and call["block"] == (256, 1, 1) and call["stream"] == 77
    assert call["values"][:3] == [11, 12, -13]


def test_a_kernel_is_loaded_once_per_device(driver: FakeDriver) -> None:
    for _ in range(3):
        run()
    assert len(driver.loaded) == 1
    driver.device_count = 2
    run(device=1)
    # The same architecture: one library serves both devices.
    assert len(driver.loaded) == 1 and set(KERNEL.handles) == {(VARIANT, 0), (VARIANT, 1)}


def test_a_cold_kernel_in_a_capture_is_refused_before_any_driver_call(driver: FakeDriver) -> None:
    driver.capturing.add(77)
    with pytest.raises(errors.ColdKernelError, match=r"page_table.unbind\['int64'\] is not loaded and its stream is capturing"):
        run()
    assert not driver.loaded and not driver.launches
    driver.capturing.clear()
    run()
    driver.capturing.add(77)
    assert run() == "result"


@pytest.mark.parametrize(
    ("capability", "clusters", "refused", "room"),
    [((9, 0), 7, None, True), ((9, 0), 0, None, False), ((12, 0), 7, "cuOccupancyMaxActiveClusters", False), ((8, 0), 7, None, False)],
)
def test_clusters_are_launched_where_a_device_has_room_for_one(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], clusters: int, refused: str | None, room: bool
) -> None:
    kernel = next(kernel for kernel in launch.kernels() if kernel.name == "route_few")
    monkeypatch.setattr(launch.devices, "properties", functools.cache(lambda device: SimpleNamespace(compute_capability=capability)))
    driver.clusters, driver.refuse = clusters, {refused: Result.CUDA_ERROR_LAUNCH_FAILED} if refused else {}
    if capability >= (9, 0):
        driver.capturing.add(77)
        with pytest.raises(errors.ColdKernelError, match="moe.route_few"):
            kernel.has_room(0, 77)
        driver.capturing.clear()
    assert [kernel.has_room(0, 77) for _ in range(2)] == [room, room] and not KERNEL.has_room(0, 77)
    # Asked once a device, and not where there are no clusters.
    assert driver.asked == [kernel.cluster] * (capability >= (9, 0))
    assert driver.attributes == [(9, kernel.carveout), (14, 1)] * (capability >= (9, 0)) and kernel.carveout


def test_shared_memory_and_the_share_of_it_are_asked_for_when_a_kernel_is_loaded(driver: FakeDriver) -> None:
    by_name = {kernel.name: kernel for kernel in launch.kernels()}
    for name, asked in (("gate_up_fp8", [(9, 28)]), ("down_fp8", []), ("down_slots_fp8", [(8, by_name["down_slots_fp8"].shared_bytes)])):
        driver.attributes.clear()
        by_name[name].load((), 0)
        by_name[name].load((), 0)
        assert driver.attributes == asked, name


def test_kernels_of_the_same_device_code_are_loaded_with_the_most_shared_memory_of_any(driver: FakeDriver) -> None:
    by_code: dict[tuple[str, str, str], list[launch.Kernel]] = {}
    for kernel in launch.kernels():
        by_code.setdefault((kernel.language, kernel.subject, kernel.name), []).append(kernel)
    several = {code: kernels for code, kernels in by_code.items() if len(kernels) > 1}
    assert ("cuda", "moe", "scores_one") in several
    for kernels in several.values():
        # What is set for the code, and would be the last one's.
        assert len({(kernel.carveout, kernel.cluster, kernel.capability, kernel.early) for kernel in kernels}) == 1
        most = max(kernel.shared_bytes for kernel in kernels)
        for kernel in sorted(kernels, key=lambda kernel: -kernel.shared_bytes):
            driver.attributes.clear()
            kernel.load((), 0)
            assert (8, most) in driver.attributes, kernel


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_kernels_for_other_devices_are_not_loaded(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(launch.devices, "properties", functools.cache(lambda device: SimpleNamespace(compute_capability=capability)))
    launch.warmup(subjects=["moe"])
    loaded = {kernel.name for kernel in launch.kernels() if kernel.handles}
    own = {kernel.name for kernel in launch.kernels() if kernel.capability}
    assert {"gate_up_one_bf16", "down_one_q5", "down_slots_w8"} < own and "gate_up_bf16" in loaded
    assert (own <= loaded) if capability == (9, 0) else not own & loaded


def test_several_launches_are_all_or_none_and_prepared_together(driver: FakeDriver) -> None:
    prepare, scan = (next(kernel for kernel in launch.kernels() if kernel.name == name) for name in ("prefill_prepare", "prefill_scan"))
    launches = [(prepare, 5, 64, (1, 2)), (scan, 6, 128, (3,))]
    prepare.load((), 0)
    driver.capturing.add(77)
    with pytest.raises(errors.ColdKernelError, match="prefill_scan"):
        launch.launch_all(launches, 0, 77, "result")
    assert not driver.launches
    driver.capturing.clear()
    assert launch.launch_all(launches, 0, 77, "result") == "result"
    assert [(call["grid"][0], call["block"][0], call["values"][0], call["shared"]) for call in driver.launches] == [
        (5, 64, 1, 0),
        (6, 128, 3, scan.shared_bytes),
    ]
    # More shared memory than any kernel may have is asked for when the kernel is loaded, and only then.
    assert scan.shared_bytes > 48 * 1024 and driver.attributes == [(8, scan.shared_bytes)]
    launch._mode.set(planning=True)
    plan = launch.launch_all(launches, 0, 77, "result")
    launch._mode.set(planning=False)
    assert len(driver.launches) == 2
    call = launch.PreparedCall(plan, ())
    assert (call(), call()) == ("result", "result")
    assert [(made["grid"][0], made["values"][0], made["shared"]) for made in driver.launches[2:]] == 2 * [(5, 1, 0), (6, 3, scan.shared_bytes)]


def test_default_streams_launch_in_the_context_of_the_arrays_device(driver: FakeDriver) -> None:
    driver.device_count = 2
    for stream in (0, 1, 2, 77):
        run(stream, device=1)
    assert [call["context"] for call in driver.launches[:3]] == [1001] * 3
    # The thread had no context and keeps the one it was given, as with the runtime.
    assert driver.stack == [1001]


def test_a_thread_without_a_context_gets_one(driver: FakeDriver) -> None:
    refused = []

    real = driver.cuLaunchKernel

    def needs_context(*arguments: object) -> object:
        if not driver.stack:
            refused.append(arguments)
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        return real(*arguments)

    driver.cuLaunchKernel = needs_context  # type: ignore[method-assign]
    assert run(stream=0) == "result"
    assert not refused and [call["context"] for call in driver.launches] == [1000]


def test_what_the_driver_refuses_is_explained(driver: FakeDriver) -> None:
    run()
    driver.refuse["cuLaunchKernel"] = Result.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(errors.ArgumentError, match="stream: expected a live stream of device 0, got handle 0x4d"):
        run()
    driver.refuse["cuLaunchKernel"] = Result.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(errors.DeviceError, match="cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED"):
        run()
    driver.refuse.clear()
    assert run() == "result"


def test_a_failed_load_leaves_nothing_loaded(driver: FakeDriver) -> None:
    driver.refuse["cuFuncLoad"] = Result.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(errors.DeviceError, match="cuFuncLoad failed"):
        run()
    assert not KERNEL.handles and driver.stack == []
    driver.refuse.clear()
    assert run() == "result"


def test_prepared_calls_pack_once_and_keep_their_arrays(driver: FakeDriver) -> None:
    class Kept:
        pass

    import weakref

    array = Kept()
    alive = weakref.ref(array)
    call: launch.PreparedCall[str] = launch.PreparedCall((KERNEL, VARIANT, 0, 77, 1, 32, (5, 6, 7), "out"), (array,))
    del array
    assert call() == "out" and call() == "out" and alive() is not None
    assert [launched["values"][:3] for launched in driver.launches] == [[5, 6, 7]] * 2
    del call
    assert alive() is None


def test_prepared_calls_keep_what_owns_an_argument_and_the_members_of_lists(driver: FakeDriver) -> None:
    import weakref

    class Owner:
        """Like a staged copy: an address that frees its memory with it."""

        def __index__(self) -> int:
            return 5

    owner = Owner()
    alive = weakref.ref(owner)
    call: launch.PreparedCall[None] = launch.PreparedCall((KERNEL, VARIANT, 0, 77, 1, 32, (owner, 6, 7), None), ())
    del owner
    assert alive() is not None
    call()
    outputs: list[object] = [object()]
    held = launch._held((), {"outs": outputs})
    outputs.clear()
    assert len(held[0]) == 1  # type: ignore[arg-type]


def test_a_float_never_changes_how_a_kernel_is_packed(driver: FakeDriver) -> None:
    with pytest.raises(struct.error):
        run(arguments=(1.5, 2, 3))  # type: ignore[arg-type]
    assert run() == "result" and driver.launches[-1]["values"][:3] == [11, 12, -13]


def test_threads_never_see_each_others_arguments(driver: FakeDriver) -> None:
    run()
    driver.launches.clear()
    threads = [threading.Thread(target=lambda n=n: [run(arguments=(n, n, n)) for _ in range(500)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 4000
    assert all(len(set(call["values"][:3])) == 1 for call in driver.launches)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_after_first_use_is_refused(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: launch.PreparedCall[None] = launch.PreparedCall((KERNEL, VARIANT, 0, 77, 1, 32, (5, 6, 7), None), ())
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (prepared, run):
            try:
                call()  # type: ignore[operator]
            except errors.ForkError:
                refused += 1
        os._exit(0 if refused == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    prepared()


def test_warmup_loads_every_variant_and_names_unknown_subjects(driver: FakeDriver) -> None:
    launch.warmup(subjects=["page_table"])
    loaded = [kernel for kernel in launch.kernels() if kernel.handles]
    assert {kernel.subject for kernel in loaded} == {"page_table"}
    assert all(set(kernel.handles) == {(variant, 0) for variant in kernel.variants} for kernel in loaded)
    with pytest.raises(errors.ArgumentError, match="subjects: expected some of .*got nonsense"):
        launch.warmup(subjects=["nonsense"])
