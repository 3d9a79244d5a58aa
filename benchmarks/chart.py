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

# Which contenders of a case are shown, and what they are called in the picture.
ROWS = [
    (
        "semaphore",
        "semaphore round trip",
        {"Cokernel, one worker": "Cokernel", "C++ condition variable, two threads": "C++ threads"},
    ),
    ("empty", "launch of 34 idle cores", {"Cokernel": "Cokernel", "jitted identity": "jax.jit"}),
    (
        "gather",
        "gather 131,072 rows",
        {
            "Cokernel": "Cokernel",
            "jit(jnp.take)": "jax.jit",
            "C++ by hand, 2 threads": "C++ by hand",
        },
    ),
    (
        "affine",
        "x * 2 + 1 on 2^20 floats",
        {
            "Cokernel": "Cokernel",
            "jit(x * 2 + 1)": "jax.jit",
            "C++ by hand, 2 threads": "C++ by hand",
        },
    ),
]
COLOURS = {
    "Cokernel": "#c2410c",
    "jax.jit": "#64748b",
    "C++ by hand": "#cbd5e1",
    "C++ threads": "#cbd5e1",
}


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def draw(results: dict, target: pathlib.Path) -> None:
    """Draws one group of bars for each case, as multiples of Cokernel's time."""
    pyplot.rcParams.update({"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    place, ticks = 0.0, []
    for case, title, shown in ROWS:
        contenders = results["cases"][case]["contenders"]
        times = {
            label: statistics.median(contenders[name]["times_s"]) for name, label in shown.items()
        }
        middle = place + (len(times) - 1) / 2
        ticks.append((middle, title))
        for label, time in times.items():
            multiple = time / times["Cokernel"]
            axes.barh(place, multiple, height=0.82, color=COLOURS[label])
            axes.text(multiple * 1.06, place, f"{label}  {duration(time)}", va="center", fontsize=9)
            place += 1
        place += 0.7
    axes.set_xscale("log")
    axes.set_xlim(0.1, axes.get_xlim()[1] * 6)
    axes.axvline(1, color="#c2410c", linewidth=0.8)
    axes.set_yticks([tick for tick, _ in ticks], [title for _, title in ticks])
    axes.invert_yaxis()
    axes.set_xlabel("time, as a multiple of Cokernel's")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
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
