//! Instructions that turn registers into a register.
//!
//! Input: the words of an instruction's name and its operands. Output: an operation of the lists in
//! [`super::arithmetic`].

use super::arithmetic::{BinaryOp, QuaternaryOp, TernaryOp, UnaryOp};
use super::convert::ConvertOp;
use super::decode::Statement;
use super::float::RoundingMode;
use super::instruction::*;
use super::operand::{OperandNames, vector};
use super::scalar::{PtxType, ScalarKind};

/// The first generic address of shared memory.
pub const SHARED_WINDOW: u64 = 2 << 60;
/// The first generic address of local memory.
pub const LOCAL_WINDOW: u64 = 4 << 60;

/// Words that change the rounding or the range of a result, or promise less precision than is computed.
const MODIFIERS: [&str; 12] =
    ["rn", "rz", "rm", "rp", "ftz", "sat", "approx", "full", "lo", "hi", "wide", "NaN"];

/// Words that round in a direction, those that round to an integer too.
const DIRECTED: [(&str, RoundingMode); 6] = {
    use RoundingMode::{Down, Up, Zero};
    [("rz", Zero), ("rm", Down), ("rp", Up), ("rzi", Zero), ("rmi", Down), ("rpi", Up)]
};

pub(super) fn arithmetic(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    let name = s.words[0];
    match name {
        "mov" => return mov(names, s),
        "cvta" => return cvta(names, s),
        "cvt" => return cvt(names, s),
        "prmt" if s.words.len() > 2 => return Err("this mode of `prmt` is not emulated".into()),
        "shf" | "lop3" | "prmt" | "bfind" => {}
        _ => s.only(&MODIFIERS)?,
    }
    let scalar = s.scalar()?;
    let to = names.target(s.operand(0)?)?;
    let sources: Result<Vec<Reg>, String> =
        s.operands[1..].iter().map(|operand| names.source(operand)).collect();
    let sources = sources?;
    let modifiers = modifiers(s);
    let is_modified = scalar == F32 && modifiers.is_special();
    if modifiers.rounding != RoundingMode::Nearest && scalar != F32 {
        return Err(format!("this rounding of {scalar:?} is not emulated"));
    }
    match *sources.as_slice() {
        [a] => {
            let op = unary_op(&full_name(name, s), scalar)?;
            match modifiers.rounding {
                _ if !is_modified => Ok(PtxOp::Unary(op, to, a)),
                RoundingMode::Nearest => Ok(PtxOp::UnaryModified(op, modifiers, to, a)),
                _ => Err(rounding_error(name)),
            }
        }
        [a, b] => match pair_element(scalar) {
            Some(element) => Ok(PtxOp::BinaryPair(binary_op(name, element)?, to, [a, b])),
            None => {
                let op = binary_op(&full_name(name, s), scalar)?;
                let rounds = matches!(op, BinaryOp::AddF32 | BinaryOp::SubF32 | BinaryOp::MulF32);
                match modifiers.rounding {
                    _ if !is_modified => Ok(PtxOp::Binary(op, to, [a, b])),
                    RoundingMode::Nearest => Ok(PtxOp::BinaryModified(op, modifiers, to, [a, b])),
                    _ if rounds => Ok(PtxOp::BinaryModified(op, modifiers, to, [a, b])),
                    _ => Err(rounding_error(name)),
                }
            }
        },
        [a, b, c] => match pair_element(scalar) {
            Some(element) => Ok(PtxOp::TernaryPair(ternary_op(name, element, s)?, to, [a, b, c])),
            None if is_modified => Ok(PtxOp::FmaModified(modifiers, to, [a, b, c])),
            None => Ok(PtxOp::Ternary(ternary_op(name, scalar, s)?, to, [a, b, c])),
        },
        [a, b, c, d] => {
            let op = match (name, scalar.bytes) {
                ("lop3", 4) => QuaternaryOp::Lop3,
                ("bfi", 4) => QuaternaryOp::InsertB32,
                ("bfi", 8) => QuaternaryOp::InsertB64,
                _ => return Err(unknown(name, scalar)),
            };
            Ok(PtxOp::Quaternary(op, to, [a, b, c, d]))
        }
        _ => Err(unknown(name, scalar)),
    }
}

const F32: PtxType = PtxType { kind: ScalarKind::Float, bytes: 4 };

impl Modifiers {
    fn is_special(&self) -> bool {
        self.flush || self.saturate || self.rounding != RoundingMode::Nearest
    }
}

fn modifiers(s: &Statement) -> Modifiers {
    let rounding = s.choose(&DIRECTED, RoundingMode::Nearest);
    Modifiers { flush: s.has("ftz"), saturate: s.has("sat"), rounding }
}

