//! Instructions that turn registers into a register.
//!
//! Input: the words of an instruction's name and its operands. Output: an operation of the lists in
//! [`super::arithmetic`].

use super::arithmetic::{BinaryOp, QuaternaryOp, TernaryOp, UnaryOp};
use super::convert::Conversion;
use super::decode::Statement;
use super::float::Rounding;
use super::instruction::*;
use super::operand::{Names, vector};
use super::scalar::{Kind, Scalar};

/// The first generic address of shared memory.
pub const SHARED_WINDOW: u64 = 2 << 60;
/// The first generic address of local memory.
pub const LOCAL_WINDOW: u64 = 4 << 60;

/// Words that change the rounding or the range of a result, or promise less precision than is computed.
const MODIFIERS: [&str; 12] =
    ["rn", "rz", "rm", "rp", "ftz", "sat", "approx", "full", "lo", "hi", "wide", "NaN"];

/// Words that round in a direction, those that round to an integer too.
const DIRECTED: [(&str, Rounding); 6] = {
    use Rounding::{Down, Up, Zero};
    [("rz", Zero), ("rm", Down), ("rp", Up), ("rzi", Zero), ("rmi", Down), ("rpi", Up)]
};

pub(super) fn arithmetic(names: &mut Names, s: &Statement) -> Result<Op, String> {
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
    if modifiers.rounding != Rounding::Nearest && scalar != F32 {
        return Err(format!("this rounding of {scalar:?} is not emulated"));
    }
    match *sources.as_slice() {
        [a] => {
            let op = unary_op(&full_name(name, s), scalar)?;
            match modifiers.rounding {
                _ if !is_modified => Ok(Op::Unary(op, to, a)),
                Rounding::Nearest => Ok(Op::UnaryModified(op, modifiers, to, a)),
                _ => Err(rounding_error(name)),
            }
        }
        [a, b] => match pair_element(scalar) {
            Some(element) => Ok(Op::BinaryPair(binary_op(name, element)?, to, [a, b])),
            None => {
                let op = binary_op(&full_name(name, s), scalar)?;
                let rounds = matches!(op, BinaryOp::AddF32 | BinaryOp::SubF32 | BinaryOp::MulF32);
                match modifiers.rounding {
                    _ if !is_modified => Ok(Op::Binary(op, to, [a, b])),
                    Rounding::Nearest => Ok(Op::BinaryModified(op, modifiers, to, [a, b])),
                    _ if rounds => Ok(Op::BinaryModified(op, modifiers, to, [a, b])),
                    _ => Err(rounding_error(name)),
                }
            }
        },
        [a, b, c] => match pair_element(scalar) {
            Some(element) => Ok(Op::TernaryPair(ternary_op(name, element, s)?, to, [a, b, c])),
            None if is_modified => Ok(Op::FmaModified(modifiers, to, [a, b, c])),
            None => Ok(Op::Ternary(ternary_op(name, scalar, s)?, to, [a, b, c])),
        },
        [a, b, c, d] => {
            let op = match (name, scalar.bytes) {
                ("lop3", 4) => QuaternaryOp::Lop3,
                ("bfi", 4) => QuaternaryOp::InsertB32,
                ("bfi", 8) => QuaternaryOp::InsertB64,
                _ => return Err(unknown(name, scalar)),
            };
            Ok(Op::Quaternary(op, to, [a, b, c, d]))
        }
        _ => Err(unknown(name, scalar)),
    }
}

const F32: Scalar = Scalar { kind: Kind::Float, bytes: 4 };

impl Modifiers {
    fn is_special(&self) -> bool {
        self.flush || self.saturate || self.rounding != Rounding::Nearest
    }
}

fn modifiers(s: &Statement) -> Modifiers {
    let rounding = s.choose(&DIRECTED, Rounding::Nearest);
    Modifiers { flush: s.has("ftz"), saturate: s.has("sat"), rounding }
}

