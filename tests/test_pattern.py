"""The rule, against an oracle that is slow and obvious: plain Python over lists."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from twofour.errors import InputError
from twofour.pattern import check_pattern, keep_best, keep_best_transposable, require_finite

INF = math.inf
FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
PATTERNS = [(2, 4), (1, 4), (4, 8), (1, 2), (3, 3), (2, 5)]

# Few distinct values, so that ties are common, and everything that compares strangely.
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, INF, -INF]) | st.floats(-100, 100, width=16)


def tables(cells, max_columns=14):
    return st.integers(0, max_columns).flatmap(
        lambda columns: st.lists(st.lists(cells, min_size=columns, max_size=columns), min_size=1, max_size=4)
    )


def groups_of(row, m):
    return [row[i : i + m] for i in range(0, len(row), m)]


def best_of_row(row, n, m):
    """Sorted by score, the left one first among equals: the first n of each group stay."""
    keep = []
    for group in groups_of(row, m):
        order = sorted(range(len(group)), key=lambda i: (-group[i], i))
        keep += [i in order[:n] for i in range(len(group))]
    return keep


def assert_keeps_best(score, n=2, m=4):
    rows = score.double().reshape(math.prod(score.shape[:-1]), score.shape[-1]).tolist()
    mask = keep_best(score, n, m)
    assert mask.dtype == torch.bool
    assert mask.shape == score.shape
    assert mask.reshape(len(rows), score.shape[-1]).tolist() == [best_of_row(row, n, m) for row in rows]


# check_pattern


@settings(deadline=None, max_examples=60)
@given(table=tables(st.sampled_from([0.0, -0.0, 1.0, -2.0, INF])), pattern=st.sampled_from(PATTERNS))
def test_check_counts_groups_and_finds_the_first_violation(table, pattern):
    n, m = pattern
    report = check_pattern(torch.tensor(table).reshape(len(table), -1), n, m)
    found = [
        (r, g, sum(v != 0 for v in group), tuple(group))
        for r, row in enumerate(table)
        for g, group in enumerate(groups_of(row, m))
    ]
    kept = [f[2] for f in found]
    assert report.groups == len(kept)
    assert report.full == sum(k == n for k in kept)
    assert report.under == sum(k < n for k in kept)
    assert report.over == sum(k > n for k in kept)
    assert report.legal == all(k <= n for k in kept)
    bad = [f for f in found if f[2] > n]
    if bad:
        first = report.first
        assert (first.row, first.group, first.kept, first.values) == bad[0]
    else:
        assert report.first is None


def test_check_locates_a_violation_in_the_last_short_group():
    matrix = torch.zeros(3, 7)
    matrix[1, 4:] = torch.tensor([1.0, -2.0, 3.0])
    first = check_pattern(matrix).first
    assert (first.row, first.group, first.kept, first.values) == (1, 1, 3, (1.0, -2.0, 3.0))


def test_check_counts_rows_over_all_leading_dimensions():
    matrix = torch.zeros(2, 3, 8)
    matrix[1, 2, 4:] = 1
    assert check_pattern(matrix).first.row == 5
    assert check_pattern(matrix).first.group == 1


def test_check_takes_nan_and_infinity_for_nonzeros():
    report = check_pattern(torch.tensor([[math.nan, INF, -INF, 0.0]]))
    assert report.over == 1
    assert report.first.kept == 3


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("columns", [8, 7])
def test_check_every_dtype(dtype, columns):
    matrix = torch.tensor([[1, 0, 1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 1, 0, 0]])[:, :columns].float().to(dtype)
    report = check_pattern(matrix)
    assert (report.full, report.under, report.over) == (1, 2, 1)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 3, 8), (0,)])
def test_empty_tensors_are_legal_and_have_empty_masks(shape):
    assert check_pattern(torch.zeros(shape)).legal
    assert check_pattern(torch.zeros(shape)).groups == 0
    mask = keep_best(torch.zeros(shape))
    assert mask.shape == shape
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("call", [check_pattern, keep_best])
def test_impossible_patterns_and_scalars_are_input_errors(call):
    for n, m in [(0, 4), (5, 4), (-1, 4), (1, 0)]:
        with pytest.raises(InputError, match=f"{n}:{m}"):
            call(torch.zeros(2, 8), n, m)
    with pytest.raises(InputError, match="scalar"):
        call(torch.tensor(1.0))


# keep_best


@settings(deadline=None, max_examples=100)
@given(table=tables(SCORES), pattern=st.sampled_from(PATTERNS), dtype=st.sampled_from(FLOATS))
@example(table=[[-INF, -INF, -INF]], pattern=(2, 4), dtype=torch.float16)
@example(table=[[0.0, -0.0, -0.0, 0.0, -1.0]], pattern=(1, 4), dtype=torch.bfloat16)
def test_keep_best_of_floats(table, pattern, dtype):
    if dtype == torch.float8_e4m3fn:  # it has no infinity
        table = [[max(-448.0, min(448.0, x)) for x in row] for row in table]
    assert_keeps_best(torch.tensor(table, dtype=torch.float32).reshape(len(table), -1).to(dtype), *pattern)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), pattern=st.sampled_from(PATTERNS), dtype=st.sampled_from(INTEGERS))
def test_keep_best_of_integers(data, pattern, dtype):
    if dtype == torch.bool:
        cells = st.booleans()
    else:
        lowest, highest = max(torch.iinfo(dtype).min, -(2**53)), min(torch.iinfo(dtype).max, 2**53)
        cells = st.sampled_from([lowest, highest, 0, 1]) | st.integers(lowest, highest)
    table = data.draw(tables(cells))
    assert_keeps_best(torch.tensor(table, dtype=dtype).reshape(len(table), -1), *pattern)


def test_ties_go_left_and_negative_zero_is_zero():
    assert keep_best(torch.tensor([3.0, 3.0, 3.0, 3.0])).tolist() == [True, True, False, False]
    assert keep_best(torch.tensor([-0.0, 0.0, 0.0, 1.0])).tolist() == [True, False, False, True]
    assert keep_best(torch.tensor([-1.0, 0.0, -0.0, -1.0])).tolist() == [False, True, True, False]


def test_infinities_and_a_short_group_of_nothing_but_minus_infinity():
    assert keep_best(torch.tensor([1e30, INF, -INF, INF])).tolist() == [False, True, False, True]
    assert keep_best(torch.tensor([-INF, -INF, -1e30, -INF])).tolist() == [True, False, True, False]
    assert keep_best(torch.full((7,), -INF)).tolist() == [True, True, False, False, True, True, False]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[::3, 1:],
        lambda x: x.flip(1)[:, ::3],
        lambda x: x[:1].expand(4, -1),
        lambda x: x.reshape(3, 4, 17)[:, 1:3],
        lambda x: x.reshape(3, 4, 17).permute(2, 0, 1),
        lambda x: x[0],
    ],
)
def test_views_strides_and_leading_dimensions(view):
    score = torch.randint(0, 4, (12, 17), generator=torch.Generator().manual_seed(3)).float()
    assert_keeps_best(view(score))
    expected = view(score).contiguous()
    assert check_pattern(view(score)) == check_pattern(expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_scores_are_refused(dtype):
    score = torch.ones(4, 8)
    score[2, 5] = math.nan
    for call in (keep_best, keep_best_transposable):
        with pytest.raises(InputError, match="NaN"):
            call(score.to(dtype))


# keep_best_transposable


@pytest.fixture(scope="module")
def tiles():
    """The cells of every legal 4×4 tile, found among all 2**16 bit patterns."""
    lines = [[4 * r + c for c in range(4)] for r in range(4)] + [
        [4 * r + c for r in range(4)] for c in range(4)
    ]
    legal = [b for b in range(1 << 16) if all(sum(b >> i & 1 for i in line) == 2 for line in lines)]
    assert len(legal) == 90
    return [[i for i in range(16) if b >> i & 1] for b in legal]


def cells_of(matrix, row, column):
    return matrix[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].reshape(-1).tolist()


@settings(deadline=None, max_examples=60)
@given(cells=st.lists(st.integers(-9, 9) | st.sampled_from([INF, -INF]), min_size=32, max_size=32))
def test_transposable_is_the_best_of_all_ninety(tiles, cells):
    score = torch.tensor(cells, dtype=torch.float32).reshape(4, 8)
    mask = keep_best_transposable(score)
    for column in range(2):
        # An infinity outweighs any sum of finite scores; with small integers, 1000 does the same.
        finite = [max(-1000, min(1000, x)) for x in cells_of(score, 0, column)]
        best = max(sum(finite[i] for i in tile) for tile in tiles)
        kept = [i for i, k in enumerate(cells_of(mask, 0, column)) if k]
        assert kept in tiles
        assert sum(finite[i] for i in kept) == best


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_transposable_of_every_dtype_and_leading_dimensions(tiles, dtype):
    draw = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(5)) * 100
    score = draw.to(dtype) if dtype != torch.bool else draw > 50
    mask = keep_best_transposable(score.transpose(0, 1))
    assert mask.dtype == torch.bool
    assert mask.shape == (3, 2, 8, 12)
    for i in range(3):
        for j in range(2):
            for row in range(2):
                for column in range(3):
                    values = cells_of(score[j, i].double(), row, column)
                    kept = [n for n, k in enumerate(cells_of(mask[i, j], row, column)) if k]
                    best = max(math.fsum(values[n] for n in tile) for tile in tiles)
                    assert math.fsum(values[n] for n in kept) == pytest.approx(best, rel=1e-12)


def test_transposable_keeps_two_in_every_row_and_column_even_of_equal_scores():
    for score in (
        torch.zeros(8, 16),
        torch.full((8, 16), INF),
        torch.full((8, 16), -INF),
        -torch.ones(8, 16),
    ):
        mask = keep_best_transposable(score)
        assert mask.reshape(8, 4, 4).sum(-1).eq(2).all()
        assert mask.t().reshape(16, 2, 4).sum(-1).eq(2).all()


def test_transposable_ties_do_not_depend_on_where_the_tile_stands():
    tile = torch.tensor(
        [[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    )
    alone = keep_best_transposable(tile)
    many = keep_best_transposable(tile.repeat(6, 9))
    assert torch.equal(many, alone.repeat(6, 9))


def test_transposable_honours_the_largest_float32():
    score = torch.full((4, 4), -torch.finfo(torch.float32).max)
    wanted = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]]).bool()
    score[wanted] = torch.finfo(torch.float32).max
    assert torch.equal(keep_best_transposable(score), wanted)


@pytest.mark.parametrize("shape", [(4,), (), (4, 6), (6, 4), (2, 5, 4)])
def test_transposable_refuses_other_shapes(shape):
    with pytest.raises(InputError, match="multiples of 4"):
        keep_best_transposable(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 4, 4)])
def test_transposable_of_empty_tensors(shape):
    assert keep_best_transposable(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize(
    "context", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference_mode", "meta"]
)
def test_transposable_remembers_nothing_of_the_context_of_its_first_call(context):
    from twofour.pattern import _transposable_patterns

    score = torch.rand(4, 4, requires_grad=True)
    _transposable_patterns.cache_clear()
    try:
        with context():
            keep_best_transposable(score.detach())
        assert keep_best_transposable(score).sum() == 8
    finally:
        _transposable_patterns.cache_clear()


# require_finite


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_require_finite_names_the_layer_counts_and_locates(dtype):
    weight = torch.ones(3, 5)
    weight[1, 2] = weight[2, 4] = math.nan
    require_finite(torch.ones(3, 5).to(dtype), "fine")
    with pytest.raises(InputError, match=r"block\.1\.fc: 2 of 15 .* index 7") as caught:
        require_finite(weight.to(dtype), "block.1.fc")
    assert caught.value.layer == "block.1.fc"
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("bad", [INF, -INF])
def test_require_finite_refuses_infinity(bad):
    with pytest.raises(InputError, match="1 of 4 weights"):
        require_finite(torch.tensor([1.0, 2.0, bad, 4.0]))


def test_require_finite_lets_integers_and_empty_tensors_pass():
    require_finite(torch.ones(2, 4, dtype=torch.int8))
    require_finite(torch.zeros(0, 4))
