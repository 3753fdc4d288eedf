//! The operations that turn registers into a register, lane by lane.
//!
//! Input: 64-bit registers whose bits above the operation's own type mean nothing. Output: a register. A list gives
//! each operation once; from it come the enumeration and a loop over the lanes of a warp for each operation, which
//! the compiler turns into vector instructions. Nothing here can fail.

use std::cell::Cell;

use super::float::*;

/// The lanes of a warp.
pub const LANES: usize = 32;
/// One register of a warp.
pub type Register = [u64; LANES];

/// Applies a function to the lanes of a mask.
#[inline(always)]
pub fn over_lanes<const N: usize>(
    registers: &mut [Register],
    mask: u32,
    to: u32,
    sources: [u32; N],
    apply: impl Fn([u64; N]) -> u64,
) {
    // The target may be one of the sources. A lane of it depends on the same lane of these alone, so nothing is copied.
    let registers = Cell::from_mut(registers).as_slice_of_cells();
    let of = |register: u32| registers[register as usize].as_array_of_cells();
    let (sources, target) = (sources.map(of), of(to));
    let lane_of = |lane: usize| {
        let mut values = [0; N];
        for (value, source) in values.iter_mut().zip(sources) {
            *value = source[lane].get();
        }
        target[lane].set(apply(values));
    };
    if mask == u32::MAX {
        (0..LANES).for_each(lane_of);
    } else {
        lanes_of(mask).for_each(lane_of);
    }
}

/// The lanes whose bits are set, in ascending order.
#[inline(always)]
pub fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

