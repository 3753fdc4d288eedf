//! The exported functions of cuBLASLt.

use std::sync::Arc;

use crate::boundary::{InPtr, OutPtr, Outcome, StaticText, Status, export, stop_panics};
use crate::driver::{current_card, refuse, submit};

use super::objects::*;
use super::product::{LtMatrix, Matmul, check};

/// The version that `cublasLtGetVersion` names: 13.0.2.
const VERSION: usize = 130_002;
/// Workspace that the one algorithm asks for where it may, so that a program that passes no workspace gets an error.
const WORKSPACE_BYTES: u64 = 4096;
/// Marks algorithms of this library.
const MAGIC: u64 = 0x7061_6365_6c69_6e65;

/// `cublasLtMatmulAlgo_t`: magic, workspace, alignments of A and B, of C and D.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == 96);

/// alpha or beta, of the type in which products are computed.
fn scale(compute: ComputeType, value: InPtr<u8>) -> Result<f64, Status> {
    let bytes = |len| value.bytes(len).ok_or(INVALID_VALUE);
    Ok(match compute {
        ComputeType::F64 => f64::from_bits(long(&bytes(8)?)?),
        ComputeType::F32 | ComputeType::Tf32 => f64::from(f32::from_bits(word(&bytes(4)?)?)),
    })
}

fn guard(body: impl FnOnce() -> Outcome) -> u32 {
    stop_panics(INTERNAL_ERROR.0, body)
}

fn give(to: OutPtr<usize>, object: Object) -> Outcome {
    to.give(objects().insert(object), INVALID_VALUE)
}

fn attribute(value: InPtr<u8>, len: usize) -> Result<Vec<u8>, Status> {
    value.bytes(len).filter(|bytes| !bytes.is_empty() && len <= 64).ok_or(INVALID_VALUE)
}

/// An algorithm that promises nothing beyond a program's preference.
fn algorithm(preference: &Preference) -> Algorithm {
    let workspace = if preference.workspace_bytes < WORKSPACE_BYTES { 0 } else { WORKSPACE_BYTES };
    let [a, b, c, d] = preference.alignments.map(u64::from);
    [MAGIC, workspace, a << 32 | b, c << 32 | d, 0, 0, 0, 0]
}

fn check_algorithm(algorithm: Algorithm, product: &Matmul, workspace: (u64, usize)) -> Outcome {
    let [magic, bytes, ab, cd, ..] = algorithm;
    if magic != MAGIC {
        return Err(refuse(INVALID_VALUE, "not an algorithm of cublasLtMatmulAlgoGetHeuristic"));
    }
    if (workspace.1 as u64) < bytes || (bytes > 0 && workspace.0 == 0) {
        let why = format!("a workspace of {} bytes; the algorithm needs {bytes}", workspace.1);
        return Err(refuse(INVALID_VALUE, why));
    }
    let alignments = [ab >> 32, ab & 0xffff_ffff, cd >> 32, cd & 0xffff_ffff];
    let matrices = [product.a, product.b, product.c, product.d];
    for (alignment, matrix) in alignments.into_iter().zip(matrices) {
        if !matrix.at.is_multiple_of(alignment.max(1)) {
            let why = format!(
                "{} at {:#x} is not aligned to {alignment} bytes, which the preference promised",
                matrix.name, matrix.at
            );
            return Err(refuse(INVALID_VALUE, why));
        }
    }
    Ok(())
}

/// The library's version, which is no status.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

/// The name of a status.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cublasLtGetStatusName(status: u32) -> StaticText {
    StaticText::new(match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        14 => c"CUBLAS_STATUS_INTERNAL_ERROR",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS_UNKNOWN",
    })
}

