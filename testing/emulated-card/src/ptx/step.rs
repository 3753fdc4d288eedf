//! One instruction for the lanes of a warp that run it: arithmetic, predicates, loads and stores.

use std::cmp::Ordering;

use crate::fault::Fault;

use super::arithmetic::{LANES, lanes_of, over_lanes};
use super::decode_arithmetic::{LOCAL_WINDOW, SHARED_WINDOW};
use super::float::*;
use super::instruction::*;
use super::scalar::{PtxType, ScalarKind};
use super::shared::AccessKind;
use super::warp::{BlockRun, Laned, Warp, on_lane};

/// The longest vector: four times 64 bits.
const LONGEST: usize = 32;

impl Warp {
    /// Runs an operation that neither branches nor waits.
    #[inline]
    pub(super) fn step(&mut self, block: &mut BlockRun, op: &PtxOp, mask: u32) -> Laned<()> {
        let registers = &mut self.registers;
        match op {
            PtxOp::Unary(op, to, a) => op.over(registers, mask, *to, [*a]),
            PtxOp::Binary(op, to, sources) => op.over(registers, mask, *to, *sources),
            PtxOp::Ternary(op, to, sources) => op.over(registers, mask, *to, *sources),
            PtxOp::Quaternary(op, to, sources) => op.over(registers, mask, *to, *sources),
            PtxOp::Compare(compare) => self.compare(compare, mask),
            PtxOp::Select { to, a, b, pred } => {
                let chosen = self.test(*pred);
                let registers = &mut self.registers;
                over_lanes(registers, mask & chosen, *to, [*a], |[a]| a);
                over_lanes(registers, mask & !chosen, *to, [*b], |[b]| b);
            }
            PtxOp::Load { scalar, address, to } => self.load(block, *scalar, *address, to, mask)?,
            PtxOp::Store { scalar, address, from } => {
                self.store(block, *scalar, *address, from, mask)?;
            }
            PtxOp::LoadParam { scalar, offset, to } => {
                for (k, to) in to.iter().enumerate() {
                    let at = offset + k * scalar.bytes;
                    let bytes = block.params.get(at..at + scalar.bytes).ok_or_else(|| {
                        Fault::illegal(format!("byte {at} of {} of parameters", block.params.len()))
                    });
                    let value = value_of(*scalar, bytes.map_err(on_lane(0))?);
                    if let Some(to) = to {
                        over_lanes(registers, mask, *to, [], |[]| value);
                    }
                }
            }
            PtxOp::Atomic { op, scalar, address, operand, old } => {
                self.atomic(block, (*op, *scalar, *address, *operand, *old), mask)?;
            }
            PtxOp::Convert(c, to, a) => over_lanes(registers, mask, *to, [*a], |[a]| c.apply(a)),
            PtxOp::ConvertPair(c, to, ab) => {
                over_lanes(registers, mask, *to, *ab, |[a, b]| c.pack(a, b));
            }
            PtxOp::UnaryModified(op, modifiers, to, a) => {
                over_lanes(registers, mask, *to, [*a], |[a]| {
                    modifiers.after(f32_of(op.apply([modifiers.before(a)])))
                });
            }
            PtxOp::BinaryModified(op, modifiers, to, sources) => {
                over_lanes(registers, mask, *to, *sources, |v| {
                    modifiers.binary(*op, v.map(|x| modifiers.before(x)))
                });
            }
            PtxOp::FmaModified(modifiers, to, sources) => {
                over_lanes(registers, mask, *to, *sources, |v| {
                    let [a, b, c] = v.map(|x| f32_of(modifiers.before(x)));
                    modifiers.after(fma_rounded(a, b, c, modifiers.rounding))
                });
            }
            PtxOp::BinaryPair(op, to, sources) => over_lanes(registers, mask, *to, *sources, |v| {
                op.apply(v) | op.apply(v.map(|x| x >> 16)) << 16
            }),
            PtxOp::TernaryPair(op, to, sources) => {
                over_lanes(registers, mask, *to, *sources, |v| {
                    op.apply(v) | op.apply(v.map(|x| x >> 16)) << 16
                })
            }
            PtxOp::Pack { to, parts, bits } => {
                let low = u64::MAX >> (64 - bits);
                for lane in lanes_of(mask) {
                    let value = parts.iter().rev().fold(0, |value: u64, part| {
                        value.checked_shl(*bits).unwrap_or(0)
                            | registers[*part as usize][lane] & low
                    });
                    registers[*to as usize][lane] = value;
                }
            }
            PtxOp::Unpack { parts, from, bits } => {
                let low = u64::MAX >> (64 - bits);
                for lane in lanes_of(mask) {
                    let value = registers[*from as usize][lane];
                    for (k, part) in parts.iter().enumerate() {
                        if let Some(part) = part {
                            registers[*part as usize][lane] = value >> (k as u32 * bits) & low;
                        }
                    }
                }
            }
            PtxOp::PredLogic { logic, to, a, b } => {
                let value = logic.apply(self.test(*a), self.test(*b));
                self.set_pred(*to, value, mask);
            }
            PtxOp::PredMove { to, from } => self.set_pred(*to, self.test(*from), mask),
            PtxOp::PredConstant { to, value } => {
                self.set_pred(*to, if *value { u32::MAX } else { 0 }, mask);
            }
            PtxOp::ActiveMask(to) => {
                over_lanes(registers, mask, *to, [], |[]| u64::from(mask));
            }
            PtxOp::Clock(to) => over_lanes(registers, mask, *to, [], |[]| block.steps),
            PtxOp::Nothing => {}
            PtxOp::Trap => {
                let lane = mask.trailing_zeros() as usize;
                return Err(on_lane(lane)(Fault::failed("trap")));
            }
            // The warp runs these itself.
            PtxOp::Branch(_)
            | PtxOp::BranchTable { .. }
            | PtxOp::Exit
            | PtxOp::Warp(..)
            | PtxOp::Barrier { .. } => {}
        }
        Ok(())
    }

