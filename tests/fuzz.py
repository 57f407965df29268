"""Coverage-guided fuzzing of everything that is read, by atheris (libFuzzer).

    python tests/fuzz.py [--seconds 60] [--only KIND ...]        -> benchmarks/results/fuzz.json

One process for each kind of file that `hostile.py` lists, each for `--seconds`. A finding is any
exception but MemspanError, a file read for longer than 20 seconds, a process of more than 2 GB, or a
file made elsewhere; its input is kept and named. Checksums are forged, as whoever makes a file would:
what stands behind them is what is fuzzed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "fuzz.json"
FINDINGS = Path("fuzz-findings").absolute()
MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Every input is written to a file."""
KINDS = (
    "preset", "config", "weights", "state", "training", "metrics", "memory", "tokenizer", "records",
    "history", "peer's options", "peer's weights", "peer's vocabulary", "peer's model",
)  # fmt: skip
MEGABYTES = 2048
SECONDS_AN_INPUT = 20


def fuzz_one(kind: str, seconds: int) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    # What decides about the content; torch's and numpy's own code is not ours to explore.
    with atheris.instrument_imports(
        include=["memspan", "json", "tomllib", "zipfile", "tyro"], enable_loader_override=False
    ):
        import hostile
    import torch

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="memspan-fuzz-", dir=MEMORY_DISK))
    os.environ["MEMSPAN_CACHE"] = str(root / "cache")
    os.chdir(root)
    reader = hostile.make_readers()[kind]
    seeds = root / "seeds"
    seeds.mkdir()
    for n, content in enumerate((reader.valid, *reader.others, *reader.refused)):
        (seeds / str(n)).write_bytes(content)
    before = layout(root)

    def test(content: bytes) -> None:
        reader(content)
        if layout(root) != before:
            raise AssertionError(f"other files: {set(layout(root)) ^ set(before)}")

    limits = f"-max_total_time={seconds} -timeout={SECONDS_AN_INPUT} -rss_limit_mb={MEGABYTES}"
    usual = "-max_len=16384 -len_control=0 -print_final_stats=1"
    found = f"-artifact_prefix={FINDINGS}/{re.sub('[^a-z]+', '-', kind)}-"
    atheris.Setup([sys.argv[0], *limits.split(), *usual.split(), found, str(seeds)], test)
    atheris.Fuzz()


def layout(root: Path) -> list[str]:
    """Names of all files but libFuzzer's own."""
    return sorted(str(path) for path in root.rglob("*") if "seeds" not in path.parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each kind")
    parser.add_argument("--only", nargs="*", default=[], choices=KINDS, metavar="KIND")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        fuzz_one(options.one, options.seconds)
    FINDINGS.mkdir(exist_ok=True)
    rows = {}
    for kind in options.only or KINDS:
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, __file__, "--one", kind, "--seconds", str(options.seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

        def last(name: str, said: str = done.stdout) -> int:
            return int([0, *re.findall(rf"{name}: (\d+)", said)][-1])

        rows[kind] = {
            "executions": last("number_of_executed_units"),
            "seconds": round(time.monotonic() - start),
            "edges": last("cov"),
            "findings": done.stdout.count("Test unit written to"),
        }
        print(f"| {kind} | {' | '.join(map(str, rows[kind].values()))} |", flush=True)
        if done.returncode:
            print(done.stdout[-3000:], flush=True)
    if not options.only:
        about: dict[str, object] = {
            "command": f"python tests/fuzz.py --seconds {options.seconds}",
            "python": platform.python_version(),
        }
        for name in ("executions", "seconds", "findings"):
            about[name] = sum(row[name] for row in rows.values())
        RESULTS.write_text(json.dumps({**about, "kinds": rows}, indent=1) + "\n")
    sys.exit(any(row["findings"] or not row["executions"] for row in rows.values()))


if __name__ == "__main__":
    main()
