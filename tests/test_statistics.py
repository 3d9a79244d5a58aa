"""What `last_launch` tells of a launch."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

READERS = 3


def test_the_last_launch_is_counted_program_by_program():
    writer_mesh = cokernel.CoreMesh(writer=1)
    reader_mesh = cokernel.CoreMesh(reader=READERS)

    def write(x_ref, out_ref, buffer, ready, copied):
        for reader in range(READERS):
            pl.semaphore_signal(ready, 1, device_id={"reader": reader})

    def read(x_ref, out_ref, buffer, ready, copied):
        pl.semaphore_wait(ready, 1)
        copy = pltpu.make_async_copy(x_ref, buffer, copied)
        copy.start()
        out_ref[lax.axis_index("reader")] = 0.0
        copy.wait()
        # A copy that is waited for straight away needs no semaphore, and none is counted.
        pltpu.async_copy(x_ref, buffer, copied).wait()
        out_ref[lax.axis_index("reader")] = buffer[0]

    kernel = cokernel.mpmd_map(
        [(writer_mesh, write), (reader_mesh, read)],
        jax.ShapeDtypeStruct((READERS,), jnp.float32),
        scratch_types=[
            cokernel.private((10,), jnp.float32) @ reader_mesh,
            pltpu.SemaphoreType.REGULAR @ reader_mesh,
            pltpu.SemaphoreType.DMA @ reader_mesh,
        ],
        compiler_params=cokernel.CompilerParams(num_workers=1),
    )
    for _ in range(2):
        out = kernel(np.full(10, 4, np.float32))
    np.testing.assert_array_equal(out, 4)
    launch = cokernel.last_launch()
    assert launch.kernel == "write_and_read"
    assert 0 < launch.seconds < 60
    writer, reader = launch.programs
    assert (writer.name, writer.cores, writer.signals) == ("write", 1, READERS)
    assert (writer.dma_count, writer.dma_bytes, writer.waits) == (0, 0, 0)
    # Each reader's first DMA signals once, when it is done.
    assert (reader.name, reader.cores, reader.signals) == ("read", READERS, READERS)
    assert (reader.dma_count, reader.dma_bytes) == (2 * READERS, 2 * READERS * 40)
    assert reader.waits == 2 * READERS
    assert reader.blocked_waits == reader.resumes <= reader.waits


def test_there_is_no_last_launch_before_the_first():
    code = "import cokernel; assert cokernel.last_launch() is None"
    subprocess.run([sys.executable, "-c", code], check=True)
