"""Columns of text, and CSV files."""

import multiprocessing
import os
from pathlib import Path

import pytest

from qconv.ground.table import Column, append_csv, csv_text, line, lines, read_csv, write_csv

COLUMNS = Column("name"), Column("count", is_right=True)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert lines([None, ("a", "1"), ("conv.long", "1,000,000")], COLUMNS) == [
        "name           count",
        "---------  ---------",
        "a                  1",
        "conv.long  1,000,000",
    ]


def test_no_heads_and_no_rows() -> None:
    assert lines([("a", "b"), ("long", "")], (Column(""), Column(""))) == ["a     b", "long"]
    assert lines([], (Column(""), Column(""))) == []
    assert lines([], COLUMNS) == ["name  count"]


def test_a_line_of_its_own_has_the_widths_of_its_columns() -> None:
    columns = Column("", width=4), Column("", is_right=True, width=3)
    assert [line(cells, columns, " ") for cells in (("a", "1"), ("conv.long", "10"))] == ["a      1", "conv.long  10"]


def test_csv_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.csv"
    assert read_csv(path) == []
    write_csv([{"a": 1}, {"a": "2, 3", "b": "é"}], path)
    assert path.read_bytes() == 'a,b\n1,\n"2, 3",é\n'.encode()
    assert read_csv(path) == [{"a": "1", "b": ""}, {"a": "2, 3", "b": "é"}]
    assert csv_text([]) == "\n"


def test_rows_are_appended_below_one_head(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.touch()  # as `qconv bench` makes it, to see that it can
    for number in (1, 2):
        append_csv({"a": number, "b": "x"}, path)
    assert path.read_text() == "a,b\n1,x\n2,x\n"
    append_csv({"c": 3, "b": "y"}, path)  # such as another size of batches
    append_csv({"c": 4, "a": 5, "b": "z"}, path)
    assert path.read_text() == "a,b,c\n1,x,\n2,x,\n,y,3\n5,z,4\n"


def test_a_last_line_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,x")  # as some editors leave it
    append_csv({"a": 2, "b": "y"}, path)
    assert path.read_text() == "a,b\n1,x\n2,y\n"


def test_names_of_files_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv([{"picture": os.fsdecode(b"caf\xe9.png")}], path)
    append_csv({"picture": os.fsdecode(b"caf\xe9.png")}, path)
    assert read_csv(path) == [{"picture": "caf\\udce9.png"}] * 2


def test_what_is_no_table_is_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "x.csv", tmp_path / "link.csv"
    path.write_text("# a note\n1,2\n")
    with pytest.raises(ValueError, match=r"x.csv has other columns, and rows that they don't fit"):
        append_csv({"a": 1}, path)
    assert path.read_text() == "# a note\n1,2\n"
    path.write_text("\ufeffa\n1\n")  # as spreadsheets begin it
    link.symlink_to(path)
    append_csv({"b": 2}, link)
    assert link.is_symlink()
    assert path.read_text() == "a,b\n1,\n,2\n"
    append_csv({"a": 1}, Path(os.devnull))
    assert not Path(os.devnull).is_file()


def add_rows(path: Path, who: int) -> None:
    for number in range(20):
        append_csv({f"column {who}": number, "who": who}, path)


def test_processes_that_add_rows_at_once(tmp_path: Path) -> None:
    """Each has a column of its own, so that the file is written anew again and again."""
    path = tmp_path / "rows.csv"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_rows, args=(path, who)) for who in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = read_csv(path)
    for who in range(3):
        assert [row[f"column {who}"] for row in rows if row["who"] == str(who)] == [str(number) for number in range(20)]
