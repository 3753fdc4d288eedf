//! One product: checks of its shapes, and its computation on the card's memory.
//!
//! `d = epilogue(alpha * op(a) op(b) + beta * c)`, all matrices by columns. Sums are f32, or f64 if the elements are, in
//! ascending order of the inner index; a card adds in another order. `c` is not read if beta is zero.

use crate::boundary::Status;
use crate::driver::{CardTask, TaskProgress, refuse};
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::ptx::{HalfType, to_tf32};

use super::objects::*;

/// A matrix in the card's memory.
#[derive(Clone, Copy, Debug)]
pub struct LtMatrix {
    /// Its name in messages.
    pub name: &'static str,
    /// Its address.
    pub at: u64,
    pub layout: MatrixLayout,
}

/// A product that waits in a stream.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    pub description: Description,
    pub a: LtMatrix,
    pub b: LtMatrix,
    /// The matrix that is added.
    pub c: LtMatrix,
    pub d: LtMatrix,
    pub alpha: f64,
    /// The factor of `c`.
    pub beta: f64,
}

/// Checks that layouts fit each other. Answers as the library does, before anything runs.
pub fn check(description: &Description, layouts: [&MatrixLayout; 4]) -> Result<(), Status> {
    let names = ["A", "B", "C", "D"];
    let [a, b, c, d] = layouts;
    for (name, layout) in names.iter().zip(layouts) {
        let MatrixLayout { rows, cols, ld, batch, stride, .. } = *layout;
        if rows == 0 || cols == 0 || batch < 1 {
            return Err(refuse(INVALID_VALUE, format!("{name} is {rows} x {cols}, {batch} times")));
        }
        if ld < rows as i64 {
            let why = format!("the leading dimension of {name} is {ld}; a column has {rows} rows");
            return Err(refuse(INVALID_VALUE, why));
        }
        if batch != d.batch {
            return Err(refuse(
                INVALID_VALUE,
                format!("{name} has {batch} matrices, D {}", d.batch),
            ));
        }
        if *name == "D" && batch > 1 && stride < ld * (cols as i64 - 1) + rows as i64 {
            return Err(refuse(INVALID_VALUE, format!("matrices of D overlap: stride {stride}")));
        }
    }
    let (m, k) = shape(a, description.transposed_a);
    let (inner, n) = shape(b, description.transposed_b);
    if inner != k || (d.rows, d.cols) != (m, n) || (c.rows, c.cols) != (m, n) {
        let why = format!(
            "op(A) is {m} x {k}, op(B) {inner} x {n}, C {} x {}, D {} x {}",
            c.rows, c.cols, d.rows, d.cols
        );
        return Err(refuse(INVALID_VALUE, why));
    }
    let types = [a.element, b.element, c.element, d.element];
    let [a, b, c, d] = types;
    if a != b || c != d || (d != a && d != Element::F32) {
        return Err(refuse(NOT_SUPPORTED, format!("types {types:?} of A, B, C, D")));
    }
    Ok(())
}

/// Rows and columns of `op(matrix)`.
fn shape(layout: &MatrixLayout, transposed: bool) -> (u64, u64) {
    if transposed { (layout.cols, layout.rows) } else { (layout.rows, layout.cols) }
}

fn decode(element: Element, bytes: &[u8], out: &mut Vec<f64>) {
    match element {
        Element::F64 => out.extend(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b))),
        Element::F32 => {
            out.extend(bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))));
        }
        Element::F16 | Element::Bf16 => {
            let half = if element == Element::F16 { HalfType::F16 } else { HalfType::Bf16 };
            let bits = |b: &[u8]| u64::from(u16::from_le_bytes([b[0], b[1]]));
            out.extend(bytes.chunks_exact(2).map(|b| f64::from(half.value(bits(b)))));
        }
    }
}

fn encode(element: Element, values: &[f64]) -> Vec<u8> {
    let half = match element {
        Element::F64 => return values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Element::F32 => return values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
        Element::F16 => HalfType::F16,
        Element::Bf16 => HalfType::Bf16,
    };
    values.iter().flat_map(|v| (half.bits(*v as f32) as u16).to_le_bytes()).collect()
}

impl LtMatrix {
    fn column_address(&self, batch: i64, column: u64) -> u64 {
        let elements = batch * self.layout.stride + column as i64 * self.layout.ld;
        self.at.wrapping_add((elements * self.layout.element.bytes() as i64) as u64)
    }

    /// All columns of one matrix, one after the other.
    fn read(&self, memory: &DeviceMemory, batch: i64) -> Result<Vec<f64>, Fault> {
        let MatrixLayout { element, rows, cols, .. } = self.layout;
        let mut values = Vec::with_capacity((rows * cols) as usize);
        for column in 0..cols {
            let at = self.column_address(batch, column);
            let bytes = memory
                .load(at, rows as usize * element.bytes())
                .map_err(|f| f.at(format!("cublasLtMatmul, column {column} of {}", self.name)))?;
            decode(element, bytes, &mut values);
        }
        Ok(values)
    }

