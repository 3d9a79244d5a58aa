"""What a launch did, program by program: cores, copies, waits, signals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramStatistics:
    """What the cores of one program did in a launch, together.

    Attributes:
      name: the program.
      cores: how many cores ran it.
      dma_count: the DMAs they started.
      dma_bytes: what these moved.
      waits: waits on semaphores, DMAs and barriers.
      blocked_waits: those among them that could not go on at once.
      signals: signals given to semaphores, those of finished DMAs included.
      resumes: how often a core went on after it had been blocked.
    """

    name: str
    cores: int
    dma_count: int
    dma_bytes: int
    waits: int
    blocked_waits: int
    signals: int
    resumes: int


@dataclass(frozen=True)
class LaunchStatistics:
    """What one launch of a kernel did.

    Attributes:
      kernel: the kernel's name.
      seconds: how long the launch took, from its start to its end.
      programs: what each program's cores did, in the order of the kernel's programs.
    """

    kernel: str
    seconds: float
    programs: tuple[ProgramStatistics, ...]


def last_launch() -> LaunchStatistics | None:
    """Returns what the launch that ended last in this process did, or None if there was none.

    JAX runs kernels asynchronously: call `jax.block_until_ready` on the results first. Launches on
    several devices or from several threads each count, and the last one to end is returned.
    """
    # Imported here, so that `import cokernel` does not load the runtime.
    from cokernel import _runtime

    found = _runtime.last_statistics()
    if found is None:
        return None
    programs = tuple(
        ProgramStatistics(
            name=program["name"],
            cores=program["cores"],
            dma_count=program["dma_count"],
            dma_bytes=program["dma_bytes"],
            waits=program["waits"],
            blocked_waits=program["blocked"],
            signals=program["signals"],
            resumes=program["resumes"],
        )
        for program in found["programs"]
    )
    return LaunchStatistics(found["name"], found["nanoseconds"] / 1e9, programs)
