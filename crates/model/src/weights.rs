//! Weight files: parameters, buffers and optimizer state in the safetensors format.
//!
//! Tensors are named `model.<parameter or buffer>` and `optimizer.<state>.<parameter>`. They have the shapes
//! of the layout, without padding, so a file does not depend on the number of ranks. The metadata holds what
//! the caller adds, and a SHA-256 of it and of all tensors in order of their names.
//!
//! Input: storage and an optimizer, or a file. Output: a file, or restored storage. This module knows nothing of ranks or runs.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use paceline_memory::{DType, ReadGuard, Shape, Tensor};
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors, TensorInfo, TensorView};
use sha2::{Digest, Sha256};

use crate::pretrained::{infos, open_with_header};
use crate::{Layout, ModelError, Optimizer, OptimizerConfig, Result, Storage};

/// The metadata key of the digest.
pub const DIGEST_KEY: &str = "sha256";

/// No header is longer, as in the reference implementation of the format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Headers are padded so that the tensors begin at a multiple of this, in bytes.
const HEADER_ALIGNMENT: usize = 8;

/// Writes parameters, buffers, optimizer state and `metadata` to `out`, as a safetensors file: the length of the
/// header (8 bytes, little-endian), the header (JSON, padded with spaces to a multiple of 8 bytes), and the tensors
/// in order of their names.
///
/// # Errors
///
/// If the memory of a tensor is in use, and if `out` fails.
pub fn write(
    out: &mut dyn Write,
    storage: &Storage,
    optimizer: &Optimizer,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let layout = storage.layout();
    let mut entries = BTreeMap::new();
    for tensor in storage.tensors() {
        let (name, value) = tensor?;
        entries.insert(format!("model.{name}"), FileTensor::new(&value)?);
    }
    for (_, param) in layout.trained() {
        for (state, part) in optimizer.state_of(param.range())? {
            let part = part.view(param.shape)?;
            entries.insert(format!("optimizer.{state}.{}", param.name), FileTensor::new(&part)?);
        }
    }
    let digest = digest(metadata, entries.iter().map(|(name, entry)| (&**name, &*entry.bytes)));
    let mut metadata = metadata.clone();
    metadata.insert(DIGEST_KEY.into(), digest);

    let mut end = 0;
    let infos = entries.iter().map(|(name, FileTensor { dtype, shape, bytes })| {
        let begin = end;
        end += bytes.len();
        let info = TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (begin, end) };
        (name.clone(), info)
    });
    let metadata = Some(metadata.into_iter().collect());
    let header = Metadata::new(metadata, infos.collect()).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&header).map_err(io::Error::from)?;
    header.resize(header.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    entries.values().try_for_each(|entry| out.write_all(&entry.bytes))?;
    Ok(())
}

struct FileTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: ReadGuard<u8>,
}

impl FileTensor {
    fn new(tensor: &Tensor) -> Result<Self> {
        let (dtype, shape) = (file_dtype(tensor.dtype()), tensor.dims().to_vec());
        Ok(Self { dtype, shape, bytes: tensor.as_bytes().read()? })
    }
}

/// The type as safetensors names it.
pub fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
    }
}

/// The digest of a file: of the metadata, except the digest itself, and of the tensors, in order of their
/// names. Each field is preceded by its length, so that boundaries are unambiguous.
pub(crate) fn digest<'a>(
    metadata: &BTreeMap<String, String>,
    tensors: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> String {
    let mut file = StreamedDigest::new(metadata);
    for (name, bytes) in tensors {
        file.tensor(name, bytes.len());
        file.bytes(bytes);
    }
    file.finish()
}

/// The digest of a file whose tensors do not lie in memory, from what [`write()`] gets, in the same order.
#[derive(Debug)]
pub struct StreamedDigest(Sha256);

impl StreamedDigest {
    /// The digest of a file with this metadata, but for the digest in it.
    pub fn new(metadata: &BTreeMap<String, String>) -> Self {
        let mut digest = Self(Sha256::new());
        for (key, value) in metadata.iter().filter(|(key, _)| *key != DIGEST_KEY) {
            digest.field(key.as_bytes());
            digest.field(value.as_bytes());
        }
        digest
    }

    /// Begins the next tensor in order of the names.
    pub fn tensor(&mut self, name: &str, num_bytes: usize) {
        self.field(name.as_bytes());
        self.0.update((num_bytes as u64).to_le_bytes());
    }