    pub(super) fn set_pred(&mut self, to: Pred, value: u32, mask: u32) {
        let pred = &mut self.predicates[to as usize];
        *pred = *pred & !mask | value & mask;
    }

    fn compare(&mut self, c: &Compare, mask: u32) {
        let (a, b) = (&self.registers[c.a as usize], &self.registers[c.b as usize]);
        let collect = |order: &dyn Fn(u64, u64) -> Option<Ordering>| {
            lanes_of(mask).fold(0, |result, lane| {
                let holds = c.comparison.holds(order(a[lane], b[lane]), c.if_unordered);
                result | u32::from(holds) << lane
            })
        };
        let scalar = c.scalar;
        let mut result = match (scalar.kind, scalar.bytes) {
            (ScalarKind::Float, 8) => collect(&|a, b| f64_of(a).partial_cmp(&f64_of(b))),
            (ScalarKind::Float, 4) if c.flush => {
                collect(&|a, b| flush(f32_of(a)).partial_cmp(&flush(f32_of(b))))
            }
            (ScalarKind::Float, 4) => collect(&|a, b| f32_of(a).partial_cmp(&f32_of(b))),
            (ScalarKind::Float, _) => {
                collect(&|a, b| HalfType::F16.value(a).partial_cmp(&HalfType::F16.value(b)))
            }
            (ScalarKind::Brain, _) => {
                collect(&|a, b| HalfType::Bf16.value(a).partial_cmp(&HalfType::Bf16.value(b)))
            }
            (ScalarKind::Signed, 4) => collect(&|a, b| Some((a as i32).cmp(&(b as i32)))),
            (ScalarKind::Signed, _) => {
                collect(&|a, b| Some((scalar.extend(a) as i64).cmp(&(scalar.extend(b) as i64))))
            }
            (_, 4) => collect(&|a, b| Some((a as u32).cmp(&(b as u32)))),
            _ => collect(&|a, b| Some(scalar.truncate(a).cmp(&scalar.truncate(b)))),
        };
        let mut opposite = !result;
        if let Some((logic, operand)) = c.combine {
            let other = self.test(operand);
            (result, opposite) = (logic.apply(result, other), logic.apply(opposite, other));
        }
        self.set_pred(c.to, result, mask);
        if let Some(complement) = c.complement {
            self.set_pred(complement, opposite, mask);
        }
    }

