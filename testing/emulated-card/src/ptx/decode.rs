//! Instructions: control flow, memory, predicates, and operations of warps and blocks.
//!
//! Input: the text of one instruction without its guard. Output: an operation, or what is unknown about it.
//! Arithmetic is in [`super::decode_arithmetic`].

use super::decode_arithmetic::{arithmetic, binary_op, pair_element};
use super::float::HalfType;
use super::instruction::*;
use super::operand::{Location, OperandNames, vector};
use super::parse::Builder;
use super::scalar::{PtxType, ScalarKind};
use super::source::split_list;

/// An instruction, cut into the words of its name and its operands.
pub(super) struct Statement<'a> {
    /// `ld`, `global`, `v4`, `f32`
    pub(super) words: Vec<&'a str>,
    pub(super) operands: Vec<&'a str>,
}

impl<'a> Statement<'a> {
    fn new(text: &'a str) -> Self {
        let (name, rest) = text.split_once(' ').unwrap_or((text, ""));
        let words = name.split(['.', ':']).filter(|w| !w.is_empty()).collect();
        Self { words, operands: split_list(rest) }
    }

    pub(super) fn has(&self, word: &str) -> bool {
        self.words[1..].contains(&word)
    }

    /// The types in the name, in order.
    pub(super) fn scalars(&self) -> Vec<PtxType> {
        self.words[1..].iter().filter_map(|w| PtxType::parse(w)).collect()
    }

    pub(super) fn scalar(&self) -> Result<PtxType, String> {
        self.scalars().last().copied().ok_or_else(|| "no type".into())
    }

    pub(super) fn operand(&self, index: usize) -> Result<&'a str, String> {
        self.operands.get(index).copied().ok_or_else(|| format!("operand {index} is missing"))
    }

    /// The value of the first of these words that stands in the name.
    pub(super) fn choose<T: Copy>(&self, words: &[(&str, T)], otherwise: T) -> T {
        words.iter().find(|(word, _)| self.has(word)).map_or(otherwise, |(_, value)| *value)
    }

    /// An error unless every word is one of those that are understood, or a type.
    pub(super) fn only(&self, known: &[&str]) -> Result<(), String> {
        let unknown = |w: &&&str| !known.contains(w) && PtxType::parse(w).is_none();
        match self.words[1..].iter().find(unknown) {
            Some(word) => Err(format!("`.{word}` is not emulated")),
            None => Ok(()),
        }
    }
}

pub(super) fn decode(builder: &mut Builder, text: &str) -> Result<PtxOp, String> {
    let s = Statement::new(text);
    let names = &mut builder.names;
    Ok(match s.words[0] {
        "bra" => {
            let target = s.operand(0)?.to_owned();
            builder.branches.push((builder.kernel.code.len(), vec![target]));
            PtxOp::Branch(0)
        }
        "brx" => {
            let index = names.source(s.operand(0)?)?;
            builder.table_branches.push((builder.kernel.code.len(), s.operand(1)?.to_owned()));
            PtxOp::BranchTable { index, targets: Vec::new() }
        }
        "ret" | "exit" => PtxOp::Exit,
        "trap" => PtxOp::Trap,
        "membar" | "fence" | "nanosleep" | "prefetch" | "prefetchu" => PtxOp::Nothing,
        "call" => return Err("calls are not emulated; force-inline the function".into()),
        "activemask" => PtxOp::ActiveMask(names.target(s.operand(0)?)?),
        "mov" if matches!(s.operand(1)?, "%clock" | "%clock64") => {
            PtxOp::Clock(names.target(s.operand(0)?)?)
        }
        "ld" | "ldu" => load(builder, &s)?,
        "st" => store(builder, &s)?,
        "atom" | "red" => atomic(builder, &s)?,
        "setp" => setp(builder, &s)?,
        "selp" => PtxOp::Select {
            to: names.target(s.operand(0)?)?,
            a: names.source(s.operand(1)?)?,
            b: names.source(s.operand(2)?)?,
            pred: names.pred_operand(s.operand(3)?)?,
        },
        "bar" | "barrier" if s.has("warp") => {
            PtxOp::Warp(WarpOp::Sync, names.source(s.operand(0)?)?)
        }
        "bar" | "barrier" => barrier(builder, &s)?,
        "shfl" | "vote" | "match" | "redux" | "mma" | "ldmatrix" => warp(builder, &s)?,
        name if s.has("pred") => predicate(builder, name, &s)?,
        _ => arithmetic(names, &s)?,
    })
}