fn unknown(name: &str, scalar: PtxType) -> String {
    format!("`{name}` of {scalar:?} is not emulated")
}

fn rounding_error(name: &str) -> String {
    format!("this rounding of `{name}` is not emulated")
}

/// `mul.wide` and `max.NaN` are operations of their own.
fn full_name(name: &str, s: &Statement) -> String {
    let part = ["wide", "hi", "NaN", "shiftamt"].into_iter().find(|part| s.has(part));
    part.map_or(name.into(), |part| format!("{name}.{part}"))
}

/// The type of each of two elements in one register.
pub(super) fn pair_element(scalar: PtxType) -> Option<PtxType> {
    match scalar.kind {
        ScalarKind::FloatPair => Some(PtxType { kind: ScalarKind::Float, bytes: 2 }),
        ScalarKind::BrainPair => Some(PtxType { kind: ScalarKind::Brain, bytes: 2 }),
        _ => None,
    }
}

/// The operation of two operands with this name.
pub(super) fn binary_op(name: &str, scalar: PtxType) -> Result<BinaryOp, String> {
    use BinaryOp::*;
    if scalar.kind == ScalarKind::Brain || (scalar.kind == ScalarKind::Float && scalar.bytes == 2) {
        let is_brain = scalar.kind == ScalarKind::Brain;
        let pick = |f16, bf16| if is_brain { bf16 } else { f16 };
        return Ok(match name {
            "add" => pick(AddF16, AddBf16),
            "sub" => pick(SubF16, SubBf16),
            "mul" => pick(MulF16, MulBf16),
            "min" => pick(MinF16, MinBf16),
            "max" => pick(MaxF16, MaxBf16),
            _ => return Err(unknown(name, scalar)),
        });
    }
    if scalar.kind == ScalarKind::Float {
        let pick = |f32, f64| if scalar.bytes == 4 { f32 } else { f64 };
        return Ok(match name {
            "add" => pick(AddF32, AddF64),
            "sub" => pick(SubF32, SubF64),
            "mul" => pick(MulF32, MulF64),
            "div" => pick(DivF32, DivF64),
            "min" => pick(MinF32, MinF64),
            "max" => pick(MaxF32, MaxF64),
            "min.NaN" if scalar.bytes == 4 => MinNanF32,
            "max.NaN" if scalar.bytes == 4 => MaxNanF32,
            "copysign" => pick(CopySignF32, CopySignF64),
            "exch" => Second,
            _ => return Err(unknown(name, scalar)),
        });
    }
    // By size, unsigned before signed. Additions and shifts to the left do not depend on the sign.
    let choices: [BinaryOp; 6] = match name {
        "add" => [AddI16, AddI16, AddI32, AddI32, AddI64, AddI64],
        "sub" => [SubI16, SubI16, SubI32, SubI32, SubI64, SubI64],
        "mul" => [MulI16, MulI16, MulI32, MulI32, MulI64, MulI64],
        "mul.hi" => [MulHighU16, MulHighS16, MulHighU32, MulHighS32, MulHighU64, MulHighS64],
        "mul.wide" if scalar.bytes < 8 => {
            [MulWideU16, MulWideS16, MulWideU32, MulWideS32, MulI64, MulI64]
        }
        "div" => [DivU16, DivS16, DivU32, DivS32, DivU64, DivS64],
        "rem" => [RemU16, RemS16, RemU32, RemS32, RemU64, RemS64],
        "min" => [MinU16, MinS16, MinU32, MinS32, MinU64, MinS64],
        "max" => [MaxU16, MaxS16, MaxU32, MaxS32, MaxU64, MaxS64],
        "and" => [And; 6],
        "or" => [Or; 6],
        "xor" => [Xor; 6],
        "exch" => [Second; 6],
        "shl" => [ShlB16, ShlB16, ShlB32, ShlB32, ShlB64, ShlB64],
        "shr" => [ShrU16, ShrS16, ShrU32, ShrS32, ShrU64, ShrS64],
        _ => return Err(unknown(name, scalar)),
    };
    let size = match scalar.bytes {
        2 => 0,
        4 => 2,
        8 => 4,
        _ => return Err(unknown(name, scalar)),
    };
    Ok(choices[size + usize::from(scalar.is_signed())])
}

