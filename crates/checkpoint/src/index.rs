//! The index of a checkpoint: its tensors, the files with their elements, and the digests of these files.
//!
//! In an [`Index`] that was read, every number has been checked against the others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use paceline_memory::DType;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The file that makes a folder a checkpoint.
pub const INDEX: &str = "index.json";
/// The version of the format that is written and read.
pub const VERSION: u32 = 5;
/// The bytes of a file that have one digest. The last chunk of a file may be shorter.
pub const CHUNK_BYTES: usize = 1 << 20;

/// The contents of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// The version of the format.
    pub version: u32,
    /// The number of ranks that wrote it.
    pub world_size: usize,
    /// The strategy of the run, with the settings that its state depends on.
    pub strategy: String,
    /// The position of the run and its settings.
    pub run: BTreeMap<String, String>,
    /// The checkpoint in the same folder after which the run wrote this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<Previous>,
    /// The files. Rank `i` wrote the file of number `i`.
    pub files: Vec<ShardFile>,
    /// The tensors, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// A checkpoint that a later one follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Previous {
    /// The optimizer steps before it, which give its folder the name.
    pub steps: u64,
    /// The digest of its index, which stands for its whole contents.
    pub sha256: String,
}

/// One file, which one rank wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardFile {
    /// Its name in the folder of the checkpoint.
    pub name: String,
    /// Its length.
    pub num_bytes: u64,
    /// The SHA-256 of each chunk of `CHUNK_BYTES`, in hexadecimal.
    pub chunks: Vec<String>,
}

/// One tensor as a whole, without padding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The element type, by its name.
    pub dtype: String,
    /// The extents.
    pub shape: Vec<usize>,
    /// Where its elements are: pieces in order, which cover the whole tensor.
    pub pieces: Vec<PieceEntry>,
}

/// A range of a tensor's elements that lies in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// The first element, counted within the tensor.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
    /// The number of the file.
    pub file: usize,
    /// The first byte within the file.
    pub offset: u64,
}

/// `index.json`: the index and its digest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Signed {
    /// The SHA-256 of the index as this program writes it.
    sha256: String,
    index: Index,
}

/// The SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl TensorEntry {
    /// The element type. [`Index::parse`] has checked that it has one.
    pub fn dtype(&self) -> DType {
        self.dtype.parse().unwrap_or(DType::U8)
    }

    /// The number of elements. [`Index::parse`] has checked that it fits.
    pub fn num_elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of bytes of all elements.
    pub fn num_bytes(&self) -> usize {
        self.num_elems() * self.dtype().size_bytes()
    }
}

impl PieceEntry {
    /// The elements, counted within the tensor.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

impl Index {
    /// The digest of the index, and so of the whole checkpoint: it covers the digests of all files.
    pub fn digest(&self) -> String {
        sha256(&serde_json::to_vec(self).expect("plain data"))
    }

    /// The contents of `index.json`.
    pub fn to_json(&self) -> Vec<u8> {
        let signed = Signed { sha256: self.digest(), index: self.clone() };
        let mut text = serde_json::to_vec(&signed).expect("plain data");
        text.push(b'\n');
        text
    }

    /// Reads `index.json`, and checks its digest and contents.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            index: Version,
        }
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let corrupt = |reason: &dyn std::fmt::Display| format!("is corrupt: {reason}");
        // Another version may have other fields, so its number is read first.
        let versioned: Versioned = serde_json::from_slice(text).map_err(|e| corrupt(&e))?;
        let version = versioned.index.version;
        if version != VERSION {
            return Err(format!(
                "is of version {version}, this program reads version {VERSION}: go on with the program that wrote it, or start \
                 again in another folder"
            ));
        }
        let Signed { sha256, index } = serde_json::from_slice(text).map_err(|e| corrupt(&e))?;
        if index.digest() != sha256 {
            return Err(corrupt(&"its contents do not match its digest"));
        }
        index.check().map_err(|reason| corrupt(&reason))?;
        Ok(index)
    }

    /// Checks every number of the index against the others.
    pub fn check(&self) -> Result<(), String> {
        if self.world_size == 0 || self.files.len() != self.world_size {
            let (files, ranks) = (self.files.len(), self.world_size);
            return Err(format!("it has {files} files of {ranks} ranks"));
        }
        let mut names = BTreeSet::new();
        for file in &self.files {
            file.check()?;
            if !names.insert(&file.name) {
                return Err(format!("it names the file {} twice", file.name));
            }
        }
        self.tensors.iter().try_for_each(|(name, tensor)| self.check_tensor(name, tensor))
    }

    fn check_tensor(&self, name: &str, tensor: &TensorEntry) -> Result<(), String> {
        let dtype: DType = tensor.dtype.parse().map_err(|_| {
            format!("the tensor {name} has the type {:?}, which is unknown", tensor.dtype)
        })?;
        let elems = tensor.shape.iter().try_fold(1usize, |len, dim| len.checked_mul(*dim));
        let bytes = elems.and_then(|elems| elems.checked_mul(dtype.size_bytes()));
        let (Some(elems), Some(_)) = (elems, bytes) else {
            return Err(format!("the tensor {name} of shape {:?} is too large", tensor.shape));
        };
        let mut next = 0;
        for piece in &tensor.pieces {
            let end = piece.start.checked_add(piece.len).filter(|end| *end <= elems);
            let (Some(end), true, true) = (end, piece.start == next, piece.len > 0) else {
                return Err(format!("the pieces of the tensor {name} do not follow each other"));
            };
            next = end;
            let end = (piece.len * dtype.size_bytes()) as u64;
            let end = piece.offset.checked_add(end);
            let len = self.files.get(piece.file).map_or(0, |file| file.num_bytes);
            if end.is_none_or(|end| end > len) {
                return Err(format!("a piece of the tensor {name} lies outside of the files"));
            }
        }
        if next != elems {
            return Err(format!(
                "{} of {elems} elements of the tensor {name} are in no file",
                elems - next
            ));
        }
        Ok(())
    }
}