fn predicate(builder: &mut Builder, name: &str, s: &Statement) -> Result<PtxOp, String> {
    let names = &mut builder.names;
    let logic = match name {
        "mov" => match s.operand(1)? {
            "0" => None,
            "1" | "-1" => Some(true),
            from => {
                let from = names.pred_operand(from)?;
                return Ok(PtxOp::PredMove { to: names.pred(s.operand(0)?)?, from });
            }
        },
        "not" => {
            let from = names.pred_operand(s.operand(1)?)?;
            let from = PredOperand { negated: !from.negated, ..from };
            return Ok(PtxOp::PredMove { to: names.pred(s.operand(0)?)?, from });
        }
        "and" | "or" | "xor" => {
            let logic = logic(name)?;
            let a = names.pred_operand(s.operand(1)?)?;
            let b = names.pred_operand(s.operand(2)?)?;
            return Ok(PtxOp::PredLogic { logic, to: names.pred(s.operand(0)?)?, a, b });
        }
        _ => return Err(format!("unknown instruction `{name}`")),
    };
    Ok(PtxOp::PredConstant { to: names.pred(s.operand(0)?)?, value: logic.unwrap_or(false) })
}

fn logic(name: &str) -> Result<Logic, String> {
    match name {
        "and" => Ok(Logic::And),
        "or" => Ok(Logic::Or),
        "xor" => Ok(Logic::Xor),
        _ => Err(format!("unknown operation `{name}`")),
    }
}

fn space(s: &Statement) -> Space {
    use Space::{Generic, Global, Local, Shared};
    let named = [("global", Global), ("const", Global), ("shared", Shared), ("local", Local)];
    s.choose(&named, Generic)
}

/// Words of loads and stores that say how to cache, not what to do.
const ACCESS: [&str; 30] = [
    "global",
    "shared",
    "local",
    "param",
    "const",
    "v2",
    "v4",
    "v8",
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "weak",
    "sys",
    "gpu",
    "cta",
    "cluster",
    "L1",
    "L2",
    "evict_last",
    "no_allocate",
];

fn address(builder: &mut Builder, s: &Statement, operand: usize) -> Result<PtxAddress, String> {
    match builder.names.location(s.operand(operand)?)? {
        Location::Register(base, offset) => Ok(PtxAddress { space: space(s), base, offset }),
        Location::Param(_) => Err("parameters can only be loaded".into()),
    }
}

fn check_vector(count: usize, scalar: PtxType, s: &Statement) -> Result<(), String> {
    let named = s.choose(&[("v2", 2), ("v4", 4), ("v8", 8)], 1);
    if named != count || count * scalar.bytes > 32 {
        return Err(format!("{count} registers for a vector of {named}"));
    }
    Ok(())
}

fn load(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    s.only(&ACCESS)?;
    let scalar = s.scalar()?;
    let to = builder.names.targets(s.operand(0)?)?;
    check_vector(to.len(), scalar, s)?;
    if s.has("param") {
        return match builder.names.location(s.operand(1)?)? {
            Location::Param(offset) => Ok(PtxOp::LoadParam { scalar, offset, to }),
            Location::Register(..) => Err("a parameter at an offset that is not constant".into()),
        };
    }
    Ok(PtxOp::Load { scalar, address: address(builder, s, 1)?, to })
}

fn store(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    s.only(&ACCESS)?;
    let scalar = s.scalar()?;
    let from = builder.names.sources(s.operand(1)?)?;
    check_vector(from.len(), scalar, s)?;
    Ok(PtxOp::Store { scalar, address: address(builder, s, 0)?, from })
}

