"""From documents to a page: values are there, gaps name their commands, names are escaped, sizes bounded."""

import json
import re
import shlex

import pytest

from twofour.errors import InputError
from twofour.report.page import report

from .html_reader import Reader
from .models_to_report import (
    KINDS,
    layer_names,
    measured,
    measured_model,
    products,
    recorded_model,
    score,
    whole_model,
    write,
)

SECTIONS = [
    *("roofline", "layer-times", "end-to-end", "advice", "perplexity", "layer-errors", "sensitivity"),
    *("recovery", "size", "generations", "made", "missing"),
]


@pytest.fixture
def whole(tmp_path):
    return whole_model(tmp_path / "model-24")


def page_of(directories, tmp_path, **options) -> Reader:
    report(directories, tmp_path / "page.html", **options)
    return Reader((tmp_path / "page.html").read_text(encoding="utf-8"))


def sound(page: Reader) -> None:
    assert page.faults == []
    assert len(page.ids) == len(set(page.ids))
    named = [attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs]
    assert set(" ".join(named).split()) <= set(page.ids)
    targets = [attrs["href"].removeprefix("#") for tag, attrs in page.tags if tag == "a"]
    assert set(targets) <= set(page.ids)


def test_everything_is_on_the_page(whole, tmp_path):
    found = report([whole], tmp_path / "page.html")
    assert found["sections"] == SECTIONS
    assert found["refused"] == []
    assert found["bytes"] == (tmp_path / "page.html").stat().st_size
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    sound(page)
    for words in (
        "7.50 against 7.00 dense (1.07×)",  # perplexity
        "its 2:4 layers together run 2.00× dense at 1 token and 2.00× at 2,048 on NVIDIA H200",
        "91.0 %",
        "dense roof 730 TFLOP/s",
        "2:4 roof 1,460 TFLOP/s",
        "reports/bench.json, products[0] and [1]",
        "6.40 ms · 1.25×",  # end to end
        "failed: refused <by> cuSPARSELt",
        "13.4 GB",  # peak memory
        "Worth it for decode: 1.44×.",
        "9.50 before and 7.25 after",  # recovery
        "a small town.",
        "Paris.",
        "twofour prune ./dense OUT --method sparsegpt --calib c4.jsonl --samples 16 --seqlen 64 --seed 3",
        "--lr 0.0001",
        "--fsdp",
        "twofour 0.1.0, torch 2.13.0, 2026-01-02T03:04:05+00:00",
        '"damping": 0.01',
    ):
        assert words in page.text, words
    record = json.loads((whole / "twofour.json").read_text())
    for name, note in record["steps"][0]["layers"].items():
        assert f"{name} {note['relative_error']:.3f}" in page.text


def test_plots_are_there_and_reachable(whole, tmp_path):
    page = page_of([whole], tmp_path)
    plots = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    # Three errors by layer of seven kinds each; roofline, end to end, perplexity and size in two widths.
    assert len(plots) >= 3 * len(KINDS) + 2 * 4
    assert all(attrs["tabindex"] == "0" and attrs["aria-labelledby"] for attrs in plots)
    regions = [attrs for _, attrs in page.tags if attrs.get("role") == "region"]
    assert all(attrs["aria-label"] and attrs["tabindex"] == "0" for attrs in regions)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "link", "iframe")]


