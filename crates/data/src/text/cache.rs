//! Keeps tokens in a file, so that texts are tokenized once.
//!
//! Input: what the tokens depend on, and the tokens. Output: the same tokens, or nothing. A file appears under its
//! name when it is complete. This module knows nothing of texts.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::TextError;

/// The first bytes of a file. A change of the layout changes them.
const MAGIC: &[u8; 8] = b"PLTOKEN1";
/// Bytes of a digest.
const DIGEST: usize = 32;
/// No file is larger: it would hold 16 billion tokens.
const MAX_FILE_BYTES: u64 = 64_000_000_000;
/// Bytes per read of a file that is hashed.
const PIECE_BYTES: usize = 1 << 20;

/// Tokenized rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenRows {
    /// The tokens of all rows, one row after the other.
    pub tokens: Vec<u32>,
    /// For each row, the number of tokens up to its end.
    pub ends: Vec<u64>,
    /// The class of each row.
    pub labels: Vec<i64>,
}

impl TokenRows {
    /// The tokens of a row.
    pub fn row(&self, row: usize) -> &[u32] {
        let begin = if row == 0 { 0 } else { self.ends[row - 1] };
        &self.tokens[begin as usize..self.ends[row] as usize]
    }
}

/// The digest of the contents of a file.
pub(super) fn file_digest(path: &Path) -> Result<[u8; DIGEST], TextError> {
    let hash = || -> io::Result<[u8; DIGEST]> {
        let (mut file, mut hash) = (paceline_files::open(path)?, Sha256::new());
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match file.read(&mut piece)? {
                0 => return Ok(hash.finalize().into()),
                len => hash.update(&piece[..len]),
            }
        }
    };
    hash().map_err(|error| TextError::file(path, error))
}

/// The file of tokens with this key.
#[derive(Debug)]
pub(super) struct CacheFile {
    folder: PathBuf,
    pub path: PathBuf,
    /// The digest of everything that the tokens depend on.
    key: [u8; DIGEST],
}

impl CacheFile {
    pub fn new(folder: &Path, key: [u8; DIGEST]) -> Self {
        let name: String = key[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { folder: folder.into(), path: folder.join(format!("{name}.tokens")), key }
    }

    /// The tokens, if the file is there. Errors with a reason if it is damaged.
    pub fn read(&self) -> Result<Option<TokenRows>, String> {
        match paceline_files::read(&self.path, MAX_FILE_BYTES) {
            Ok(bytes) => self.decode(&bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Writes the tokens. Another process that writes the same file does no harm, since the bytes are the same.
    pub fn write(&self, rows: &TokenRows) -> Result<(), TextError> {
        let unfinished = self.path.with_extension(format!("tokens.{}", std::process::id()));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.folder)?;
            let mut file = paceline_files::create(&unfinished)?;
            file.write_all(&self.encode(rows))?;
            file.sync_all()?;
            fs::rename(&unfinished, &self.path)
        };
        write().map_err(|error| {
            // The error that is reported is the one of the write.
            let _ = fs::remove_file(&unfinished);
            TextError::file(&self.path, format!("cannot keep the tokens here: {error}"))
        })
    }

    /// The magic number, the key, the numbers of rows and of tokens, ends, labels, tokens, and the digest of all of it.
    fn encode(&self, rows: &TokenRows) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.key);
        for number in [rows.ends.len(), rows.tokens.len()] {
            bytes.extend_from_slice(&(number as u64).to_le_bytes());
        }
        bytes.extend(rows.ends.iter().flat_map(|end| end.to_le_bytes()));
        bytes.extend(rows.labels.iter().flat_map(|label| label.to_le_bytes()));
        bytes.extend(rows.tokens.iter().flat_map(|token| token.to_le_bytes()));
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        bytes
    }

    fn decode(&self, bytes: &[u8]) -> Result<TokenRows, String> {
        const HEAD: usize = MAGIC.len() + DIGEST + 16;
        let short = || format!("{} bytes are too few", bytes.len());
        let split = bytes.len().checked_sub(DIGEST).filter(|len| *len >= HEAD).ok_or_else(short)?;
        let (contents, digest) = bytes.split_at(split);
        if Sha256::digest(contents)[..] != *digest {
            return Err("its digest is not that of its contents".to_owned());
        }
        if contents[..MAGIC.len()] != *MAGIC || contents[MAGIC.len()..HEAD - 16] != self.key {
            return Err("it holds other tokens".to_owned());
        }
        // The digest is right, so the rest is what was written.
        let (numbers, _) = contents[MAGIC.len() + DIGEST..].as_chunks::<8>();
        let num_rows = u64::from_le_bytes(numbers[0]) as usize;
        let numbers = &numbers[2..2 + 2 * num_rows];
        let (tokens, _) = contents[HEAD + 16 * num_rows..].as_chunks::<4>();
        Ok(TokenRows {
            ends: numbers[..num_rows].iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(),
            labels: numbers[num_rows..].iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
            tokens: tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
        })
    }
}