    /// The address of a lane's access.
    #[inline(always)]
    pub(super) fn at(&self, address: PtxAddress, lane: usize, len: usize) -> Laned<(Space, u64)> {
        let base = self.registers[address.base as usize][lane];
        let mut at = base.wrapping_add(address.offset as u64);
        debug_assert!(len.is_power_of_two());
        if at & (len as u64 - 1) != 0 {
            return Err(on_lane(lane)(Fault::misaligned(at, len)));
        }
        let mut space = address.space;
        if space == Space::Generic {
            (space, at) = match at >> 60 {
                2 => (Space::Shared, at - SHARED_WINDOW),
                4 => (Space::Local, at - LOCAL_WINDOW),
                _ => (Space::Global, at),
            };
        }
        Ok((space, at))
    }

    /// Reads the bytes of one lane.
    #[inline(always)]
    pub(super) fn read(
        &self,
        block: &mut BlockRun,
        lane: usize,
        (space, at): (Space, u64),
        out: &mut [u8],
    ) -> Laned<()> {
        let len = out.len();
        let bytes = match space {
            Space::Global | Space::Generic => block.memory.load(at, len),
            Space::Shared => {
                block.shared.access(self.number, at, len, AccessKind::Read).map(|bytes| &*bytes)
            }
            Space::Local => self.local_range(lane, at, len).map(|range| &self.local[range]),
        };
        out.copy_from_slice(bytes.map_err(on_lane(lane))?);
        Ok(())
    }

    fn local_range(
        &self,
        lane: usize,
        at: u64,
        len: usize,
    ) -> Result<std::ops::Range<usize>, Fault> {
        let size = self.local.len() / LANES;
        match usize::try_from(at).ok().filter(|at| *at <= size && len <= size - at) {
            Some(at) => Ok(lane * size + at..lane * size + at + len),
            None => Err(Fault::illegal(format!(
                "access of {len} bytes at {at:#x} of {size} bytes of local memory"
            ))),
        }
    }

