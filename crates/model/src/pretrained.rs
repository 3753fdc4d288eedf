//! Weights of a folder in the form of Hugging Face: `model.safetensors`, or several such files and an index.
//!
//! Input: a folder, and storage that holds any part of a model. Output: that part, converted to the storage's element
//! type. Only the headers and the needed bytes are read: a rank that holds a shard reads its shard.
//! This module knows nothing of ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use paceline_memory::{DType, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::{Layout, ModelError, Param, Result, Storage};

/// The file of a model's settings, in a folder for Hugging Face's `transformers`. Checkpoints keep its contents under this
/// name.
pub const CONFIG_FILE: &str = "config.json";
/// The file of a model's weights.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// The file that says which file has which tensor, if a model's weights have several.
pub const WEIGHTS_INDEX_FILE: &str = "model.safetensors.index.json";
/// No header is longer. One with the most blocks that a model may have takes 11 MB, and the headers of published models below
/// 1 MB; reading one takes about eleven times as much memory. (The reference implementation allows 100 MB.)
const MAX_HEADER_BYTES: u64 = 16_000_000;
/// No index is longer. It has an entry of about 100 bytes for each tensor.
pub const MAX_INDEX_BYTES: u64 = 16_000_000;
/// Bytes that are read at once.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// The tensors of a folder, by name.
#[derive(Debug)]
pub struct Pretrained {
    folder: PathBuf,
    tensors: BTreeMap<String, StoredTensor>,
}

/// A parameter whose first values are not in the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewParam {
    /// Its name.
    pub name: String,
    /// Shape and type of the tensor that has its name, if there is one.
    pub stored: Option<String>,
}

/// The location of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    path: Arc<Path>,
    file: Arc<File>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Its first byte in the file.
    begin: u64,
}

fn refused<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(ModelError::File { path: path.to_owned(), reason: reason.into() })
}

impl Pretrained {
    /// Reads the headers of a folder's weight files.
    ///
    /// Errors, with the name of the file, if there are none, if one is not what its header or the index says, or if it cannot
    /// be read.
    pub fn open(folder: &Path) -> Result<Self> {
        let (single, index) = (folder.join(WEIGHTS_FILE), folder.join(WEIGHTS_INDEX_FILE));
        let tensors = match (single.exists(), index.exists()) {
            (true, _) => stored_in(&single)?.into_iter().collect(),
            (false, true) => tensors_by_index(folder, &index)?,
            (false, false) => {
                return refused(
                    folder,
                    format!("there is no {WEIGHTS_FILE} and no {WEIGHTS_INDEX_FILE}"),
                );
            }
        };
        Ok(Self { folder: folder.to_owned(), tensors })
    }

    /// Checks names, shapes and types against a model. `replaced` are parameters that need not be there, such as a new
    /// head: those without a usable tensor are returned, and
    /// [`Pretrained::load`] leaves them as they are. `ignored` are tensors that the model does not use. Errors name the
    /// first tensor that is missing, left over, or of another shape or type.
    pub fn check(
        &self,
        layout: &Layout,
        replaced: &[&str],
        ignored: &[&str],
    ) -> Result<Vec<NewParam>> {
        let mut new = Vec::new();
        for param in layout.params() {
            match self.of(param) {
                Ok(_) => {}
                Err(_) if replaced.contains(&&*param.name) => {
                    let stored = self.tensors.get(&param.name);
                    let stored = stored.map(|of| format!("{:?} of {:?}", of.shape, of.dtype));
                    new.push(NewParam { name: param.name.clone(), stored });
                }
                Err(error) => return Err(error),
            }
        }
        let is_known = |name: &str| {
            ignored.contains(&name) || layout.params().iter().any(|param| param.name == name)
        };
        match self.tensors.iter().find(|(name, _)| !is_known(name)) {
            Some((name, stored)) => {
                refused(&stored.path, format!("the model has no parameter {name}"))
            }
            None => Ok(new),
        }
    }

    /// Reads what the storage holds of all parameters but those that are `new`, which [`Pretrained::check`] has returned.
    /// Errors if another parameter has no usable tensor, if a file cannot be read, or if the memory of a parameter is in use.
    pub fn load(&self, storage: &Storage, new: &[NewParam]) -> Result<()> {
        for param in storage.layout().params() {
            if new.iter().any(|new| new.name == param.name) {
                continue;
            }
            let stored = self.of(param)?;
            for (range, tensor) in storage.values().within(&param.range())? {
                let own = range.start - param.start..range.end - param.start;
                for (run, start) in param.in_whole(own.clone()) {
                    let to = tensor.slice(run.start - own.start..run.end - own.start)?;
                    stored.read(start..start + run.len(), &to)?;
                }
            }
        }
        Ok(())
    }

