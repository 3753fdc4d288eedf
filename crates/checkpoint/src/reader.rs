//! Reads the elements of a checkpoint's tensors.
//!
//! It yields the bytes of any range of any tensor, and reads only the chunks in which it lies. Each chunk is compared
//! with its digest once, before its first byte is used.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use paceline_files::{Printable, printable};

use super::index::{CHUNK_BYTES, INDEX, Index, PieceEntry, ShardFile, sha256};

/// The most bytes of an index. One of 256 MB has the digests of 3 TB, and takes a few times as much memory.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// A checkpoint whose index has been read, and whose files have the right lengths.
#[derive(Debug)]
pub struct Reader {
    /// The folder.
    pub path: PathBuf,
    /// The contents of the checkpoint.
    pub index: Index,
    files: Vec<Mutex<Shard>>,
    /// Bytes that have been read of the files.
    pub num_read: AtomicU64,
}

/// A file, and the state of its checks.
#[derive(Debug)]
struct Shard {
    /// `None` until it is read.
    content: Option<File>,
    /// For each chunk, whether it has been compared with its digest.
    verified: Vec<bool>,
    /// The chunk that was read last.
    last: Option<(usize, Vec<u8>)>,
}

impl Reader {
    /// Opens the checkpoint in the folder `path`. Fails with the fault, the file and the rank that wrote it.
    pub fn open(path: &Path) -> Result<Self, String> {
        let reader = Self::open_index(path)?;
        let files = 0..reader.index.files.len();
        match files.into_iter().find_map(|file| reader.problem_with(file)) {
            Some(problem) => Err(problem),
            None => Ok(reader),
        }
    }

    /// Like [`Reader::open`], but does not look at the files.
    pub fn open_index(path: &Path) -> Result<Self, String> {
        let file = path.join(INDEX);
        let named = |reason: &str| format!("{} {}", file.printable(), printable(reason));
        let text = paceline_files::read(&file, MAX_INDEX_BYTES)
            .map_err(|e| named(&format!("cannot be read: {e}")))?;
        let index = Index::parse(&text).map_err(|reason| named(&reason))?;
        let shard = |file: &ShardFile| Shard {
            content: None,
            verified: vec![false; file.chunks.len()],
            last: None,
        };
        let files = index.files.iter().map(|file| Mutex::new(shard(file))).collect();
        Ok(Self { path: path.to_owned(), index, files, num_read: AtomicU64::new(0) })
    }

    /// In words: a file is missing or has another length.
    pub fn problem_with(&self, file: usize) -> Option<String> {
        let ShardFile { name, num_bytes, .. } = &self.index.files[file];
        let problem = match fs::metadata(self.path.join(name)) {
            Err(error) => format!("cannot be read: {error}"),
            Ok(found) if found.len() != *num_bytes => {
                format!("is corrupt: it has {} bytes, not {num_bytes}", found.len())
            }
            Ok(_) => return None,
        };
        Some(self.about(file, &problem))
    }

    fn about(&self, file: usize, problem: &str) -> String {
        let path = self.path.join(&self.index.files[file].name);
        format!("{}, which rank {file} wrote, {problem}", path.printable())
    }

    /// Copies elements of a tensor to `to`, which has their length in bytes.
    pub fn read(&self, name: &str, range: Range<usize>, to: &mut [u8]) -> Result<(), String> {
        let tensor = self.index.tensors.get(name);
        let tensor =
            tensor.ok_or_else(|| format!("{} has no tensor {name}", self.path.printable()))?;
        let elem_bytes = tensor.dtype().size_bytes();
        if range.end > tensor.num_elems() || to.len() != range.len() * elem_bytes {
            return Err(format!("{name} has {} elements, not {range:?}", tensor.num_elems()));
        }
        let first = tensor.pieces.partition_point(|piece| piece.range().end <= range.start);
        for piece in &tensor.pieces[first..] {
            let PieceEntry { start, file, offset, .. } = *piece;
            let common = range.start.max(start)..range.end.min(piece.range().end);
            if common.is_empty() {
                break;
            }
            let bytes =
                (common.start - range.start) * elem_bytes..(common.end - range.start) * elem_bytes;
            let from = offset + ((common.start - start) * elem_bytes) as u64;
            self.read_file(file, from, &mut to[bytes])?;
        }
        Ok(())
    }

    /// Compares every chunk of a file with its digest. Returns the faults.
    pub fn verify_file(&self, file: usize) -> Vec<String> {
        let mut shard = self.lock(file);
        let num_chunks = self.index.files[file].chunks.len();
        (0..num_chunks).filter_map(|chunk| self.verify(&mut shard, file, chunk).err()).collect()
    }

    fn lock(&self, file: usize) -> MutexGuard<'_, Shard> {
        self.files[file].lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn read_file(&self, file: usize, mut from: u64, mut to: &mut [u8]) -> Result<(), String> {
        let mut shard = self.lock(file);
        let of = &self.index.files[file];
        while !to.is_empty() {
            let chunk = (from / CHUNK_BYTES as u64) as usize;
            let bounds = of.chunk(chunk);
            let len = to.len().min((bounds.end - from) as usize);
            let (now, rest) = to.split_at_mut(len);
            if !shard.verified[chunk] {
                self.verify(&mut shard, file, chunk)?;
            }
            match &shard.last {
                Some((last, bytes)) if *last == chunk => {
                    let start = (from - bounds.start) as usize;
                    now.copy_from_slice(&bytes[start..start + len]);
                }
                _ => {
                    self.num_read.fetch_add(len as u64, Ordering::Relaxed);
                    self.read_at(&mut shard, file, now, from)?;
                }
            }
            (from, to) = (from + len as u64, rest);
        }
        Ok(())
    }