fn unknown(name: &str, scalar: Scalar) -> String {
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

fn pair_element(scalar: Scalar) -> Option<Scalar> {
    match scalar.kind {
        Kind::FloatPair => Some(Scalar { kind: Kind::Float, bytes: 2 }),
        Kind::BrainPair => Some(Scalar { kind: Kind::Brain, bytes: 2 }),
        _ => None,
    }
}

/// The operation of two operands with this name.
pub(super) fn binary_op(name: &str, scalar: Scalar) -> Result<BinaryOp, String> {
    use BinaryOp::*;
    if scalar.kind == Kind::Brain || (scalar.kind == Kind::Float && scalar.bytes == 2) {
        let is_brain = scalar.kind == Kind::Brain;
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
    if scalar.kind == Kind::Float {
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

fn unary_op(name: &str, scalar: Scalar) -> Result<UnaryOp, String> {
    use UnaryOp::*;
    Ok(match (name, scalar.kind, scalar.bytes) {
        ("neg", Kind::Float, 4) => NegF32,
        ("abs", Kind::Float, 4) => AbsF32,
        ("sqrt", Kind::Float, 4) => SqrtF32,
        ("rcp", Kind::Float, 4) => RcpF32,
        ("rsqrt", Kind::Float, 4) => RsqrtF32,
        ("ex2", Kind::Float, 4) => Exp2F32,
        ("lg2", Kind::Float, 4) => Log2F32,
        ("sin", Kind::Float, 4) => SinF32,
        ("cos", Kind::Float, 4) => CosF32,
        ("tanh", Kind::Float, 4) => TanhF32,
        ("neg", Kind::Float, 8) => NegF64,
        ("abs", Kind::Float, 8) => AbsF64,
        ("sqrt", Kind::Float, 8) => SqrtF64,
        ("rcp", Kind::Float, 8) => RcpF64,
        ("rsqrt", Kind::Float, 8) => RsqrtF64,
        ("neg", Kind::Float | Kind::Brain, 2) => NegHalf,
        ("abs", Kind::Float | Kind::Brain, 2) => AbsHalf,
        ("neg", Kind::FloatPair | Kind::BrainPair, _) => NegHalfPair,
        ("abs", Kind::FloatPair | Kind::BrainPair, _) => AbsHalfPair,
        ("neg", Kind::Signed, 2) => NegI16,
        ("neg", Kind::Signed, 4) => NegI32,
        ("neg", Kind::Signed, 8) => NegI64,
        ("abs", Kind::Signed, 2) => AbsS16,
        ("abs", Kind::Signed, 4) => AbsS32,
        ("abs", Kind::Signed, 8) => AbsS64,
        ("not", Kind::Bits, _) => Not,
        ("popc", _, 4) => PopcB32,
        ("popc", _, 8) => PopcB64,
        ("clz", _, 4) => ClzB32,
        ("clz", _, 8) => ClzB64,
        ("brev", _, 4) => BrevB32,
        ("brev", _, 8) => BrevB64,
        ("bfind.shiftamt", Kind::Unsigned, 4) => ShiftToFirst32,
        ("bfind.shiftamt", Kind::Unsigned, 8) => ShiftToFirst64,
        ("bfind", Kind::Unsigned, 4) => FindU32,
        ("bfind", Kind::Unsigned, 8) => FindU64,
        _ => return Err(unknown(name, scalar)),
    })
}

fn ternary_op(name: &str, scalar: Scalar, s: &Statement) -> Result<TernaryOp, String> {
    use TernaryOp::*;
    let signed = scalar.is_signed();
    let pick = |unsigned, with_sign| if signed { with_sign } else { unsigned };
    Ok(match (name, scalar.kind, scalar.bytes) {
        ("fma" | "mad", Kind::Float, 4) => FmaF32,
        ("fma" | "mad", Kind::Float, 8) => FmaF64,
        ("fma", Kind::Float, 2) => FmaF16,
        ("fma", Kind::Brain, 2) => FmaBf16,
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

fn mov(names: &mut Names, s: &Statement) -> Result<Op, String> {
    let scalar = s.scalar()?;
    let (to, from) = (s.operand(0)?, s.operand(1)?);
    let bits = |parts: usize| 8 * scalar.bytes as u32 / parts as u32;
    if to.starts_with('{') {
        let (parts, from) = (names.targets(to)?, names.source(from)?);
        return Ok(Op::Unpack { bits: bits(parts.len()), parts, from });
    }
    if from.starts_with('{') {
        let (to, parts) = (names.target(to)?, names.sources(from)?);
        return Ok(Op::Pack { to, bits: bits(vector(from).len()), parts });
    }
    Ok(Op::Unary(UnaryOp::Move, names.target(to)?, names.source(from)?))
}

/// Generic addresses of shared and local memory lie in windows of their own.
fn cvta(names: &mut Names, s: &Statement) -> Result<Op, String> {
    let (to, from) = (names.target(s.operand(0)?)?, names.source(s.operand(1)?)?);
    let window = match () {
        () if s.has("shared") => SHARED_WINDOW,
        () if s.has("local") => LOCAL_WINDOW,
        () if s.has("global") || s.has("const") => return Ok(Op::Unary(UnaryOp::Move, to, from)),
        () => return Err("this space is not emulated".into()),
    };
    let window = names.constant(Constant::Value(window));
    let op = if s.has("to") { BinaryOp::SubI64 } else { BinaryOp::AddI64 };
    Ok(Op::Binary(op, to, [from, window]))
}

fn cvt(names: &mut Names, s: &Statement) -> Result<Op, String> {
    if s.words[1..] == ["rna", "tf32", "f32"] {
        let (to, from) = (names.target(s.operand(0)?)?, names.source(s.operand(1)?)?);
        return Ok(Op::Unary(UnaryOp::Tf32FromF32, to, from));
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
    let rounding = s.choose(&DIRECTED, Rounding::Nearest);
    let to_integer = ["rni", "rzi", "rmi", "rpi"].iter().any(|word| s.has(word));
    let to_half = to.is_float() && to.bytes == 2;
    let half_exact = matches!(rounding, Rounding::Nearest)
        || (rounding == Rounding::Zero && from.is_float() && from.bytes <= 4);
    if to_half && !to_integer && !half_exact {
        return Err("this rounding to 16 bits is not emulated".into());
    }
    let (flush, saturate, relu) = (s.has("ftz"), s.has("sat"), s.has("relu"));
    let conversion = Conversion { to, from, rounding, to_integer, flush, saturate, relu };
    let target = names.target(s.operand(0)?)?;
    let a = names.source(s.operand(1)?)?;
    if pair.is_some() {
        let b = names.source(s.operand(2)?)?;
        return Ok(Op::ConvertPair(conversion, target, [a, b]));
    }
    let is_plain = !flush && !saturate && !relu && rounding == Rounding::Nearest && !to_integer;
    Ok(match fast_conversion(&conversion).filter(|_| is_plain) {
        Some(op) => Op::Unary(op, target, a),
        None => Op::Convert(conversion, target, a),
    })
}

/// Frequent conversions as operations of their own.
fn fast_conversion(c: &Conversion) -> Option<UnaryOp> {
    use UnaryOp::*;
    let bits = |s: Scalar| (s.kind, s.bytes);
    Some(match (bits(c.to), bits(c.from)) {
        ((Kind::Float, 4), (Kind::Unsigned, 4)) => F32FromU32,
        ((Kind::Float, 4), (Kind::Signed, 4)) => F32FromS32,
        ((Kind::Float, 4), (Kind::Float, 2)) => F32FromF16,
        ((Kind::Float, 4), (Kind::Brain, 2)) => F32FromBf16,
        ((Kind::Float, 2), (Kind::Float, 4)) => F16FromF32,
        ((Kind::Brain, 2), (Kind::Float, 4)) => Bf16FromF32,
        ((Kind::Float, 8), (Kind::Float, 4)) => F64FromF32,
        ((Kind::Float, 4), (Kind::Float, 8)) => F32FromF64,
        _ if c.to.is_float() || c.from.is_float() || c.from.bytes > c.to.bytes => return None,
        (_, (Kind::Unsigned, 1)) => ZeroExtend8,
        (_, (Kind::Unsigned, 2)) => ZeroExtend16,
        (_, (Kind::Unsigned, 4)) => ZeroExtend32,
        (_, (Kind::Signed, 1)) => SignExtend8,
        (_, (Kind::Signed, 2)) => SignExtend16,
        (_, (Kind::Signed, 4)) => SignExtend32,
        _ => return None,
    })
}
