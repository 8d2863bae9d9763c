# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps: a page's life
#
# A scheduler hands out *virtual* pages and never sees them move. Two tables say where each lies: `v2p` and `p2v`. This notebook walks one page
# through its life on NumPy arrays; on a machine with a GPU the same lines run there, see the last cells.

# %%
import numpy as np

from gpukit import Signal
from gpukit.kernels import free_list, page_table
from gpukit.kernels.free_list import DevicePages, FreeList

v2p, p2v = page_table.empty(num_virtual=8, num_physical=8)
free = FreeList(np.arange(1, 8))
v2p, p2v

# %% [markdown]
# ## Bind
# Three virtual pages get the next three physical ones. `take` returns a view: nothing is copied.

# %%
virtual = np.array([4, 2, 7])
page_table.bind(virtual, free.take(3), v2p, p2v)
v2p, p2v, len(free)

# %% [markdown]
# ## Place tokens and translate them
# Tokens 0…5 of a request fill virtual pages of four tokens each; attention needs physical tokens.

# %%
page_size = 4
tokens = free_list.gather_extend(np.array([0]), np.array([6]), np.array([-1]), virtual, page_size, num_tokens=6, num_pages=2)
tokens, page_table.translate(tokens, v2p, page_size)

# %% [markdown]
# ## Free
# The pages go to a list whose length only the device knows. Bad ids are skipped and counted, never written.

# %%
signal = Signal()
freed = DevicePages(capacity=8)
page_table.unbind_into(np.array([2, 4, 2, 99]), v2p, p2v, freed, signal=signal)
freed.take(2), signal.counts()

# %% [markdown]
# ## The same on a GPU
# Arrays decide: CuPy or torch arrays run the kernel. The plain kernel forms are at hand as well: the Numba dispatcher of an index kernel, and a
# CUDA C subject as a `cupy.RawModule`.

# %%
from gpukit import devices

if devices.count():
    import cupy

    from gpukit.compile import raw_module
    from gpukit.compile.numba_dsl import kernel_source

    tables = tuple(cupy.asarray(table) for table in page_table.empty(8))
    page_table.bind(cupy.asarray(virtual), cupy.asarray([1, 2, 3]), *tables)
    print(tables, kernel_source("page_table", "bind").dispatcher(), raw_module("page_copy").get_function("gpukit_move_pages"))
else:
    print("no GPU here: the lines above ran on the NumPy backend")
