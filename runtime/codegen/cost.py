"""The cost model: every number that decides how a kernel is run, with its unit and the benchmark that shows it.

Times are counted in FMAs: 1.0 is the time of one FMA of vectors where the processor's units are never idle. A time is
an estimate to compare candidates of one kernel with; none is held against a clock.

All numbers were set by hand, on two machines with AVX-512 (docs/performance.md). Above each: its unit, what it means,
and in brackets the benchmark to check it with and the commit that brought it, where one was about it (they say what
changed, few what was measured; what has no commit here has been there from the beginning). `no benchmark`: none is
known to move with it. What a processor has (vectors, registers, caches) is no choice and stands in `target.py`.
"""

from __future__ import annotations

from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.uop.ops import Ops

# bytes: of an element that is packed or summed, for half types are converted to float32 [no benchmark]
ELEMENT_BYTES = 4
# bytes: ahead of a row that is packed in squares, its next ones are asked for [gemm.py, NT 512x576x576]
PACK_AHEAD_BYTES = 256
# rows: of either factor at least, for a product in parts; for fewer, FMAs take less time than packing [gemm.py, NT]
LEAST_PARTS_ROWS = 128
# terms: of such a product at most, as a panel of them lies in memory [no benchmark]
MOST_PARTS_TERMS = 1 << 14
# bytes: of an element of float32 that is packed in parts of bfloat16 [no benchmark]
PARTS_BYTES = 6
# bytes: of the vectors that pack along a loop which is not the vectorised one: a cache line [gemm.py, TN]
PACK_BYTES = 64

# *** reductions ***

# iterations: a shorter range is not accumulated in lanes, for folding them costs as much [no benchmark]
LEAST_LANES_TERMS = 8
# vectors: of a row, between which its running maximum is raised; with their exponentials and constants they fill the
# registers [memory_bound.py, cross_entropy; 1a5b300]
ONLINE_VECTORS = 4
# bytes: a row from here on is read by itself, for several at once meet in the same sets of the first cache, and pays
# for one pass where two would do [memory_bound.py, sum dim 1 and cross_entropy; 1a5b300]
LONG_ROW_BYTES = 2 << 10
# iterations: shorter sums of bytes or bfloat16 do not pay for joining neighbours in lanes [gemm.py, int8; a2498ba]
LEAST_DOT_TERMS = 16
# FMAs: of a tile's body with a short inner range written out, at most [conv.py]
WRITTEN_OUT = 256
# iterations: of such a range, at most [conv.py]
WRITTEN_OUT_ITERATIONS = 16
# FMAs: of such a body that knows its conditions, with ranges that decide none of them [conv.py; 2d08982]
KNOWN_BODY = 144
# registers: for masks of lanes in which a row's maximum met NaNs; AVX-512 has seven [memory_bound.py, max dim 1;
# 149cc1a]
MASK_REGISTERS = 6

# *** which loop is vectorized: the time of a vector's access ***

# share: of the time one element at a time, below which vectors are worth it [no benchmark]
SCALAR_SHARE = 0.9
# FMAs: a load, a store, an operation [memory_bound.py, chain]
CONTIGUOUS_TIME = 1.0
# FMAs: one element in all lanes [memory_bound.py, chain]
BROADCAST_TIME = 1.5
# FMAs: lanes backwards, every second element, or in squares turned in registers [memory_bound.py, transpose]
SHUFFLED_TIME = 3.0
# FMAs: a lane, where every element is loaded by itself [memory_bound.py, embedding grad]
GATHERED_TIME = 0.8


def access_time(stride: int | None, turned: bool, lanes: int) -> float:
    """FMAs that the access of a vector takes whose lanes lie `stride` elements apart (None: irregularly, 2 also: a
    known pattern); `turned`: in squares along another loop."""
    if stride == 1:
        return CONTIGUOUS_TIME
    if stride == 0:
        return BROADCAST_TIME
    return SHUFFLED_TIME if stride in (-1, 2) or turned else GATHERED_TIME * lanes


# *** products: what an operand's and the results' vectors cost ***