    fn write(&self, memory: &mut DeviceMemory, batch: i64, values: &[f64]) -> Result<(), Fault> {
        for (column, values) in values.chunks_exact(self.layout.rows as usize).enumerate() {
            let at = self.column_address(batch, column as u64);
            memory
                .store(at, &encode(self.layout.element, values))
                .map_err(|f| f.at(format!("cublasLtMatmul, column {column} of {}", self.name)))?;
        }
        Ok(())
    }
}

/// The matrix with rows and columns exchanged.
fn transpose(values: &[f64], rows: usize) -> Vec<f64> {
    let columns = values.len() / rows;
    (0..values.len()).map(|k| values[k % columns * rows + k / columns]).collect()
}

impl Matmul {
    /// Rounds to the type in which sums are computed. Results of f32 are rounded from f64, which has the bits of operations on
    /// f32: f64 has more than twice the digits.
    fn rounding(&self) -> impl Fn(f64) -> f64 + use<> {
        let is_f64 = self.description.compute == ComputeType::F64;
        move |x| if is_f64 { x } else { f64::from(x as f32) }
    }

    /// `op(a)` and `op(b)` of a batch, by columns.
    fn operands(&self, memory: &DeviceMemory, batch: i64) -> Result<[Vec<f64>; 2], Fault> {
        let Self { description, a, b, .. } = self;
        let (mut left, mut right) = (a.read(memory, batch)?, b.read(memory, batch)?);
        if description.transposed_a {
            left = transpose(&left, a.layout.rows as usize);
        }
        if description.transposed_b {
            right = transpose(&right, b.layout.rows as usize);
        }
        if description.compute == ComputeType::Tf32 && a.layout.element == Element::F32 {
            for value in left.iter_mut().chain(&mut right) {
                *value = f64::from(to_tf32(*value as f32));
            }
        }
        Ok([left, right])
    }

    fn one(&self, memory: &mut DeviceMemory, batch: i64) -> Result<(), Fault> {
        let Self { description, a, c, d, alpha, beta, .. } = self;
        let (m, k) = shape(&a.layout, description.transposed_a);
        let (m, k) = (m as usize, k as usize);
        let [left, right] = self.operands(memory, batch)?;
        let rounded = self.rounding();
        let mut result = match beta {
            0.0 => vec![0.0; m * (right.len() / k)],
            _ => c.read(memory, batch)?.iter().map(|c| rounded(beta * c)).collect(),
        };
        let bias = match description.epilogue & BIAS {
            0 => None,
            _ => Some(self.bias(m, batch).read(memory, 0)?),
        };
        let mut sums = vec![0.0; m];
        for (column, factors) in result.chunks_exact_mut(m).zip(right.chunks_exact(k)) {
            sums.fill(0.0);
            for (factor, column) in factors.iter().zip(left.chunks_exact(m)) {
                for (sum, value) in sums.iter_mut().zip(column) {
                    *sum = rounded(*sum + rounded(value * factor));
                }
            }
            for (i, (value, sum)) in column.iter_mut().zip(&sums).enumerate() {
                *value = rounded(*value + rounded(alpha * sum));
                if let Some(bias) = &bias {
                    *value = rounded(*value + bias[i]);
                }
                // A NaN stays one.
                if description.epilogue & RELU != 0 && *value < 0.0 {
                    *value = 0.0;
                }
            }
        }
        d.write(memory, batch, &result)?;
        let sums = match description.epilogue {
            BIAS_GRADIENT_A => {
                sums.fill(0.0);
                for column in left.chunks_exact(m) {
                    sums.iter_mut().zip(column).for_each(|(sum, x)| *sum = rounded(*sum + x));
                }
                sums
            }
            BIAS_GRADIENT_B => {
                let sum = |c: &[f64]| c.iter().fold(0.0, |sum, value| rounded(sum + value));
                right.chunks_exact(k).map(sum).collect()
            }
            _ => return Ok(()),
        };
        self.bias(sums.len(), batch).write(memory, 0, &sums)
    }

    /// The bias as a matrix of one column.
    fn bias(&self, len: usize, batch: i64) -> LtMatrix {
        let element = self.description.bias_element.unwrap_or(self.d.layout.element);
        let offset = batch * self.description.bias_stride * element.bytes() as i64;
        let (rows, ld) = (len as u64, len as i64);
        let at = self.description.bias.wrapping_add(offset as u64);
        let layout = MatrixLayout { element, rows, cols: 1, ld, batch: 1, stride: 0 };
        LtMatrix { name: "the bias", at, layout }
    }
}

impl CardTask for Matmul {
    fn name(&self) -> &'static str {
        "emulated_cublasLt_matmul"
    }

    fn advance(&self, memory: &mut DeviceMemory) -> Result<TaskProgress, Fault> {
        for batch in 0..i64::from(self.d.layout.batch) {
            self.one(memory, batch)?;
        }
        Ok(TaskProgress::Done)
    }
}
