from __future__ import annotations

from pathlib import Path

import pytest

from routeprof.report.files import write_text


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_holds_the_text_byte_by_byte(tmp_path: Path, kind: type):
    text = "a\nb\r\nÜ 客户\u2028\n"
    file = write_text(kind(tmp_path / "new" / "deep" / "report.txt"), text)
    assert file == tmp_path / "new" / "deep" / "report.txt"
    assert file.read_bytes() == text.encode("utf-8")
    write_text(file, "again")
    assert file.read_bytes() == b"again"