# FMAs: to pack a vector of what lies along the reduction, in squares turned by shuffles [gemm.py, NT; eea109e]
PACK_TIME = 6
# FMAs: the same where it comes from memory, which nothing but packing waits for [gemm.py, NT of 24 rows]
PACK_MEMORY_TIME = 16
# FMAs: to pack a vector of what lies along neither, element by element [conv.py, gradient of the weights; eea109e]
PACK_APART_TIME = 48
# FMAs: to turn a vector of what lies along the reduction in registers where it is used, by each round of shuffles
# [gemm.py, NT of 4 and of 8 rows]
TURN_TIME = 1
# vectors: of a panel, before its width is known [conv.py --image 224; fc43351]
PANEL_VECTORS = 4
# FMAs: to store a vector across its lanes, where whole vectors lie side by side in a tile [conv.py; 33a4610]
STORE_TURNED_TIME = 12
# FMAs: the same, where TURNED_HALF positions do [conv.py; 33a4610]
STORE_TURNED_HALF_TIME = 20
# FMAs: the same, where LEAST_TURNED do, or lanes are within a vector's length of each other [conv.py; 33a4610]
STORE_TURNED_FEW_TIME = 40
# FMAs: the same, where nothing lies side by side [conv.py; 33a4610]
STORE_SCATTERED_TIME = 80
# positions: side by side, half a vector of 16 [conv.py; 33a4610]
TURNED_HALF = 8
# positions: side by side, from which turning them pays [conv.py; 1f44d21]
LEAST_TURNED = 3


def pack_time(along_reduction: bool, from_memory: bool, uses: int) -> float:
    """FMAs that packing an operand adds to each FMA, of which a packed vector serves `uses`."""
    if not along_reduction:
        return PACK_APART_TIME / uses
    return (PACK_MEMORY_TIME if from_memory else PACK_TIME) / uses


def turn_time(lanes: int, uses: int) -> float:
    """FMAs that turning an operand in registers adds to each FMA, of which a turned vector serves `uses`."""
    return TURN_TIME * (lanes.bit_length() - 1) / uses


def store_time(step: int | None, side: int, lanes: int) -> int:
    """FMAs beyond a plain store that a vector of results takes whose lanes lie `step` elements apart (not 1; None:
    irregularly), where `side` positions of its tile lie side by side."""
    if side >= lanes:
        return STORE_TURNED_TIME
    if side >= TURNED_HALF:
        return STORE_TURNED_HALF_TIME
    return STORE_TURNED_FEW_TIME if side >= LEAST_TURNED or (step and abs(step) < lanes) else STORE_SCATTERED_TIME


# *** products: tiles of rows x vectors of accumulators ***

