//! Operations of the threads of a warp together: shuffles, votes, reductions and products on tensor cores.
//!
//! The lanes of the mask have all arrived. Sums of a product are computed in f64 and rounded once; a card rounds in
//! between in a way that is not documented, so results are close and not equal.

use crate::fault::Fault;

use super::arithmetic::{LANES, lanes_of, over_lanes};
use super::float::{f32_of, from_f32, to_tf32};
use super::instruction::*;
use super::warp::{BlockRun, Laned, Warp, on_lane};

impl Warp {
    pub(super) fn together(&mut self, block: &mut BlockRun, op: &WarpOp, mask: u32) -> Laned<()> {
        match op {
            WarpOp::Sync => {}
            WarpOp::Shuffle { mode, to, in_range, value, lane, clamp } => {
                self.shuffle(*mode, (*to, *in_range), [*value, *lane, *clamp], mask)?;
            }
            WarpOp::VotePred { vote, to, from } => {
                let lanes = self.test(*from) & mask;
                let holds = match vote {
                    Vote::All => lanes == mask,
                    Vote::Any | Vote::Ballot => lanes != 0,
                    Vote::Uniform => lanes == mask || lanes == 0,
                };
                self.set_pred(*to, if holds { u32::MAX } else { 0 }, mask);
            }
            WarpOp::Ballot { to, from } => {
                let lanes = u64::from(self.test(*from) & mask);
                over_lanes(&mut self.registers, mask, *to, [], |[]| lanes);
            }
            WarpOp::MatchAny { to, value, bytes } => {
                let values = self.registers[*value as usize];
                let low = u64::MAX >> (64 - 8 * bytes);
                for lane in lanes_of(mask) {
                    let same = |other: &usize| (values[*other] ^ values[lane]) & low == 0;
                    let lanes = lanes_of(mask).filter(same).fold(0, |m, other| m | 1u64 << other);
                    self.registers[*to as usize][lane] = lanes;
                }
            }
            WarpOp::Reduce { op, to, value } => {
                let values = self.registers[*value as usize];
                let result = lanes_of(mask).map(|lane| values[lane]);
                let result = result.reduce(|a, b| op.apply([a, b])).unwrap_or(0);
                over_lanes(&mut self.registers, mask, *to, [], |[]| result);
            }
            WarpOp::MatrixProduct(product) => self.matrix_product(product)?,
            WarpOp::LoadMatrix { to, address, transposed } => {
                self.load_matrix(block, to, *address, *transposed)?;
            }
        }
        Ok(())
    }

    fn shuffle(
        &mut self,
        mode: ShuffleMode,
        (to, in_range): (Reg, Option<Pred>),
        [value, lane, clamp]: [Reg; 3],
        mask: u32,
    ) -> Laned<()> {
        let [values, distances, clamps] =
            [value, lane, clamp].map(|register| self.registers[register as usize]);
        let mut found = 0;
        for lane in lanes_of(mask) {
            let (segment, clamp) = (clamps[lane] as usize >> 8 & 31, clamps[lane] as usize & 31);
            let first = lane & segment;
            let last = first | clamp & !segment;
            let distance = distances[lane] as usize & 31;
            let (source, is_inside) = match mode {
                ShuffleMode::Up => {
                    let source = lane as isize - distance as isize;
                    (source, source >= last as isize)
                }
                ShuffleMode::Down => ((lane + distance) as isize, lane + distance <= last),
                ShuffleMode::Butterfly => ((lane ^ distance) as isize, lane ^ distance <= last),
                ShuffleMode::Index => {
                    let source = first | distance & !segment;
                    (source as isize, source <= last)
                }
            };
            let source = if is_inside { source as usize } else { lane };
            if mask >> source & 1 == 0 {
                return Err(on_lane(lane)(Fault::failed(format!(
                    "absent lane: reads from lane {source}, which the mask {mask:#x} does not name"
                ))));
            }
            found |= u32::from(is_inside) << lane;
            self.registers[to as usize][lane] = values[source] & 0xffff_ffff;
        }
        if let Some(pred) = in_range {
            self.set_pred(pred, found, mask);
        }
        Ok(())
    }

    /// `d = a b + c` of 16 x 16 by 16 x 8. Lane `4 g + t` holds rows `g` and `g + 8` and column pairs `t` and `t + 4` of
    /// `a`, column `g` of `b`, and columns `2 t` and `2 t + 1` of `c` and `d`. In TF32 the product is 16 x 8 by 8 x 8, with
    /// columns instead of pairs; a number that was not rounded to TF32 is a fault.
    fn matrix_product(&mut self, product: &MatrixProduct) -> Laned<()> {
        let MatrixProduct { half, d, a, b, c } = product;
        let (mut left, mut right) = ([[0f64; 16]; 16], [[0f64; 8]; 16]);
        for lane in 0..LANES {
            let (g, t) = (lane / 4, lane % 4);
            let values = |register: Reg| -> Laned<Vec<f64>> {
                let bits = self.registers[register as usize][lane];
                let Some(half) = half else {
                    let value = f32_of(bits);
                    if value.to_bits() != to_tf32(value).to_bits() {
                        let message = format!("{value:e} is not rounded to TF32");
                        return Err(on_lane(lane)(Fault::failed(message)));
                    }
                    return Ok(vec![f64::from(value)]);
                };
                Ok([bits, bits >> 16].map(|bits| f64::from(half.value(bits & 0xffff))).to_vec())
            };
            for (k, register) in a.iter().enumerate() {
                let values = values(*register)?;
                for (i, value) in values.iter().enumerate() {
                    left[g + 8 * (k % 2)][values.len() * (t + 4 * (k / 2)) + i] = *value;
                }
            }
            for (k, register) in b.iter().enumerate() {
                let values = values(*register)?;
                for (i, value) in values.iter().enumerate() {
                    right[values.len() * (t + 4 * k) + i][g] = *value;
                }
            }
        }
        for lane in 0..LANES {
            let (g, t) = (lane / 4, lane % 4);
            // `c` and `d` may share registers, so all of `c` is read before `d` is written.
            let sums: [u64; 4] = std::array::from_fn(|k| {
                let (row, column) = (g + 8 * (k / 2), 2 * t + k % 2);
                let start = f64::from(f32_of(self.registers[c[k] as usize][lane]));
                let sum = (0..16).fold(start, |sum, i| sum + left[row][i] * right[i][column]);
                from_f32(sum as f32)
            });
            for (register, sum) in d.iter().zip(sums) {
                self.registers[*register as usize][lane] = sum;
            }
        }
        Ok(())
    }

    fn load_matrix(
        &mut self,
        block: &mut BlockRun,
        to: &[Reg],
        address: PtxAddress,
        transposed: bool,
    ) -> Laned<()> {
        for (matrix, to) in to.iter().enumerate() {
            let mut rows = [[0u8; 16]; 8];
            for (row, bytes) in rows.iter_mut().enumerate() {
                let lane = 8 * matrix + row;
                let at = self.at(address, lane, 16)?;
                self.read(block, lane, at, bytes)?;
            }
            let element = |row: usize, column: usize| {
                u64::from(u16::from_le_bytes([rows[row][2 * column], rows[row][2 * column + 1]]))
            };
            for lane in 0..LANES {
                let (g, t) = (lane / 4, 2 * (lane % 4));
                let (low, high) = if transposed {
                    (element(t, g), element(t + 1, g))
                } else {
                    (element(g, t), element(g, t + 1))
                };
                self.registers[*to as usize][lane] = high << 16 | low;
            }
        }
        Ok(())
    }
}
