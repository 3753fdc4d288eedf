//! Operands: from text to registers, predicates and addresses.
//!
//! Input: the text of one operand. Output: its meaning in the kernel that is built. Registers get numbers when they
//! are first named; so do immediates and special registers. What an instruction does with them is not known here.

use std::collections::HashMap;

use super::instruction::*;
use super::source::split_list;

/// Names of one kernel and of its module.
#[derive(Clone, Debug, Default)]
pub struct OperandNames {
    registers: HashMap<String, Reg>,
    predicates: HashMap<String, Pred>,
    constants: HashMap<Constant, Reg>,
    specials: HashMap<Special, Reg>,
    /// Offsets of parameters.
    pub params: HashMap<String, usize>,
    /// Offsets of variables in shared and local memory, and variables of the module.
    pub symbols: HashMap<String, Constant>,
    next_register: Reg,
    next_predicate: Pred,
    /// For each block within braces that is open, the names that it declares and what they meant before.
    shadowed: Vec<Vec<(String, Meaning)>>,
}

#[derive(Clone, Copy, Debug)]
enum Meaning {
    Register(Option<Reg>),
    Predicate(Option<Pred>),
}

/// `[...]` before its space is known.
pub enum Location {
    /// A parameter at a fixed offset.
    Param(usize),
    /// An address in a register.
    Register(Reg, i64),
}

impl OperandNames {
    /// No names but the module's variables.
    pub fn new(symbols: HashMap<String, Constant>) -> Self {
        Self { symbols, ..Self::default() }
    }

    /// The register that holds a constant.
    pub fn constant(&mut self, constant: Constant) -> Reg {
        *self.constants.entry(constant).or_insert_with(|| fresh(&mut self.next_register))
    }

    /// An operand that is read: a register, an immediate, a special register or the address of a variable.
    pub fn source(&mut self, text: &str) -> Result<Reg, String> {
        if let Some(special) = special(text) {
            let register = self.specials.entry(special);
            return Ok(*register.or_insert_with(|| fresh(&mut self.next_register)));
        }
        if let Some(value) = immediate(text) {
            return Ok(self.constant(Constant::Value(value)));
        }
        if let Some(symbol) = self.symbols.get(text) {
            return Ok(self.constant(*symbol));
        }
        self.target(text)
    }

    /// A register that is written.
    pub fn target(&mut self, text: &str) -> Result<Reg, String> {
        if let Some(register) = self.registers.get(text) {
            return Ok(*register);
        }
        let known = text.starts_with('%') && !text.contains('.') && !text.contains(' ');
        if !known {
            return Err(format!("unknown operand `{text}`"));
        }
        self.declare(text)
    }

    /// Gives a number to a name that need not begin with `%`, as inline assembly declares it.
    pub fn declare(&mut self, name: &str) -> Result<Reg, String> {
        const UNKNOWN: [&str; 8] = [
            "%clusterid",
            "%smid",
            "%nsmid",
            "%gridid",
            "%globaltimer",
            "%nwarpid",
            "%dynamic_smem_size",
            "%total_smem_size",
        ];
        if UNKNOWN.contains(&name) {
            return Err(format!("the special register `{name}` is not emulated"));
        }
        let register = self.registers.entry(name.into());
        Ok(*register.or_insert_with(|| fresh(&mut self.next_register)))
    }

    /// Begins a block within braces: what it declares is another register of that name until its end.
    pub fn open(&mut self) {
        self.shadowed.push(Vec::new());
    }

    /// Ends a block within braces.
    pub fn close(&mut self) {
        for (name, meaning) in self.shadowed.pop().into_iter().flatten().rev() {
            match meaning {
                Meaning::Register(Some(register)) => _ = self.registers.insert(name, register),
                Meaning::Register(None) => _ = self.registers.remove(&name),
                Meaning::Predicate(Some(pred)) => _ = self.predicates.insert(name, pred),
                Meaning::Predicate(None) => _ = self.predicates.remove(&name),
            }
        }
    }

    /// A declaration of a register, or of a predicate, by its whole name.
    pub fn declaration(&mut self, name: &str, is_pred: bool) -> Result<(), String> {
        if let Some(block) = self.shadowed.last_mut() {
            let before = if is_pred {
                Meaning::Predicate(self.predicates.remove(name))
            } else {
                Meaning::Register(self.registers.remove(name))
            };
            block.push((name.to_owned(), before));
        }
        if is_pred { self.pred(name).map(|_| ()) } else { self.declare(name).map(|_| ()) }
    }