# vectors: that a tile may be wide [gemm.py]
TILE_VECTORS = (1, 2, 3, 4, 6)
# rows: of a tile at most [gemm.py]
TILE_ROWS = 16
# iterations: from which a loop is as good for rows as a longer one [gemm.py; 7c1467b]
ENOUGH_ROWS = 4
# positions: of rows that conditions leave some out of, at most, as code is made for each [conv.py; 33a4610]
TILE_POSITIONS = 72
# loads: an FMA, that run beside it [gemm.py]
FREE_LOADS = 0.4
# rows: a vector of columns that serves fewer arrives from the second cache too late [gemm.py; 6561556]
STREAM_ROWS = 6
# FMAs: that it is late by, for each time that its rows are short of STREAM_ROWS [gemm.py; 6561556]
STREAM_TIME = 0.3
# sums: of two units with a latency of four cycles; with fewer, FMAs wait for each other [gemm.py]
BUSY_ACCUMULATORS = 8
# rows: what is packed along them is packed in vectors of so many [gemm.py, TN; 3c2e69c]
PACKED_ROWS = 8
# times: the time of a tile of packed rows that is no multiple of these [gemm.py, TN; 3c2e69c]
ODD_ROWS_TIME = 1.12
# times: the time of a product whose operand is packed because it is read under conditions [conv.py; 101f973]
PACK_MASKED_TIME = 1.12
# times: the time of a product some of whose conditions are asked while it runs [conv.py; 101f973]
ASKED_TIME = 1.1
# positions: of a tile at which a condition may be asked while it runs [conv.py; f19c06b]
ASKED_POSITIONS = 4
# versions: of a reduction at most, by which of its conditions hold [conv.py; 2d08982]
EDGE_VERSIONS = 4
# share: a condition that holds in at most so many cases is asked for each iteration [conv.py, strides; 6561556]
LEFT_OUT = 0.75
# FMAs: over the vectors of a tile without rows; memory bounds it, and wide tiles read in longer runs [memory_bound.py,
# sum dim 0; 2bef02a]
WIDE_TIME = 0.3
# positions: of two loops side by side by the accumulators there are, for vectors along the reduction [gemm.py, NT of
# few columns; b89f62e]
DOT_TILES = {24: (8, 3), 16: (4, 4), 0: (3, 3)}
# times: that what an instruction of a matrix unit adds up may be less than it could; else vectors are used
# [no benchmark]
MATRIX_SHARE = 2
# panels: of columns, at least, for which rows are turned once, for a matrix unit; they may rest in the third cache
# [gemm.py, TN of bfloat16]
TURNED_PANELS = 8
# panels: the same where rows are packed in parts of bfloat16 [gemm.py, NT 512x576x1536]
PARTS_PANELS = 4
# panels: if so many rest in the cache whole, no more are better [gemm.py, NT 512x1536x576]
ENOUGH_PARTS_PANELS = 6
# panels: the same at most, where a part of the reduction is packed at a time [gemm.py, NT 512x1024x4096]
MOST_PARTS_PANELS = 12
# iterations: of the reduction in such a part at least [gemm.py, NT 1024x384x1536]
LEAST_PARTS_TERMS = 256
# bytes: of sums that rest between such parts, at most [no benchmark]
RESTING_SUMS_BYTES = 16 << 20
# vectors: of a block of quantised weights that is written out, at most [inference.py]
BLOCK_VECTORS = 32

# iterations: of the reduction of a product that are written out, where nothing asks for more [gemm.py, NT 512x576x1536]
PRODUCT_UNROLL = 2
# rows: of a tile that are multiplied by a block, by the accumulators there are [inference.py, 8 rows]
BLOCK_TILE_ROWS = {16: 8, 0: 4}
# FMAs: of the body of such a tile, with two columns; more do not find all that is unpacked in registers
# [inference.py, 8 rows]
BLOCK_TILE_BODY = 64
# columns: of a tile of a product of blocks of bytes; so many rows of packed weights share a vector [inference.py]
BLOCK_COLUMNS = 16


def fma_time(rows: float, vectors: int) -> float:
    """FMAs that one in a tile of `rows` x `vectors` takes: its share of the loads, of the wait for columns from the
    second cache, and of its latency where the accumulators are too few to hide it."""
    if not rows or not vectors:
        return 0.0
    loads = max(0.0, (rows + vectors) / (rows * vectors) - FREE_LOADS)
    late = STREAM_TIME * max(0.0, STREAM_ROWS / rows - 1)
    return (1.0 + loads + late) * max(1.0, BUSY_ACCUMULATORS / (rows * vectors))


