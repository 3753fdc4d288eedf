//! Decoded kernels: what a parser makes and an interpreter runs.
//!
//! An instruction names registers only. Immediates and special registers (`%tid.x`) are registers too, filled before
//! a block starts, so that every operand is fetched in the same way.

use std::sync::Arc;

use super::arithmetic::{BinaryOp, CompareOp, QuaternaryOp, TernaryOp, UnaryOp};
use super::convert::ConvertOp;
use super::float::{HalfType, RoundingMode};
use super::scalar::PtxType;

/// The number of a 64-bit register.
pub type Reg = u32;
/// The number of a predicate.
pub type Pred = u32;

/// A predicate as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredOperand {
    pub pred: Pred,
    /// Whether its opposite is meant.
    pub negated: bool,
}

/// The address spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Shared,
    Local,
    /// The address says which one.
    Generic,
}

/// `[base + offset]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxAddress {
    pub space: Space,
    /// The register with the address.
    pub base: Reg,
    /// Added to it.
    pub offset: i64,
}

/// The use of the old value in an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    Combine(BinaryOp),
    /// Combines two halves in each 32 bits.
    CombinePair(BinaryOp),
    /// Replaces it if it equals the first operand.
    CompareAndSwap(Reg),
    /// Adds one, back to zero at the operand.
    Increment,
    /// Subtracts one, back to the operand at zero.
    Decrement,
}

/// How lanes are paired by `shfl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShuffleMode {
    /// From the lane this many below.
    Up,
    /// From the lane this many above.
    Down,
    /// From the lane whose number differs in these bits.
    Butterfly,
    /// From the lane with this number.
    Index,
}

/// The result of `vote` and `barrier.red` from one predicate per thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    /// The lanes where it is true, or for a block their count.
    Ballot,
}

/// An operation of the threads of a warp together.
#[derive(Clone, Debug, PartialEq)]
pub enum WarpOp {
    /// `bar.warp.sync`
    Sync,
    /// `shfl.sync`
    Shuffle {
        mode: ShuffleMode,
        to: Reg,
        /// Whether the source lane is in range.
        in_range: Option<Pred>,
        value: Reg,
        /// The lane or the distance.
        lane: Reg,
        /// The segment mask and the clamp.
        clamp: Reg,
    },
    /// `vote.sync` with a predicate as the result.
    VotePred {
        vote: Vote,
        to: Pred,
        /// Each lane's predicate.
        from: PredOperand,
    },
    /// `vote.sync.ballot`
    Ballot {
        to: Reg,
        /// Each lane's predicate.
        from: PredOperand,
    },
    /// `match.any.sync`: the lanes that hold the same value.
    MatchAny {
        to: Reg,
        value: Reg,
        /// How many bytes of it count.
        bytes: usize,
    },
    /// `redux.sync`
    Reduce {
        op: BinaryOp,
        to: Reg,
        /// Each lane's value.
        value: Reg,
    },
    /// `mma.sync.m16n8k16`, or `m16n8k8` in TF32, with f32 sums.
    MatrixProduct(Box<MatrixProduct>),
    /// `ldmatrix`: 8 x 8 matrices of 16 bits from shared memory.
    LoadMatrix {
        /// One register per matrix.
        to: Vec<Reg>,
        /// Lane `8 i + j` has the address of row `j` of matrix `i`.
        address: PtxAddress,
        transposed: bool,
    },
}

/// The fragments of a product on tensor cores: `d = a b + c`.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixProduct {
    /// The type of `a` and `b`: 16 bits, or TF32.
    pub half: Option<HalfType>,
    /// Four f32 of the result.
    pub d: [Reg; 4],
    /// Four pairs of `a`, or numbers of TF32.
    pub a: [Reg; 4],
    /// Two pairs of `b`, or numbers of TF32.
    pub b: [Reg; 2],
    /// Four f32 that are added.
    pub c: [Reg; 4],
}

/// The result that the threads of a block get at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierResult {
    /// Nothing: `bar.sync`.
    None,
    /// A predicate: `bar.red.and`, `bar.red.or`.
    Pred(Vote, Pred, PredOperand),
    /// A count: `bar.red.popc`.
    Count(Reg, PredOperand),
}

/// Combines predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Logic {
    And,
    Or,
    Xor,
}

impl Logic {
    /// The combination of the lanes' bits.
    pub fn apply(self, a: u32, b: u32) -> u32 {
        match self {
            Self::And => a & b,
            Self::Or => a | b,
            Self::Xor => a ^ b,
        }
    }
}

/// `setp` and `set`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compare {
    /// The order that is tested.
    pub comparison: CompareOp,
    /// The result if one side is not a number.
    pub if_unordered: bool,
    pub scalar: PtxType,
    /// Subnormal operands count as zero.
    pub flush: bool,
    pub to: Pred,
    pub complement: Option<Pred>,
    pub a: Reg,
    pub b: Reg,
    /// The result is combined with this predicate.
    pub combine: Option<(Logic, PredOperand)>,
}