    /// A predicate that is written.
    pub fn pred(&mut self, text: &str) -> Result<Pred, String> {
        let is_name = |c: char| c.is_alphanumeric() || "%_$".contains(c);
        if text.is_empty() || !text.chars().all(is_name) {
            return Err(format!("`{text}` is not a predicate"));
        }
        let predicate = self.predicates.entry(text.into());
        Ok(*predicate.or_insert_with(|| fresh(&mut self.next_predicate)))
    }

    /// A predicate that is read, possibly as `!p`.
    pub fn pred_operand(&mut self, text: &str) -> Result<PredOperand, String> {
        let (name, negated) = match text.strip_prefix('!') {
            Some(name) => (name, true),
            None => (text, false),
        };
        if !self.predicates.contains_key(name) && !name.starts_with('%') {
            return Err(format!("unknown predicate `{name}`"));
        }
        Ok(PredOperand { pred: self.pred(name)?, negated })
    }

    /// A register or a vector of registers that are read.
    pub fn sources(&mut self, text: &str) -> Result<Vec<Reg>, String> {
        vector(text).into_iter().map(|t| self.source(t)).collect()
    }

    /// A register or a vector of registers that are written; `_` drops a part.
    pub fn targets(&mut self, text: &str) -> Result<Vec<Option<Reg>>, String> {
        let one = |t| if t == "_" { Ok(None) } else { self.target(t).map(Some) };
        vector(text).into_iter().map(one).collect()
    }

    /// `[register + offset]`, `[symbol + offset]` or `[parameter + offset]`.
    pub fn location(&mut self, text: &str) -> Result<Location, String> {
        let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        let inner = inner.ok_or_else(|| format!("`{text}` is not an address"))?;
        let (base, offset) = match inner.split_once('+') {
            Some((base, offset)) => {
                let value = immediate(offset.trim()).ok_or_else(|| format!("offset `{offset}`"))?;
                (base.trim(), value as i64)
            }
            None => (inner.trim(), 0),
        };
        match self.params.get(base) {
            Some(at) => Ok(Location::Param((*at as i64 + offset) as usize)),
            None => Ok(Location::Register(self.source(base)?, offset)),
        }
    }

    /// The registers of the kernel.
    pub fn finish(self) -> Registers {
        let mut constants: Vec<_> = self.constants.into_iter().map(|(c, r)| (r, c)).collect();
        let mut specials: Vec<_> = self.specials.into_iter().map(|(s, r)| (r, s)).collect();
        constants.sort_by_key(|(register, _)| *register);
        specials.sort_by_key(|(register, _)| *register);
        Registers {
            count: self.next_register,
            num_predicates: self.next_predicate,
            constants,
            specials,
        }
    }
}

fn fresh(next: &mut u32) -> u32 {
    *next += 1;
    *next - 1
}

/// The parts of `{a, b}`, or the operand itself.
pub fn vector(text: &str) -> Vec<&str> {
    match text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
        Some(inner) => split_list(inner),
        None => vec![text],
    }
}

/// A number: `-1`, `0x1f`, `0f3F800000` (the bits of an f32), `0d...` (of an f64), `WARP_SZ`.
pub fn immediate(text: &str) -> Option<u64> {
    if text == "WARP_SZ" {
        return Some(32);
    }
    let float = ["0f", "0F", "0d", "0D"].iter().find_map(|p| text.strip_prefix(p));
    if let Some(hex) = float {
        return u64::from_str_radix(hex, 16).ok();
    }
    let (digits, negative) = match text.strip_prefix('-') {
        Some(digits) => (digits, true),
        None => (text, false),
    };
    let digits = digits.strip_suffix('U').unwrap_or(digits);
    let hex = digits.strip_prefix("0x").or(digits.strip_prefix("0X"));
    let value = match hex {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

fn special(text: &str) -> Option<Special> {
    let axis = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    Some(match text {
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%lanemask_eq" => Special::LaneMask(LaneMask::Equal),
        "%lanemask_lt" => Special::LaneMask(LaneMask::Less),
        "%lanemask_le" => Special::LaneMask(LaneMask::LessEqual),
        "%lanemask_gt" => Special::LaneMask(LaneMask::Greater),
        "%lanemask_ge" => Special::LaneMask(LaneMask::GreaterEqual),
        _ => {
            let (name, part) = text.split_once('.')?;
            let axis = axis(part)?;
            match name {
                "%tid" => Special::Thread(axis),
                "%ntid" => Special::BlockSize(axis),
                "%ctaid" => Special::Block(axis),
                "%nctaid" => Special::GridSize(axis),
                _ => return None,
            }
        }
    })
}
