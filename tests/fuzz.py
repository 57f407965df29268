"""Coverage-guided fuzzing of everything that is read, by atheris (libFuzzer).

    python tests/fuzz.py [--seconds 60] [--only KIND ...]        -> benchmarks/results/fuzz.json

One process for each kind of file that `hostile.py` lists, each for `--seconds`. A finding is any
exception but MemspanError, a file read for longer than 20 seconds, a process of more than 2 GB, or a
file made elsewhere; its input is kept and named. Checksums are forged, as whoever makes a file would:
what stands behind them is what is fuzzed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "fuzz.json"
KINDS = (
    "preset", "config", "weights", "state", "training", "shard", "metrics", "memory",
    "tokens", "token header", "tokenizer", "records",
    "history",
    "peer's options", "peer's weights", "peer's vocabulary", "peer's model",
)  # fmt: skip
MEGABYTES, SECONDS_AN_INPUT = 2048, 20


def fuzz_one(kind: str, seconds: int, findings: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    # What decides about the content; torch's and numpy's own code is not ours to explore.
    with atheris.instrument_imports(
        include=["memspan", "json", "tomllib", "zipfile", "tyro"], enable_loader_override=False
    ):
        import hostile
    import torch

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="memspan-fuzz-", dir=memory_disk()))
    os.environ["MEMSPAN_CACHE"] = str(root / "cache")
    os.chdir(root)
    reader = hostile.make_readers(root)[kind]
    seeds = root / "seeds"
    seeds.mkdir()
    for n, content in enumerate((reader.valid, *reader.others, *reader.refused)):
        (seeds / str(n)).write_bytes(content)
    before = layout(root)

    def test(content: bytes) -> None:
        reader(content)
        if layout(root) != before:
            raise AssertionError(f"other files: {set(layout(root)) ^ set(before)}")

    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-timeout={SECONDS_AN_INPUT}",
            f"-rss_limit_mb={MEGABYTES}",
            "-max_len=16384",
            "-len_control=0",
            "-print_final_stats=1",
            f"-artifact_prefix={findings}/{re.sub('[^a-z]+', '-', kind)}-",
            str(seeds),
        ],
        test,
    )
    atheris.Fuzz()


def layout(root: Path) -> list[str]:
    """Names of all files but libFuzzer's own; the folder above is the system's."""
    return sorted(
        str(Path(folder) / name)
        for folder, folders, names in os.walk(root)
        for name in (*names, *folders)
        if "seeds" not in folder
    )


def memory_disk() -> str | None:
    """A disk in memory, where there is one: every input is written to a file."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each kind")
    parser.add_argument("--only", nargs="*", default=[], choices=KINDS, metavar="KIND")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        fuzz_one(options.one, options.seconds, options.findings.absolute())
    options.findings.mkdir(exist_ok=True)
    rows = {}
    print(
        f"| {'file':<12} | executions | seconds | edges | findings |\n| --- | --- | --- | --- | --- |"
    )
    for kind in options.only or KINDS:
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, __file__, "--one", kind, "--seconds", str(options.seconds),
             "--findings", str(options.findings)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        runs = re.findall(r"number_of_executed_units: (\d+)", done.stdout)
        edges = re.findall(r"cov: (\d+)", done.stdout)
        if not runs:
            sys.exit(f"fuzzing {kind} did not work:\n{done.stdout[-3000:]}")
        found = re.findall(r"Test unit written to (\S+)", done.stdout)
        rows[kind] = {
            "executions": int(runs[-1]),
            "seconds": round(time.monotonic() - start),
            "edges": int(edges[-1]) if edges else 0,
            "findings": len(found),
        }
        cells = " | ".join(
            f"{n:>{w}}" for n, w in zip(rows[kind].values(), (10, 7, 5, 8), strict=True)
        )
        print(f"| {kind:<12} | {cells} |", flush=True)
        if found or done.returncode:
            trace = re.findall(
                r"=== Uncaught Python exception: ===(.*?)\n==", done.stdout, re.DOTALL
            )
            print(f"{' '.join(found)}\n{(trace or [done.stdout[-2000:]])[0].strip()}", flush=True)
    with contextlib.suppress(OSError):
        options.findings.rmdir()
    if not options.only:
        record = {
            "command": f"python tests/fuzz.py --seconds {options.seconds}",
            "python": platform.python_version(),
            "executions": sum(r["executions"] for r in rows.values()),
            "seconds": sum(r["seconds"] for r in rows.values()),
            "findings": sum(r["findings"] for r in rows.values()),
            "kinds": rows,
        }
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{record['executions']:,} executions, {record['findings']} findings: {RESULTS}")
    sys.exit(1 if any(r["findings"] for r in rows.values()) else 0)


if __name__ == "__main__":
    main()