    /// Reads as many bytes as the index states, whatever the length of the file.
    fn read_at(
        &self,
        shard: &mut Shard,
        file: usize,
        to: &mut [u8],
        start: u64,
    ) -> Result<(), String> {
        let mut read = || {
            if shard.content.is_none() {
                let path = self.path.join(&self.index.files[file].name);
                shard.content = Some(paceline_files::open(&path)?);
            }
            shard.content.as_ref().ok_or(io::ErrorKind::NotFound)?.read_exact_at(to, start)
        };
        read().map_err(|e: io::Error| self.about(file, &format!("cannot be read: {e}")))
    }

    /// Reads a chunk and compares it with its digest.
    fn verify(&self, shard: &mut Shard, file: usize, chunk: usize) -> Result<(), String> {
        let of = &self.index.files[file];
        let bounds = of.chunk(chunk);
        let mut bytes = shard.last.take().map_or_else(Vec::new, |(_, bytes)| bytes);
        bytes.resize((bounds.end - bounds.start) as usize, 0);
        self.num_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.read_at(shard, file, &mut bytes, bounds.start)?;
        if sha256(&bytes) != of.chunks[chunk] {
            return Err(self.about(
                file,
                &format!("is corrupt: its bytes {bounds:?} do not match their digest"),
            ));
        }
        shard.verified[chunk] = true;
        shard.last = Some((chunk, bytes));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::index::{TensorEntry, VERSION};
    use super::*;

    /// A tensor of bytes in two files of three chunks each, whose pieces take turns.
    fn checkpoint(folder: &Path) -> (Reader, Vec<u8>) {
        let file_bytes = 2 * CHUNK_BYTES + 1000;
        let all: Vec<u8> = (0..2 * file_bytes).map(|at| (at * 7 + at / 255) as u8).collect();
        let mut index = Index { version: VERSION, world_size: 2, ..Index::default() };
        let mut tensor =
            TensorEntry { dtype: "u8".into(), shape: vec![2, file_bytes], pieces: Vec::new() };
        let mut files = [Vec::new(), Vec::new()];
        for (at, part) in all.chunks(300_000).enumerate() {
            let file = at % 2;
            let offset = files[file].len() as u64;
            let piece = PieceEntry { start: at * 300_000, len: part.len(), file, offset };
            tensor.pieces.push(piece);
            files[file].extend(part);
        }
        for (at, bytes) in files.iter().enumerate() {
            let name = format!("rank-{at}.shard");
            fs::write(folder.join(&name), bytes).unwrap();
            let chunks = bytes.chunks(CHUNK_BYTES).map(sha256).collect();
            index.files.push(ShardFile { name, num_bytes: bytes.len() as u64, chunks });
        }
        index.tensors.insert("a".into(), tensor);
        fs::write(folder.join(INDEX), index.to_json()).unwrap();
        (Reader::open(folder).unwrap(), all)
    }

    #[test]
    fn any_range_is_read_and_only_its_chunks_are() {
        let folder = tempfile::tempdir().unwrap();
        let (reader, all) = checkpoint(folder.path());
        let num_read = |reader: &Reader| reader.num_read.load(Ordering::Relaxed);
        let read = |reader: &Reader, range: Range<usize>| {
            let mut bytes = vec![0; range.len()];
            reader.read("a", range.clone(), &mut bytes).unwrap();
            assert!(bytes == all[range.clone()], "{range:?}");
        };
        read(&reader, 10..20);
        assert_eq!(num_read(&reader), CHUNK_BYTES as u64);
        read(&reader, 5..299_999);
        assert_eq!(num_read(&reader), CHUNK_BYTES as u64, "a chunk is verified once");
        read(&reader, 299_999..300_001);
        assert_eq!(num_read(&reader), 2 * CHUNK_BYTES as u64);
        for range in [0..0, 0..all.len(), 600_000..600_001, 123_456..3_456_789] {
            read(&reader, range);
        }
        let (again, _) = checkpoint(folder.path());
        read(&again, 0..all.len());
        let files: u64 = again.index.files.iter().map(|file| file.num_bytes).sum();
        assert!(num_read(&again) <= 2 * files, "{} of {files} bytes", num_read(&again));
        again.read("a", 0..all.len() + 1, &mut vec![0; all.len() + 1]).unwrap_err();
        again.read("b", 0..1, &mut [0]).unwrap_err();
    }

    #[test]
    fn damage_is_found_by_those_who_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let (_, all) = checkpoint(folder.path());
        let path = folder.path().join("rank-1.shard");
        let mut bytes = fs::read(&path).unwrap();
        bytes[CHUNK_BYTES + 5] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let reader = Reader::open(folder.path()).unwrap();
        let mut to = vec![0; 1000];
        // The first chunk of that file.
        reader.read("a", 300_000..301_000, &mut to).unwrap();
        let start = 4 * 600_000;
        let refused = reader.read("a", start - 1000..start, &mut to).unwrap_err();
        for words in ["rank-1.shard, which rank 1 wrote, is corrupt", "its bytes 1048576.."] {
            assert!(refused.contains(words), "{refused}");
        }
        assert_eq!(reader.verify_file(0), [""; 0]);
        assert_eq!(reader.verify_file(1), [refused]);
        fs::write(&path, &bytes[1..]).unwrap();
        let refused = Reader::open(folder.path()).unwrap_err();
        assert!(refused.contains("which rank 1 wrote, is corrupt: it has"), "{refused}");
        fs::remove_file(&path).unwrap();
        let refused = Reader::open(folder.path()).unwrap_err();
        assert!(refused.contains("which rank 1 wrote, cannot be read: No such file"), "{refused}");
        drop(all);
    }
}