fn unary_op(name: &str, scalar: PtxType) -> Result<UnaryOp, String> {
    use UnaryOp::*;
    Ok(match (name, scalar.kind, scalar.bytes) {
        ("neg", ScalarKind::Float, 4) => NegF32,
        ("abs", ScalarKind::Float, 4) => AbsF32,
        ("sqrt", ScalarKind::Float, 4) => SqrtF32,
        ("rcp", ScalarKind::Float, 4) => RcpF32,
        ("rsqrt", ScalarKind::Float, 4) => RsqrtF32,
        ("ex2", ScalarKind::Float, 4) => Exp2F32,
        ("lg2", ScalarKind::Float, 4) => Log2F32,
        ("sin", ScalarKind::Float, 4) => SinF32,
        ("cos", ScalarKind::Float, 4) => CosF32,
        ("tanh", ScalarKind::Float, 4) => TanhF32,
        ("neg", ScalarKind::Float, 8) => NegF64,
        ("abs", ScalarKind::Float, 8) => AbsF64,
        ("sqrt", ScalarKind::Float, 8) => SqrtF64,
        ("rcp", ScalarKind::Float, 8) => RcpF64,
        ("rsqrt", ScalarKind::Float, 8) => RsqrtF64,
        ("neg", ScalarKind::Float | ScalarKind::Brain, 2) => NegHalf,
        ("abs", ScalarKind::Float | ScalarKind::Brain, 2) => AbsHalf,
        ("neg", ScalarKind::FloatPair | ScalarKind::BrainPair, _) => NegHalfPair,
        ("abs", ScalarKind::FloatPair | ScalarKind::BrainPair, _) => AbsHalfPair,
        ("neg", ScalarKind::Signed, 2) => NegI16,
        ("neg", ScalarKind::Signed, 4) => NegI32,
        ("neg", ScalarKind::Signed, 8) => NegI64,
        ("abs", ScalarKind::Signed, 2) => AbsS16,
        ("abs", ScalarKind::Signed, 4) => AbsS32,
        ("abs", ScalarKind::Signed, 8) => AbsS64,
        ("not", ScalarKind::Bits, _) => Not,
        ("popc", _, 4) => PopcB32,
        ("popc", _, 8) => PopcB64,
        ("clz", _, 4) => ClzB32,
        ("clz", _, 8) => ClzB64,
        ("brev", _, 4) => BrevB32,
        ("brev", _, 8) => BrevB64,
        ("bfind.shiftamt", ScalarKind::Unsigned, 4) => ShiftToFirst32,
        ("bfind.shiftamt", ScalarKind::Unsigned, 8) => ShiftToFirst64,
        ("bfind", ScalarKind::Unsigned, 4) => FindU32,
        ("bfind", ScalarKind::Unsigned, 8) => FindU64,
        _ => return Err(unknown(name, scalar)),
    })
}

fn ternary_op(name: &str, scalar: PtxType, s: &Statement) -> Result<TernaryOp, String> {
    use TernaryOp::*;
    let signed = scalar.is_signed();
    let pick = |unsigned, with_sign| if signed { with_sign } else { unsigned };
    Ok(match (name, scalar.kind, scalar.bytes) {
        ("fma" | "mad", ScalarKind::Float, 4) => FmaF32,
        ("fma" | "mad", ScalarKind::Float, 8) => FmaF64,
        ("fma", ScalarKind::Float, 2) => FmaF16,
        ("fma", ScalarKind::Brain, 2) => FmaBf16,
        ("mad", _, 2) if s.has("wide") => pick(MadWideU16, MadWideS16),
        ("mad", _, 4) if s.has("wide") => pick(MadWideU32, MadWideS32),
        ("mad", _, 4) if s.has("hi") => pick(MadHighU32, MadHighS32),
        ("mad", _, 8) if s.has("hi") => pick(MadHighU64, MadHighS64),
        ("mad", _, 2) if s.has("lo") => MadI16,
        ("mad", _, 4) if s.has("lo") => MadI32,
        ("mad", _, 8) if s.has("lo") => MadI64,
        ("prmt", _, 4) => Permute,
        ("bfe", _, 4) => pick(ExtractU32, ExtractS32),
        ("bfe", _, 8) => pick(ExtractU64, ExtractS64),
        ("shf", _, 4) if s.has("l") && s.has("wrap") => FunnelLeftWrap,
        ("shf", _, 4) if s.has("l") && s.has("clamp") => FunnelLeftClamp,
        ("shf", _, 4) if s.has("r") && s.has("wrap") => FunnelRightWrap,
        ("shf", _, 4) if s.has("r") && s.has("clamp") => FunnelRightClamp,
        _ => return Err(unknown(name, scalar)),
    })
}

fn mov(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    let scalar = s.scalar()?;
    let (to, from) = (s.operand(0)?, s.operand(1)?);
    let bits = |parts: usize| 8 * scalar.bytes as u32 / parts as u32;
    if to.starts_with('{') {
        let (parts, from) = (names.targets(to)?, names.source(from)?);
        return Ok(PtxOp::Unpack { bits: bits(parts.len()), parts, from });
    }
    if from.starts_with('{') {
        let (to, parts) = (names.target(to)?, names.sources(from)?);
        return Ok(PtxOp::Pack { to, bits: bits(vector(from).len()), parts });
    }
    Ok(PtxOp::Unary(UnaryOp::Move, names.target(to)?, names.source(from)?))
}