    /// Whether two tensors have the same shape and values, whatever their types; `None` if one is missing. Errors
    /// if their files cannot be read.
    pub fn are_equal(&self, first: &str, second: &str) -> Result<Option<bool>> {
        let (Some(first), Some(second)) = (self.tensors.get(first), self.tensors.get(second))
        else {
            return Ok(None);
        };
        if first.shape != second.shape {
            return Ok(Some(false));
        }
        let num_elems: usize = first.shape.iter().product();
        let mut pieces = [vec![0.0f32; CHUNK_BYTES], vec![0.0f32; CHUNK_BYTES]];
        for begin in (0..num_elems).step_by(CHUNK_BYTES) {
            let elems = begin..num_elems.min(begin + CHUNK_BYTES);
            for (piece, stored) in pieces.iter_mut().zip([first, second]) {
                stored.read_as(elems.clone(), &mut piece[..elems.len()], |x| x)?;
            }
            let [first, second] = pieces.each_ref().map(|piece| &piece[..elems.len()]);
            let same = |(first, second): (&f32, &f32)| first.to_bits() == second.to_bits();
            if !first.iter().zip(second).all(same) {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }

    /// The tensor of a parameter. Errors if there is none, or one that cannot become the parameter.
    fn of(&self, param: &Param) -> Result<&StoredTensor> {
        let Some(stored) = self.tensors.get(&param.name) else {
            return refused(&self.folder, format!("there is no tensor {}", param.name));
        };
        if stored.shape != param.shape.dims() {
            let (name, got) = (&param.name, &stored.shape);
            let reason = format!("{name} has shape {got:?}, and the model needs {}", param.shape);
            return refused(&stored.path, reason);
        }
        if !matches!(stored.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let reason = format!("{} is of type {:?}", param.name, stored.dtype);
            return refused(&stored.path, format!("{reason}; F32, F16 and BF16 can be read"));
        }
        Ok(stored)
    }
}

impl StoredTensor {
    /// Reads these elements into a flat tensor of f32 or f64.
    fn read(&self, elems: Range<usize>, to: &Tensor) -> Result<()> {
        match to.dtype() {
            DType::F64 => to.overwrite(|to| self.read_as(elems, to, f64::from))?,
            _ => to.overwrite(|to| self.read_as(elems, to, |x| x))?,
        }
    }

    fn read_as<T>(
        &self,
        elems: Range<usize>,
        to: &mut [T],
        convert: impl Fn(f32) -> T,
    ) -> Result<()> {
        if !matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return refused(&self.path, format!("{:?} cannot be read", self.dtype));
        }
        let size = self.dtype.bitsize() / 8;
        let mut bytes = vec![0; CHUNK_BYTES.min(elems.len() * size)];
        let mut at = self.begin + (elems.start * size) as u64;
        for to in to.chunks_mut(CHUNK_BYTES / size) {
            let bytes = &mut bytes[..to.len() * size];
            self.read_at(at, bytes)?;
            at += bytes.len() as u64;
            for (to, bytes) in to.iter_mut().zip(bytes.chunks_exact(size)) {
                *to = convert(match (self.dtype, bytes) {
                    (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
                    (Dtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
                    (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
                    _ => return refused(&self.path, format!("{:?} cannot be read", self.dtype)),
                });
            }
        }
        Ok(())
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Fills `bytes` with those from byte `begin` of the tensor on.
    pub(crate) fn read_bytes(&self, begin: usize, bytes: &mut [u8]) -> Result<()> {
        self.read_at(self.begin + begin as u64, bytes)
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(bytes, at);
        read.or_else(|error| refused(&self.path, format!("cannot be read ({error})")))
    }
}

/// Opens a safetensors file. Returns it with its length and its header. A header that does not fit into the file, or with more
/// than `max_bytes`, is [`io::ErrorKind::InvalidData`]; `advice` says what to do about the latter.
pub(crate) fn open_with_header(
    path: &Path,
    max_bytes: u64,
    advice: &str,
) -> io::Result<(File, u64, Vec<u8>)> {
    let damaged = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    let file = paceline_files::open(path)?;
    let len = file.metadata()?.len();
    let mut prefix = [0; 8];
    if len < prefix.len() as u64 {
        return damaged(format!("it has {len} bytes: it is truncated, or no safetensors file"));
    }
    file.read_exact_at(&mut prefix, 0)?;
    let header_len = u64::from_le_bytes(prefix);
    if header_len.checked_add(8).is_none_or(|end| end > len) {
        return damaged(format!(
            "its header would have {header_len} bytes, and the file has {len}: it is truncated, or no safetensors file"
        ));
    }
    if header_len > max_bytes {
        return damaged(format!(
            "its header has {} MB, and at most {} MB are read{advice}",
            header_len / 1_000_000,
            max_bytes / 1_000_000
        ));
    }
    let mut header = vec![0; header_len as usize];
    file.read_exact_at(&mut header, 8)?;
    Ok((file, len, header))
}

/// The tensors of one file, in order.
pub(crate) fn stored_in(path: &Path) -> Result<Vec<(String, StoredTensor)>> {
    let advice = "; divide the model among several files";
    let opened = open_with_header(path, MAX_HEADER_BYTES, advice);
    let (file, len, header) = opened.or_else(|error| refused(path, error.to_string()))?;
    let infos = infos(&header, len).or_else(|reason| refused(path, reason))?;
    let (path, file): (Arc<Path>, _) = (path.into(), Arc::new(file));
    let tensors = infos.into_iter().map(|(name, begin, TensorInfo { dtype, shape, .. })| {
        (name, StoredTensor { path: path.clone(), file: file.clone(), dtype, shape, begin })
    });
    Ok(tensors.collect())
}

/// The tensors that the header of a file of `len` bytes names, each with its first byte: in the order of the metadata, and then by name.
/// Errors say what is wrong.
pub(crate) fn infos(
    header: &[u8],
    len: u64,
) -> std::result::Result<Vec<(String, u64, TensorInfo)>, String> {
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|error| format!("its header is damaged ({error})"))?;
    let data = 8 + header.len() as u64;
    // The numbers of a damaged header may be any.
    let expected = data.checked_add(metadata.data_len() as u64);
    if expected != Some(len) {
        let expected = expected.map_or("more".to_owned(), |expected| expected.to_string());
        return Err(format!(
            "it has {len} bytes, and its header says {expected}: it is truncated or damaged"
        ));
    }
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let begin = data + info.data_offsets.0 as u64;
        (name, begin, info.clone())
    });
    let order = metadata.metadata().as_ref().and_then(|all| all.get("order"));
    let order = order.into_iter().flat_map(|names| names.lines().zip(0..));
    let order: HashMap<&str, usize> = order.collect();
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort_by_cached_key(|(name, ..)| {
        let part = |part: &str| (part.parse::<u64>().unwrap_or(u64::MAX), part.to_owned());
        let by_name: Vec<_> = name.split('.').map(part).collect();
        (order.get(&**name).copied().unwrap_or(usize::MAX), by_name)
    });
    Ok(tensors)
}

/// The tensors of the files that an index names.
fn tensors_by_index(folder: &Path, index: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let text = paceline_files::read_text(index, MAX_INDEX_BYTES);
    let text = text.or_else(|error| refused(index, format!("cannot be read ({error})")))?;
    let weight_map = weight_map(&text).or_else(|reason| refused(index, reason))?;
    let mut files = BTreeMap::<_, BTreeMap<_, _>>::new();
    let mut tensors = BTreeMap::new();
    for (name, file) in weight_map {
        if !files.contains_key(&file) {
            let path = folder.join(&file);
            if !path.exists() {
                return refused(
                    &path,
                    format!("is missing, and {WEIGHTS_INDEX_FILE} says that {name} is there"),
                );
            }
            files.insert(file.clone(), stored_in(&path)?.into_iter().collect());
        }
        let Some(stored) = files[&file].get(&name) else {
            return refused(
                &folder.join(&file),
                format!("there is no tensor {name}, which {WEIGHTS_INDEX_FILE} says is here"),
            );
        };
        tensors.insert(name, stored.clone());
    }
    Ok(tensors)
}

/// The files that a `model.safetensors.index.json` with this text names. Errors say what is wrong with the text.
pub fn files_of_index(text: &str) -> std::result::Result<BTreeSet<String>, String> {
    Ok(weight_map(text)?.into_values().collect())
}

/// Which file has which tensor.
fn weight_map(text: &str) -> std::result::Result<BTreeMap<String, String>, String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } =
        serde_json::from_str(text).map_err(|e| format!("is no index of weights ({e})"))?;
    // An index must not name files of other folders.
    match weight_map.iter().find(|(_, file)| file.contains('/')) {
        Some((name, file)) => Err(format!("{name} lies in {file:?}, which is no name of a file")),
        None => Ok(weight_map),
    }
}