/// f32 arithmetic that is not plain round-to-nearest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modifiers {
    /// `.ftz`
    pub flush: bool,
    /// `.sat`
    pub saturate: bool,
    /// `.rz`, `.rm`, `.rp`
    pub rounding: RoundingMode,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum PtxOp {
    /// Memory fences and hints: accesses run in order anyway.
    Nothing,
    Branch(u32),
    /// `brx.idx`
    BranchTable {
        index: Reg,
        targets: Vec<u32>,
    },
    Exit,
    Trap,
    /// `%clock`: how many instructions the launch has run.
    Clock(Reg),
    ActiveMask(Reg),
    Unary(UnaryOp, Reg, Reg),
    Binary(BinaryOp, Reg, [Reg; 2]),
    Ternary(TernaryOp, Reg, [Reg; 3]),
    Quaternary(QuaternaryOp, Reg, [Reg; 4]),
    UnaryModified(UnaryOp, Modifiers, Reg, Reg),
    BinaryModified(BinaryOp, Modifiers, Reg, [Reg; 2]),
    FmaModified(Modifiers, Reg, [Reg; 3]),
    /// Two 16-bit operations in one register.
    BinaryPair(BinaryOp, Reg, [Reg; 2]),
    TernaryPair(TernaryOp, Reg, [Reg; 3]),
    Convert(ConvertOp, Reg, Reg),
    /// Two f32 become a pair of halves.
    ConvertPair(ConvertOp, Reg, [Reg; 2]),
    /// One register from parts of so many bits, the first lowest.
    Pack {
        to: Reg,
        parts: Vec<Reg>,
        bits: u32,
    },
    Unpack {
        parts: Vec<Option<Reg>>,
        from: Reg,
        bits: u32,
    },
    Compare(Compare),
    /// `to = if pred { a } else { b }`
    Select {
        to: Reg,
        a: Reg,
        b: Reg,
        pred: PredOperand,
    },
    PredLogic {
        logic: Logic,
        to: Pred,
        a: PredOperand,
        b: PredOperand,
    },
    PredMove {
        to: Pred,
        from: PredOperand,
    },
    PredConstant {
        to: Pred,
        value: bool,
    },
    Load {
        scalar: PtxType,
        address: PtxAddress,
        to: Vec<Option<Reg>>,
    },
    Store {
        scalar: PtxType,
        address: PtxAddress,
        from: Vec<Reg>,
    },
    /// From the kernel's parameters, at a fixed offset.
    LoadParam {
        scalar: PtxType,
        offset: usize,
        to: Vec<Option<Reg>>,
    },
    Atomic {
        op: AtomicOp,
        scalar: PtxType,
        address: PtxAddress,
        operand: Reg,
        old: Option<Reg>,
    },
    /// With the lanes that take part.
    Warp(WarpOp, Reg),
    Barrier {
        /// The barrier's number.
        number: u32,
        result: BarrierResult,
    },
}

/// An operation, when it runs, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// Only lanes where this holds run it.
    pub guard: Option<PredOperand>,
    pub op: PtxOp,
    /// Its line in the PTX text.
    pub line: u32,
}

/// A value that does not change during a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Constant {
    Value(u64),
    /// The address of a variable of the module, plus an offset.
    Variable(usize),
    /// Where dynamic shared memory begins.
    DynamicShared,
}

/// A register that the card fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    Thread(usize),
    BlockSize(usize),
    Block(usize),
    GridSize(usize),
    Lane,
    Warp,
    /// The lanes below, at and above this one.
    LaneMask(LaneMask),
}

/// `%lanemask_lt` and its siblings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum LaneMask {
    Equal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// Where a parameter lies in the parameters' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Bytes before it.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
}

/// A variable of the module, in the card's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its first contents. A variable without an initializer is zero.
    pub bytes: Vec<u8>,
}

/// The registers of a thread.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    /// How many there are, constants and special ones included.
    pub count: u32,
    pub num_predicates: u32,
    pub constants: Vec<(Reg, Constant)>,
    pub specials: Vec<(Reg, Special)>,
}

/// A kernel that can be launched.
#[derive(Clone, Debug, Default)]
pub struct PtxKernel {
    /// Its name in PTX.
    pub name: String,
    /// Its parameters.
    pub params: Vec<Parameter>,
    /// The parameters' memory in bytes.
    pub param_bytes: usize,
    /// The registers of a thread.
    pub registers: Registers,
    /// The instructions.
    pub code: Vec<Instruction>,
    /// Static shared memory in bytes.
    pub shared_bytes: usize,
    /// Local memory per thread in bytes.
    pub local_bytes: usize,
    /// The largest block that it was compiled for.
    pub max_threads: Option<u32>,
    /// The lines of the PTX text, for messages.
    pub lines: Arc<[String]>,
}

/// The kernels and variables of one PTX text.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// The kernels.
    pub kernels: Vec<Arc<PtxKernel>>,
    /// The variables.
    pub variables: Vec<Variable>,
}