macro_rules! operations {
    ($(#[$doc:meta])* $name:ident, $count:literal, $arguments:pat => {
        $($variant:ident => $body:expr,)+
    }) => {
        $(#[$doc])*
        #[allow(missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($variant),+ }

        impl $name {
            /// The result for one lane.
            pub fn apply(self, $arguments: [u64; $count]) -> u64 {
                match self { $(Self::$variant => $body),+ }
            }

            /// The results for the lanes of a mask.
            pub fn over(self, registers: &mut [Register], mask: u32, to: u32, sources: [u32; $count]) {
                match self {
                    $(Self::$variant => {
                        over_lanes(registers, mask, to, sources, #[inline(always)] |$arguments| $body)
                    })+
                }
            }
        }
    };
}

#[inline(always)]
fn i16_of(x: u64) -> i16 {
    x as i16
}

#[inline(always)]
fn s32(x: i32) -> u64 {
    u64::from(x as u32)
}

#[inline(always)]
fn u32_of(x: u32) -> u64 {
    u64::from(x)
}

#[inline(always)]
fn u16_of(x: u16) -> u64 {
    u64::from(x)
}

operations! {
    /// Operations of two registers. A division by zero gives all ones, as on a card.
    BinaryOp, 2, [a, b] => {
        AddF32 => from_f32(f32_of(a) + f32_of(b)),
        SubF32 => from_f32(f32_of(a) - f32_of(b)),
        MulF32 => from_f32(f32_of(a) * f32_of(b)),
        DivF32 => from_f32(f32_of(a) / f32_of(b)),
        MinF32 => from_f32(min_f32(f32_of(a), f32_of(b))),
        MaxF32 => from_f32(max_f32(f32_of(a), f32_of(b))),
        MinNanF32 => from_f32(if f32_of(a).is_nan() || f32_of(b).is_nan() { f32::NAN } else { min_f32(f32_of(a), f32_of(b)) }),
        MaxNanF32 => from_f32(if f32_of(a).is_nan() || f32_of(b).is_nan() { f32::NAN } else { max_f32(f32_of(a), f32_of(b)) }),
        CopySignF32 => u64::from(f32_of(b).copysign(f32_of(a)).to_bits()),
        AddF64 => from_f64(f64_of(a) + f64_of(b)),
        SubF64 => from_f64(f64_of(a) - f64_of(b)),
        MulF64 => from_f64(f64_of(a) * f64_of(b)),
        DivF64 => from_f64(f64_of(a) / f64_of(b)),
        MinF64 => from_f64(min_f64(f64_of(a), f64_of(b))),
        MaxF64 => from_f64(max_f64(f64_of(a), f64_of(b))),
        CopySignF64 => from_f64(f64_of(b).copysign(f64_of(a))),
        AddF16 => HalfType::F16.bits(HalfType::F16.value(a) + HalfType::F16.value(b)),
        SubF16 => HalfType::F16.bits(HalfType::F16.value(a) - HalfType::F16.value(b)),
        MulF16 => HalfType::F16.bits(HalfType::F16.value(a) * HalfType::F16.value(b)),
        MinF16 => HalfType::F16.bits(min_f32(HalfType::F16.value(a), HalfType::F16.value(b))),
        MaxF16 => HalfType::F16.bits(max_f32(HalfType::F16.value(a), HalfType::F16.value(b))),
        AddBf16 => HalfType::Bf16.bits(HalfType::Bf16.value(a) + HalfType::Bf16.value(b)),
        SubBf16 => HalfType::Bf16.bits(HalfType::Bf16.value(a) - HalfType::Bf16.value(b)),
        MulBf16 => HalfType::Bf16.bits(HalfType::Bf16.value(a) * HalfType::Bf16.value(b)),
        MinBf16 => HalfType::Bf16.bits(min_f32(HalfType::Bf16.value(a), HalfType::Bf16.value(b))),
        MaxBf16 => HalfType::Bf16.bits(max_f32(HalfType::Bf16.value(a), HalfType::Bf16.value(b))),
        AddI16 => u16_of((a as u16).wrapping_add(b as u16)),
        AddI32 => u32_of((a as u32).wrapping_add(b as u32)),
        AddI64 => a.wrapping_add(b),
        SubI16 => u16_of((a as u16).wrapping_sub(b as u16)),
        SubI32 => u32_of((a as u32).wrapping_sub(b as u32)),
        SubI64 => a.wrapping_sub(b),
        MulI16 => u16_of((a as u16).wrapping_mul(b as u16)),
        MulI32 => u32_of((a as u32).wrapping_mul(b as u32)),
        MulI64 => a.wrapping_mul(b),
        MulHighU16 => u16_of(((a as u16 as u32 * b as u16 as u32) >> 16) as u16),
        MulHighS16 => u16_of(((i16_of(a) as i32 * i16_of(b) as i32) >> 16) as u16),
        MulHighU32 => (a as u32 as u64 * b as u32 as u64) >> 32,
        MulHighS32 => s32(((a as i32 as i64 * b as i32 as i64) >> 32) as i32),
        MulHighU64 => ((a as u128 * b as u128) >> 64) as u64,
        MulHighS64 => ((a as i64 as i128 * b as i64 as i128) >> 64) as u64,
        MulWideU16 => u32_of(a as u16 as u32 * b as u16 as u32),
        MulWideS16 => s32(i16_of(a) as i32 * i16_of(b) as i32),
        MulWideU32 => a as u32 as u64 * b as u32 as u64,
        MulWideS32 => (a as i32 as i64 * b as i32 as i64) as u64,
        DivU16 => u16_of((a as u16).checked_div(b as u16).unwrap_or(u16::MAX)),
        DivS16 => u16_of(if i16_of(b) == 0 { u16::MAX } else { i16_of(a).wrapping_div(i16_of(b)) as u16 }),
        DivU32 => u32_of((a as u32).checked_div(b as u32).unwrap_or(u32::MAX)),
        DivS32 => s32(if b as i32 == 0 { -1 } else { (a as i32).wrapping_div(b as i32) }),
        DivU64 => a.checked_div(b).unwrap_or(u64::MAX),
        DivS64 => if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 },
        RemU16 => u16_of((a as u16).checked_rem(b as u16).unwrap_or(u16::MAX)),
        RemS16 => u16_of(if i16_of(b) == 0 { u16::MAX } else { i16_of(a).wrapping_rem(i16_of(b)) as u16 }),
        RemU32 => u32_of((a as u32).checked_rem(b as u32).unwrap_or(u32::MAX)),
        RemS32 => s32(if b as i32 == 0 { -1 } else { (a as i32).wrapping_rem(b as i32) }),
        RemU64 => a.checked_rem(b).unwrap_or(u64::MAX),
        RemS64 => if b == 0 { u64::MAX } else { (a as i64).wrapping_rem(b as i64) as u64 },
        MinU16 => u16_of((a as u16).min(b as u16)),
        MinS16 => u16_of(i16_of(a).min(i16_of(b)) as u16),
        MinU32 => u32_of((a as u32).min(b as u32)),
        MinS32 => s32((a as i32).min(b as i32)),
        MinU64 => a.min(b),
        MinS64 => (a as i64).min(b as i64) as u64,
        MaxU16 => u16_of((a as u16).max(b as u16)),
        MaxS16 => u16_of(i16_of(a).max(i16_of(b)) as u16),
        MaxU32 => u32_of((a as u32).max(b as u32)),
        MaxS32 => s32((a as i32).max(b as i32)),
        MaxU64 => a.max(b),
        MaxS64 => (a as i64).max(b as i64) as u64,
        And => a & b,
        Or => a | b,
        Xor => a ^ b,
        ShlB16 => if b as u32 >= 16 { 0 } else { u16_of((a as u16) << (b as u32)) },
        ShlB32 => u32_of((a as u32).checked_shl(b as u32).unwrap_or(0)),
        ShlB64 => a.checked_shl(b as u32).unwrap_or(0),
        ShrU16 => if b as u32 >= 16 { 0 } else { u16_of(a as u16 >> (b as u32)) },
        ShrS16 => u16_of((i16_of(a) >> (b as u32).min(15)) as u16),
        ShrU32 => u32_of((a as u32).checked_shr(b as u32).unwrap_or(0)),
        ShrS32 => s32(a as i32 >> (b as u32).min(31)),
        ShrU64 => a.checked_shr(b as u32).unwrap_or(0),
        ShrS64 => (a as i64 >> (b as u32).min(63)) as u64,
        Second => [a, b][1],
    }
}

operations! {
    /// Operations of one register.
    UnaryOp, 1, [a] => {
        Move => a,
        NegF32 => u64::from(a as u32 ^ 0x8000_0000),
        AbsF32 => u64::from(a as u32 & 0x7fff_ffff),
        SqrtF32 => from_f32(f32_of(a).sqrt()),
        RcpF32 => from_f32(1.0 / f32_of(a)),
        RsqrtF32 => from_f32((1.0 / f64::from(f32_of(a)).sqrt()) as f32),
        Exp2F32 => from_f32(f64::from(f32_of(a)).exp2() as f32),
        Log2F32 => from_f32(f64::from(f32_of(a)).log2() as f32),
        SinF32 => from_f32(f64::from(f32_of(a)).sin() as f32),
        CosF32 => from_f32(f64::from(f32_of(a)).cos() as f32),
        TanhF32 => from_f32(f64::from(f32_of(a)).tanh() as f32),
        NegF64 => a ^ (1 << 63),
        AbsF64 => a & !(1 << 63),
        SqrtF64 => from_f64(f64_of(a).sqrt()),
        RcpF64 => from_f64(1.0 / f64_of(a)),
        RsqrtF64 => from_f64(1.0 / f64_of(a).sqrt()),
        NegHalf => (a ^ 0x8000) & 0xffff,
        AbsHalf => a & 0x7fff,
        NegHalfPair => (a ^ 0x8000_8000) & 0xffff_ffff,
        AbsHalfPair => a & 0x7fff_7fff,
        NegI16 => u16_of((a as u16).wrapping_neg()),
        NegI32 => u32_of((a as u32).wrapping_neg()),
        NegI64 => a.wrapping_neg(),
        AbsS16 => u16_of(i16_of(a).unsigned_abs()),
        AbsS32 => u32_of((a as i32).unsigned_abs()),
        AbsS64 => (a as i64).unsigned_abs(),
        Not => !a,
        PopcB32 => u32_of((a as u32).count_ones()),
        PopcB64 => u32_of(a.count_ones()),
        ClzB32 => u32_of((a as u32).leading_zeros()),
        ClzB64 => u32_of(a.leading_zeros()),
        BrevB32 => u32_of((a as u32).reverse_bits()),
        BrevB64 => a.reverse_bits(),
        FindU32 => u32_of(31u32.wrapping_sub((a as u32).leading_zeros())),
        FindU64 => u32_of(63u32.wrapping_sub(a.leading_zeros())),
        ShiftToFirst32 => if a as u32 == 0 { u64::from(u32::MAX) } else { u32_of((a as u32).leading_zeros()) },
        ShiftToFirst64 => if a == 0 { u64::from(u32::MAX) } else { u32_of(a.leading_zeros()) },
        ZeroExtend8 => a as u8 as u64,
        ZeroExtend16 => a as u16 as u64,
        ZeroExtend32 => a as u32 as u64,
        SignExtend8 => a as i8 as i64 as u64,
        SignExtend16 => a as i16 as i64 as u64,
        SignExtend32 => a as i32 as i64 as u64,
        F32FromU32 => from_f32(a as u32 as f32),
        F32FromS32 => from_f32(a as i32 as f32),
        F32FromF16 => from_f32(HalfType::F16.value(a)),
        F32FromBf16 => from_f32(HalfType::Bf16.value(a)),
        F16FromF32 => HalfType::F16.bits(f32_of(a)),
        Bf16FromF32 => HalfType::Bf16.bits(f32_of(a)),
        Tf32FromF32 => from_f32(to_tf32(f32_of(a))),
        F64FromF32 => from_f64(f64::from(f32_of(a))),
        F32FromF64 => from_f32(f64_of(a) as f32),
    }
}

operations! {
    /// Operations of three registers.
    TernaryOp, 3, [a, b, c] => {
        FmaF32 => from_f32(f32_of(a).mul_add(f32_of(b), f32_of(c))),
        FmaF64 => from_f64(f64_of(a).mul_add(f64_of(b), f64_of(c))),
        FmaF16 => HalfType::F16.fma(a, b, c),
        FmaBf16 => HalfType::Bf16.fma(a, b, c),
        MadI16 => u16_of((a as u16).wrapping_mul(b as u16).wrapping_add(c as u16)),
        MadI32 => u32_of((a as u32).wrapping_mul(b as u32).wrapping_add(c as u32)),
        MadI64 => a.wrapping_mul(b).wrapping_add(c),
        MadWideU16 => u32_of((a as u16 as u32 * b as u16 as u32).wrapping_add(c as u32)),
        MadWideS16 => s32((i16_of(a) as i32 * i16_of(b) as i32).wrapping_add(c as i32)),
        MadWideU32 => (a as u32 as u64 * b as u32 as u64).wrapping_add(c),
        MadWideS32 => ((a as i32 as i64 * b as i32 as i64) as u64).wrapping_add(c),
        MadHighU32 => u32_of((((a as u32 as u64 * b as u32 as u64) >> 32) as u32).wrapping_add(c as u32)),
        MadHighS32 => s32((((a as i32 as i64 * b as i32 as i64) >> 32) as i32).wrapping_add(c as i32)),
        MadHighU64 => (((a as u128 * b as u128) >> 64) as u64).wrapping_add(c),
        MadHighS64 => (((a as i64 as i128 * b as i64 as i128) >> 64) as u64).wrapping_add(c),
        Permute => permute(a as u32, b as u32, c as u32),
        ExtractU32 => extract(a as u32 as u64, b, c),
        ExtractU64 => extract(a, b, c),
        ExtractS32 => s32(extract_signed(a as i32 as i64, b, c, 32) as i32),
        ExtractS64 => extract_signed(a as i64, b, c, 64) as u64,
        FunnelLeftWrap => u32_of((join(a, b) << (c & 31) >> 32) as u32),
        FunnelLeftClamp => u32_of((join(a, b) << (c as u32).min(32) >> 32) as u32),
        FunnelRightWrap => u32_of((join(a, b) >> (c & 31)) as u32),
        FunnelRightClamp => u32_of((join(a, b) >> (c as u32).min(32)) as u32),
    }
}

operations! {
    /// Operations of four registers.
    QuaternaryOp, 4, [a, b, c, d] => {
        InsertB32 => u32_of(insert(a, b as u32 as u64, c, d) as u32),
        InsertB64 => insert(a, b, c, d),
        Lop3 => lop3(a as u32, b as u32, c as u32, d as u32),
    }
}

fn join(low: u64, high: u64) -> u64 {
    high << 32 | u64::from(low as u32)
}

/// `prmt`: each of four bytes is chosen from eight; with the selector's high bit, its sign fills the byte.
fn permute(a: u32, b: u32, selector: u32) -> u64 {
    let bytes = join(u64::from(a), u64::from(b));
    (0..4).fold(0, |result, k| {
        let select = selector >> (4 * k) & 15;
        let byte = bytes >> (8 * (select & 7)) & 0xff;
        let sign_fill = if byte & 0x80 != 0 { 0xff } else { 0 };
        result | (if select & 8 == 0 { byte } else { sign_fill }) << (8 * k)
    })
}

fn low_bits(count: u64) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

fn extract(a: u64, position: u64, len: u64) -> u64 {
    a.checked_shr(position as u32 & 0xff).unwrap_or(0) & low_bits(len & 0xff)
}

/// The field's own highest bit is its sign; a field that reaches past the value takes the value's sign.
fn extract_signed(a: i64, position: u64, len: u64, width: u32) -> i64 {
    let (position, len) = (position as u32 & 0xff, len as u32 & 0xff);
    if len == 0 {
        return 0;
    }
    let shifted = a >> position.min(63);
    let kept = len.min(width.saturating_sub(position)).max(1);
    shifted << (64 - kept) >> (64 - kept)
}

fn insert(a: u64, b: u64, position: u64, len: u64) -> u64 {
    let (position, len) = (position & 0xff, len & 0xff);
    if position >= 64 {
        return b;
    }
    let mask = low_bits(len) << position;
    (a << position) & mask | b & !mask
}

/// Any function of three bits, given by its truth table.
fn lop3(a: u32, b: u32, c: u32, table: u32) -> u64 {
    let terms = (0..8).filter(|k| table >> k & 1 == 1).map(|k| {
        let pick = |x: u32, bit: u32| if k >> bit & 1 == 1 { x } else { !x };
        pick(a, 2) & pick(b, 1) & pick(c, 0)
    });
    u64::from(terms.fold(0, |x, term| x | term))
}

/// Orders that `setp` tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareOp {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    /// `num`: both are numbers.
    Ordered,
    /// `nan`: one is not a number.
    Unordered,
}

