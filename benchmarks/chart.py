"""Draws the README's picture from what `benchmarks/run.py --json FILE` has measured.

python benchmarks/chart.py FILE docs/pictures/speed.svg
"""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

# What each case is called in the picture; a case that is not named here goes by its key.
TITLES = {
    "semaphore": "semaphore round trip",
    "empty": "launch of 34 idle cores",
    "workers": "x → 2.9 x (1 - x) on 512 lanes",
    "copy": "copy 1024²",
    "scale": "scale 1024², pipeline",
    "affine": "x · 2 + 1 on 2²⁰",
    "gather": "gather 131,072 rows",
    "gather_window": "gather 4,096 rows",
    "scatter_add": "scatter-add 2²⁰ into 65,536",
    "cumsum": "cumulative sum of 2²⁰, lanes",
    "scalar_cumsum": "cumulative sum of 2²⁰, scalars",
    "sort": "sort 2¹⁶",
    "matmul_512_float32": "matmul 512³ float32",
    "matmul_512_bfloat16": "matmul 512³ bfloat16",
    "matmul_2048_float32": "matmul 2048³ float32",
    "matmul_2048_bfloat16": "matmul 2048³ bfloat16",
    "softmax": "softmax over rows of 4096",
    "attention": "attention, 2048 keys",
    "exp": "exp of 2²⁰",
    "tanh": "tanh of 2²⁰",
    "erf": "erf of 2²⁰",
}
# The kinds of contenders: how the names of theirs begin, their mark, its colour and its size. Of
# several of a kind in one case, the last is shown: the one with most threads.
KINDS = {
    "jax.jit": (("jax.jit",), "o", "#475569", 42),
    "JAX's HLO interpreter": (("JAX's HLO interpreter",), "s", "#94a3b8", 34),
    "C++ by hand or BLAS, all threads": (("C++", "BLAS"), "D", "#0d9488", 30),
    "limit of the machine": (("limit",), "|", "#0f172a", 90),
}
ACCENT = "#c2410c"


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def marks(contenders: dict[str, dict]) -> tuple[float, dict[str, float]]:
    """The time of Cokernel, which comes first in each case, and that of each kind of peer."""
    times = {
        # A disturbed measurement only ever makes the machine look slower than it is.
        name: (min if name.startswith("limit") else statistics.median)(one["times_s"])
        for name, one in contenders.items()
    }
    ours = next(iter(times.values()))
    shown = {
        kind: [time for name, time in times.items() if name.startswith(beginnings)]
        for kind, (beginnings, *_) in KINDS.items()
    }
    return ours, {kind: found[-1] for kind, found in shown.items() if found}


def draw(results: dict, target: pathlib.Path) -> None:
    """Draws one line for each case, its peers as multiples of Cokernel's time."""
    pyplot.rcParams.update({"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none"})
    cases = results["cases"]
    figure, axes = pyplot.subplots(figsize=(8, 1.3 + 0.3 * len(cases)))
    axes.axvspan(1e-4, 1, color="#f1f5f9", zorder=0)
    axes.axvline(1, color=ACCENT, linewidth=1.4, zorder=1, label="Cokernel, and its time")
    ticks, named, largest, smallest = [], set(), 1.0, 1.0
    for place, (key, case) in enumerate(cases.items()):
        ours, peers = marks(case["contenders"])
        ticks.append(TITLES.get(key, key))
        multiples = {kind: time / ours for kind, time in peers.items()}
        ends = [*multiples.values(), 1]
        largest, smallest = max(largest, *ends), min(smallest, *ends)
        axes.plot([min(ends), max(ends)], [place, place], color="#cbd5e1", linewidth=1, zorder=1)
        for kind, multiple in multiples.items():
            _, mark, colour, size = KINDS[kind]
            label = kind if kind not in named else None
            named.add(kind)
            axes.scatter(multiple, place, s=size, marker=mark, color=colour, zorder=3, label=label)
        axes.text(
            1.004, place, duration(ours), transform=axes.get_yaxis_transform(), color=ACCENT,
            va="center", fontsize=9,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda multiple, _: f"{multiple:g}")
    axes.set_xlim(smallest / 1.5, largest * 1.5)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_yticks(range(len(cases)), ticks)
    axes.set_xlabel("time as a multiple of Cokernel's (to the right of the line: slower)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / figure.get_figheight()))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Reads the measurements and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    options = parser.parse_args()
    draw(json.loads(options.measurements.read_text()), options.picture)


if __name__ == "__main__":
    main()
