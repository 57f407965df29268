"""Figures as PNG files, with names drawn as the text that they are."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memspan.errors import MemspanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AS_TEXT: dict[Any, bool] = {
    "text.usetex": False,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
}
"""matplotlib's settings, which override its files: text between two ``$`` would become a formula."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of lines, in this order; colour-blind readers tell them apart (Okabe and Ito 2008)."""
FAINT = "#8C959F"
"""Colour of a line that others are compared with."""
LOOK: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
"""The style of the project's plots."""


def png(draw: Callable[[Figure], None], width: float, height: float, dpi: int) -> bytes:
    """The PNG of a figure of ``width`` by ``height`` inches that ``draw`` fills."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.rcsetup import cycler

        content = io.BytesIO()
        look: Any = LOOK | AS_TEXT | {"axes.prop_cycle": cycler(color=COLOURS)}
        with matplotlib.rc_context(look), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure = Figure(figsize=(width, height), layout="constrained")
            draw(figure)
            figure.savefig(content, format="png", dpi=dpi)
    except ImportError:
        raise MemspanError("matplotlib is not installed: pip install matplotlib") from None
    except Exception as error:
        # Its parts raise anything, and a failed picture must not stop the work that it belongs to.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MemspanError(f"matplotlib cannot draw it ({reason[:200]})") from error
    return content.getvalue()


def label(name: str) -> str:
    """A name for a legend, where those that begin with an underscore would be left out."""
    return f" {name}" if name.startswith("_") else name