def rowless_time(tiles: int, vectors: int, columns: int, cores: int) -> float:
    """FMAs that one of a sum takes none of whose loops are rows, of `columns` vectors in `tiles` of so many `vectors`:
    by the core with the most tiles."""
    return -(-tiles // cores) * cores * vectors / columns + WIDE_TIME / vectors


def load_ports_idle(rows: int, vectors: int) -> bool:
    """Whether the FMAs of a tile leave the load ports the time to prefetch its next rows [train_step.py, MLP;
    436745f]."""
    return vectors + 2 * rows <= vectors * rows


def block_rows(machine: Machine, vectors: int, words: bool) -> int:
    """Rows of a tile, so many vectors wide, of blocks of bytes with scales: each has a block's sum and that of all,
    and an unpacked block takes a third of the registers; `words`: where several instructions multiply, there is time
    for the sums of all to wait in memory while a block's are made [inference.py, AVX2]."""
    return max(1, machine.accumulators * (2 if words else 1) // (3 * vectors))


def block_overflows(machine: Machine, vectors: int) -> bool:
    """Whether a block that is unpacked to so many vectors leaves registers for nothing else [inference.py, AVX2]."""
    return vectors > machine.accumulators


def dot_positions(accumulators: int) -> int:
    """Positions of one loop side by side, for vectors along the reduction [memory_bound.py, sum dim 1]."""
    return max(1, min(4, accumulators // 4))


# *** products: what rests in which cache ***

# bytes: of local memory for a packed panel at most, at 8 bytes an element [no benchmark]
SCRATCH_PANEL_BYTES = 16 << 20
# iterations: of rows; fewer do not pay for packing the columns that they share [gemm.py; 179652e]
SHARED_BY_ROWS = 32
# vectors: of a row, from which the next one is prefetched [train_step.py, MLP; 436745f]
PREFETCH_VECTORS = 4
# tiles: that blocks would hold if the last one were whole, at most, by those there are; threads share whole blocks
# [gemm.py, NT 512x576x576]
UNEVEN_BLOCKS = 1.06
# blocks: of resting rows at least, where there are rows enough [gemm.py, TN; c3cf44d]
BLOCKS = 16
# pieces: into which what is blocked falls at least, on one core, too [gemm.py, TN; c3cf44d]
LEAST_PIECES = 2
# rows: of a block of a long reduction at most [gemm.py, TN; 888dcb6]
BLOCK_ROWS = 512
# rows: of such a block at least; smaller ones do not pay for the way of their sums to memory [gemm.py, TN; 888dcb6]
LEAST_BLOCK_ROWS = 96
# iterations: of the reduction in such a block at most [gemm.py, TN of 2048; 196f73a]
BLOCK_TERMS = 128
# iterations: of the reduction in such a block at least [gemm.py, TN; 2265300]
LEAST_BLOCK_TERMS = 16
# times: of a product so much wider than high, such blocks are of columns [gemm.py, TN; 888dcb6]
WIDE_PRODUCT = 2


def columns_bytes(machine: Machine) -> int:
    """Bytes of columns that the first cache keeps beside the rows that pass by: 2/3 of it [gemm.py, batches;
    436745f]."""
    return machine.first_cache_bytes * 2 // 3


def panel_bytes(machine: Machine) -> int:
    """Bytes of packed columns that rest in the second cache: 1/2 of it, the rest is for rows and results [gemm.py;
    179652e]."""
    return machine.cache_bytes // 2


def resting_rows_bytes(machine: Machine) -> int:
    """Bytes of packed rows that rest: twice the second cache, as columns pass them in long runs [gemm.py, TN;
    3c2e69c]."""
    return 2 * machine.cache_bytes


def near_bytes(machine: Machine) -> int:
    """Bytes of an operand that the second cache holds beside all else: 1/4 of it [gemm.py, TN; 179652e]."""
    return machine.cache_bytes // 4


def block_elements(machine: Machine) -> int:
    """Elements of the block of an operand that a blocked reduction packs at a time: 1/8 of the second cache, so that a
    panel of the other operand stays in the first [gemm.py, TN; 196f73a]."""
    return machine.cache_bytes // 8 // ELEMENT_BYTES


# *** elementwise kernels and stores ***

# (operations, vectors): up to so many operations an element, so many vectors at once hide the latency of loads
# [memory_bound.py, chain]
VECTORS_OF_WORK = ((12, 4), (30, 2))
# vectors: of a transposed row at least; shorter ones are not turned in squares [memory_bound.py, transpose; b3ecfaf]
TURNED_LANE_VECTORS = 4
# lines: of which squares that are turned are wide [memory_bound.py, transpose; b3ecfaf]
TURNED_LINES = 2
# vectors: of a row at least for whole lines to pay for its odd ends [memory_bound.py, softmax of 1,000; 27491f5]
LEAST_ROW_VECTORS = 8
# vectors: at once of a loop of a kernel that stores in order, the most first [memory_bound.py, embedding grad; 890b2e5]
IN_ORDER_VECTORS = (8, 4, 2)

# *** memory: sizes beyond which caches do not help ***

# bytes: read of an array that has left the cores' caches [memory_bound.py, sum; 1a5b300]
LARGE_BYTES = 8 << 20
# rows: at once of a sum down them; streams that the processor follows [memory_bound.py, sum dim 0; 1a5b300]
ROWS_AT_ONCE = 8
# turns: of so many rows that such a sum has at least [memory_bound.py, sum dim 0; 1a5b300]
TURNS = 8
# pieces: a core, from which the columns of such a sum are not cut, too [no benchmark]
CORE_PIECES = 8
# elements: of a row that is kept at most; several fit the second cache [memory_bound.py, softmax; 7b50cb8]
KEPT_ROW = 16384
# operations: an element, from which its value is kept; a load from the first cache and a store to it take about two
# [memory_bound.py, softmax grad; 7b50cb8]
KEPT_WORK = 6
# operations: that one counts for; all others 1 [memory_bound.py, softmax grad; 7b50cb8]
OPERATIONS = {Ops.EXP: 16, Ops.LOG: 16, Ops.SIN: 16, Ops.POW: 80, Ops.FDIV: 3, Ops.RECIP: 3, Ops.SQRT: 3}
# rows: that are prefetched, in a tile at least [memory_bound.py, softmax; 9d04fae]
LEAST_ROWS_HELD = 2
# bytes: ahead of what is read in order, at least [inference.py]
AHEAD_BYTES = 4096
# bytes: of a tile's rows, at most, for the next tile's to be asked for; longer rows are read ahead each [inference.py]
TILE_AHEAD_BYTES = 16 << 10
# bytes: the same of a product's tile [gemm.py, NT of 4 to 32 rows]
PRODUCT_AHEAD_BYTES = 256 << 10
# bytes: of an array that is read so; a smaller one rests in the first caches [inference.py]
AHEAD_OF_BYTES = 64 << 10
# bytes: of a piece of it that an iteration of the outermost loop reads, at most [inference.py]
PIECE_BYTES = 64 << 10
# uses: of an element, at most; more leave the processor the time to fetch the next [inference.py]
AHEAD_USES = 32
# bytes: an output of at least this much has left the caches before it is read [memory_bound.py, copy; 32 MiB in all]
STREAM_BYTES = 16 << 20
# bytes: the same beside an update in place, whose lines stay in the caches instead [train_step.py, 1 sample; bc9bde6]
RECORD_BYTES = 1 << 20
# bytes: the same of a transpose, which writes many rows in turns [memory_bound.py, transpose; b3ecfaf]
TRANSPOSED_BYTES = 4 << 20


def sums_bytes(machine: Machine) -> int:
    """Bytes of sums down the rows that stay in the first cache beside what is read: 1/3 of it [memory_bound.py, sum
    dim 0; 1a5b300]."""
    return machine.first_cache_bytes // 3


def sums_in_registers(machine: Machine) -> int:
    """Vectors of sums down the rows in a tile: 2/3 of a product's accumulators, the others are for what is loaded
    [memory_bound.py, sum dim 0; 1a5b300]."""
    return machine.accumulators * 2 // 3


def rows_bytes(machine: Machine) -> int:
    """Bytes of a tile's rows and of what is kept of them, of the first cache: 1/2, as rows of 4 KiB share its sets
    [memory_bound.py, softmax; 1942228]."""
    return machine.first_cache_bytes // 2


def is_burst(nbytes: int, machine: Machine) -> bool:
    """Whether a row is as long as what a core prefetches at once, or half as long [memory_bound.py, softmax;
    618acdc]."""
    return machine.burst_bytes // 2 <= nbytes <= machine.burst_bytes


# *** threads ***

# pieces: of the parallel loop, enough for any number of threads to have equal shares [train_step.py; b89f62e]
PIECES = 64
# pieces: where a thread packs for its part of the loop and keeps what neighbours share [gemm.py; b89f62e]
PACKED_PIECES = 1024