fn atomic(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    let scalar = s.scalar()?;
    let returns = s.words[0] == "atom";
    let first = usize::from(returns);
    let old = if returns && s.operand(0)? != "_" {
        Some(builder.names.target(s.operand(0)?)?)
    } else {
        None
    };
    let address = address(builder, s, first)?;
    let operand = builder.names.source(s.operand(first + 1)?)?;
    if s.has("cas") {
        let (op, new) = (AtomicOp::CompareAndSwap(operand), s.operand(first + 2)?);
        let operand = builder.names.source(new)?;
        return Ok(PtxOp::Atomic { op, scalar, address, operand, old });
    }
    let is_known = |w: &&&str| {
        matches!(**w, "exch" | "inc" | "dec" | "add" | "min" | "max" | "and" | "or" | "xor")
    };
    let op = match *s.words[1..].iter().find(is_known).ok_or("unknown atomic operation")? {
        "inc" => AtomicOp::Increment,
        "dec" => AtomicOp::Decrement,
        word => match pair_element(scalar) {
            Some(element) if word != "exch" => AtomicOp::CombinePair(binary_op(word, element)?),
            _ => AtomicOp::Combine(binary_op(word, scalar)?),
        },
    };
    Ok(PtxOp::Atomic { op, scalar, address, operand, old })
}

fn setp(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    use super::arithmetic::CompareOp::*;
    let names = &mut builder.names;
    let scalar = s.scalar()?;
    if !matches!(scalar.bytes, 2 | 4 | 8)
        || pair_element(scalar).is_some()
        || scalar.kind == ScalarKind::Predicate
    {
        return Err("comparison of this type is not emulated".into());
    }
    let (comparison, if_unordered) = match s.words.get(1).copied().unwrap_or_default() {
        "eq" => (Equal, false),
        // An ordered comparison: false if one side is not a number.
        "ne" => (NotEqual, false),
        "lt" | "lo" => (Less, false),
        "le" | "ls" => (LessEqual, false),
        "gt" | "hi" => (Greater, false),
        "ge" | "hs" => (GreaterEqual, false),
        "equ" => (Equal, true),
        "neu" => (NotEqual, true),
        "ltu" => (Less, true),
        "leu" => (LessEqual, true),
        "gtu" => (Greater, true),
        "geu" => (GreaterEqual, true),
        "num" => (Ordered, false),
        "nan" => (Unordered, true),
        word => return Err(format!("comparison `{word}`")),
    };
    let combine = match s.words.get(2).copied().unwrap_or_default() {
        name @ ("and" | "or" | "xor") => Some((logic(name)?, names.pred_operand(s.operand(3)?)?)),
        _ => None,
    };
    let (a, b) = (names.source(s.operand(1)?)?, names.source(s.operand(2)?)?);
    let target = s.operand(0)?;
    let (to, complement) = match target.split_once('|') {
        Some((to, complement)) => (to, Some(names.pred(complement)?)),
        None => (target, None),
    };
    let to = names.pred(to)?;
    let flush = s.has("ftz");
    Ok(PtxOp::Compare(Compare {
        comparison,
        if_unordered,
        scalar,
        flush,
        to,
        complement,
        a,
        b,
        combine,
    }))
}

fn barrier(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    let names = &mut builder.names;
    let is_reduction = s.has("red");
    let at = usize::from(is_reduction);
    let number = s.operand(at)?.parse().map_err(|_| "a barrier whose number is not constant")?;
    let count = if is_reduction { 3 } else { 1 };
    if s.has("arrive") || s.operands.len() > count {
        return Err("barriers for a part of the block are not emulated".into());
    }
    let result = if !is_reduction {
        BarrierResult::None
    } else {
        let from = names.pred_operand(s.operand(2)?)?;
        if s.has("popc") {
            BarrierResult::Count(names.target(s.operand(0)?)?, from)
        } else {
            let vote = if s.has("and") { Vote::All } else { Vote::Any };
            BarrierResult::Pred(vote, names.pred(s.operand(0)?)?, from)
        }
    };
    Ok(PtxOp::Barrier { number, result })
}

