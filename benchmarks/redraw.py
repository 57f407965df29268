"""Draw the plots of the documentation anew, from stored results; nothing is measured. Those of agents:
agents.py --pictures.

python benchmarks/redraw.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import any_span
import learning
import long_streams
import memory_worth
import programs
import recall_pictures
import retrieval
import shipped_recall
import soak
import synthetic
import synthetic_pictures
from page_tables import DOCS
from timing import RESULTS
from trainings import rows_in


def read(path: Path) -> Any:
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def main() -> None:
    any_span.plot()
    for comparison in learning.COMPARISONS:
        image = RESULTS / f"{comparison}-learning.png"
        learning.plot(read(image)["rows"], image)
    image = RESULTS / "long-streams.png"
    found = read(image)
    long_streams.plot(found["streams"], found["drifts"], image)
    memory_worth.plot(read(memory_worth.PLOT)["rows"])
    image = RESULTS / "soak.png"
    soak.plot(read(image)["points"], image)
    image = DOCS / "programs" / "programs-3.png"
    found = read(image)
    programs.picture(found["results"], found["last_value_known"], 3, image)
    for setting in ("capacity", "updates"):
        image = DOCS / "retrieval" / f"retrieval-{setting}.png"
        found = read(image)
        sizes = found["options"]["width"], found["options"]["favor_features"]
        retrieval.plot(found["rows"], setting, *sizes, image)
    folder = DOCS / "recall"
    recall_pictures.pictures(rows_in(folder / "recall.json"), folder)
    shipped_recall.plot(read(shipped_recall.RESULTS))
    runs = [row for row in rows_in(folder / "synthetic.json") if row["seed"]]
    synthetic_pictures.pictures(runs, folder, synthetic.PAIRS, synthetic.WORDS // 2)


if __name__ == "__main__":
    main()
