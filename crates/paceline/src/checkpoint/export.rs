//! Writes a checkpoint as one safetensors file, for other programs.
//!
//! The tensors have the names `model.<parameter or buffer>` and, if they are asked for, `optimizer.<state>.<parameter>`,
//! as in the weight files of `paceline-model`, which can read the file. It is written tensor by tensor, so it may be
//! larger than memory.

use std::collections::BTreeMap;
use std::io::{self, Write};

use paceline_memory::DType;
use paceline_model::weights::{DIGEST_KEY, FileDigest};
use serde_json::{Value, json};

use super::index::TensorEntry;
use super::reader::Reader;

/// Bytes that are read at once.
const BLOCK_BYTES: usize = 4 << 20;
/// Headers are padded so that the tensors begin at a multiple of this, in bytes.
const HEADER_ALIGNMENT: usize = 8;

/// Writes the parameters and running statistics, and with `with_optimizer` also the optimizer's state. Returns the
/// number of tensors and of their bytes.
pub fn export(
    reader: &Reader,
    with_optimizer: bool,
    out: &mut dyn Write,
) -> io::Result<(usize, u64)> {
    let is_wanted = |name: &str| {
        name.starts_with("model.") || (with_optimizer && name.starts_with("optimizer."))
    };
    let tensors: Vec<(&String, &TensorEntry)> =
        reader.index().tensors.iter().filter(|(name, _)| is_wanted(name)).collect();
    let mut metadata: BTreeMap<String, String> = reader.index().run.clone();
    // The digest covers all tensors and stands before them, so they are read twice.
    let mut digest = FileDigest::new(&metadata);
    for (name, tensor) in &tensors {
        digest.tensor(name, tensor.num_bytes());
        read(reader, name, tensor, |bytes| {
            digest.bytes(bytes);
            Ok(())
        })?;
    }
    metadata.insert(DIGEST_KEY.into(), digest.finish());
    let mut header = serde_json::Map::from_iter([("__metadata__".to_owned(), json!(metadata))]);
    let mut end = 0;
    for (name, tensor) in &tensors {
        let start = end;
        end += tensor.num_bytes();
        header.insert((*name).clone(), info(tensor, [start, end]));
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (name, tensor) in &tensors {
        read(reader, name, tensor, |bytes| out.write_all(bytes))?;
    }
    Ok((tensors.len(), end as u64))
}

fn info(tensor: &TensorEntry, offsets: [usize; 2]) -> Value {
    let dtype = match tensor.dtype() {
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::I32 => "I32",
        DType::I64 => "I64",
        DType::U8 => "U8",
    };
    json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": offsets })
}

/// Passes all bytes of a tensor on, in blocks.
fn read(
    reader: &Reader,
    name: &str,
    tensor: &TensorEntry,
    mut to: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (elem_bytes, all) = (tensor.dtype().size_bytes(), tensor.num_elems());
    let len = BLOCK_BYTES / elem_bytes;
    let mut block = vec![0; len.min(all) * elem_bytes];
    for start in (0..all).step_by(len) {
        let range = start..all.min(start + len);
        let bytes = &mut block[..range.len() * elem_bytes];
        reader.read(name, range, bytes).map_err(io::Error::other)?;
        to(bytes)?;
    }
    Ok(())
}