impl CompareOp {
    /// Whether the comparison holds. `order` is `None` if one side is not a number; then `if_unordered` decides.
    #[inline(always)]
    pub fn holds(self, order: Option<std::cmp::Ordering>, if_unordered: bool) -> bool {
        let Some(order) = order else {
            return if_unordered || self == Self::Unordered;
        };
        match self {
            Self::Equal => order.is_eq(),
            Self::NotEqual => order.is_ne(),
            Self::Less => order.is_lt(),
            Self::LessEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterEqual => order.is_ge(),
            Self::Ordered => true,
            Self::Unordered => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bit_fields() {
        assert_eq!(permute(0x3322_1100, 0x7766_5544, 0x5410), 0x5544_1100);
        assert_eq!(permute(0x0000_8000, 0, 0x9999), 0xffff_ffff);
        assert_eq!(extract(0xabcd, 4, 8), 0xbc);
        assert_eq!(extract_signed(0x80, 4, 4, 32), -8);
        assert_eq!(TernaryOp::ExtractS32.apply([0x8000_0000, 31, 5]), 0xffff_ffff);
        assert_eq!(insert(0xf, 0, 4, 2), 0x30);
        assert_eq!(lop3(0b1100, 0b1010, 0b0110, 0x96) & 0xf, 0b1100 ^ 0b1010 ^ 0b0110);
        assert_eq!(TernaryOp::FunnelLeftWrap.apply([0x8000_0000, 1, 1]), 3);
        assert_eq!(BinaryOp::ShrS32.apply([0x8000_0000, 40]), 0xffff_ffff);
        assert_eq!(BinaryOp::MinF32.apply([0, 0x8000_0000]), 0x8000_0000);
    }
}
