//! The scalar types of PTX, as they stand in the names of instructions.

/// The meaning of a value's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalarKind {
    /// Bits without meaning.
    Bits,
    Unsigned,
    Signed,
    /// An IEEE float.
    Float,
    /// A bfloat16.
    Brain,
    /// Two IEEE halves in 32 bits.
    FloatPair,
    /// Two bfloat16 in 32 bits.
    BrainPair,
    Predicate,
}

/// A scalar type: `u32`, `f64`, `bf16x2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxType {
    pub kind: ScalarKind,
    pub bytes: usize,
}

impl PtxType {
    /// The type with this name, without its dot.
    pub fn parse(name: &str) -> Option<Self> {
        let (kind, bytes) = match name {
            "pred" => (ScalarKind::Predicate, 1),
            "bf16" => (ScalarKind::Brain, 2),
            "bf16x2" => (ScalarKind::BrainPair, 4),
            "f16x2" => (ScalarKind::FloatPair, 4),
            _ => {
                let (kind, bits) = name.split_at_checked(1)?;
                let kind = match kind {
                    "b" => ScalarKind::Bits,
                    "u" => ScalarKind::Unsigned,
                    "s" => ScalarKind::Signed,
                    "f" => ScalarKind::Float,
                    _ => return None,
                };
                let bytes = match bits {
                    "8" => 1,
                    "16" => 2,
                    "32" => 4,
                    "64" => 8,
                    _ => return None,
                };
                (kind, bytes)
            }
        };
        Some(Self { kind, bytes })
    }

    /// Whether the type is a float of any kind.
    pub fn is_float(self) -> bool {
        matches!(self.kind, ScalarKind::Float | ScalarKind::Brain)
    }

    /// Whether the type is a signed integer.
    pub fn is_signed(self) -> bool {
        self.kind == ScalarKind::Signed
    }

    /// The value's own bits, zero above.
    pub fn truncate(self, value: u64) -> u64 {
        if self.bytes == 8 { value } else { value & ((1 << (8 * self.bytes)) - 1) }
    }

    /// The value's own bits, extended by its sign if the type has one.
    pub fn extend(self, value: u64) -> u64 {
        if !self.is_signed() {
            return self.truncate(value);
        }
        let unused = 64 - 8 * self.bytes as u32;
        ((value << unused) as i64 >> unused) as u64
    }
}
