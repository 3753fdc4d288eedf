//! Writes a checkpoint as one safetensors file, for other programs.
//!
//! The tensors have the names `model.<parameter or buffer>` and, if they are asked for, `optimizer.<state>.<parameter>`,
//! as in the weight files of `paceline-model`, which can read the file. For Hugging Face's `transformers` they have the
//! names of the parameters alone. The file is written tensor by tensor, so it may be larger than memory.

use std::collections::BTreeMap;
use std::io::{self, Write};

use paceline_model::weights::{DIGEST_KEY, StreamedDigest, file_dtype};
use serde_json::json;

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
    let all = reader.index.tensors.iter();
    let wanted = all.filter(|(name, _)| is_wanted(name));
    let tensors: Vec<Named> = wanted.map(|(name, tensor)| (&**name, &**name, tensor)).collect();
    let mut metadata: BTreeMap<String, String> = reader.index.run.clone();
    // The digest covers all tensors and stands before them, so they are read twice.
    let mut digest = StreamedDigest::new(&metadata);
    for (stored, written, tensor) in &tensors {
        digest.tensor(written, tensor.num_bytes());
        read(reader, stored, tensor, |bytes| {
            digest.bytes(bytes);
            Ok(())
        })?;
    }
    metadata.insert(DIGEST_KEY.into(), digest.finish());
    write(reader, &metadata, &tensors, out)
}

/// Writes the parameters under their own names. Returns the number of tensors and of their bytes.
pub fn export_parameters(reader: &Reader, out: &mut dyn Write) -> io::Result<(usize, u64)> {
    let all = reader.index.tensors.iter();
    let tensors: Vec<Named> = all
        .filter_map(|(stored, tensor)| Some((&**stored, stored.strip_prefix("model.")?, tensor)))
        .collect();
    // `transformers` asks for this entry.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write(reader, &metadata, &tensors, out)
}

/// The name of a tensor in the checkpoint, its name in the file, and the tensor.
type Named<'a> = (&'a str, &'a str, &'a TensorEntry);

fn write(
    reader: &Reader,
    metadata: &BTreeMap<String, String>,
    tensors: &[Named],
    out: &mut dyn Write,
) -> io::Result<(usize, u64)> {
    let mut header = serde_json::Map::from_iter([("__metadata__".to_owned(), json!(metadata))]);
    let mut end = 0;
    for (_, written, tensor) in tensors {
        let start = end;
        end += tensor.num_bytes();
        let (dtype, shape) = (file_dtype(tensor.dtype()), &tensor.shape);
        let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        header.insert((*written).to_owned(), info);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (stored, _, tensor) in tensors {
        read(reader, stored, tensor, |bytes| out.write_all(bytes))?;
    }
    Ok((tensors.len(), end as u64))
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