    /// Adds bytes of the current tensor.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest, in hexadecimal.
    pub fn finish(self) -> String {
        hex(&self.0.finalize())
    }

    fn field(&mut self, field: &[u8]) {
        self.0.update((field.len() as u64).to_le_bytes());
        self.0.update(field);
    }
}

/// The header and the tensors of a safetensors file.
pub(crate) fn parse(
    bytes: &[u8],
) -> std::result::Result<(Metadata, SafeTensors<'_>), SafeTensorError> {
    // safetensors 0.8 adds the length of the header to the end of the last tensor without a check, so the ends are
    // checked first. If the header cannot be read here, safetensors says why.
    let len = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
    let end = usize::try_from(len).ok().and_then(|len| len.checked_add(8));
    let header = end.and_then(|end| bytes.get(8..end)).unwrap_or_default();
    if let Ok(header) = serde_json::from_slice::<Metadata>(header)
        && header.tensors().values().any(|info| info.data_offsets.1 > bytes.len())
    {
        return Err(SafeTensorError::MetadataIncompleteBuffer);
    }
    let (_, header) = SafeTensors::read_metadata(bytes)?;
    Ok((header, SafeTensors::deserialize(bytes)?))
}

/// The bytes of a file that is as long as its header says. Any other is [`io::ErrorKind::InvalidData`], before memory is
/// taken for it.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let (file, len, header) = open_with_header(path, MAX_HEADER_BYTES, "")?;
    infos(&header, len).map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason))?;
    let mut bytes = Vec::new();
    let len = usize::try_from(len).map_err(io::Error::other)?;
    bytes.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn is_param(layout: &Layout, name: &str) -> bool {
    layout.params().iter().any(|param| param.name == name)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A weight file in memory, whose digest has been verified.
#[derive(Debug)]
pub struct WeightFile {
    path: PathBuf,
    bytes: Vec<u8>,
    metadata: BTreeMap<String, String>,
}

impl WeightFile {
    /// Reads and verifies a file. Errors if it cannot be read, is not a safetensors file, or does not match its own digest.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = read(path).map_err(|error| ModelError::File {
            path: path.into(),
            reason: match error.kind() {
                io::ErrorKind::InvalidData => format!("is corrupt: {error}"),
                _ => format!("cannot be read: {error}"),
            },
        })?;
        Self::from_bytes(path, bytes)
    }

    /// Verifies the contents of a file, as [`WeightFile::open`] does. `path` is for error messages.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let fail = |reason: String| ModelError::File { path: path.into(), reason };
        let corrupt = |e: &dyn std::fmt::Display| fail(format!("is corrupt: {e}"));
        let (header, tensors) = parse(&bytes).map_err(|e| corrupt(&e))?;
        let metadata: BTreeMap<String, String> =
            header.metadata().clone().unwrap_or_default().into_iter().collect();
        let mut by_name: Vec<_> =
            tensors.iter().map(|(name, tensor)| (name, tensor.data())).collect();
        by_name.sort_unstable_by_key(|(name, _)| *name);
        let digest = digest(&metadata, by_name);
        match metadata.get(DIGEST_KEY) {
            Some(stored) if *stored == digest => {}
            Some(_) => return Err(corrupt(&"its contents do not match its digest")),
            None => return Err(fail("has no digest, so it is no checkpoint of ours".into())),
        }
        Ok(Self { path: path.into(), bytes, metadata })
    }

    /// The metadata that [`write()`] was given, and the digest.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The digest. Files with different contents have different digests.
    pub fn digest(&self) -> &str {
        self.metadata.get(DIGEST_KEY).map_or("", String::as_str)
    }

    /// Checks that the file has exactly the parameters and buffers of `layout`, with their shapes. The error names the first
    /// difference.
    pub fn check_model(&self, layout: &Layout, dtype: DType) -> Result<()> {
        let tensors = self.tensors()?;
        for (kind, name, shape) in layout.tensors() {
            let stored = tensors.tensor(&format!("model.{name}")).map_err(|_| {
                self.differs(format!("it has no {kind} {name}, which this model has"))
            })?;
            self.compare(&format!("{kind} {name}"), stored, shape, dtype)?;
        }
        let is_known = |name: &str| layout.tensors().any(|(_, own, _)| own == name);
        self.check_names(|name| name.strip_prefix("model.").is_none_or(is_known))
    }

    /// Like [`WeightFile::check_model`], with the optimizer state.
    pub fn check(&self, layout: &Layout, dtype: DType, optimizer: &OptimizerConfig) -> Result<()> {
        self.check_model(layout, dtype)?;
        let tensors = self.tensors()?;
        let states = optimizer.state_names();
        self.check_names(|name| {
            let of_state = |state: &&str| {
                let rest = name.strip_prefix("optimizer.").and_then(|n| n.strip_prefix(state));
                rest.and_then(|n| n.strip_prefix('.')).is_some_and(|name| is_param(layout, name))
            };
            name.starts_with("model.") || states.iter().any(of_state)
        })?;
        let num_names = tensors.names().len();
        let of_params = layout.params().len() + layout.trained().count() * states.len();
        let needed = of_params + layout.buffers().len();
        if num_names < needed {
            let reason = format!("it lacks the optimizer state this run needs ({states:?})");
            return Err(self.differs(reason));
        }
        if num_names > needed {
            let reason = "it has optimizer state of parameters that this run has frozen";
            return Err(self.differs(reason.into()));
        }
        for (_, param) in layout.trained() {
            for state in states {
                let name = format!("optimizer.{state}.{}", param.name);
                let stored = tensors.tensor(&name).map_err(|e| self.fail(e.to_string()))?;
                self.compare(&name, stored, param.shape, dtype)?;
            }
        }
        Ok(())
    }

    /// Copies parameters and buffers to `storage`, after [`WeightFile::check_model`].
    pub fn restore_model(&self, storage: &Storage) -> Result<()> {
        self.check_model(storage.layout(), storage.values().dtype())?;
        let tensors = self.tensors()?;
        for tensor in storage.tensors() {
            let (name, to) = tensor?;
            self.copy(&tensors, &format!("model.{name}"), to)?;
        }
        Ok(())
    }

    /// Copies parameters, buffers and optimizer state to `storage` and `optimizer`, after
    /// [`WeightFile::check`]. The caller must restore the number of optimizer steps.
    pub fn restore(&self, storage: &Storage, optimizer: &Optimizer) -> Result<()> {
        let layout = storage.layout();
        self.check(layout, storage.values().dtype(), optimizer.config())?;
        self.restore_model(storage)?;
        let tensors = self.tensors()?;
        for (_, param) in layout.trained() {
            for (state, part) in optimizer.state_of(param.range())? {
                self.copy(&tensors, &format!("optimizer.{state}.{}", param.name), part)?;
            }
        }
        Ok(())
    }

    fn copy(&self, tensors: &SafeTensors, name: &str, to: Tensor) -> Result<()> {
        let from = tensors.tensor(name).map_err(|e| self.fail(e.to_string()))?;
        Ok(to.as_bytes().overwrite::<u8, _>(|to| to.copy_from_slice(from.data()))?)
    }

    /// Errors if a stored tensor has another shape or type than that of this model.
    fn compare(&self, what: &str, stored: TensorView, ours: Shape, dtype: DType) -> Result<()> {
        let (shape, theirs) = (stored.shape(), stored.dtype());
        if shape != ours.dims() {
            let reason = format!("{what} has shape {shape:?} there, and {ours} in this model");
            return Err(self.differs(reason));
        }
        if theirs != file_dtype(dtype) {
            let reason = format!("{what} has type {theirs:?} there, and {dtype} in this model");
            return Err(self.differs(reason));
        }
        Ok(())
    }

    /// Errors with the first unknown name of the file.
    fn check_names(&self, is_known: impl Fn(&str) -> bool) -> Result<()> {
        let tensors = self.tensors()?;
        let mut names = tensors.names();
        names.sort_unstable();
        match names.iter().find(|name| !is_known(name)) {
            Some(name) => {
                Err(self.differs(format!("it has {name}, which this run has no use for")))
            }
            None => Ok(()),
        }
    }

    fn differs(&self, reason: String) -> ModelError {
        ModelError::OtherModel { path: self.path.clone(), reason }
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|e| self.fail(e.to_string()))
    }

    fn fail(&self, reason: String) -> ModelError {
        ModelError::File { path: self.path.clone(), reason }
    }
}