fn warp(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    if !s.has("sync") {
        return Err("warp operations without `.sync` are not emulated".into());
    }
    match s.words[0] {
        "shfl" => shuffle(&mut builder.names, s),
        "vote" => vote(&mut builder.names, s),
        "match" if s.has("any") => {
            let (names, bytes) = (&mut builder.names, s.scalar()?.bytes);
            let (to, value) = (names.target(s.operand(0)?)?, names.source(s.operand(1)?)?);
            Ok(PtxOp::Warp(WarpOp::MatchAny { to, value, bytes }, mask(names, s)?))
        }
        "redux" => {
            let names = &mut builder.names;
            let op = binary_op(s.words.get(2).copied().unwrap_or_default(), s.scalar()?)?;
            let (to, value) = (names.target(s.operand(0)?)?, names.source(s.operand(1)?)?);
            Ok(PtxOp::Warp(WarpOp::Reduce { op, to, value }, mask(names, s)?))
        }
        "mma" => matrix_product(&mut builder.names, s),
        "ldmatrix" if s.has("m8n8") && s.has("b16") && s.has("shared") && s.has("aligned") => {
            load_matrix(builder, s)
        }
        name => Err(format!("this form of `{name}` is not emulated")),
    }
}

/// The last operand: the lanes that take part.
fn mask(names: &mut OperandNames, s: &Statement) -> Result<Reg, String> {
    names.source(s.operands.last().ok_or("no operands")?)
}

/// The mask of an operation in which all lanes take part.
fn everyone(names: &mut OperandNames) -> Reg {
    names.constant(Constant::Value(u64::from(u32::MAX)))
}

fn shuffle(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    use ShuffleMode::{Butterfly, Down, Index, Up};
    let mode = s.choose(&[("up", Up), ("down", Down), ("bfly", Butterfly)], Index);
    let target = s.operand(0)?;
    let (to, in_range) = match target.split_once('|') {
        Some((to, pred)) => (to, Some(names.pred(pred)?)),
        None => (target, None),
    };
    let to = names.target(to)?;
    let mut operand = |k| names.source(s.operand(k)?);
    let (value, lane, clamp) = (operand(1)?, operand(2)?, operand(3)?);
    let mask = operand(4)?;
    Ok(PtxOp::Warp(WarpOp::Shuffle { mode, to, in_range, value, lane, clamp }, mask))
}

fn vote(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    let from = names.pred_operand(s.operand(1)?)?;
    let mask = names.source(s.operand(2)?)?;
    if s.has("ballot") {
        return Ok(PtxOp::Warp(WarpOp::Ballot { to: names.target(s.operand(0)?)?, from }, mask));
    }
    let vote = s.choose(&[("all", Vote::All), ("any", Vote::Any)], Vote::Uniform);
    Ok(PtxOp::Warp(WarpOp::VotePred { vote, to: names.pred(s.operand(0)?)?, from }, mask))
}

fn matrix_product(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    let name = s.words[1..].join(".");
    let half = match name.as_str() {
        "sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => Some(HalfType::Bf16),
        "sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => Some(HalfType::F16),
        "sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" => None,
        _ => return Err(format!("the product `{name}` is not emulated")),
    };
    if s.operands.len() != 4 {
        return Err(format!("{} operands instead of 4", s.operands.len()));
    }
    let d = written(names, s.operand(0)?)?;
    let mut fragment = |k| names.sources(s.operand(k)?);
    let (a, b, c) = (fragment(1)?, fragment(2)?, fragment(3)?);
    let size = |_| "a fragment of the wrong size";
    let product = MatrixProduct {
        half,
        d: d.try_into().map_err(size)?,
        a: a.try_into().map_err(size)?,
        b: b.try_into().map_err(size)?,
        c: c.try_into().map_err(size)?,
    };
    Ok(PtxOp::Warp(WarpOp::MatrixProduct(Box::new(product)), everyone(names)))
}

fn load_matrix(builder: &mut Builder, s: &Statement) -> Result<PtxOp, String> {
    s.only(&["sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared"])?;
    let (to, transposed) = (written(&mut builder.names, s.operand(0)?)?, s.has("trans"));
    if !s.has(&format!("x{}", to.len())) {
        return Err(format!("{} registers for matrices of another number", to.len()));
    }
    let address = address(builder, s, 1)?;
    Ok(PtxOp::Warp(WarpOp::LoadMatrix { to, address, transposed }, everyone(&mut builder.names)))
}

/// The registers of a vector, all of which are written.
fn written(names: &mut OperandNames, text: &str) -> Result<Vec<Reg>, String> {
    vector(text).into_iter().map(|part| names.target(part)).collect()
}