def test_the_page_fetches_nothing(whole, tmp_path):
    page_of([whole], tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)|@import|url\(", text)
    assert "default-src 'none'" in text


def test_what_was_not_measured_is_said_with_its_command(packed, tmp_path):
    found = report([packed], tmp_path / "page.html")
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    sound(page)
    commands = [gap["command"] for gap in found["missing"]]
    for start in (
        "twofour bench --shapes 8B --json >",
        f"twofour tune {packed} --save",
        f"twofour bench {packed} --data TEXT --save",
        f"twofour eval {packed} --data TEXT --against ",
        f"twofour advise {packed} --save",
        "twofour recover ",
        f"twofour report {packed} --generate",
        "twofour prune MODEL OUT --method best --calib TEXT",
    ):
        assert any(command.startswith(start) for command in commands), start
    for gap in found["missing"]:
        assert gap["what"] in page.text
        assert page.text.count(gap["command"]) >= 2  # where it would be, and in the list at the end
    assert f"mkdir -p {packed}/reports" in page.text
    assert "its speed on a GPU and its accuracy were not measured" in found["verdicts"]["packed"]


def test_the_commands_make_what_is_missing(packed, tmp_path, twofour):
    """A page that names a command is right about it: here that of eval, run as it stands."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 10)
    ran = twofour("eval", packed, "--data", text, "--json")
    write(packed / "reports" / "eval.json", ran.json)
    found = report([packed], tmp_path / "page.html")
    assert not any(gap["command"].startswith(f"twofour eval {packed}") for gap in found["missing"])
    assert f"perplexity {ran.json['perplexity']:.0f}" in found["verdicts"]["packed"].replace(",", "")


def test_what_the_verbs_print_is_understood(twofour, dense, tmp_path):
    """The real documents, not ours: a verb that changes its JSON breaks this."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    pruned, packed = tmp_path / "pruned", tmp_path / "packed"
    extra = []
    for number, arguments in enumerate(
        (
            ["prune", dense, pruned, "--method", "wanda", "--calib", text, "--samples", "2"],
            ["pack", pruned, packed],
            ["check", packed],
            ["eval", packed, "--data", text, "--against", dense],
            ["eval", dense, "--data", text],
            ["bench", "--shapes", "tiny", "--tokens", "1"],
            ["advise", dense, "--gpu", "H200"],
            ["doctor"],
        )
    ):
        ran = twofour(*arguments, "--json")
        assert ran.status == 0, ran.err
        extra.append(write(tmp_path / f"{number}.json", ran.json))
    found = report([packed], tmp_path / "page.html", documents=extra[2:])
    assert found["refused"] == []
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    sound(page)
    assert "Error of each layer's output" in page.text
    assert "Predicted by advise" in page.text
    assert "dense (1." in found["verdicts"]["packed"] or "dense (0." in found["verdicts"]["packed"]
    assert not any("perplexity" in gap["what"] for gap in found["missing"])
    # Without the record the stages' own documents tell how it was made.
    (packed / "twofour.json").unlink()
    again = report([packed], tmp_path / "page.html", documents=[extra[1]])
    assert not any("how it was made" in gap["what"] for gap in again["missing"])


def test_a_model_about_which_nothing_is_known(dense, tmp_path):
    found = report([dense], tmp_path / "page.html")
    assert found["verdicts"]["dense"] == "dense is dense: nothing of it is 2:4 yet."
    assert any(gap["command"].startswith("twofour prune MODEL") for gap in found["missing"])
    sound(Reader((tmp_path / "page.html").read_text(encoding="utf-8")))


def test_hostile_names_and_texts_are_shown_not_run(tmp_path):
    evil = "<script>alert('x')</script>&\"`|*"
    directory = recorded_model(tmp_path / "m\"'><b>&", {f"{evil}.weights": (64, 64), **layer_names()})
    write(directory / "reports" / "g.json", {"verb": "generate", "model": "x", "prompt": evil, "text": evil})
    write(directory / "reports" / "s.json", score(evil, 3.0, data=evil))
    write(directory / "reports" / "u.json", {"verb": evil})
    write(directory / "reports" / "b.json", products() | {"about": {"gpu": evil}})
    page = page_of([directory], tmp_path)
    sound(page)
    assert not [tag for tag, _ in page.tags if tag in ("script", "b")]
    assert evil in page.text
    assert "m\"'><b>&" in page.text
    found = report([directory], tmp_path / "page.md")
    assert found["format"] == "md"
    text = (tmp_path / "page.md").read_text()
    outside_code = re.sub(r"(`+)[^`].*?\1", "", text)
    assert not re.search(r"(?<!\\)<script", outside_code)


def test_commands_can_be_pasted(tmp_path):
    directory = recorded_model(tmp_path / "my model; rm", layer_names())
    found = report([directory], tmp_path / "page.html")
    for gap in found["missing"]:
        words = shlex.split(gap["command"])
        assert any(word.startswith(str(directory)) for word in words), gap


def test_five_hundred_layers_fit(tmp_path):
    directory = whole_model(tmp_path / "big", blocks=72)
    assert len(layer_names(72)) > 500
    found = report([directory, whole_model(tmp_path / "other", blocks=72)], tmp_path / "page.html")
    assert found["bytes"] < 2_000_000
    sound(Reader((tmp_path / "page.html").read_text(encoding="utf-8")))


def test_a_long_log_is_thinned_and_says_so(tmp_path):
    directory = whole_model(tmp_path / "m")
    lines = [json.dumps({"step": step, "loss": 3.0 if step < 19_999 else 1.125}) for step in range(20_000)]
    (directory / "recover.jsonl").write_text("\n".join(lines))
    page = page_of([directory], tmp_path)
    assert "300 of 20,000 points of m are drawn" in page.text
    assert "Training loss 1.12" in page.text  # the last one is kept


def test_layers_without_numbers(tmp_path):
    directory = recorded_model(tmp_path / "cnn", {f"stage_{chr(97 + i)}": (64, 64) for i in range(20)})
    page = page_of([directory], tmp_path)
    sound(page)
    assert "stage_t 0.419" in page.text


def test_several_models_are_compared(tmp_path):
    one = whole_model(tmp_path / "one")
    two = recorded_model(tmp_path / "two", layer_names(), error=0.6)
    write(two / "reports" / "eval.json", score("two", 14.0))
    found = report([one, two], tmp_path / "page.html", documents=[one / "reports" / "eval-dense.json"])
    assert "(1.07×)" in found["verdicts"]["one"]
    assert found["verdicts"]["two"].startswith("two is smaller, but lost too much to be used as it is")
    assert "(2.00×)" in found["verdicts"]["two"]
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    sound(page)
    assert "model.layers.0.self_attn.q_proj 0.400 0.600" in page.text  # a column for each model
    assert any(gap["model"] == "two" and "recovery" in gap["what"] for gap in found["missing"])


def test_models_with_the_same_errors_share_a_line(tmp_path):
    one, two = (recorded_model(tmp_path / name, layer_names()) for name in ("one", "two"))
    page = page_of([one, two, recorded_model(tmp_path / "three", layer_names(), error=0.5)], tmp_path)
    assert "one and two three" in page.text  # the legend of the weights' errors
    assert "recovery has changed the weights of one, two and three since" in page.text


def test_a_demo_is_understood(tmp_path):
    directory = recorded_model(tmp_path / "packed", layer_names())
    result = {"perplexity": 10.0, "tokens": 64, "context": 32, "stride": 16, "agreement": None, "kl": None}
    told = {"verb": "demo", "dense": "demo/dense", "packed": "demo/packed", "prompt": "I am"}
    told |= {"dense_text": " fine", "packed_text": " fried", "dense_eval": result}
    told |= {"packed_eval": result | {"perplexity": 25.0, "agreement": 0.5}}
    document = write(tmp_path / "demo.json", told)
    found = report([directory], tmp_path / "page.html", documents=[document])
    assert "perplexity 25.0 against 10.0 dense (2.50×)" in found["verdicts"]["packed"]
    text = Reader((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "dense (to compare) fine" in text
    assert "packed fried" in text


def test_perplexities_of_other_protocols_are_not_compared(tmp_path):
    directory = recorded_model(tmp_path / "m", layer_names())
    write(directory / "reports" / "eval.json", score("m", 8.0))
    write(directory / "reports" / "eval-dense.json", score("dense", 4.0, stride=16))
    found = report([directory], tmp_path / "page.html")
    assert "no dense model to compare with" in found["verdicts"]["m"]
    assert "2.00×" not in found["verdicts"]["m"]


def test_times_of_other_shapes_are_not_taken(tmp_path):
    directory = recorded_model(tmp_path / "m", {"layers.0.proj": (640, 640)})
    write(directory / "reports" / "bench.json", products())
    found = report([directory], tmp_path / "page.html")
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "its speed" in found["verdicts"]["m"]
    assert "none of those shapes was measured here" in page.text
    assert "computed, not measured" in page.text


def test_tune_gives_times(tmp_path):
    directory = recorded_model(tmp_path / "m", {"layers.0.proj": (640, 640), "layers.1.proj": (640, 640)})
    rows = [
        {"n": 640, "k": 640, "tokens": t, "dense_ms": 0.03, "times_dense": 1.5, "best": {}} for t in (8, 512)
    ]
    write(directory / "reports" / "tune.json", {"verb": "tune", "rows": rows})
    found = report([directory], tmp_path / "page.html")
    assert "run 1.50× dense at 8 tokens and 1.50× at 512" in found["verdicts"]["m"]
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "60.0 µs dense and 40.0 µs in 2:4 (1.50×) at 8 tokens" in page.text  # both layers together


def test_not_finite_figures_do_not_break_the_page(tmp_path):
    directory = whole_model(tmp_path / "m")
    write(directory / "reports" / "eval.json", score("m", float("nan")))
    (directory / "recover.jsonl").write_text('{"step": 1, "loss": Infinity}\n{"step": 2, "loss": 1.0}\n')
    page = page_of([directory], tmp_path)
    sound(page)
    assert "not finite" in page.text
    assert not [
        attrs for _, attrs in page.tags if "nan" in str(attrs.get("d", "")) + str(attrs.get("width", ""))
    ]


def test_markdown_has_the_same_facts(whole, tmp_path):
    html = report([whole], tmp_path / "page.html")
    text = tmp_path / "page.md"
    found = report([whole], text)
    assert {k: found[k] for k in ("verdicts", "sections", "missing")} == {
        k: html[k] for k in ("verdicts", "sections", "missing")
    }
    lines = text.read_text(encoding="utf-8").splitlines()
    assert any("| model.layers.1.mlp.down\\_proj | 0.413 |" in line for line in lines)
    before = 0
    for line in lines:  # every row of a table has as many cells as its head
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (before and cells) or cells == before, line
        before = cells


def test_wrong_arguments(whole, tmp_path):
    with pytest.raises(InputError, match="no format 'pdf'"):
        report([whole], tmp_path / "x", format="pdf")
    with pytest.raises(InputError, match="is a directory"):
        report([whole], tmp_path)
    with pytest.raises(InputError, match="needs a model directory"):
        report([], tmp_path / "x.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        report([whole], tmp_path / "file" / "x.html")
    with pytest.raises(InputError, match="is empty"):
        report([whole], tmp_path / "x.html", generate=" ")


def test_only_a_report_is_written_over(whole, tmp_path, monkeypatch):
    def work(*_):
        raise AssertionError("refused only after the work")

    kept = {"data.jsonl": '{"text": "mine"}\n', "notes.md": "# Notes\n", "index.html": "<!doctype html>\n"}
    with monkeypatch.context() as early:
        early.setattr("twofour.report.page.read_subjects", work)
        for name, content in kept.items():
            (tmp_path / name).write_text(content)
            with pytest.raises(InputError, match="no report of twofour"):
                report([whole], tmp_path / name)
            assert (tmp_path / name).read_text() == content
        with pytest.raises(InputError, match=r"End it in \.html or \.md"):
            report([whole], tmp_path / "page.pdf")
    for name in ("page.html", "page.md"):
        first = report([whole], tmp_path / name)
        assert report([whole], tmp_path / name)["bytes"] == first["bytes"]
    assert report([whole], tmp_path / "page", format="md")["format"] == "md"
    assert report([whole], tmp_path / "page", format="md")["format"] == "md"


def test_a_model_is_not_compared_with_itself(whole, tmp_path):
    with pytest.raises(InputError, match="is given twice"):
        report([whole, whole / ".." / whole.name], tmp_path / "x.html")


def test_models_write_on_the_spot(packed, dense, tmp_path):
    record = json.loads((packed / "twofour.json").read_text())
    record["steps"][0]["source"] = str(dense)
    write(packed / "twofour.json", record)
    page = page_of([packed], tmp_path, generate="once")
    sound(page)
    assert "“once” …" in page.text
    assert "dense (to compare)" in page.text


def test_the_verb_is_callable_again_and_again(whole, tmp_path):
    import twofour

    for name in ("a.html", "b.html"):  # after the first use the name is the module's
        assert twofour.report([whole], tmp_path / name)["format"] == "html"


def test_command(twofour, whole, tmp_path):
    ran = twofour("report", whole, "-o", tmp_path / "page.html", "--json")
    assert ran.status == 0
    assert ran.json["verb"] == "report"
    assert ran.json["out"] == str(tmp_path / "page.html")
    assert ran.json["sections"] == SECTIONS
    unknown = write(tmp_path / "odd.json", {"verb": "odd"})
    ran = twofour("report", whole, "-o", tmp_path / "page.md", "--with", unknown)
    assert "model-24 is smaller and faster, at some loss" in ran.out
    assert "not understood" in ran.err
    assert (tmp_path / "page.md").read_text().startswith("# model-24")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    ran = twofour("report", whole, "-o", tmp_path / "x.html", "--with", broken)
    assert ran.status == 2
    assert "broken.json" in ran.err
    assert not (tmp_path / "x.html").exists()
    ran = twofour("report", whole, "-o", tmp_path / "x.html", "--with", tmp_path / "nope.json")
    assert ran.status == 2
    assert ran.err.endswith("nope.json does not exist. Give a file that a verb wrote with --json.\n")
    assert twofour("report", tmp_path / "no").status == 2
    assert "Example: twofour report" in twofour("report", "--help").out


def test_the_model_itself_was_measured(tmp_path):
    directory = measured_model(tmp_path / "model-24")
    found = report([directory], tmp_path / "page.html")
    assert found["refused"] == []
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    sound(page)
    # The whole model says more than its layers, and the last perplexity counts.
    told = found["verdicts"]["model-24"]
    assert (
        "it runs 1.50× dense in decode at batch 1 and 1.12× dense in prefill at batch 16 on NVIDIA H200"
        in told
    )
    assert "its 2:4 layers together" not in told
    assert "perplexity 6.06 against 6.00 dense (1.01×)" in told
    assert told.startswith("model-24 is smaller and faster, and as good as dense")
    for words in ("model-24 itself, 2 layers", "87.5 %", "2.22 GB", "a queen", "a king", "of wiki.txt"):
        assert words in page.text, words
    assert not any("as a whole" in gap["what"] for gap in found["missing"])


def test_a_model_of_random_weights_is_not_the_model(whole, tmp_path):
    found = report([whole], tmp_path / "page.html")
    assert any(gap["command"].startswith(f"twofour bench {whole}") for gap in found["missing"])
    assert "random weights" in (tmp_path / "page.html").read_text()


def test_a_bench_of_one_model_is_not_of_another(tmp_path):
    one, two = (recorded_model(tmp_path / name, layer_names()) for name in ("one", "two"))
    about_two = write(tmp_path / "bench.json", measured("elsewhere/two"))
    found = report([one, two], tmp_path / "page.html", documents=[about_two])
    assert found["refused"] == []
    assert "it runs" in found["verdicts"]["two"]
    assert "it runs" not in found["verdicts"]["one"]
    write(one / "reports" / "bench.json", measured("two"))
    found = report([one], tmp_path / "page.html")
    assert [refusal["why"] for refusal in found["refused"]] == [
        "is a bench of two, which is not the model it lies beside"
    ]


def test_on_a_cpu_nothing_is_said_of_speed(tmp_path):
    directory = recorded_model(tmp_path / "m", layer_names())
    write(directory / "reports" / "bench.json", measured("m") | {"about": {"gpu": None, "machine": "x86_64"}})
    found = report([directory], tmp_path / "page.html")
    assert "its speed on a GPU was not measured" in found["verdicts"]["m"]
    assert "A CPU has no Sparse Tensor Cores" in (tmp_path / "page.html").read_text()


def test_later_documents_count_more(tmp_path):
    directory = recorded_model(tmp_path / "m", layer_names())
    for number in (1, 2, 10):
        write(directory / "reports" / f"eval-{number}.json", score("m", float(number)))
    found = report([directory], tmp_path / "page.html")
    assert "perplexity 10.0" in found["verdicts"]["m"]