impl ShardFile {
    fn check(&self) -> Result<(), String> {
        let Self { name, num_bytes, chunks } = self;
        // It must lie in the folder of the checkpoint.
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if name.is_empty() || name.starts_with('.') || !name.bytes().all(is_plain) {
            return Err(format!("{name:?} is not the name of a file"));
        }
        let needed = num_bytes.div_ceil(CHUNK_BYTES as u64);
        if chunks.len() as u64 != needed {
            let found = chunks.len();
            return Err(format!("{name} has {num_bytes} bytes and {found} digests, not {needed}"));
        }
        Ok(())
    }

    /// The bytes of a chunk.
    pub fn chunk(&self, number: usize) -> Range<u64> {
        let start = number as u64 * CHUNK_BYTES as u64;
        start..self.num_bytes.min(start + CHUNK_BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor of six elements in two files.
    fn index() -> Index {
        let file = |name: &str| ShardFile {
            name: name.into(),
            num_bytes: 16,
            chunks: vec![sha256(&[0; 16])],
        };
        let piece = |start, len, file, offset| PieceEntry { start, len, file, offset };
        let tensor = TensorEntry {
            dtype: "f32".into(),
            shape: vec![2, 3],
            pieces: vec![piece(0, 4, 1, 0), piece(4, 2, 0, 8)],
        };
        Index {
            version: VERSION,
            world_size: 2,
            strategy: "exact".into(),
            run: BTreeMap::from([("steps".into(), "7".into())]),
            previous: Some(Previous { steps: 4, sha256: sha256(b"before") }),
            files: vec![file("rank-000-of-002.shard"), file("rank-001-of-002.shard")],
            tensors: BTreeMap::from([("model.a".into(), tensor)]),
        }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        let index = index();
        let text = index.to_json();
        assert_eq!(Index::parse(&text).unwrap(), index);
        // Line breaks do not matter.
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let pretty = serde_json::to_vec_pretty(&value).unwrap();
        assert_eq!(Index::parse(&pretty).unwrap(), index);
    }

    #[test]
    fn no_byte_of_an_index_can_change_unseen() {
        let text = index().to_json();
        for at in 0..text.len() - 1 {
            let mut changed = text.clone();
            changed[at] ^= 1;
            let refused = Index::parse(&changed).unwrap_err();
            assert!(refused.contains("corrupt") || refused.contains("version"), "{at}: {refused}");
        }
        for len in 0..text.len() - 1 {
            Index::parse(&text[..len]).unwrap_err();
        }
    }

    #[test]
    fn contradictions_are_refused() {
        type Change = fn(&mut Index);
        fn tensor(index: &mut Index) -> &mut TensorEntry {
            index.tensors.get_mut("model.a").unwrap()
        }
        let cases: [(&str, Change); 13] = [
            ("version 9", |index| index.version = 9),
            ("2 files of 3 ranks", |index| index.world_size = 3),
            ("names the file rank-000-of-002.shard twice", |index| {
                index.files[1].name = index.files[0].name.clone();
            }),
            ("\"../secret\" is not the name", |index| index.files[0].name = "../secret".into()),
            ("\".hidden\" is not the name", |index| index.files[0].name = ".hidden".into()),
            ("16 bytes and 0 digests", |index| index.files[0].chunks.clear()),
            ("which is unknown", |index| tensor(index).dtype = "f31".into()),
            ("is too large", |index| tensor(index).shape = vec![usize::MAX, 2]),
            ("do not follow each other", |index| tensor(index).pieces[1].start = 5),
            ("do not follow each other", |index| tensor(index).pieces[0].len = usize::MAX),
            ("2 of 6 elements of the tensor model.a are in no file", |index| {
                tensor(index).pieces.pop();
            }),
            ("outside of the files", |index| tensor(index).pieces[0].file = 2),
            ("outside of the files", |index| tensor(index).pieces[0].offset = u64::MAX),
        ];
        for (words, change) in cases {
            let mut index = index();
            change(&mut index);
            let refused = Index::parse(&index.to_json()).unwrap_err();
            assert!(refused.contains(words), "no {words:?} in {refused}");
        }
    }
}