    fn load(
        &mut self,
        block: &mut BlockRun,
        scalar: PtxType,
        address: PtxAddress,
        to: &[Option<Reg>],
        mask: u32,
    ) -> Laned<()> {
        let len = to.len() * scalar.bytes;
        let mut buffer = [0; LONGEST];
        for lane in lanes_of(mask) {
            let at = self.at(address, lane, len)?;
            self.read(block, lane, at, &mut buffer[..len])?;
            // (`chunks_exact` divides.)
            for (k, to) in to.iter().enumerate() {
                if let Some(to) = to {
                    let bytes = &buffer[k * scalar.bytes..][..scalar.bytes];
                    self.registers[*to as usize][lane] = value_of(scalar, bytes);
                }
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        block: &mut BlockRun,
        scalar: PtxType,
        address: PtxAddress,
        from: &[Reg],
        mask: u32,
    ) -> Laned<()> {
        let len = from.len() * scalar.bytes;
        let mut buffer = [0; LONGEST];
        for lane in lanes_of(mask) {
            let (space, at) = self.at(address, lane, len)?;
            for (k, from) in from.iter().enumerate() {
                let value = self.registers[*from as usize][lane].to_le_bytes();
                buffer[k * scalar.bytes..][..scalar.bytes].copy_from_slice(&value[..scalar.bytes]);
            }
            let result = match space {
                Space::Global | Space::Generic => block.memory.store(at, &buffer[..len]),
                Space::Shared => block
                    .shared
                    .access(self.number, at, len, AccessKind::Write)
                    .map(|bytes| bytes.copy_from_slice(&buffer[..len])),
                Space::Local => self
                    .local_range(lane, at, len)
                    .map(|range| self.local[range].copy_from_slice(&buffer[..len])),
            };
            result.map_err(on_lane(lane))?;
        }
        Ok(())
    }

    fn atomic(
        &mut self,
        block: &mut BlockRun,
        (op, scalar, address, operand, target): (AtomicOp, PtxType, PtxAddress, Reg, Option<Reg>),
        mask: u32,
    ) -> Laned<()> {
        let len = scalar.bytes;
        for lane in block.lane_order {
            if mask >> lane & 1 == 0 {
                continue;
            }
            let (space, at) = self.at(address, lane, len)?;
            let operand = self.registers[operand as usize][lane];
            let expected = match op {
                AtomicOp::CompareAndSwap(expected) => self.registers[expected as usize][lane],
                _ => 0,
            };
            let apply = |old: u64| match op {
                AtomicOp::Combine(op) => op.apply([old, operand]),
                AtomicOp::CombinePair(op) => {
                    op.apply([old, operand]) | op.apply([old >> 16, operand >> 16]) << 16
                }
                AtomicOp::CompareAndSwap(_) if old == scalar.truncate(expected) => operand,
                AtomicOp::CompareAndSwap(_) => old,
                AtomicOp::Increment if old as u32 >= operand as u32 => 0,
                AtomicOp::Increment => old + 1,
                AtomicOp::Decrement if old == 0 || old as u32 > operand as u32 => operand,
                AtomicOp::Decrement => old - 1,
            };
            let fail = on_lane(lane);
            let mut bytes = [0; 8];
            let old = match space {
                Space::Global | Space::Generic => {
                    bytes[..len].copy_from_slice(block.memory.load(at, len).map_err(&fail)?);
                    let old = u64::from_le_bytes(bytes);
                    let new = apply(old).to_le_bytes();
                    block.memory.store(at, &new[..len]).map_err(&fail)?;
                    old
                }
                Space::Shared => {
                    let access = block.shared.access(self.number, at, len, AccessKind::Atomic);
                    let stored = access.map_err(&fail)?;
                    bytes[..len].copy_from_slice(stored);
                    let old = u64::from_le_bytes(bytes);
                    stored.copy_from_slice(&apply(old).to_le_bytes()[..len]);
                    old
                }
                Space::Local => {
                    return Err(fail(Fault::failed("atomic operation on local memory")));
                }
            };
            if let Some(target) = target {
                self.registers[target as usize][lane] = scalar.extend(old);
            }
        }
        Ok(())
    }
}

/// A loaded value: signed types fill the register with their sign.
#[inline(always)]
fn value_of(scalar: PtxType, bytes: &[u8]) -> u64 {
    let value = match *bytes {
        [a] => u64::from(a),
        [a, b] => u64::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => 0,
    };
    if scalar.is_signed() { scalar.extend(value) } else { value }
}

impl Modifiers {
    #[inline(always)]
    fn before(&self, x: u64) -> u64 {
        if self.flush { u64::from(flush(f32_of(x)).to_bits()) } else { x }
    }

    #[inline(always)]
    fn after(&self, x: f32) -> u64 {
        let x = if self.flush { flush(x) } else { x };
        from_f32(if self.saturate { saturate(x) } else { x })
    }

    fn binary(&self, op: super::arithmetic::BinaryOp, [a, b]: [u64; 2]) -> u64 {
        use super::arithmetic::BinaryOp::*;
        let rounding = self.rounding;
        self.after(match op {
            _ if rounding == RoundingMode::Nearest => f32_of(op.apply([a, b])),
            SubF32 => add_rounded(f32_of(a), -f32_of(b), rounding),
            MulF32 => mul_rounded(f32_of(a), f32_of(b), rounding),
            _ => add_rounded(f32_of(a), f32_of(b), rounding),
        })
    }
}
