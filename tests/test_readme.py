"""The README's figures are those of the stored results, never typed."""

from kernels import bench
from lab import results

README = (results.ROOT / "README.md").read_text()


def test_the_readmes_table_is_the_stored_one():
    block = bench.ladder_block(bench.readme_ladder())
    assert f"<!-- ladder:begin -->\n{block}\n<!-- ladder:end -->" in README, "run `python -m kernels.bench readme`"


def test_the_readmes_picture_is_there():
    assert bench.PICTURE.relative_to(results.ROOT).as_posix() in README
    assert bench.PICTURE.read_bytes().startswith(b"\x89PNG")


def test_a_block_is_replaced_and_nothing_else():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert bench.replace_block(text, "x", "new") == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    assert (
        bench.replace_block("<!-- x:begin -->\n<!-- x:end -->", "x", "new") == "<!-- x:begin -->\nnew\n<!-- x:end -->"
    )


def test_bench_names_an_unknown_topic(capsys):
    assert bench.main(["no_such_topic"]) == 2
    assert "no_such_topic" in capsys.readouterr().out