export! { guard;
fn cublasLtCreate(library: OutPtr<usize>) {
    // CUBLAS_STATUS_NOT_INITIALIZED
    current_card().map_err(|_| refuse(Status(1), "cublasLtCreate without a context"))?;
    give(library, Object::Library)
}
fn cublasLtDestroy(library: usize) { objects().remove(library) }
fn cublasLtMatmulDescCreate(description: OutPtr<usize>, compute: u32, scale: u32) {
    give(description, Object::Description(Description::new(compute, scale)?))
}
fn cublasLtMatmulDescDestroy(description: usize) { objects().remove(description) }
fn cublasLtMatmulDescSetAttribute(description: usize, which: u32, value: InPtr<u8>, len: usize) {
    match objects().get_mut(description)? {
        Object::Description(description) => description.set(which, &attribute(value, len)?),
        _ => Err(INVALID_VALUE),
    }
}
fn cublasLtMatrixLayoutCreate(layout: OutPtr<usize>, element: u32, rows: u64, cols: u64, ld: i64) {
    give(layout, Object::Layout(MatrixLayout::new(element, rows, cols, ld)?))
}
fn cublasLtMatrixLayoutDestroy(layout: usize) { objects().remove(layout) }
fn cublasLtMatrixLayoutSetAttribute(layout: usize, which: u32, value: InPtr<u8>, len: usize) {
    match objects().get_mut(layout)? {
        Object::Layout(layout) => layout.set(which, &attribute(value, len)?),
        _ => Err(INVALID_VALUE),
    }
}
fn cublasLtMatmulPreferenceCreate(preference: OutPtr<usize>) {
    give(preference, Object::Preference(Preference::default()))
}
fn cublasLtMatmulPreferenceDestroy(preference: usize) { objects().remove(preference) }
fn cublasLtMatmulPreferenceSetAttribute(preference: usize, which: u32, value: InPtr<u8>, len: usize) {
    match objects().get_mut(preference)? {
        Object::Preference(preference) => preference.set(which, &attribute(value, len)?),
        _ => Err(INVALID_VALUE),
    }
}
/// The algorithms for a product: there is one.
fn cublasLtMatmulAlgoGetHeuristic(
    _library: usize,
    description: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    preference: usize,
    requested: i32,
    results: OutPtr<HeuristicResult>,
    found: OutPtr<i32>,
) {
    found.set(0);
    if requested < 1 || results.is_null() || found.is_null() {
        return Err(INVALID_VALUE);
    }
    let objects = objects();
    let layouts = [a, b, c, d].map(|handle| objects.layout(handle));
    let [a, b, c, d] = layouts;
    check(&objects.description(description)?, [&a?, &b?, &c?, &d?])?;
    let algorithm = algorithm(&objects.preference(preference)?);
    results.set(HeuristicResult {
        algorithm,
        workspace_bytes: algorithm[1] as usize,
        state: 0,
        waves: 1.0,
        reserved: [0; 4],
    });
    found.set(1);
    Ok(())
}
fn cublasLtMatmul(
    _library: usize,
    description: usize,
    alpha: InPtr<u8>,
    a: u64,
    a_layout: usize,
    b: u64,
    b_layout: usize,
    beta: InPtr<u8>,
    c: u64,
    c_layout: usize,
    d: u64,
    d_layout: usize,
    chosen: InPtr<Algorithm>,
    workspace: u64,
    workspace_bytes: usize,
    stream: usize,
) {
    let product = {
        let objects = objects();
        let matrix = |name, at, layout| Ok(LtMatrix { name, at, layout: objects.layout(layout)? });
        Matmul {
            description: objects.description(description)?,
            a: matrix("A", a, a_layout)?,
            b: matrix("B", b, b_layout)?,
            c: matrix("C", c, c_layout)?,
            d: matrix("D", d, d_layout)?,
            alpha: scale(objects.description(description)?.compute, alpha)?,
            beta: scale(objects.description(description)?.compute, beta)?,
        }
    };
    let matrices = [product.a, product.b, product.c, product.d];
    let [a, b, c, d] = &matrices;
    check(&product.description, [&a.layout, &b.layout, &c.layout, &d.layout])?;
    for matrix in &matrices {
        let is_read = matrix.name != "C" || product.beta != 0.0;
        if is_read && (matrix.at == 0 || !matrix.at.is_multiple_of(matrix.layout.element.bytes() as u64)) {
            let why = format!("the address {:#x} of {}", matrix.at, matrix.name);
            return Err(refuse(INVALID_VALUE, why));
        }
    }
    let same_layout = (c.layout.ld, c.layout.stride) == (d.layout.ld, d.layout.stride);
    if product.beta != 0.0 && c.at == d.at && !same_layout {
        return Err(refuse(INVALID_VALUE, "C and D are one matrix with two layouts"));
    }
    if product.description.epilogue >= BIAS && product.description.bias == 0 {
        return Err(refuse(INVALID_VALUE, "an epilogue with a bias, but no bias"));
    }
    if let Some(chosen) = chosen.get() {
        check_algorithm(chosen, &product, (workspace, workspace_bytes))?;
    }
    submit(stream, Arc::new(product)).map_err(|_| EXECUTION_FAILED)
}
}