/// Generic addresses of shared and local memory lie in windows of their own.
fn cvta(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    let (to, from) = (names.target(s.operand(0)?)?, names.source(s.operand(1)?)?);
    if s.has("global") || s.has("const") {
        return Ok(PtxOp::Unary(UnaryOp::Move, to, from));
    }
    let windows = [("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW)];
    let window = windows.iter().find(|(space, _)| s.has(space)).map(|(_, window)| *window);
    let window = window.ok_or("this space is not emulated")?;
    let window = names.constant(Constant::Value(window));
    let op = if s.has("to") { BinaryOp::SubI64 } else { BinaryOp::AddI64 };
    Ok(PtxOp::Binary(op, to, [from, window]))
}

fn cvt(names: &mut OperandNames, s: &Statement) -> Result<PtxOp, String> {
    if s.words[1..] == ["rna", "tf32", "f32"] {
        let (to, from) = (names.target(s.operand(0)?)?, names.source(s.operand(1)?)?);
        return Ok(PtxOp::Unary(UnaryOp::Tf32FromF32, to, from));
    }
    s.only(&["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu"])?;
    let [mut to, from] = s.scalars()[..] else {
        return Err("a conversion needs two types".into());
    };
    let pair = pair_element(to);
    to = pair.unwrap_or(to);
    if pair_element(from).is_some() || (pair.is_some() && from != F32) {
        return Err("this conversion of pairs is not emulated".into());
    }
    let rounding = s.choose(&DIRECTED, RoundingMode::Nearest);
    let to_integer = ["rni", "rzi", "rmi", "rpi"].iter().any(|word| s.has(word));
    let to_half = to.is_float() && to.bytes == 2;
    let half_exact = matches!(rounding, RoundingMode::Nearest)
        || (rounding == RoundingMode::Zero && from.is_float() && from.bytes <= 4);
    if to_half && !to_integer && !half_exact {
        return Err("this rounding to 16 bits is not emulated".into());
    }
    let (flush, saturate, relu) = (s.has("ftz"), s.has("sat"), s.has("relu"));
    let conversion = ConvertOp { to, from, rounding, to_integer, flush, saturate, relu };
    let target = names.target(s.operand(0)?)?;
    let a = names.source(s.operand(1)?)?;
    if pair.is_some() {
        let b = names.source(s.operand(2)?)?;
        return Ok(PtxOp::ConvertPair(conversion, target, [a, b]));
    }
    let is_plain = !flush && !saturate && !relu && rounding == RoundingMode::Nearest && !to_integer;
    Ok(match fast_conversion(&conversion).filter(|_| is_plain) {
        Some(op) => PtxOp::Unary(op, target, a),
        None => PtxOp::Convert(conversion, target, a),
    })
}

/// Frequent conversions as operations of their own.
fn fast_conversion(c: &ConvertOp) -> Option<UnaryOp> {
    use UnaryOp::*;
    let bits = |s: PtxType| (s.kind, s.bytes);
    Some(match (bits(c.to), bits(c.from)) {
        ((ScalarKind::Float, 4), (ScalarKind::Unsigned, 4)) => F32FromU32,
        ((ScalarKind::Float, 4), (ScalarKind::Signed, 4)) => F32FromS32,
        ((ScalarKind::Float, 4), (ScalarKind::Float, 2)) => F32FromF16,
        ((ScalarKind::Float, 4), (ScalarKind::Brain, 2)) => F32FromBf16,
        ((ScalarKind::Float, 2), (ScalarKind::Float, 4)) => F16FromF32,
        ((ScalarKind::Brain, 2), (ScalarKind::Float, 4)) => Bf16FromF32,
        ((ScalarKind::Float, 8), (ScalarKind::Float, 4)) => F64FromF32,
        ((ScalarKind::Float, 4), (ScalarKind::Float, 8)) => F32FromF64,
        _ if c.to.is_float() || c.from.is_float() || c.from.bytes > c.to.bytes => return None,
        (_, (ScalarKind::Unsigned, 1)) => ZeroExtend8,
        (_, (ScalarKind::Unsigned, 2)) => ZeroExtend16,
        (_, (ScalarKind::Unsigned, 4)) => ZeroExtend32,
        (_, (ScalarKind::Signed, 1)) => SignExtend8,
        (_, (ScalarKind::Signed, 2)) => SignExtend16,
        (_, (ScalarKind::Signed, 4)) => SignExtend32,
        _ => return None,
    })
}
