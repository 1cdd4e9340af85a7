"""The op table of the IR: every node kind, with the group it belongs to."""

from __future__ import annotations

from enum import Enum, auto


class Ops(Enum):
    __hash__ = object.__hash__  # (Enum's own hashes the name, in Python: a quarter of the time of looking nodes up)

    # leaves
    BUFFER = auto()  # storage; arg BufferSpec; src ()
    PARAM = auto()  # slot of a CALL or of a normalised graph; arg BufferSpec, its uid the slot; kernel: arg the slot
    CONST = auto()  # arg the Python value; src ()
    IOTA = auto()  # 0, 1, ..., n-1; arg n; shape (n,)
    DEFINE_VAR = auto()  # symbolic integer; arg VarArg
    BIND = auto()  # a variable with its value: (DEFINE_VAR, CONST)
    # movement; arg as named
    RESHAPE = auto()  # new shape
    PERMUTE = auto()  # order
    EXPAND = auto()  # new shape
    PAD = auto()  # ((before, after), ...), filled with zeros
    SHRINK = auto()  # ((begin, end), ...)
    FLIP = auto()  # (bool, ...)
    # unary
    NEG = auto()
    RECIP = auto()
    SQRT = auto()
    EXP = auto()
    LOG = auto()
    SIN = auto()
    TRUNC = auto()
    NOT = auto()  # logical on bool, bitwise on integers
    # binary
    ADD = auto()
    SUB = auto()
    MUL = auto()
    FDIV = auto()  # float division
    POW = auto()  # float power
    IDIV = auto()  # integer division, towards zero (C); on dtypes.index: floor
    MOD = auto()  # remainder with the sign of the dividend (C); on dtypes.index: floor
    MAX = auto()
    CMPLT = auto()
    CMPNE = auto()
    CMPEQ = auto()
    AND = auto()
    OR = auto()
    XOR = auto()
    SHL = auto()
    SHR = auto()
    # ternary
    WHERE = auto()
    FMA = auto()  # a * b + c of floats, rounded once
    # types
    CAST = auto()
    BITCAST = auto()
    # structure of the tensor graph
    # tensor graph: arg ReduceArg, dims kept as 1; kernel: src (value, *ranges), arg op
    REDUCE = auto()
    GATHER = auto()  # (x, i0, ..., ik-1): out[s..., r...] = x[i0[s], ..., ik-1[s], r...], 0 where an index is outside
    # (base, value, i0, ..., ik-1), arg "set", "place", "add", "mul" or "max": base with value[s..., r...] set at, or
    # combined with, [i..., r...]. "set": of values for one place the last in the order of s stays; "place": no two
    # differ for one place, so they are written in any order
    SCATTER = auto()
    CAT = auto()  # src joined along arg
    CONTIGUOUS = auto()  # stored as it is; arg None, or the number of the leaf tensor that it is
    DETACH = auto()  # the same value, no gradient
    # (x, word), arg CheckArg: x; where it runs the BUFFER word learns of an x < low or >= size that is not spared
    CHECK = auto()
    WIRE = auto()  # the same value; a sum over devices that is due in it is carried out in the type that its arg names
    FINISH = auto()  # what is computed of each element of a sum over devices; arg FinishArg
    BARRIER = auto()  # (x, y): x, to be read once what y is computed from is there; never one with x
    COPY = auto()  # the value on device(s) arg
    SHARD = auto()  # the value cut, or replicated, over several devices; arg ShardArg
    # collectives, after multi: src (MSTACK of flat local values), arg as named
    ALLREDUCE = auto()  # AllReduceArg: terms summed
    ALLGATHER = auto()  # AllGatherArg: parts joined
    REDUCESCATTER = auto()  # ReduceScatterArg: each device its part of the sum
    ALLTOALL = auto()  # AllToAllArg: from parts of rows to parts of columns
    BROADCAST = auto()  # BroadcastArg: the root's value on every device
    POINT_TO_POINT = auto()  # PointToPointArg: from the first of two devices to the second
    MSTACK = auto()  # n per-device values seen as one
    MSELECT = auto()  # value arg of an MSTACK
    STORE = auto()  # tensor graph: (target, value); kernel: (INDEX, value, *ranges)
    AFTER = auto()  # (x, *effects): x once the effects have happened
    CUSTOM = auto()  # (srcs), arg CustomGrad: identity with a user's gradient
    FUNCTION = auto()  # a call of a traced function: src its arguments, arg its body, a SINK of values over PARAMs
    RESULT = auto()  # value arg of a FUNCTION
    SINK = auto()
    # kernels
    RANGE = auto()  # src (size,), arg RangeArg
    INDEX = auto()  # (PARAM, offset[, valid])
    LOAD = auto()  # (INDEX,)
    # the schedule
    CALL = auto()  # (what, *buffers or VIEWs of them)
    # (*kernels): what is called where they run one after the other for each block of their rows; arg ChainSpec
    CHAIN = auto()
    VIEW = auto()  # (buffer,): a contiguous part, read in place; arg ViewArg
    LINEAR = auto()  # ordered CALLs
    # what a collective's own CALLs call, beside COPY and kernels (`collectives/lower`)
    SEND = auto()  # lends an argument to another worker; arg MessageArg
    RECEIVE = auto()  # into an argument, or as one, where it is a BUFFER; arg MessageArg
    RELEASE = auto()  # an argument that was received is not read any more
    SETTLE = auto()  # waits until arguments that were sent may be written; arg a MessageArg for each


class GroupOp:
    MOVEMENT = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND, Ops.PAD, Ops.SHRINK, Ops.FLIP})
    VIEW = MOVEMENT - {Ops.PAD}  # each element is one of the source's: memory can be read and written through it
    UNARY = frozenset({Ops.NEG, Ops.RECIP, Ops.SQRT, Ops.EXP, Ops.LOG, Ops.SIN, Ops.TRUNC, Ops.NOT})
    BINARY = frozenset({Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.POW, Ops.IDIV, Ops.MOD, Ops.MAX, Ops.CMPLT, Ops.CMPNE,
                        Ops.CMPEQ, Ops.AND, Ops.OR, Ops.XOR, Ops.SHL, Ops.SHR})  # fmt: skip
    TERNARY = frozenset({Ops.WHERE, Ops.FMA})
    ALU = UNARY | BINARY | TERNARY
    ELEMENTWISE = ALU | {Ops.CAST, Ops.BITCAST}
    COMPARE = frozenset({Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ})
    COMMUTATIVE = frozenset({Ops.ADD, Ops.MUL, Ops.MAX, Ops.CMPNE, Ops.CMPEQ, Ops.AND, Ops.OR, Ops.XOR})
    COLLECTIVE = frozenset({Ops.ALLREDUCE, Ops.ALLGATHER, Ops.REDUCESCATTER, Ops.ALLTOALL, Ops.BROADCAST,
                            Ops.POINT_TO_POINT})  # fmt: skip
