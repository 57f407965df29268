"""Tables of texts, one document per row, read by the library ``datasets``: CSV, TSV, Parquet."""

from __future__ import annotations

import contextlib
import glob
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.lab.data.compressed import is_damage
from memspan.lab.data.records import (
    AS_IT_IS,
    NAME_IT,
    column_of,
    damaged,
    missing_field,
    record_text,
    suffix_of,
)

TABLES = (".csv", ".tsv", ".parquet")
"""Suffixes of tables, compressed or not."""
ROWS = 256
"""Rows in memory at a time."""
TEXT = ("string", "large_string", "string_view", "null")
"""The library's column types that hold text. The last has no values, so its rows are empty."""
NESTED = ("list", "dict")
"""Types of columns that may hold text inside, by a path."""


def data_library(name: str, instead: str = "") -> Any:
    """The library ``datasets``, which reads ``name``; ``instead``: another remedy if it is missing."""
    try:
        import datasets
    except ImportError:
        raise MemspanError(
            f"{name} needs the library datasets: pip install datasets{instead}"
        ) from None
    return datasets


def read_table(path: Path, field: str) -> Iterator[bytes]:
    """The documents of a CSV, TSV or Parquet file, row by row.

    The first line of a CSV names the columns. Its separator is a comma, a semicolon or a tab.

    Raises:
        MissingFieldError: there is no such column.
        MemspanError: the library is missing; a column does not hold text; the file is damaged.
    """
    datasets = data_library(str(path), ", or name other files, such as 'FOLDER/*.txt'")
    is_csv = suffix_of(path) != ".parquet"
    try:
        with _quiet(datasets):
            if is_csv:
                rows = _csv(datasets, path, field)
            else:
                rows = _load(datasets, path, "parquet", batch_size=ROWS)
            if rows is not None:
                yield from row_texts(rows, field, str(path))
    except (MemspanError, OSError):
        raise
    except UnicodeDecodeError as error:
        raise MemspanError(f"{path} is not UTF-8 ({error.reason}): convert it") from None
    # The library raises the errors of its many parts.
    except Exception as error:
        if is_csv and not is_damage(error):
            reason = " ".join(str(error).split())
            raise MemspanError(
                f"{path} is not a valid table ({reason[:200]}): quote texts that hold separators, "
                f"quotes or line breaks{AS_IT_IS}"
            ) from None
        raise damaged(path, error) from None


def _csv(datasets: Any, path: Path, field: str) -> Any:
    """The rows of a CSV, all columns as text; None: it is empty."""
    from pandas.errors import EmptyDataError, ParserError, ParserWarning

    options: dict[str, Any] = {"keep_default_na": False, "index_col": False}
    names: list[str] = []
    failure = None
    for separator in "\t" if suffix_of(path) == ".tsv" else ",;\t":
        try:
            with warnings.catch_warnings():
                # The first row has more columns than the line of their names.
                warnings.filterwarnings("error", "Length of header")
                rows = [*_load(datasets, path, "csv", sep=separator, nrows=1, **options)]
        except EmptyDataError:
            return None
        except (ParserError, ParserWarning) as error:
            failure = error
            continue
        found = [*rows[0]] if rows else []
        if column_of(field, found) in found:
            features = datasets.Features(dict.fromkeys(found, datasets.Value("string")))
            options |= {"sep": separator, "features": features, "chunksize": ROWS}
            return _load(datasets, path, "csv", **options)
        names = max(names, found, key=len)
    if failure is not None and len(names) < 2:
        raise failure
    if not names:
        return None
    raise missing_field(str(path), field, names, AS_IT_IS)


def _load(datasets: Any, path: Path, kind: str, **options: Any) -> Any:
    name = glob.escape(str(path))
    return datasets.load_dataset(kind, data_files=name, split="train", streaming=True, **options)


def row_texts(rows: Any, field: str, where: str) -> Iterator[bytes]:
    """The documents of a data set of the library.

    Args:
        rows: the data set, in memory or streamed.
        field: the column of the text, or a path to texts inside it.
        where: its name, for messages.
    """
    column = column_of(field, rows.column_names)
    if column not in rows.column_names:
        raise missing_field(where, field, rows.column_names)
    # Before a row is read, which would decode images and sounds.
    kind = getattr(rows.features[column], "dtype", "list")
    if column == field and kind not in (*TEXT, *NESTED):
        raise MemspanError(f"{where}: {field} is of type {kind}, not text: {NAME_IT}")
    number = 0
    for batch in rows.select_columns([column]).with_format(None).iter(ROWS):
        for value in batch[column]:
            number += 1
            yield record_text({column: value}, field, f"{where}, row {number:,}", number == 1)


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Keep the library from logging an error that it also raises."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)
